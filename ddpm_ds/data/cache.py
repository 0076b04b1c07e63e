"""Data-set cache: all images of a source, in their final size, in files of bounded size.

::

    <store_root>/<source>-<size>px-<channels>ch[-<hash>]/
        images.npy, images.1.npy, ...   uint8 (n, C, H, W), float16 for latents, float16 or float32 for fields; `shards`
                                        of meta.json lists every n
        condition.npy, mask.npy, vector.npy, ...   other fields of the same images, in as many files; `fields` of
                                        meta.json has their shapes and types
        constants.npy   float32 (C, H, W), fields that all images share
        labels.npy    int64 (N,)
        images-mirrored.npy, condition-1.npy, ...   other latents of the same images: :func:`variant`
        sizes.npy, captions.npy   with captions: float32 (N, 6), and lines of captions.jsonl, int32 (N, most captions)
        captions.jsonl   distinct captions, each a JSON text; the first is empty
        source.npy    with several sources: number among data.sources, repeats in the folder's name, int32 (N, 2)
        meta.json     CacheMeta
        skipped.txt   images that were left out, with the reasons, if there were any
    <store_root>/text-<captions>-<encoders>[-ids]/
        the same files for captions: images.npy has tokens (n, 1, tokens, channels), or their numbers (n, 1, encoders,
        tokens), which training encodes; pooled.npy, and cut.npy: tokens of a caption that were cut off
"""

from __future__ import annotations

import copy
import itertools
import math
import mmap
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from types import EllipsisType
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, ValidationError
from tqdm import tqdm

from ddpm_ds.data.sources.base import map_array
from ddpm_ds.data.statistics import Kept, Numbers, Statistics
from ddpm_ds.data.text import Encoded
from ddpm_ds.ground.errors import DataError, one_line
from ddpm_ds.ground.files import open_regular, read_bytes, sha256_of
from ddpm_ds.schema.choices import SOURCES
from ddpm_ds.schema.types import MOST_VARIANTS

FORMAT: Final = 1
LABELS, META, SKIPPED = "labels.npy", "meta.json", "skipped.txt"
CONSTANTS = "constants.npy"
IMAGES: Final = "images"
"""Name of the field that every cache has."""
CONDITION, MASK, VECTOR = "condition", "mask", "vector"
SIZES, CAPTIONS, CAPTIONS_FILE = "sizes", "captions", "captions.jsonl"
SOURCE = "source"
"""Field of an image's number among ``data.sources``, and of the repeats in its folder's name or 0."""
TEXT, POOLED, CUT = "text", "pooled", "cut"
"""Fields of encoded captions; a text cache has the tokens as :data:`IMAGES`."""
TEXTS, BUCKETS = "text/", "bucket/"
"""Prefixes of encoded text and of other buckets of aspect in the checksums of images."""
Kind = Literal["pixels", "latents", "fields", "text"]
MOST_META_BYTES = 2**28
"""Maximum size of ``meta.json``, which names every class: a million names of 250 bytes."""
MOST_NAMED = 12
"""Maximum classes that a summary names one by one."""
MOST_ROUNDING = 0.01
"""RMS of the rounding, as a share of the spread, above which another type is advised."""
MOST_OPEN = 256
"""Maximum image files open at a time: processes are often limited to 1,024 open files."""

_LATER = re.compile(r"(.+)\.([1-9]\d*)\.npy")  # name of a field's second file, or of a later one

Look = tuple[int, int]
"""Size in bytes, 0 for a folder, and time of the last change in ns. Of a folder of arrays all files count."""
Indices = npt.NDArray[np.int64]
Draw = Callable[[int, int], Indices]
"""Function of a stream and a number of words that returns so many draws for each image, (n, words) in [0, 2^32)."""
Images = npt.NDArray[Any]
"""Images (n, C, H, W), uint8, or float16 for latents, or float16 or float32 for fields; vectors are (n, K)."""


def shard_name(number: int, name: str = IMAGES) -> str:
    """Return the name of the ``number``-th file of a field; the first has no number."""
    return f"{name}.{number}.npy" if number else f"{name}.npy"


