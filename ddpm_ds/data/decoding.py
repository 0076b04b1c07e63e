"""Decoding of source images to pixels of one size and colour mode, in several threads.

An image is decoded within limits, turned upright, scaled and cropped.
"""

import contextlib
import io
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image

from ddpm_ds.data.cache import CAPTIONS, SIZES
from ddpm_ds.data.sources.base import WHOLE, Pixels, Source, beside_of, formats, one_line, read_file
from ddpm_ds.data.spec import ALPHA
from ddpm_ds.data.writing import Chunk
from ddpm_ds.ground.errors import DataError
from ddpm_ds.schema.types import written

Size = tuple[int, int]  # height and width in pixels
CHUNK_BYTES, CHUNK_IMAGES = 2**22, 64  # maximum bytes of pixels, and images, in a chunk that one thread decodes
MOST_PIXELS = 2**25  # maximum pixels that are decoded, of a JPEG after it was scaled down; its coefficients are of all
BIG_PIXELS = 2**22  # pixels above which an image counts as big
BIG = threading.Lock()  # locked while a thread decodes a big image, so that memory does not grow with threads
Sizes = npt.NDArray[np.float32]
"""Pixels, float32 (6,), in the order of SDXL's ``add_time_ids``: height and width of the original image, top and left
of the crop in the scaled image, height and width of the crop."""
MODES = {1: "L", 3: "RGB"}  # mode of decoded images, by channels
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations of images whose height is the width of the file
_TURNS = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"]
UPRIGHT = {orientation: Image.Transpose[turn] for orientation, turn in enumerate(_TURNS, start=2)}
"""Operation that turns an image upright, by EXIF orientation."""


def decode(content: bytes | Pixels, size: Size, channels: int) -> Pixels:
    """Convert an image file, or pixels (H, W) or (H, W, C), to uint8 (height, width, ``channels``) of ``size``.

    Takes the first frame, turns a file by its EXIF orientation, and scales 16-bit grey to 8 bits. May raise any
    exception of a decoder.
    """
    return decode_with_sizes(content, size, channels)[0]


def upright_size(content: bytes | Pixels) -> Size:
    """Return height and width of an upright image from its header alone; may raise any exception of a decoder."""
    if not isinstance(content, bytes):
        return content.shape[0], content.shape[1]
    with Image.open(io.BytesIO(content), formats=formats()) as image:
        # A PNG's own getexif decodes it, to find EXIF behind its pixels.
        return image.size if _orientation(image, Image.Image.getexif) in SIDEWAYS else image.size[::-1]


def decode_with_sizes(content: bytes | Pixels, size: Size, channels: int, alpha: bool = False) -> tuple[Pixels, Sizes]:
    """Decode as :func:`decode`, an image's ``alpha`` alone if asked, and return the sizes of image and crop too."""
    if not isinstance(content, bytes):
        grey = content[..., 0] if content.ndim == 3 and content.shape[2] == 1 else content
        with _within_memory(grey.shape[1::-1]):
            return fit(Image.fromarray(grey), size, channels), _sizes(grey.shape[1::-1], size)
    with Image.open(io.BytesIO(content), formats=formats()) as image:
        whole = image.size
        # A JPEG can be scaled down while it is decoded, which is faster; twice the final size keeps Lanczos' quality.
        drafted = image.draft(None, (2 * size[1], 2 * size[0]))
        extent = None if drafted is None else drafted[1][2:]
        with _within_memory(whole if "progressive" in image.info else image.size):
            image.load()
            if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
                raise ValueError(f"pixels of mode {image.mode} have no fixed range; save it with 8 or 16 bits")
            turned = whole[::-1] if _orientation(image) in SIDEWAYS else whole
            return fit(image, size, channels, extent, alpha), _sizes(turned, size)


def _sizes(whole: tuple[int, int], size: Size) -> Sizes:
    """Return the :data:`Sizes` of an image of ``whole`` (width, height) that is scaled and cropped to ``size``."""
    width, height = whole
    scale = max(size[0] / height, size[1] / width)
    crop = (round((side * scale - kept) / 2) for side, kept in zip((height, width), size, strict=True))
    return np.array([height, width, *crop, *size], np.float32)


def _within_memory(size: tuple[int, ...]) -> AbstractContextManager[object]:
    """Return the context in which an image of a width and height may be decoded; raises ValueError if it is large."""
    pixels = math.prod(size)
    if pixels > MOST_PIXELS:
        raise ValueError(f"{size[0]} x {size[1]} are more than {MOST_PIXELS:,} pixels; scale it down")
    return BIG if pixels > BIG_PIXELS else contextlib.nullcontext()


