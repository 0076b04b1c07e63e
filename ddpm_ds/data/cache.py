"""Data-set cache: all images of a source, in their final size, in files of bounded size.

::

    <store_root>/<source>-<size>px-<channels>ch[-<hash>][-encoded]/
        images.npy, images.1.npy, ...   uint8 (n, C, H, W), float16 for latents; `shards` of meta.json lists every n.
                                        Encoded images are concatenated in images.bin, images.1.bin, ...
        offsets.npy   int64 (N + 1,), only for encoded images: first byte of each, over all files, and the end
        labels.npy    int64 (N,)
        meta.json     CacheMeta
        skipped.txt   images that were left out and why, one per line, if there were any
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from tqdm import tqdm

from ddpm_ds.data.decoding import decode
from ddpm_ds.data.sources.base import map_array
from ddpm_ds.errors import DataError, one_line
from ddpm_ds.files import open_regular, read_bytes, sha256_of

FORMAT: Final = 1
LABELS, OFFSETS, META, SKIPPED = "labels.npy", "offsets.npy", "meta.json", "skipped.txt"
Kind = Literal["pixels", "encoded", "latents"]
DECODING: Final = "decoding"
"""Name of the version of decoding among the checksums of encoded images, which are other pixels by another version."""
MOST_META_BYTES = 2**28
"""Maximum size of ``meta.json``, which names every class: a million names of 250 bytes."""
MOST_NAMED = 12
"""Maximum classes of which a summary names each."""
MOST_OPEN = 256
"""Maximum image files open at a time; processes are often limited to 1,024 open files."""
READAHEAD_BYTES = 2**17
"""Bytes that Linux reads ahead at once by default: it drops the rest of a longer request."""

Look = tuple[int, int]
"""Size in bytes, 0 for a folder, and time of the last change in ns."""
Indices = npt.NDArray[np.int64]
Images = npt.NDArray[Any]
"""Images (n, C, H, W), uint8 or, for latents, float16."""


def shard_name(kind: Kind, number: int) -> str:
    """Return the name of the ``number``-th file of images; the first has no number."""
    return f"images{f'.{number}' if number else ''}.{'bin' if kind == 'encoded' else 'npy'}"


Extent = Annotated[int, Field(ge=1, le=2**16)]
"""Channels, height or width of the images, of which a forged number is refused before memory is allocated for it."""


class Origin(BaseModel):
    """State of ``data.path`` when its images were prepared."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    content: str
    """Hash of the names, the labels and some images."""
    looks: dict[str, Look]
    """Looks of the path (``.``) and of some folders and files in it, by relative name."""


class CacheMeta(BaseModel):
    """Content of ``meta.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1]
    source: str
    folder: str | None
    count: NonNegativeInt
    shape: tuple[Extent, Extent, Extent]  # (C, H, W)
    classes: tuple[str, ...]
    skipped: NonNegativeInt
    sha256: dict[str, str]
    kind: Kind = "pixels"
    shards: tuple[NonNegativeInt, ...] = ()
    """Number of images in each file; empty if one file holds all."""
    origin: Origin | None = None
    """None for a source that is not at a path, for latents, and in caches of earlier versions."""

    @classmethod
    def read(cls, cache: Path) -> CacheMeta:
        """Read the description of the cache in a folder; raises OSError and, for one of another format, ValueError."""
        return cls.model_validate_json(read_bytes(cache / META, MOST_META_BYTES))

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of images in each file."""
        return self.shards or (self.count,)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values of an image that is read."""
        return np.dtype(np.float16 if self.kind == "latents" else np.uint8)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files of images."""
        return tuple(shard_name(self.kind, number) for number in range(len(self.counts)))