def variant(name: str, number: int, mirrored: bool) -> str:
    """Return the name of the field with another of an image's latents, or of their masks; the first has no number."""
    return f"{name}{f'-{number}' if number else ''}{'-mirrored' if mirrored else ''}"


def by_field(checksums: Mapping[str, str]) -> dict[str, str]:
    """Return one checksum of each field's files, that of their checksums if there are several, under the first name."""
    files = defaultdict[str, list[tuple[int, str]]](list)
    for name, checksum in checksums.items():
        later = _LATER.fullmatch(name)
        files[shard_name(0, later[1]) if later else name].append((int(later[2]) if later else 0, checksum))
    several = {name: sha256(repr(sorted(sums)).encode()).hexdigest() for name, sums in files.items() if sums[1:]}
    return {name: several.get(name, sums[0][1]) for name, sums in files.items()}


Extent = Annotated[int, Field(ge=1, le=2**16)]
"""Channels, height or width; the limit refuses a forged number before memory is allocated."""


class StoredField(Kept):
    """Shape and type of a field of one image."""

    shape: Annotated[tuple[Extent, ...], Field(min_length=1, max_length=3)]
    """(C, h, w), or (K,) for a vector."""
    values: Literal["uint8", "int32", "float16", "float32"]
    channels: tuple[str, ...] = ()
    """Names of the channels, such as t2m or u.850, if the source has some."""
    offset: tuple[float, ...] = ()
    """Number that is subtracted from each channel before rounding to float16, and added in reading, if any."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.values)

    @property
    def wide(self) -> StoredField:
        """The field before rounding."""
        return self.model_copy(update={"values": "float32", "offset": ()}) if self.values == "float16" else self

    def rounded(self, values: Images) -> Images:
        """Return values (C, ...) as they are stored; values beyond the type become infinite."""
        with np.errstate(over="ignore", invalid="ignore"):
            if self.offset:
                offset = np.array(self.offset, np.float32).reshape(-1, *[1] * (values.ndim - 1))
                values = np.subtract(values, offset, dtype=np.result_type(values.dtype, np.float32))
            return np.ascontiguousarray(values, self.dtype)

    def read(self, stored: Images, out: Images | None = None) -> Images:
        """Return stored values (..., C, h, w) as they are read: float32 if they have an offset."""
        if not self.offset:
            return stored
        return np.add(stored, np.array(self.offset, np.float32)[:, None, None], out=out)

    @property
    def nbytes(self) -> int:
        """Bytes of one image."""
        return math.prod(self.shape) * self.dtype.itemsize


def field_of(kind: Kind, shape: tuple[int, int, int]) -> StoredField:
    """Return the only field of a cache of pictures or latents."""
    return StoredField(shape=shape, values="float16" if kind == "latents" else "uint8")


class Coordinate(Kept):
    """Positions along one dimension of the images, from the source, which files of samples get."""

    along: Literal["image", "height", "width"]
    name: str
    values: tuple[float, ...] | tuple[str, ...]
    """Empty if the source has only a name."""
    units: str = ""


class Origin(Kept):
    """State of ``data.path`` when its images were prepared."""

    content: str
    """Hash of names, labels and some images, or of whole files of arrays."""
    looks: dict[str, Look]
    """Looks of the path (``.``) and of folders and files in it, by relative name."""
    condition_looks: dict[str, Look] = Field(default={})
    """The same for ``data.condition.path``."""


class FieldFacts(Kept):
    """Facts of a data-set cache that a run keeps, so that it can sample without the cache."""

    fields: dict[str, StoredField]
    statistics: dict[str, Statistics]
    coordinates: tuple[Coordinate, ...]
    """Coordinates along height and width."""


class CacheMeta(Kept):
    """Content of ``meta.json``."""

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
    """None for a source without a path."""
    fields: dict[str, StoredField] = Field(default={})
    """All fields, images included; empty for pictures or latents without others."""
    constants: StoredField | None = None
    statistics: dict[str, Statistics] = Field(default={})
    """Statistics by field, for floats and for conditions in bytes."""
    rounding: dict[str, Numbers] = Field(default={})
    """RMS of the rounding to float16 by channel, as a share of the standard deviation."""
    coordinates: tuple[Coordinate, ...] = ()
    masked: bool = False
    """Whether there may be NaN, which is read as the mean of its channel."""

    @classmethod
    def read(cls, cache: Path) -> CacheMeta:
        """Read ``meta.json`` of the cache in a folder; raises OSError, and ValueError for another format."""
        return cls.model_validate_json(read_bytes(cache / META, MOST_META_BYTES))

    @property
    def facts(self) -> FieldFacts | None:
        """Facts that a run on these fields keeps; None for pictures and latents."""
        if not self.fields or self.kind == "latents" or not getattr(SOURCES.get(self.source), "arrays", False):
            return None
        of_place = tuple(each for each in self.coordinates if each.along != "image")
        return FieldFacts(fields=self.fields, statistics=self.statistics, coordinates=of_place)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of images in each file."""
        return self.shards or (self.count,)

    @property
    def stored(self) -> Mapping[str, StoredField]:
        """All fields, images included."""
        return self.fields or {IMAGES: field_of(self.kind, self.shape)}

    def files_of(self, name: str) -> tuple[str, ...]:
        """Names of the files of a field."""
        return tuple(shard_name(number, name) for number in range(len(self.counts)))

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(file for name in self.stored for file in self.files_of(name))


