"""Buckets of aspect while images are prepared: which sizes there are, and which image is in which bucket.

Images of a bucket are brought to its size, which crops them little. Each bucket has a cache of its own, made of the
source's images in it::

    source     3:4   1:1   16:9   1:1   ...
                │     └──────│─────┘
    caches   896x1152  1024x1024   768x1344 ...

Training takes some images of one bucket, then of another: :class:`ddpm_ds.data.order.BucketOrder`.
"""

import copy
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from ddpm_ds.config.spec import DataSpec, RunSpec, written
from ddpm_ds.data.cache import Indices
from ddpm_ds.data.decoding import Size, upright_size
from ddpm_ds.data.latents import autoencoder_of
from ddpm_ds.data.sources.base import Captions, Labels, Pixels, Source, captions_of
from ddpm_ds.errors import DataError
from ddpm_ds.files import read_bytes, replace_file

AREAS = 0.06
"""Largest difference of a bucket's pixels from the pixels that were asked for, as a share: one order of passes serves
all buckets."""
MOST_SHAPES_BYTES = 2**33
Shapes = npt.NDArray[np.int32]
"""Heights and widths of a source's images, (N, 2), upright; 0 of those that can't be read."""


def bucket_sizes(size: Size, step: int, widest: float) -> tuple[Size, ...]:
    """Return the buckets (height, width) around the pixels of a ``size``, from the tallest to the widest.

    Sides are multiples of ``step`` pixels, their ratio is at most ``widest``, and for each height there is the width
    that comes nearest to the pixels, within :data:`AREAS`.
    """
    pixels = math.prod(size)
    found = []
    for height in range(step, int(math.sqrt(pixels * widest) * (1.0 + AREAS)) + step, step):
        width = max(1, round(pixels / height / step)) * step
        fits = abs(height * width - pixels) <= AREAS * pixels
        if fits and max(height, width) <= widest * min(height, width):
            found.append((height, width))
    return tuple(reversed(found))


def bucket_of(image: Size, sizes: Sequence[Size]) -> int:
    """Return the number of the bucket that crops an ``image`` (height, width) least; of equal ones the first."""
    return min(range(len(sizes)), key=lambda number: cropped(image, sizes[number]))


def cropped(image: Size, size: Size) -> float:
    """Return the share of an image (height, width) that is lost when it is scaled to cover a ``size`` and cropped."""
    ratio = image[0] * size[1] / (image[1] * size[0])
    return 1.0 - min(ratio, 1.0 / ratio)


class BucketData(DataSpec):
    """Images of one bucket, whose size is ``image_size``."""

    number: int
    """Its number; that of the spec's own ``data.image_size`` is 0."""
    sizes: tuple[Size, ...]
    """Height and width in pixels of all buckets, by number."""

    def members_of(self, shapes: Shapes) -> Indices:
        """Return the positions, int64 and rising, of the images of these shapes that are in this bucket."""
        return np.flatnonzero(numbers_of(shapes, self.sizes) == self.number)


