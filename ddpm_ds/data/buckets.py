"""Buckets of aspect in preparation: their sizes, and the bucket of each image.

Images are scaled and cropped to the size of their bucket, which loses little. Each bucket has a cache of its own::

    source     3:4   1:1   16:9   1:1   ...
                │     └──────│─────┘
    caches   896x1152  1024x1024   768x1344 ...

Training takes some images of one bucket, then of another: :class:`ddpm_ds.data.loader.Order`.
"""

import copy
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from ddpm_ds.data.cache import Indices
from ddpm_ds.data.decoding import Size, upright_size
from ddpm_ds.data.sources.base import Captions, Labels, Pixels, Source, beside_of, captions_of, parts_of
from ddpm_ds.data.spec import BucketsSpec, DataSpec
from ddpm_ds.ground.errors import DataError
from ddpm_ds.ground.files import read_bytes, replace_file
from ddpm_ds.schema.types import written

AREAS = 0.06
"""Largest difference in pixels between a bucket and ``data.image_size``, as a share, so that all need equal times."""
SDXL_AREA = 0.9
"""Smallest share of the pixels of ``data.image_size`` in SDXL's buckets, at most all. Source: Podell et al. 2023."""
MOST_SIZES = 512
MOST_SHAPES_BYTES = 2**33
Shapes = npt.NDArray[np.int32]
"""Heights and widths of a source's upright images, (N, 2); 0 if unreadable."""