class ByPosition(ABC):
    """Field of N images, read by position: ``field[7]``, ``field[:100]``, ``field[positions]``."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    image_bytes: int

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: int | slice | Indices | Sequence[int]) -> Images:
        positions = np.arange(len(self))[which]
        found = self.read(np.atleast_1d(positions))
        return found if positions.ndim else found[0]

    @abstractmethod
    def read(self, positions: Indices, out: Images | None = None, draw: Draw | None = None) -> Images:
        """Return the field (n, ...) of the images at ``positions`` (n,), in ``out`` if it is given; raises DataError.

        ``draw`` chooses among several captions of an image, and changes tags; without it the first is taken, with all
        its tags.
        """


class StoredImages(ByPosition):
    """Memory-mapped field of a cache on disk; masked values are read as the mean of their channel.

    The size of a file is checked before each read: reading beyond the end of a truncated file would kill the process.
    With ``crop`` only the central (height, width) pixels are returned.
    """

    def __init__(self, path: Path, meta: CacheMeta, crop: tuple[int, int] | None = None, name: str = IMAGES) -> None:
        self._field = stored = meta.stored[name]
        self.shape = (meta.count, *stored.shape) if crop is None else (meta.count, stored.shape[0], *crop)
        self.dtype, self.name = (np.dtype("f4") if stored.offset else stored.dtype), name
        self.crop, self._path = crop, path
        sides = () if crop is None else zip(stored.shape[1:], crop, strict=True)
        starts = ((begin := (side - kept) // 2, begin + kept) for side, kept in sides)
        self.inside: tuple[slice | EllipsisType, ...] = (..., *itertools.starmap(slice, starts))
        self._starts = np.cumsum((0, *meta.counts))  # (files + 1,)
        self._files = meta.files_of(name)
        self._sizes = [(path / file).stat().st_size for file in self._files]
        self.image_bytes, self._by_rows = stored.nbytes, False
        means = meta.statistics[name].mean if meta.masked and name in meta.statistics else ()
        self._means = np.array(means, self.dtype)  # (C,), or empty if nothing is masked
        # A file that leaves this cache is closed by its last user: another thread may still read it.
        self._mapped = lru_cache(MOST_OPEN)(lambda number: map_array(path / self._files[number]))

    def rows(self, first: int, stop: int) -> StoredImages:
        """Return the same whole images without their other rows, which are not read."""
        found = copy.copy(self)
        found.inside, found._by_rows = (..., slice(first, stop), slice(None)), True
        found.shape = (*self.shape[:2], stop - first, self.shape[3])
        found.image_bytes = self.image_bytes // self.shape[2] * (stop - first)
        return found

    def read(self, positions: Indices, out: Images | None = None, draw: Draw | None = None) -> Images:
        out = np.empty((len(positions), *self.shape[1:]), self.dtype) if out is None else out
        stored = np.empty(out.shape, self._field.dtype) if self._field.offset else out
        try:
            if len(self._files) == 1 and len(self.inside) == 1:
                # With mode="clip" numpy copies once; in its other modes it copies into a buffer first.
                np.take(self._opened(0), positions, axis=0, out=stored, mode="clip")
            else:
                files = self._starts.searchsorted(positions, side="right") - 1  # (n,)
                for number in np.unique(files).tolist():
                    mapped, rows = self._opened(number), np.flatnonzero(files == number)
                    places = (positions[rows] - self._starts[number]).tolist()
                    header = self._sizes[number] - mapped.nbytes
                    for place in places:  # a disk serves all requests together faster than one by one
                        for part in mapped[place][self.inside] if self._by_rows else mapped[place : place + 1]:
                            begin = header + part.ctypes.data - mapped.ctypes.data
                            page = begin // mmap.PAGESIZE * mmap.PAGESIZE
                            mapped.base.madvise(mmap.MADV_WILLNEED, page, begin + part.nbytes - page)
                    for row, place in zip(rows.tolist(), places, strict=True):
                        stored[row] = mapped[place][self.inside]
        except OSError as error:
            raise damaged(self._path, f"{error.filename or self._path} can't be read ({error.strerror})") from error
        found = self._field.read(stored, out)
        for image in found if len(self._means) else ():
            for channel, mean in zip(image, self._means, strict=True):
                np.copyto(channel, mean, where=np.isnan(channel))
        return found

    def _opened(self, number: int) -> Any:
        """Return the memory-mapped images (n, C, H, W) of a file; raises DataError if it was cut."""
        name, before = self._files[number], self._sizes[number]
        if (now := (self._path / name).stat().st_size) != before:
            raise damaged(self._path, f"{name} was cut from {before:,} to {now:,} bytes while it was read")
        return self._mapped(number)


class Variants(ByPosition):
    """Field of which each image has several: ``copies`` others, and then as many of the mirrored image, if any."""

    def __init__(self, fields: Sequence[StoredImages], copies: int) -> None:
        self._fields, self._copies = fields, copies
        self.shape, self.dtype, self.image_bytes = fields[0].shape, fields[0].dtype, fields[0].image_bytes

    def read(self, positions: Indices, out: Images | None = None, draw: Draw | None = None) -> Images:
        if draw is None:
            return self._fields[0].read(positions, out)
        from ddpm_ds.ground.keyed import Stream  # imports torch

        found = np.empty((len(positions), *self.shape[1:]), self.dtype) if out is None else out
        which = draw(Stream.CUT, 1)[:, 0] * self._copies >> 32
        if len(self._fields) > self._copies:
            which = which + self._copies * (draw(Stream.FLIP, 1)[:, 0] >> 31)
        for number in np.unique(which).tolist():
            own = which == number
            found[own] = self._fields[number].read(positions[own])
        return found


class CaptionText(ByPosition):
    """Field of the images' encoded captions, (N, tokens, channels), (N, tokens) or (N, channels)."""

    def __init__(self, captions: StoredImages, texts: StoredImages) -> None:
        self._captions, self._texts = captions, texts
        self.shape = (len(captions), *texts.shape[-2 if len(texts.shape) == 4 else 1 :])
        self.dtype, self.image_bytes = texts.dtype, texts.image_bytes

    def read(self, positions: Indices, out: Images | None = None, draw: Draw | None = None) -> Images:
        rows = chosen(self._captions, positions, draw)
        if out is not None:
            out = out.reshape(len(positions), *self._texts.shape[1:])
        return self._texts.read(rows, out).reshape(len(positions), *self.shape[1:])


