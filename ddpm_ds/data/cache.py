"""Data-set cache: all images of a source, in their final size, in one memory-mapped array.

::

    <store_root>/<source>-<size>px-<channels>ch[-<hash of path>]/
        images.npy    uint8 (N, C, H, W)
        labels.npy    int64 (N,)
        meta.json     CacheMeta
        skipped.txt   unreadable images, one per line, where there were any
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError
from tqdm import tqdm

from ddpm_ds.errors import DataError
from ddpm_ds.files import open_regular, read_bytes, sha256_of

FORMAT: Final = 1
IMAGES, LABELS, META, SKIPPED = "images.npy", "labels.npy", "meta.json", "skipped.txt"


class CacheMeta(BaseModel):
    """Content of ``meta.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1]
    source: str
    folder: str | None
    count: NonNegativeInt
    shape: tuple[PositiveInt, PositiveInt, PositiveInt]  # (C, H, W)
    classes: tuple[str, ...]
    skipped: NonNegativeInt
    sha256: dict[str, str]
    kind: Literal["pixels", "latents"] = "pixels"


@dataclass(frozen=True)
class DatasetCache:
    """Open data-set cache. Sent to another process, it is opened there again: the images don't travel."""

    path: Path
    meta: CacheMeta
    images: npt.NDArray[np.uint8] = field(repr=False)  # (N, C, H, W), mapped from the file
    labels: npt.NDArray[np.int64] = field(repr=False)  # (N,)
    file_bytes: int = 0
    """Size of the file of images when it was opened."""
    cropped: int | None = None
    """Height and width in pixels of the crops made by :meth:`centre`; None where images are as they were prepared."""

    @classmethod
    def open(cls, path: Path, verify: bool = True, progress: bool = False) -> DatasetCache:
        """Open the cache at ``path``; ``verify`` reads every byte and compares checksums.

        One process per node should verify; the others need not.

        Raises:
            DataError: it is missing, damaged or of another format.
        """
        if not path.is_dir():
            raise DataError(f"there is no data-set cache at {path}; make it with: ddpm-ds prepare")
        try:
            meta = CacheMeta.model_validate_json(read_bytes(path / META))
            for name in (IMAGES, LABELS):
                open_regular(path / name).close()
            if verify:
                for name, checksum in checksums(path, progress).items():
                    if meta.sha256.get(name) != checksum:
                        raise _damaged(path, f"{name} has another checksum than meta.json says")
            images = np.load(path / IMAGES, mmap_mode="r")
            labels = np.load(path / LABELS, mmap_mode="r")  # a header that lies can't allocate what the file lacks
        except OSError as error:
            raise _damaged(path, f"{error.filename or path} can't be read ({error.strerror or error})") from error
        except ValidationError as error:
            raise _damaged(path, f"{META} is not that of a data-set cache of format {FORMAT}") from error
        except (ValueError, EOFError, OverflowError, MemoryError) as error:  # numpy's, on a broken header or file
            raise _damaged(path, "images.npy or labels.npy is cut short or no numpy file") from error
        dtype = np.uint8 if meta.kind == "pixels" else np.float16
        if images.dtype != dtype or images.shape != (
            meta.count,
            *meta.shape,
        ):
            raise _damaged(path, f"images.npy is {images.dtype} {images.shape}, meta.json says otherwise")
        if labels.dtype != np.int64 or labels.shape != (meta.count,):
            raise _damaged(path, f"labels.npy is {labels.dtype} {labels.shape} for {meta.count} images")
        if not ((labels >= 0) & (labels < len(meta.classes))).all():
            raise _damaged(path, f"labels.npy has labels of none of the {len(meta.classes)} classes")
        return cls(path, meta, images, np.array(labels), (path / IMAGES).stat().st_size)

    def check_file(self) -> None:
        """Raise an error if the file of images was cut short since it was opened: to read it would end the process.

        Raises:
            DataError: the message names the file.
        """
        try:
            found = (self.path / IMAGES).stat().st_size
        except OSError:  # removed: what is mapped stays
            return
        if found < self.file_bytes:
            raise _damaged(self.path, f"{IMAGES} was cut from {self.file_bytes:,} to {found:,} bytes while it was read")

    def __len__(self) -> int:
        return self.meta.count

    def __reduce__(self) -> tuple[Callable[[Path, int | None], DatasetCache], tuple[Path, int | None]]:
        return _reopen, (self.path, self.cropped)

    def centre(self, size: int) -> DatasetCache:
        """Return this cache with the centres of its images, (C, ``size``, ``size``) in images and meta, without a copy.

        Evaluation reads these; training reads crops from other places too.
        """
        channels, height, width = self.meta.shape
        if (height, width) == (size, size):
            return self
        top, left = (height - size) // 2, (width - size) // 2
        images = self.images[:, :, top : top + size, left : left + size]
        meta = self.meta.model_copy(update={"shape": (channels, size, size)})
        return replace(self, meta=meta, images=images, cropped=size)

    @property
    def key(self) -> str:
        """Return a hexadecimal key of exactly these images: their checksum, hashed with the size of crops."""
        checksum = self.meta.sha256[IMAGES]
        return checksum if self.cropped is None else sha256(f"{checksum} {self.cropped}".encode()).hexdigest()


def _reopen(path: Path, cropped: int | None) -> DatasetCache:
    cache = DatasetCache.open(path, verify=False)
    return cache if cropped is None else cache.centre(cropped)


def checksums(folder: Path, progress: bool) -> dict[str, str]:
    """Return the SHA-256 of the arrays in ``folder``, by file name; shows a bar on stderr after a second."""
    total = sum((folder / name).stat().st_size for name in (IMAGES, LABELS))
    title = f"checking {folder.name}"
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, delay=1, disable=not progress) as bar:
        return {name: sha256_of(folder / name, bar) for name in (IMAGES, LABELS)}


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"data-set cache is unusable: {what}; delete {path} and prepare again")