class StoredImages:
    """Images of a cache on disk, read by position: ``images[7]``, ``images[:100]``, ``images[positions]``.

    A single file of pixels or latents is memory-mapped, and its size checked before each read, since reading beyond the
    end of a truncated file would kill the process. Several files, or encoded ones, are opened at their first use, and
    their images read, and decoded, one by one. With ``crop`` only the central (height, width) pixels are returned.
    """

    def __init__(
        self, path: Path, meta: CacheMeta, offsets: Indices | None, crop: tuple[int, int] | None = None
    ) -> None:
        self.shape = (meta.count, *meta.shape) if crop is None else (meta.count, meta.shape[0], *crop)
        self.dtype, self.offsets = meta.dtype, offsets
        self.crop, self._path, self._meta = crop, path, meta
        self._starts = np.cumsum((0, *meta.counts))  # (files + 1,)
        self._paths = [path / name for name in meta.files]
        self._sizes = np.array([os.stat(file).st_size for file in self._paths])
        self._image_bytes = math.prod(meta.shape) * self.dtype.itemsize
        self._headers = self._sizes - np.array(meta.counts) * self._image_bytes  # only of .npy files
        # A dropped file is closed by its last user: another thread may still read it.
        self._file = lru_cache(MOST_OPEN)(lambda number: io.FileIO(self._paths[number]))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: int | slice | Indices | Sequence[int]) -> Images:
        positions = np.arange(len(self))[which]
        found = self.read(np.atleast_1d(positions))
        return found if positions.ndim else found[0]

    def read(self, positions: Indices, out: Images | None = None) -> Images:
        """Return the images (n, C, H, W) at ``positions`` (n,), in ``out`` if it is given.

        Raises:
            DataError: a file was truncated or removed since the cache was opened, or an encoded image can't be decoded.
        """
        out = np.empty((len(positions), *self.shape[1:]), self.dtype) if out is None else out
        try:
            if len(self._sizes) == 1 and self.offsets is None and self.crop is None:
                if self._bytes_now(0) != self._sizes[0]:
                    raise self._cut_short(0)
                # With mode="clip" numpy copies once; in its other modes it copies into a buffer first.
                return np.take(self._mapped, positions, axis=0, out=out, mode="clip")
            places = list(self._places(positions))
            if len(self._sizes) > 1:  # all at once, which a disk serves faster than one by one
                for place in places:
                    self._ask(*place)
            for row, position, place in zip(out, positions.tolist(), places, strict=True):
                self._read_one(row, position, *place)
        except OSError as error:
            raise damaged(self._path, f"{error.filename or self._path} can't be read ({error.strerror})") from error
        return out

    def will_read(self, first: int, last: int) -> None:
        """Ask the system to read images ``first`` to ``last`` - 1 from disk, without waiting for it."""
        while first < last:
            number = int(self._starts.searchsorted(first, side="right")) - 1
            end = min(last, int(self._starts[number + 1]))
            (_, begin, _), (_, _, stop) = self._places(np.array([first, end - 1]))
            self._ask(number, begin, stop)
            first = end

    def _places(self, positions: Indices) -> Iterator[tuple[int, int, int]]:
        """Yield each image's file number, its first byte in that file and the byte after its last."""
        files = self._starts.searchsorted(positions, side="right") - 1  # (n,)
        starts = self._starts[files]
        if self.offsets is not None:
            begins, ends = (self.offsets[positions + more] - self.offsets[starts] for more in (0, 1))
        else:
            begins = self._headers[files] + (positions - starts) * self._image_bytes
            ends = begins + self._image_bytes
        return zip(files.tolist(), begins.tolist(), ends.tolist(), strict=True)

    def _ask(self, number: int, begin: int, end: int) -> None:
        """Ask the system to read these bytes of file ``number``."""
        file = self._file(number)
        for byte in range(begin, end, READAHEAD_BYTES):
            os.posix_fadvise(file.fileno(), byte, min(READAHEAD_BYTES, end - byte), os.POSIX_FADV_WILLNEED)

    def _read_one(self, row: Images, position: int, number: int, begin: int, end: int) -> None:
        """Read the image at ``position`` into ``row``, from these bytes of file ``number``."""
        encoded, cropped = self.offsets is not None, self.crop is not None
        if encoded:
            content: Any = bytearray(end - begin)
        else:
            content = np.empty(self._meta.shape, self.dtype) if cropped else row
        file = self._file(number)
        if os.preadv(file.fileno(), [content], begin) != end - begin:
            raise self._cut_short(number)
        if encoded:
            channels, *size = self._meta.shape
            try:
                stretched = DECODING not in self._meta.sha256
                content = decode(bytes(content), (size[0], size[1]), channels, stretched=stretched).transpose(2, 0, 1)
            except Exception as error:  # a decoder may raise anything on broken bytes
                reason = " ".join(str(error).split())
                raise damaged(self._path, f"image {position} can't be decoded ({reason})") from error
        if encoded or cropped:
            top, left = ((side - kept) // 2 for side, kept in zip(content.shape[1:], row.shape[1:], strict=True))
            row[:] = content[:, top : top + row.shape[1], left : left + row.shape[2]]

    @cached_property
    def _mapped(self) -> Images:
        """Memory-mapped images (n, C, H, W) of a single file."""
        return map_array(self._paths[0])

    def _bytes_now(self, number: int) -> int:
        file = self._file(number)
        return os.fstat(file.fileno()).st_size

    def _cut_short(self, number: int) -> DataError:
        name, before, now = self._meta.files[number], self._sizes[number], self._bytes_now(number)
        return damaged(self._path, f"{name} was cut from {before:,} to {now:,} bytes while it was read")


@dataclass(frozen=True)
class DatasetCache:
    """Open data-set cache. Pickling sends no images: the receiving process opens the cache again."""

    path: Path
    meta: CacheMeta
    images: StoredImages = field(repr=False)
    """(N, C, H, W)"""
    labels: Indices = field(repr=False)  # (N,)

    @classmethod
    def open(cls, path: Path, verify: bool = True, progress: bool = False) -> DatasetCache:
        """Open the cache at ``path``; ``verify`` reads every byte and compares checksums.

        It is enough that one process per node verifies.

        Raises:
            DataError: it is missing, damaged or in another format.
        """
        if not path.is_dir():
            raise DataError(f"there is no data-set cache at {path}; make it with: ddpm-ds prepare")
        try:
            meta = CacheMeta.read(path)
            names = (*meta.files, LABELS, *([OFFSETS] if meta.kind == "encoded" else []))
            for name in names:
                open_regular(path / name).close()
                if name not in meta.sha256:
                    raise damaged(path, f"{META} has no checksum of {name}")
            if verify:
                for name, checksum in checksums(path, names, progress).items():
                    if meta.sha256[name] != checksum:
                        raise damaged(path, f"{name} has another checksum than meta.json says")
            labels = map_array(path / LABELS)
            offsets = np.array(map_array(path / OFFSETS)) if meta.kind == "encoded" else None
            for wrong in _misfits(path, meta, labels, offsets):
                raise damaged(path, wrong)
            return cls(path, meta, StoredImages(path, meta, offsets), np.array(labels))
        except OSError as error:
            raise damaged(path, f"{error.filename or path} can't be read ({error.strerror or error})") from error
        except ValidationError as error:
            raise damaged(path, f"{META} is not that of a data-set cache of format {FORMAT}") from error

    def __len__(self) -> int:
        return self.meta.count

    def __reduce__(self) -> tuple[Callable[[Path, tuple[int, int]], DatasetCache], tuple[Path, tuple[int, int]]]:
        return _reopen, (self.path, self.meta.shape[1:])

    def centre(self, size: tuple[int, int]) -> DatasetCache:
        """Return this cache with its images centre-cropped to ``size`` (height, width), without a copy.

        Evaluation reads these; training takes random crops.
        """
        channels, height, width = self.meta.shape
        if (height, width) == size:
            return self
        images = StoredImages(self.path, self.meta, self.images.offsets, size)
        meta = self.meta.model_copy(update={"shape": (channels, *size)})
        return replace(self, meta=meta, images=images)

    @property
    def summary(self) -> str:
        """The number of images, of those left out, and of the images of each class; of many classes only some."""
        counts = np.bincount(self.labels, minlength=len(self.meta.classes)).tolist()
        named = [f"{one_line(name)} {count:,}" for name, count in zip(self.meta.classes, counts, strict=True)]
        if len(named) > MOST_NAMED:
            named = [f"{min(counts):,} to {max(counts):,} each", *named[:3], "...", named[-1]]
        left_out = f", {self.meta.skipped:,} left out ({SKIPPED})" if self.meta.skipped else ""
        kinds = "without classes" if self.meta.classes == (".",) else f"in {len(counts):,} classes: {', '.join(named)}"
        return f"{len(self):,} images{left_out} {kinds}"

    @property
    def key(self) -> str:
        """Hexadecimal key that identifies these images: a hash of their checksums and the crop size."""
        parts = [self.meta.sha256[name] for name in (*self.meta.files, DECODING) if name in self.meta.sha256]
        parts += [] if self.images.crop is None else [" ".join(map(str, dict.fromkeys(self.images.crop)))]
        return parts[0] if len(parts) == 1 else sha256(" ".join(parts).encode()).hexdigest()


def _misfits(path: Path, meta: CacheMeta, labels: npt.NDArray[Any], offsets: npt.NDArray[Any] | None) -> Iterator[str]:
    """Yield a description of everything that contradicts ``meta.json``."""
    if sum(meta.counts) != meta.count:
        yield f"{META} has shards of {sum(meta.counts):,} images and {meta.count:,} in all"
    if labels.dtype != np.int64 or labels.shape != (meta.count,):
        yield f"{LABELS} is {labels.dtype} {labels.shape} for {meta.count} images"
    if not ((labels >= 0) & (labels < len(meta.classes))).all():
        yield f"{LABELS} has labels of none of the {len(meta.classes)} classes"
    if offsets is not None and (offsets.dtype != np.int64 or offsets.shape != (meta.count + 1,)):
        yield f"{OFFSETS} is {offsets.dtype} {offsets.shape} for {meta.count} images"
    if offsets is not None and (offsets[1:] < offsets[:-1]).any():  # a difference might not fit 64 bits
        yield f"{OFFSETS} does not rise"
    start = 0
    for name, count in zip(meta.files, meta.counts, strict=True):
        if offsets is None:
            images = map_array(path / name)
            if images.dtype != meta.dtype or images.shape != (count, *meta.shape):
                yield f"{name} is {images.dtype} {images.shape}, {META} says otherwise"
        elif (path / name).stat().st_size != offsets[start + count] - offsets[start]:
            yield f"{name} has another size than {OFFSETS} says"
        start += count


def _reopen(path: Path, size: tuple[int, int]) -> DatasetCache:
    return DatasetCache.open(path, verify=False).centre(size)


def checksums(folder: Path, names: tuple[str, ...], progress: bool) -> dict[str, str]:
    """Compute the SHA-256 of files in ``folder``, by name, in threads; shows a bar on stderr after a second."""
    total = sum((folder / name).stat().st_size for name in names)
    title = f"checking {folder.name}"
    with (
        tqdm(total=total, desc=title, unit="B", unit_scale=True, delay=1, disable=not progress) as bar,
        ThreadPoolExecutor() as threads,
    ):
        return dict(zip(names, threads.map(lambda name: sha256_of(folder / name, bar), names), strict=True))


def damaged(path: Path, what: str) -> DataError:
    """Return the error for a cache that can't be used."""
    return DataError(f"data-set cache is unusable: {what}; delete {path} and prepare again")
