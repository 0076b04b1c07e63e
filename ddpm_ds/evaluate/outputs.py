"""Requests for images, and the outputs that hold them: a folder of finished batches, a folder of PNG files, a grid or
an npz archive.

Each output contains a record of its request, so that nothing is overwritten or mixed with other images. A file is
complete or does not exist, and interrupted sampling continues from the files that exist.
"""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from PIL import Image, PngImagePlugin
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from ddpm_ds.command_line import check_output
from ddpm_ds.config.spec import SamplerSpec
from ddpm_ds.data.pictures import grid, grid_title, picture, write_png
from ddpm_ds.data.prepare import class_names
from ddpm_ds.device import DTYPES
from ddpm_ds.errors import OutputError
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.files import sync, temporary_beside, write_file

RECORD = "sampling.json"
PNG_KEY = "sampling"
"""Keyword of the PNG text chunk that holds the record of a grid's request."""


class Request(BaseModel):
    """Requested images and everything that determines their pixels."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    origin: str
    """Path of the weights when the request was made; they may have moved since."""
    weights: str
    images_seen: int | None
    digest: str
    """Checksum of the weights."""
    precision: str
    guide: str | None = None
    """Path of the guiding weights; None if there are none, and guidance, if any, uses "no label"."""
    guide_digest: str | None = None
    """Checksum of the guiding weights."""
    sampler: SamplerSpec
    """Sampler; its number of steps is filled in."""
    seed: int
    labels: tuple[int, ...] | None
    """Labels that the images take in turn: image i takes number i modulo their number; None means no labels."""
    first: int = 0
    count: int = 0
    batch_images: int = 0
    """Number of images per batch; another number gives the same images only up to rounding."""

    @classmethod
    def of(
        cls,
        trained: Trained,
        sampler: SamplerSpec,
        labels: Sequence[int] | None,
        guide: Trained | None = None,
        /,
        **numbers: int,
    ) -> Self:
        """Return a request for images of ``trained``, guided by ``guide`` unless guidance is 1; ``numbers`` are
        ``seed``, ``first``, ``count`` and ``batch_images``.
        """
        guide = guide if sampler.guidance != 1.0 else None
        stored = next(trained.unet.parameters()).dtype
        return cls(
            origin=trained.origin,
            weights=trained.weights,
            images_seen=trained.images_seen,
            digest=trained.digest,
            precision=next(name for name, (_, dtype) in DTYPES.items() if dtype is stored),
            guide=None if guide is None else guide.origin,
            guide_digest=None if guide is None else guide.digest,
            sampler=sampler.model_copy(update={"steps": sampler.steps_of(trained.diffusion)}),
            labels=None if labels is None else tuple(labels),
            **numbers,
        )

    @property
    def index(self) -> range:
        """Numbers of the requested images."""
        return range(self.first, self.first + self.count)

    @property
    def batches(self) -> list[range]:
        """Numbers of the images in each batch."""
        size = self.batch_images
        return [self.index[at : at + size] for at in range(0, self.count, size)]

    def labels_of(self, index: Sequence[int]) -> Tensor | None:
        """Return the labels (N,) int64 of the images with the numbers ``index``; None without labels."""
        return None if self.labels is None else torch.tensor([self.labels[i % len(self.labels)] for i in index])

    def dump(self, *left_out: str) -> bytes:
        """Return the request as JSON without the fields ``left_out``, for :meth:`read`."""
        return (self.model_dump_json(indent=2, exclude=set(left_out)) + "\n").encode()

    @classmethod
    def read(cls, content: bytes | str) -> Self | None:
        """Return the request from the output of :meth:`dump`; None if ``content`` is anything else."""
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            return None

    def difference(self, there: Self, *left_out: str) -> str:
        """Return the names of the values that determine pixels and differ in ``there``; empty if the images are the
        same.
        """
        ignored = {"origin", "weights", "images_seen", "guide", "sampler", *left_out}
        mine, theirs = (
            request.model_dump(exclude=ignored) | {f"sampler.{name}": value for name, value in request.sampler}
            for request in (self, there)
        )
        said = {"digest": "weights", "guide_digest": "guide"}
        return ", ".join(said.get(name, name) for name in mine if mine[name] != theirs[name])


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system in the body into an OutputError about ``path``."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} can't be written ({error.strerror or error}); fix that and run the same command again, which "
            "keeps what is drawn, or name another --out"
        ) from None


class ImageFolder:
    """Folder of finished images and the record of their request.

    Raises:
        OutputError: the file system refuses; every method may raise it.
    """

    left_out: tuple[str, ...] = ()
    """Fields of the request that may differ in this folder without changing its images."""

    def __init__(self, folder: Path, request: Request) -> None:
        self._folder, self._request = folder, request

    def check(self) -> None:
        """Raise OutputError if the folder holds anything but images of this request; write nothing."""
        if not self._folder.exists():
            return
        record = self._folder / RECORD
        kept = self._folder.iterdir() if self._folder.is_dir() else [self._folder]
        if any(path != record and not path.name.startswith(".") for path in kept):
            there = Request.read(record.read_bytes()) if record.is_file() else None
            _refuse_other(self._folder, self._request, there, self.left_out)

    def claim(self) -> None:
        """Write the record of the request; one process calls this, before any calls :meth:`keep`."""
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(self._folder / RECORD, self._request.dump(*self.left_out))

    def there(self) -> set[int]:
        """Return the numbers of the requested images that the folder holds."""
        raise NotImplementedError

    def keep(self, index: Sequence[int], images: Tensor) -> None:
        """Write images (N, C, H, W) uint8, those of one batch that the folder lacked."""
        raise NotImplementedError

    def _names(self) -> set[str]:
        return set(os.listdir(self._folder)) if self._folder.exists() else set()


class PngFolder(ImageFolder):
    """Folder of PNG files named by image number. More images of the same kind may be added at any time."""

    left_out = ("first", "count", "batch_images")

    def there(self) -> set[int]:
        names = self._names()
        return {i for i in self._request.index if f"{i:06}.png" in names}

    def keep(self, index: Sequence[int], images: Tensor) -> None:
        with writing(self._folder):
            for number, image in zip(index, images, strict=True):
                write_png(picture(image), self._folder / f"{number:06}.png")


class BatchFolder(ImageFolder):
    """Folder of finished batches, which become one file at the end.

    ::

        DIR/
            sampling.json    the request
            000000000.npy    a finished batch, named by its first image, uint8 (N, C, H, W)
            000000064.npy
            images.npy       all images, once none is missing; it replaces the batches
    """

    def __init__(self, folder: Path, request: Request) -> None:
        super().__init__(folder, request)
        self._whole = folder / "images.npy"
        # Once all images are there, it no longer matters in which batches they were drawn.
        self.left_out = ("batch_images",) if self._whole.exists() else ()

    def there(self) -> set[int]:
        names = self._names()
        if self._whole.name in names:
            return set(self._request.index)
        return {i for batch in self._request.batches if self._path(batch).name in names for i in batch}

    def keep(self, index: Sequence[int], images: Tensor) -> None:
        content = io.BytesIO()
        np.save(content, images.numpy())
        with writing(self._folder):
            write_file(self._path(index), content.getvalue())

    def images(self) -> np.ndarray:
        """Return all images in order, (N, C, H, W) uint8, mapped into memory; none may be missing."""
        with writing(self._folder):
            if not self._whole.exists():
                self._join_batches()
            for batch in self._request.batches:
                self._path(batch).unlink(missing_ok=True)
        return np.load(self._whole, mmap_mode="r")

    def _join_batches(self) -> None:
        temporary = self._whole.with_name(".images.npy.tmp")
        shape = np.load(self._path(self._request.batches[0]), mmap_mode="r").shape[1:]
        whole = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=(self._request.count, *shape))
        for batch in self._request.batches:
            start = batch.start - self._request.first
            whole[start : start + len(batch)] = np.load(self._path(batch))
        whole.flush()
        temporary.replace(self._whole)

    def _path(self, batch: Sequence[int]) -> Path:
        return self._folder / f"{batch[0]:09}.npy"


def check_file(path: Path, request: Request, *, overwrite: bool = False) -> bool:
    """Return whether ``path`` already exists as the requested file.

    Raises:
        OutputError: it is another file, and may not be overwritten.
    """
    if overwrite and os.path.lexists(path):
        check_output(path, overwrite=True, called="--out ")
    if overwrite or not os.path.lexists(path):
        return False
    _refuse_other(path, request, record_of(path), ("batch_images",))
    return True


def titled_grid(trained: Trained, sampler: SamplerSpec, images: np.ndarray, labels: Tensor | None) -> Image.Image:
    """Return a grid of images (N, C, H, W) uint8, with names of labels (N,) and a title that says what drew them."""
    run = (trained.run_dir or Path(trained.origin)).resolve().name
    title = grid_title(run, trained.images_seen, sampler, trained.diffusion, trained.weights)
    names = [] if trained.spec is None else class_names(trained.spec)
    classes = [] if labels is None else labels.tolist()
    return grid(torch.from_numpy(np.array(images)), title, [names[label] if names else str(label) for label in classes])


def write_grid(path: Path, image: Image.Image, request: Request) -> None:
    """Write a grid of the requested images as a PNG file, with the record of the request.

    Raises:
        OutputError: it can't be written.
    """
    text = PngImagePlugin.PngInfo()
    text.add_itxt(PNG_KEY, request.dump("batch_images").decode())
    with _complete(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=text)


def write_npz(path: Path, images: np.ndarray, request: Request) -> None:
    """Write an npz archive: ``arr_0`` are images (N, H, W, C) uint8, ``arr_1`` the labels (N,) int64, if any.

    Names and axes are those of guided-diffusion (Dhariwal and Nichol 2021), which evaluators read.
    ``images`` (N, C, H, W) may be mapped from a file: numpy copies it in pieces. The archive's comment is the record,
    unless that is longer than a comment may be, such as one with thousands of labels; then it is a file in the archive.

    Raises:
        OutputError: it can't be written.
    """
    labels = request.labels_of(request.index)
    arrays = [images.transpose(0, 2, 3, 1), *([] if labels is None else [labels.numpy()])]
    with _complete(path) as temporary:
        with temporary.open("wb") as file:
            np.savez(file, *arrays)
        record = request.dump("batch_images")
        with zipfile.ZipFile(temporary, "a") as archive:
            if len(record) <= zipfile.ZIP_MAX_COMMENT:
                archive.comment = record
            else:
                archive.writestr(RECORD, record)


def record_of(path: Path) -> Request | None:
    """Return the record in a file of :func:`write_grid` or :func:`write_npz`; None for any other file."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return Request.read(archive.read(RECORD) if RECORD in archive.namelist() else archive.comment)
        with PngImagePlugin.PngImageFile(path) as image:  # not Image.open, which refuses very large grids
            return Request.read(str(image.info.get(PNG_KEY, "")))
    except (OSError, ValueError, SyntaxError, zipfile.BadZipFile):  # Pillow's SyntaxError means "not a PNG file"
        return None


def _refuse_other(path: Path, asked: Request, there: Request | None, left_out: Sequence[str]) -> None:
    fix = f"{'remove it' if path.is_dir() else 'replace it with --overwrite'}, or name another --out"
    if there is None:
        raise OutputError(f"{path} exists and does not say how it was drawn; {fix}")
    if difference := asked.difference(there, *left_out):
        raise OutputError(f"{path} was drawn with another {difference}; {fix}")


@contextlib.contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """Yield a temporary file that becomes ``path`` when the body ends, and is on the disk by then, so that a power cut
    can't lose it.
    """
    temporary = temporary_beside(path)
    with writing(path):
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