def chosen(captions: StoredImages, positions: Indices, draw: Draw | None) -> Indices:
    """Return the number of one caption of each image, int64 (n,): a drawn one, or the first."""
    from ddpm_ds.ground.keyed import Stream  # imports torch

    found = captions.read(positions)  # (n, most captions)
    which = np.zeros_like(positions)
    if draw is not None:
        which = draw(Stream.CAPTION, 1)[:, 0] % np.maximum(1, (found >= 0).sum(axis=1))
    return found[np.arange(len(positions)), which].astype(np.int64)


@dataclass(frozen=True)
class DatasetCache:
    """Open data-set cache."""

    path: Path
    meta: CacheMeta
    images: StoredImages = field(repr=False)
    """(N, C, H, W)"""
    labels: Indices = field(repr=False)  # (N,)
    others: Mapping[str, StoredImages] = field(default_factory=dict, repr=False)
    """Other fields, by name: condition (N, C, h, w), mask (N, 1 or C, H, W), vector (N, K), sizes (N, 6), captions
    (N, most captions)."""
    constants: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    """Fields that all images share, (C, H, W)."""
    text: DatasetCache | None = field(default=None, repr=False)
    """Encoded distinct captions, or their tokens; None without text, and if captions are tokenized while training."""
    tokens: ByPosition | None = field(default=None, repr=False)
    """Tokens of the images' captions, (N, encoders, tokens), if captions are tokenized while training."""
    buckets: tuple[DatasetCache, ...] = field(default=(), repr=False)
    """Other buckets of aspect, if this cache is the first bucket."""

    @property
    def fields(self) -> Mapping[str, ByPosition]:
        """All fields, images included, by name; an image's text is one of its captions, its latents are drawn too."""
        stored = {IMAGES: self.images, **self.others}
        found: dict[str, ByPosition] = {**stored}
        for name in (IMAGES, CONDITION, MASK):
            copies = sum(variant(name, number, False) in stored for number in range(MOST_VARIANTS))
            each = [variant(name, number, mirrored) for mirrored in (False, True) for number in range(copies)]
            if len(each := [other for other in each if other in stored]) > 1:
                found[name] = Variants([stored[other] for other in each], copies)
        if self.text is not None:
            texts = {TEXT: self.text.images, **self.text.others}
            captions = self.others[CAPTIONS]
            found |= {name: CaptionText(captions, stored) for name, stored in texts.items() if name != CUT}
        return found if self.tokens is None else found | {TEXT: self.tokens}

    def with_others(self, text: DatasetCache | None, buckets: Sequence[DatasetCache] = ()) -> DatasetCache:
        """Return this cache with its encoded captions and the other buckets of aspect, and with their checksums."""
        sums, others = dict(self.meta.sha256), {bucket_prefix(each.meta.shape): each for each in buckets}
        for prefix, each in (others | ({TEXTS: text} if text else {})).items():
            sums |= {f"{prefix}{name}": checksum for name, checksum in each.meta.sha256.items()}
        meta = self.meta.model_copy(update={"sha256": sums})
        return replace(self, text=text or self.text, buckets=tuple(buckets), meta=meta)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of its images."""
        height, width = self.images.shape[2:]
        return height, width

    @property
    def caches(self) -> tuple[DatasetCache, ...]:
        """Caches of all buckets of aspect, this cache first."""
        return (self, *self.buckets)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of images in each bucket of aspect."""
        return tuple(map(len, self.caches))

    def by_bucket(self, positions: Indices) -> tuple[Indices, ...]:
        """Return rising ``positions`` among the images of all :attr:`caches` as positions in each cache."""
        starts = np.cumsum((0, *self.counts))
        parts = np.split(positions, positions.searchsorted(starts[1:-1]))
        return tuple(part - start if start else part for part, start in zip(parts, starts, strict=False))  # few copies

    @property
    def empty_text(self) -> Encoded | None:
        """The encoded empty caption, N = 1, on the CPU; None without encoded text."""
        if self.text is None or self.text.images.dtype == np.int32:
            return None
        import torch

        found = {name: torch.from_numpy(stored[:1]) for name, stored in self.text.fields.items()}
        return Encoded(found[IMAGES][:, 0], found.get(POOLED))

    @classmethod
    def open(cls, path: Path, verify: bool = True, progress: bool = False) -> DatasetCache:
        """Open the cache at ``path``; ``verify`` compares all checksums. Raises DataError."""
        if not path.is_dir():
            raise DataError(f"there is no data-set cache at {path}; make it with: ddpm-ds prepare")
        if not (path / META).exists():
            raise DataError(f"{path} has no {META}, so it is no data-set cache; name another, or move this folder away")
        try:
            meta = CacheMeta.read(path)
            optional = {CONSTANTS: meta.constants, CAPTIONS_FILE: CAPTIONS in meta.fields}
            names = (*meta.files, LABELS, *(name for name, kept in optional.items() if kept))
            for name in names:
                open_regular(path / name).close()
                if name not in meta.sha256:
                    raise damaged(path, f"{META} has no checksum of {name}")
            if verify:
                for name, checksum in checksums(path, names, progress).items():
                    if meta.sha256[name] != checksum:
                        raise damaged(path, f"{name} has another checksum than meta.json says")
            labels = np.array(map_array(path / LABELS))
            if (wrong := next(_misfits(path, meta, labels), None)) is not None:
                raise damaged(path, wrong)
            fields = {name: StoredImages(path, meta, name=name) for name in meta.stored}
            constants = np.array(map_array(path / CONSTANTS)) if meta.constants else None
            return cls(path, meta, fields.pop(IMAGES), labels, fields, constants)
        except OSError as error:
            raise damaged(path, f"{error.filename or path} can't be read ({error.strerror or error})") from error
        except ValidationError as error:
            raise damaged(path, f"{META} does not describe a data-set cache of format {FORMAT}") from error

    def __len__(self) -> int:
        return self.meta.count

    def with_statistics(self, statistics: Mapping[str, Statistics]) -> DatasetCache:
        """Return this uncropped cache with other statistics, which scale images and fill masked values."""
        if statistics == self.meta.statistics:
            return self
        meta = self.meta.model_copy(update={"statistics": dict(statistics)})
        fields = {name: StoredImages(self.path, meta, name=name) for name in meta.stored}
        return replace(self, meta=meta, images=fields.pop(IMAGES), others=fields)

    def centre(self, size: tuple[int, int]) -> DatasetCache:
        """Return this cache with all fields of the images' size centre-cropped to ``size``, without a copy."""
        channels, *before = self.meta.shape
        if (*before,) == size:
            return self
        fields, images = dict(self.meta.fields), {IMAGES: StoredImages(self.path, self.meta, size)}
        for name, stored in self.meta.fields.items():
            if [*stored.shape[1:]] == before:
                fields[name] = stored.model_copy(update={"shape": (stored.shape[0], *size)})
                images[name] = StoredImages(self.path, self.meta, size, name)
        meta, constants = self.meta.model_copy(update={"shape": (channels, *size), "fields": fields}), self.constants
        if constants is not None and [*constants.shape[1:]] == before:
            constants = constants[images[IMAGES].inside]
        found = images.pop(IMAGES)
        return replace(self, meta=meta, images=found, others={**self.others, **images}, constants=constants)

    def rows(self, first: int, stop: int) -> DatasetCache:
        """Return this cache with these rows alone of fields of the images' size, but of a mask all."""
        size, others = self.images.shape[2:], dict(self.others)
        for name, stored in self.others.items():
            if not name.startswith(MASK) and stored.shape[2:] == size:
                others[name] = stored.rows(first, stop)
        return replace(self, images=self.images.rows(first, stop), others=others)

    @property
    def summary(self) -> str:
        """Line with the number of images in all, left out, and in each class, or in some of many classes."""
        *counts, unlabelled = np.bincount(self.labels, minlength=len(self.meta.classes) + 1).tolist()
        named = [f"{one_line(name)} {count:,}" for name, count in zip(self.meta.classes, counts, strict=True)]
        if len(named) > MOST_NAMED:
            named = [f"{min(counts):,} to {max(counts):,} each", *named[:3], "...", named[-1]]
        left_out = f", {self.meta.skipped:,} left out ({SKIPPED})" if self.meta.skipped else ""
        kinds = "without classes" if self.meta.classes == (".",) else f"in {len(counts):,} classes: {', '.join(named)}"
        return f"{len(self):,} images{left_out} {kinds}{f', {unlabelled:,} in none' if unlabelled else ''}"

    @property
    def rounding(self) -> list[str]:
        """Lines about the errors of rounding to float16."""
        lines = []
        for name, shares in self.meta.rounding.items():
            channels = self.meta.stored[name].channels or tuple(f"channel {number}" for number in range(len(shares)))
            worst = sorted(zip(shares, channels, strict=True), reverse=True)[:MOST_NAMED]
            each = ", ".join(f"{channel} {share:.2g}" for share, channel in worst)
            fix = "; --set data.values=float32 keeps more" if worst[0][0] > MOST_ROUNDING else ""
            lines.append(f"RMS of the rounding of {name} to float16, as a share of their spread: {each}{fix}")
        return lines

    @property
    def key(self) -> str:
        """Hexadecimal hash of the images' checksums and the crop size, which identifies these images."""
        others = self.buckets if self.text is None else (self.text, *self.buckets)
        parts = [*(self.meta.sha256[name] for name in self.meta.files), *(each.key for each in others)]
        parts += [] if self.images.crop is None else [" ".join(map(str, dict.fromkeys(self.images.crop)))]
        return parts[0] if len(parts) == 1 else sha256(" ".join(parts).encode()).hexdigest()