def buckets_of(data: DataSpec) -> tuple[BucketData, ...]:
    """Return all buckets of ``data``, that of ``data.image_size`` first.

    Raises:
        DataError: sizes of latents don't fit the steps, or the autoencoder can't be used.
    """
    assert data.buckets is not None
    autoencoder = autoencoder_of(data)
    factor = 1 if autoencoder is None else autoencoder.factor
    step, widest = data.buckets.step, data.buckets.widest
    size = (data.size[0] * factor, data.size[1] * factor)
    if step % factor or any(side % step for side in size):
        raise DataError(
            f"data.buckets.step = {step} should be a multiple of the {factor} pixels that are one of a latent, and "
            f"divide the {written(size)} pixels of data.image_size; use {factor * math.gcd(*data.size)} or a divisor"
        )
    sizes = (size, *(each for each in bucket_sizes(size, step, widest) if each != size))
    return tuple(
        BucketData(**{**dict(data), "image_size": (height // factor, width // factor)}, number=number, sizes=sizes)
        for number, (height, width) in enumerate(sizes)
    )


def check_steps(spec: RunSpec) -> None:
    """Refuse buckets of latents that can't be halved as often as the U-Net does.

    Raises:
        DataError: it names the step and one that would do.
    """
    if spec.data.buckets is None or (autoencoder := autoencoder_of(spec.data)) is None:
        return
    multiple = autoencoder.factor * 2 ** (len(spec.unet.multipliers) - 1)
    if spec.data.buckets.step % multiple:
        raise DataError(
            f"data.buckets.step = {spec.data.buckets.step} should be a multiple of {multiple} pixels: a latent is made "
            f"of {autoencoder.factor}, and unet.multipliers halves latents {len(spec.unet.multipliers) - 1} times"
        )


def numbers_of(shapes: Shapes, sizes: Sequence[Size]) -> Indices:
    """Return the number of the bucket of each image, int64 (N,); those that can't be read are in bucket 0."""
    distinct, which = np.unique(shapes, axis=0, return_inverse=True)
    numbers = [bucket_of((height, width), sizes) if height and width else 0 for height, width in distinct.tolist()]
    return np.array(numbers, np.int64)[which.reshape(-1)]


def check_buckets(counts: Sequence[int], sizes: Sequence[Size], group: int) -> None:
    """Refuse buckets with fewer images than consecutive ones of training, ``group``, and none of ``data.image_size``.

    Raises:
        DataError: it names the bucket, its images and what would do.
    """
    if not counts[0]:
        most = max(range(len(counts)), key=lambda number: counts[number])
        raise DataError(
            f"data.image_size is of the bucket {written(sizes[0])}, in which no image falls; use that of "
            f"{written(sizes[most])}, which has {counts[most]:,}"
        )
    for size, count in zip(sizes, counts, strict=True):
        if 0 < count < group:
            raise DataError(
                f"data.buckets: {written(size)} has {count:,} images, fewer than the {group:,} that follow each other; "
                f"use a smaller data.buckets.images, at most {count:,}, a larger data.buckets.step, or a smaller "
                "data.buckets.widest"
            )


def shapes_of(source: Source, progress: bool) -> Shapes:
    """Return the shapes of all images of a source, by their headers alone."""
    shapes = np.zeros((len(source.labels), 2), np.int32)
    for i in tqdm(range(len(shapes)), desc="reading sizes", delay=1, disable=not progress):
        try:
            shapes[i] = upright_size(source.read(i))
        except Exception:  # decoding will report the reason
            continue
    return shapes


def read_shapes(path: Path) -> tuple[str, Shapes] | None:
    """Return the shapes in a file and the hash of the source whose they are; None if there is no such file."""
    try:
        with np.load(io.BytesIO(read_bytes(path, MOST_SHAPES_BYTES)), allow_pickle=False) as found:
            content, shapes = str(found["content"]), found["shapes"]
    except Exception:  # numpy raises almost anything on a damaged file, which is made again
        return None
    return (content, shapes) if shapes.dtype == np.int32 and shapes.ndim == 2 and shapes.shape[1] == 2 else None


def write_shapes(path: Path, content: str, shapes: Shapes) -> None:
    """Write the shapes of a source's images, and the hash of its content, to a file; raises OSError."""
    file = io.BytesIO()
    np.savez_compressed(file, content=np.array(content), shapes=shapes)
    replace_file(path, file.getvalue())


@dataclass
class Members:
    """The images of a source that are at some positions in it."""

    source: Source
    positions: Indices

    def __post_init__(self) -> None:
        self.classes: tuple[str, ...] = self.source.classes
        self.labels: Labels = self.source.labels[self.positions]
        self.captions: Captions | None = None
        if (captions := captions_of(self.source)) is not None:  # all texts, so that buckets share them encoded
            self.captions = copy.copy(captions)
            self.captions.table = captions.table[self.positions]
            self.captions.missing = np.flatnonzero(np.isin(self.positions, np.asarray(captions.missing))).tolist()

    def name(self, i: int, /) -> str:
        """Return the name of an image in the source."""
        return self.source.name(int(self.positions[i]))

    def read(self, i: int, /) -> bytes | Pixels:
        """Return an image as the source does."""
        return self.source.read(int(self.positions[i]))
