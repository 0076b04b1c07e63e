"""How tests read a source and its errors."""

import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from ddpm_ds.data.cache import DatasetCache, Indices, Subset
from ddpm_ds.data.decoding import Decoding, decode
from ddpm_ds.data.loader import MicroBatch, Share, micro_batches
from ddpm_ds.data.prepare import prepare
from ddpm_ds.data.sources import open_source
from ddpm_ds.data.sources.base import Pixels, Source
from ddpm_ds.ground.errors import DataError
from tests.launching import error_of

PICTURES = np.random.default_rng(3).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
"""Twelve colour pictures of 8x8 pixels."""


def encoded(pixels: npt.NDArray[np.uint8], kind: str = "png") -> bytes:
    """An image file of these pixels."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


def at(source: Source, i: int, size: int = 8, channels: int = 1) -> tuple[Pixels, int]:
    """Pixels and label of an image."""
    return decode(source.read(i), (size, size), channels), int(source.labels[i])


def skipped(source: Source, i: int) -> tuple[str, str]:
    """Name of an image that can't be read, and the reason in a line."""
    (chunk,) = Decoding(source, (1, 8, 8), threads=1).chunks(range(i, i + 1))
    ((name, reason),) = chunk.skipped
    assert reason.isprintable() and " at 0x" not in reason
    return name, reason


def loaded(
    store: DatasetCache,
    micro_batch_images: int,
    replicas: int = 1,
    replica: int = 0,
    among: Indices | None = None,
    **asked: Any,
) -> Iterator[MicroBatch]:
    """The micro-batches of a replica, by default of the only one, in an order of seed 0."""
    share = Share(micro_batch_images, replicas, replica)
    images = Subset.of(store) if among is None else Subset(store, among)
    return micro_batches(images, share, **{"seed": 0, **asked})


line_of = partial(error_of, DataError, open_source)
"""The error of opening a source."""
refusal = partial(error_of, DataError, prepare)
"""The error of a preparation."""