class Subset(NamedTuple):
    """Images at rising positions in a cache, which may have several buckets of aspect."""

    cache: DatasetCache
    positions: Indices

    @classmethod
    def of(cls, cache: DatasetCache) -> Subset:
        return cls(cache, np.arange(sum(cache.counts)))

    def of_size(self, size: tuple[int, int]) -> Subset:
        """Return the images of the spec's ``size``, which are in the first bucket of aspect if there are any."""
        count = self.cache.counts[0] if self.cache.size == size else 0
        return Subset(self.cache, self.positions[self.positions < count])


def _misfits(path: Path, meta: CacheMeta, labels: Images) -> Iterator[str]:
    """Yield each contradiction of ``meta.json``, in words."""
    if sum(meta.counts) != meta.count:
        yield f"{META} has shards of {sum(meta.counts):,} images and {meta.count:,} in all"
    if labels.dtype != np.int64 or labels.shape != (meta.count,):
        yield f"{LABELS} is {labels.dtype} {labels.shape} for {meta.count} images"
    if not ((labels >= 0) & (labels <= len(meta.classes))).all():  # the last says that an image has no class
        yield f"{LABELS} has labels of none of the {len(meta.classes)} classes"
    if meta.fields and (IMAGES not in meta.fields or meta.fields[IMAGES].shape != meta.shape):
        yield f"{META} has fields that are not those of its images"
        return
    if any(len(known.mean) != meta.stored[name].shape[0] for name, known in meta.statistics.items()):
        yield f"{META} has statistics of another number of channels"
    if any(len(stored.offset) not in (0, stored.shape[0]) for stored in meta.fields.values()):
        yield f"{META} has offsets of another number of channels"
    arrays = {
        file: ((count, *stored.shape), stored)
        for name, stored in meta.stored.items()
        for file, count in zip(meta.files_of(name), meta.counts, strict=True)
    }
    if meta.constants is not None:
        arrays[CONSTANTS] = (meta.constants.shape, meta.constants)
    for name, (shape, stored) in arrays.items():
        found = map_array(path / name)
        if found.dtype != stored.dtype or found.shape != shape:
            yield f"{name} is {found.dtype} {found.shape}, {META} says otherwise"


def bucket_prefix(shape: tuple[int, int, int]) -> str:
    """Return the prefix of the checksums of a bucket whose images have a shape (C, H, W)."""
    return f"{BUCKETS}{shape[1]}x{shape[2]}/"


def checksums(folder: Path, names: tuple[str, ...], progress: bool) -> dict[str, str]:
    """Compute the SHA-256 of files in ``folder``, by name, in threads; shows a bar on stderr after a second."""
    total, title = sum((folder / name).stat().st_size for name in names), f"checking {folder.name}"
    bar = tqdm(total=total, desc=title, unit="B", unit_scale=True, delay=1, disable=not progress)
    with bar, ThreadPoolExecutor() as threads:
        return dict(zip(names, threads.map(lambda name: sha256_of(folder / name, bar), names), strict=True))


def damaged(path: Path, what: str) -> DataError:
    return DataError(f"data-set cache is unusable: {what}; delete {path} and prepare again")
