"""How tests read a source and its errors."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from ddpm_ds.data.decoding import decoded
from ddpm_ds.data.prepare import prepare
from ddpm_ds.data.sources import open_source
from ddpm_ds.data.sources.base import Pixels, Source
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError

PICTURES = np.random.default_rng(3).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
"""Twelve colour pictures of 8x8 pixels."""


def encoded(pixels: npt.NDArray[np.uint8], kind: str = "png") -> bytes:
    """An image file of these pixels."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


def at(source: Source, i: int, size: int = 8, channels: int = 1) -> tuple[Pixels, int]:
    """Pixels and label of an image."""
    return decoded(source, i, (size, size), channels)[0], int(source.labels[i])


def line_of(spec: DataSpec) -> str:
    """The error of a source, which is one line."""
    with pytest.raises(DataError) as caught:
        open_source(spec)
    assert str(caught.value).isprintable()
    return str(caught.value)


def refusal(spec: DataSpec) -> str:
    """The error of a preparation, which is one line."""
    with pytest.raises(DataError) as caught:
        prepare(spec)
    assert str(caught.value).isprintable()
    return str(caught.value)