def bucket_sizes(size: Size, buckets: BucketsSpec) -> tuple[Size, ...]:
    """Return buckets (height, width) with about the pixels of ``size``, each also turned, from tall to wide."""
    pixels, step = math.prod(size), buckets.step
    least, most, found = buckets.minimum or step, buckets.maximum or 2**16, set[Size]()
    if buckets.sizes == "sd_scripts":
        square = int(math.sqrt(pixels)) // step * step
        least, most = buckets.minimum or square // 4, buckets.maximum or 2 * square
        sides = range(-(-least // step) * step, most + 1, step)
        found = {(square, square), *((side, min(most, pixels // side) // step * step) for side in sides)}
    tallest = 0 if found else int(math.sqrt(pixels * buckets.widest) * (1.0 + AREAS)) + step
    for height in range(step, tallest, step):
        if buckets.sizes == "sdxl":
            widths = range(-int(-SDXL_AREA * pixels // (height * step)) * step, pixels // height + 1, step)
        else:
            nearest = max(1, round(pixels / height / step)) * step
            widths = range(nearest, nearest + (abs(height * nearest - pixels) <= AREAS * pixels))
        found |= {(height, width) for width in widths if max(height, width) <= buckets.widest * min(height, width)}
    found |= {(width, height) for height, width in found}
    found = {sides for sides in found if least <= min(sides) and max(sides) <= most}
    return tuple(sorted(found, key=lambda sides: (-sides[0] / sides[1], sides)))


def cropped(shapes: Shapes, sizes: Sequence[Size]) -> npt.NDArray[np.float64]:
    """Return the share of each readable image that a crop to each size loses, (N, sizes)."""
    wide, (heights, widths) = shapes.astype(np.int64), np.array(sizes, np.int64).T
    ratios = wide[:, :1] * widths / (wide[:, 1:] * heights)
    return 1.0 - np.minimum(ratios, 1.0 / ratios)


def reduced(shapes: Shapes, sizes: Sequence[Size]) -> npt.NDArray[np.float64]:
    """Return the share of the largest size that images lack in each size, (N, sizes); above 1 if they are enlarged."""
    lost, sides, pixels = cropped(shapes, sizes), np.array(sizes, np.int64), np.prod(sizes, axis=1)
    enlarged = (sides > shapes[:, None]).any(axis=2)  # (N, sizes)
    return np.where(enlarged, 1.0 + lost, 1.0 - (1.0 - lost) * pixels / pixels.max())


def own_sizes(shapes: Shapes, size: Size, buckets: BucketsSpec, group: int) -> list[Size]:
    """Return the sizes of at least ``group`` images with fewer pixels than ``size``, in multiples of the step."""
    sides = shapes[shapes.prod(axis=1, dtype=np.int64) < math.prod(size)] // buckets.step * buckets.step
    found, counts = np.unique(sides[(sides >= (buckets.minimum or 1)).all(axis=1)], axis=0, return_counts=True)
    return [(height, width) for height, width in found[counts >= group].tolist()]


class Bucket(NamedTuple):
    """Bucket: its number among the heights and widths in pixels of all. An image is in the one that crops it least."""

    number: int
    sizes: tuple[Size, ...]
    no_upscale: bool = False
    """Whether an image is in the one that keeps most of its pixels, and does not enlarge it."""

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that decides which images are in it, beside its own size."""
        return (*self.sizes, "no_upscale") if self.no_upscale else self.sizes

    @property
    def pixels(self) -> Size:
        """Height and width of its images in pixels."""
        return self.sizes[self.number]

    def members_of(self, shapes: Shapes) -> Indices:
        """Return the positions, int64 and rising, of this bucket's images, given the shapes of all."""
        return np.flatnonzero(numbers_of(shapes, self.sizes, self.no_upscale) == self.number)


def sizes_of(data: DataSpec, factor: int) -> tuple[Size, ...]:
    """Return heights and widths in pixels of all buckets, first the one of ``data.image_size``; raises DataError.

    ``factor`` is the number of pixels, each way, in a unit of ``data.image_size``: 1, or more for latents.
    """
    assert data.buckets is not None
    step = data.buckets.step
    size = (data.size[0] * factor, data.size[1] * factor)
    if step % factor or any(side % step for side in size):
        raise DataError(
            f"data.buckets.step = {step} should be a multiple of a latent's {factor} pixels, and divide the "
            f"{written(size)} pixels of data.image_size; use {factor * math.gcd(*data.size)} or a divisor"
        )
    sizes = bucket_sizes(size, data.buckets)
    if size not in sizes:
        raise DataError(
            f"data.buckets has no {written(size)} pixels, as data.image_size asks for, with step = {step}, minimum = "
            f"{data.buckets.minimum}, maximum = {data.buckets.maximum}; change these"
        )
    if len(sizes) > MOST_SIZES:
        raise DataError(
            f"data.buckets.step = {step} makes {len(sizes):,} buckets, above {MOST_SIZES}; use a larger one"
        )
    return (size, *(each for each in sizes if each != size))


def kept_sizes(
    sizes: Sequence[Size], shapes: Shapes, group: int, held_out: int, no_upscale: bool = False
) -> tuple[Size, ...]:
    """Return ``sizes`` without the buckets of fewer than ``group`` training images, whose images the others take.

    Training images are all but ``held_out``. The smallest bucket goes first. Raises DataError if all images are fewer.
    """
    kept = [*sizes]
    if (left := len(shapes) - held_out) < group:
        what = "images" if not held_out else f"images beside data.held_out_images = {held_out:,}"
        raise DataError(
            f"data.buckets: there are {max(0, left):,} {what}, fewer than the {group:,} that share a bucket; use a "
            f"smaller data.buckets.images{f', at most {left:,}' if left > 0 else ''}, or more images"
        )
    while True:
        counts = np.bincount(numbers_of(shapes, kept, no_upscale), minlength=len(kept)).tolist()
        trained = [count - share for count, share in zip(counts, shares_of(counts, held_out), strict=True)]
        small = [number for number, count in enumerate(counts) if count and trained[number] < group]
        if not small:
            return tuple(kept)
        del kept[min(small, key=trained.__getitem__)]


def shares_of(counts: Sequence[int], held_out: int) -> list[int]:
    """Return each bucket's number of ``held_out`` images, in proportion to the ``counts`` of all its images."""
    ends = np.cumsum([0, *counts])
    return np.diff(held_out * ends // max(1, ends[-1])).tolist()


def filled_buckets(
    sizes: tuple[Size, ...], kept: Sequence[Size], shapes: Shapes, no_upscale: bool = False
) -> list[Bucket]:
    """Return the buckets of ``kept`` sizes that have images, first the nearest to the first of all ``sizes``.

    A bucket that has the same images among all sizes is named after all, so that runs share its cache.
    """
    numbers, kept_numbers = (numbers_of(shapes, each, no_upscale) for each in (sizes, kept))
    found: list[Bucket] = []
    for number, size in enumerate(kept):
        members, among_all = kept_numbers == number, Bucket(sizes.index(size), sizes, no_upscale)
        if members.any():
            same = np.array_equal(members, numbers == among_all.number)
            found.append(among_all if same else Bucket(number, tuple(kept), no_upscale))
    nearest = cropped(np.array(sizes[:1], np.int32), [bucket.pixels for bucket in found]).argmin()
    first = found.pop(int(nearest))
    return [first, *found]


def moved(sizes: Sequence[Size], shapes: Shapes, buckets: Sequence[Bucket], group: int) -> str | None:
    """Return a line about the images of small buckets, which other ``buckets`` took; None without any."""
    kept = {bucket.pixels for bucket in buckets}
    numbers = numbers_of(shapes, sizes, buckets[0].no_upscale)
    counts = np.bincount(numbers, minlength=len(sizes)).tolist()
    small = {written(size): count for size, count in zip(sizes, counts, strict=True) if count and size not in kept}
    if not small:
        return None
    each = ", ".join(f"{size} ({count:,})" for size, count in small.items())
    return (
        f"data.buckets: fewer images than the {group:,} that share a bucket are in {each}; these "
        f"{sum(small.values()):,} of {len(shapes):,} images are in the next-best of the {len(buckets):,} other sizes"
    )


def numbers_of(shapes: Shapes, sizes: Sequence[Size], no_upscale: bool = False) -> Indices:
    """Return the number of each image's bucket, int64 (N,); unreadable images are in the fullest."""
    distinct, which = np.unique(shapes, axis=0, return_inverse=True)
    readable = distinct.all(axis=1)
    numbers = np.full(len(distinct), -1)
    numbers[readable] = (reduced if no_upscale else cropped)(distinct[readable], sizes).argmin(axis=1)
    numbers = numbers[which.reshape(-1)]
    numbers[numbers < 0] = np.bincount(numbers[numbers >= 0], minlength=1).argmax()
    return numbers


def shapes_of(source: Source, progress: bool) -> Shapes:
    """Return the shapes of all images of a source, from their headers."""
    shapes = np.zeros((len(source.labels), 2), np.int32)
    for i in tqdm(range(len(shapes)), desc="reading sizes", delay=1, disable=not progress):
        try:
            shapes[i] = upright_size(source.read(i))
        except Exception:  # decoding will report the reason
            continue
    return shapes


def read_shapes(path: Path) -> tuple[str, Shapes] | None:
    """Return the stored shapes and the hash of their source; None without a readable file."""
    try:
        with np.load(io.BytesIO(read_bytes(path, MOST_SHAPES_BYTES)), allow_pickle=False) as found:
            content, shapes = str(found["content"]), found["shapes"]
    except Exception:  # numpy raises almost anything on a damaged file, which is made again
        return None
    return (content, shapes) if shapes.dtype == np.int32 and shapes.ndim == 2 and shapes.shape[1] == 2 else None


def write_shapes(path: Path, content: str, shapes: Shapes) -> None:
    """Write the file that :func:`read_shapes` reads."""
    file = io.BytesIO()
    np.savez_compressed(file, content=np.array(content), shapes=shapes)
    replace_file(path, file.getvalue())


@dataclass
class Members:
    """Source of the images that are at some positions in another source."""

    source: Source
    positions: Indices

    def __post_init__(self) -> None:
        self.classes: tuple[str, ...] = self.source.classes
        self.labels: Labels = self.source.labels[self.positions]
        self.parts = None if (parts := parts_of(self.source)) is None else parts[self.positions]
        beside = beside_of(self.source).items()
        self.beside = {name: [files[i] for i in self.positions.tolist()] for name, files in beside}
        self.captions: Captions | None = None
        if (captions := captions_of(self.source)) is not None:  # all texts, so that buckets share the encoded ones
            self.captions = copy.copy(captions)
            self.captions.table = captions.table[self.positions]
            self.captions.missing = np.flatnonzero(np.isin(self.positions, np.asarray(captions.missing))).tolist()

    def name(self, i: int, /) -> str:
        return self.source.name(int(self.positions[i]))

    def read(self, i: int, /) -> bytes | Pixels:
        return self.source.read(int(self.positions[i]))