def fit(
    image: Image.Image, size: Size, channels: int, extent: tuple[float, float] | None = None, alpha: bool = False
) -> Pixels:
    """Turn an image upright, scale it (Lanczos) until it just covers ``size`` (height, width), and crop the centre.

    Returns uint8 (height, width, ``channels``); transparent pixels become white. ``extent`` is the width and height
    without padding at the right and lower edge: a JPEG of 500 x 333, read at a quarter of its size, has 125 x 84 pixels
    and an extent of 125 x 83.25. ``alpha`` returns how opaque pixels are, 0 to 255.
    """
    orientation, (rows, columns) = _orientation(image), size
    order = -1 if orientation in SIDEWAYS else 1
    whole, (width, height) = image.size[::order], (extent or image.size)[::order]
    # A product by a quotient of 1 is exact, so squares are cut to the pixel, and rounding never leads over the edge.
    wide, high = min(width, height * (columns / rows)), min(height, width * (rows / columns))
    left, top = (width - wide) / 2, (height - high) / 2
    left += (whole[0] - width) * (orientation in (2, 3, 6, 7))  # turning puts the padding first
    top += (whole[1] - height) * (orientation in (3, 4, 7, 8))
    upright = image.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else image
    box = (left, top, left + wide, top + high)
    if upright.mode.startswith("I"):  # 16 bits ("I" for PGM); Pillow's own conversion clips instead of scaling
        upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    if alpha:
        upright = upright.convert("RGBA").getchannel("A")
    if upright.has_transparency_data:
        upright = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
    coloured = upright if upright.mode == MODES[channels] else upright.convert(MODES[channels])
    fitted = coloured.resize((columns, rows), Image.Resampling.LANCZOS, box)
    return np.array(fitted).reshape(*size, channels)  # (H, W, C)


def _orientation(image: Image.Image, read: Callable[[Image.Image], Image.Exif] = lambda image: image.getexif()) -> int:
    """Return an image's EXIF orientation; 1 (upright) if its EXIF block is damaged."""
    try:
        return int(read(image).get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow may raise anything on broken EXIF
        return 1


class Decoding:
    """Decoding of a source's images to pixels of a shape (C, H, W), in several threads."""

    def __init__(
        self,
        source: Source,
        shape: tuple[int, int, int],
        threads: int,
        others: Mapping[str, npt.NDArray[np.int32]] = MappingProxyType({}),
        beside: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.source, self.shape, self.threads = source, shape, threads
        self.others = others  # rows that are stored of each image, (N, numbers), by field
        self.beside = beside  # channels of the pictures that are read beside each image, by field
        self.chunk_images = min(CHUNK_IMAGES, max(1, CHUNK_BYTES // math.prod(shape)))

    def chunks(self, numbers: range) -> Iterator[Chunk]:
        """Yield the images of a range in chunks, some of them decoded ahead: Pillow lets other threads run."""
        ahead, stopped = deque[Future[Chunk]](), threading.Event()
        with ThreadPoolExecutor(self.threads) as pool:
            try:
                for first in range(0, len(numbers), self.chunk_images):
                    ahead.append(pool.submit(self._chunk, numbers[first : first + self.chunk_images], stopped))
                    if len(ahead) > 2 * self.threads:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                stopped.set()

    def _chunk(self, numbers: range, stopped: threading.Event) -> Chunk:
        images, labels, skipped = list[bytes](), list[int](), list[tuple[str, str]]()
        names = (*self.others, *self.beside, *[SIZES] * (CAPTIONS in self.others))
        others: dict[str, list[bytes]] = {name: [] for name in names}
        channels, *size = self.shape
        for i in numbers:
            if stopped.is_set():
                break
            content = None
            try:
                content = self.source.read(i)
                pixels, sizes = decode_with_sizes(content, (size[0], size[1]), channels)
                beside = {name: self._beside(name, i, content, sizes) for name in self.beside}
            except DataError:
                raise
            except Exception as error:  # a decoder may raise anything on broken bytes
                if content is None and not isinstance(error, (OSError, ValueError, MemoryError)):
                    raise  # a bug of the source
                skipped.append((self.source.name(i), one_line(error)))
                continue
            images.append(pixels.transpose(2, 0, 1).tobytes())
            labels.append(int(self.source.labels[i]))
            for name, rows in self.others.items():
                others[name].append(rows[i].tobytes())
            for name, picture in beside.items():
                others[name].append(picture.transpose(2, 0, 1).tobytes())
            if SIZES in others:
                others[SIZES].append(sizes.tobytes())
        return Chunk(images, labels, skipped, others)

    def _beside(self, name: str, i: int, content: bytes | Pixels, sizes: Sizes) -> Pixels:
        """Return the mask or condition of an image of these contents and sizes, cropped like it."""
        file, (_, height, width) = beside_of(self.source)[name][i], self.shape
        if file == WHOLE:
            return np.full((height, width, 1), 255, np.uint8)
        if file == ALPHA:
            return decode_with_sizes(content, (height, width), 1, alpha=True)[0]
        try:
            pixels, own = decode_with_sizes(read_file(Path(file)), (height, width), self.beside[name])
        except Exception as error:  # a decoder may raise anything on broken bytes
            raise ValueError(f"{file}: {one_line(error)}") from error
        if (own[:2] != sizes[:2]).any():
            there, here = (written((int(each[0]), int(each[1]))) for each in (own, sizes))
            raise DataError(
                f"data.{name}: {file} has {there} pixels, and {self.source.name(i)} has {here}; give both one size"
            )
        return pixels
