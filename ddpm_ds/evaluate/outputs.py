"""A folder that is complete or not there.

What drawn images are written to: a grid, an npz archive, or a folder of PNG files, each with its record inside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import PngImagePlugin
from torch import Tensor

from ddpm_ds.checkpoint.folder import sync, write_file
from ddpm_ds.data.pictures import grid, picture, write_png
from ddpm_ds.errors import OutputError
from ddpm_ds.evaluate.draw import Recipe, Request, SavedRequest, refuse_other
from ddpm_ds.evaluate.sampling import RECORD, writing


def check_new_folder(path: Path) -> None:
    """Refuse a folder that holds something or that can't be made; leaves nothing behind.

    Raises:
        OutputError: with what is in the way.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise OutputError(f"{path} exists and is {'not empty' if path.is_dir() else 'no folder'}; name a new folder")
    existing = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise OutputError(f"{path} can't be written ({error.strerror}: {existing}); name one that can") from None


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` that becomes ``path`` when the body ends, and is removed when it raises.

    Raises:
        OutputError: ``path`` holds something, or the file system refuses.
    """
    check_new_folder(path)
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.writing-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.replace(path)  # an empty folder of that name gives way
        sync(path.parent)
    except OSError as error:
        if error.strerror is None:
            raise
        raise OutputError(f"{path} can't be written ({error.strerror}); name one that can") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


CHUNK_IMAGES = 1024
PNG_KEY = "sampling"
"""Keyword of the PNG text that holds the record of a grid."""


class PngFolder:
    """A :class:`~ddpm_ds.evaluate.sampling.Keeper` of PNG files named by image index, beside their recipe.

    More images of the recipe may be added at any time.

    Raises:
        OutputError: all methods, where the file system refuses.
    """

    def __init__(self, folder: Path, job: SavedRequest) -> None:
        self._folder, self._job = folder, job

    def check(self) -> None:
        if not self._folder.exists():
            return
        record = self._folder / RECORD
        kept = self._folder.iterdir() if self._folder.is_dir() else [self._folder]
        if any(path != record and not path.name.startswith(".") for path in kept):
            there = Recipe.read(record.read_bytes()) if record.is_file() else None
            refuse_other(self._folder, self._job.only(Recipe), there)

    def claim(self) -> None:
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(self._folder / RECORD, self._job.only(Recipe).dump())

    def missing(self, batch: range) -> Sequence[int]:
        return [index for index in batch if not self._path(index).exists()]

    def keep(self, index: Sequence[int], images: Tensor) -> None:
        with writing(self._folder):
            for number, image in zip(index, images, strict=True):
                write_png(picture(image), self._path(number))

    def done(self) -> int:
        there = {path.name for path in self._folder.iterdir()} if self._folder.exists() else set()
        return sum(self._path(index).name in there for index in self._job.index)

    def _path(self, index: int) -> Path:
        return self._folder / f"{index:06}.png"


def check_file(path: Path, request: Request) -> bool:
    """Whether ``path`` is what is asked for already.

    Raises:
        OutputError: it is something else.
    """
    if not path.exists():
        return False
    refuse_other(path, request, _record_of(path))
    return True


def write_grid(path: Path, images: np.ndarray, request: Request) -> None:
    """All images (N, C, H, W) uint8 in one PNG file.

    Raises:
        OutputError: it can't be written.
    """
    text = PngImagePlugin.PngInfo()
    text.add_itxt(PNG_KEY, request.dump().decode())
    temporary = _temporary(path)
    with writing(path):
        grid(torch.from_numpy(np.array(images))).save(temporary, format="PNG", pnginfo=text)
        _put_in_place(temporary, path)


def write_npz(path: Path, images: np.ndarray, request: Request) -> None:
    """An archive that numpy loads: arr_0 images (N, H, W, C) uint8, arr_1 labels (N,) int64 where there are any.

    Names and order of axes are those of guided-diffusion (Dhariwal and Nichol 2021), which evaluators read.
    ``images`` (N, C, H, W) is read in pieces. The record is the archive's comment.

    Raises:
        OutputError: it can't be written.
    """
    labels = request.labels_of(request.index)
    temporary = _temporary(path)
    with writing(path):
        with zipfile.ZipFile(temporary, "w") as archive:
            archive.comment = request.dump()
            count, channels, height, width = images.shape
            with archive.open(zipfile.ZipInfo("arr_0.npy"), "w", force_zip64=True) as file:
                _write_header(file, (count, height, width, channels), "|u1")
                for start in range(0, count, CHUNK_IMAGES):
                    chunk = images[start : start + CHUNK_IMAGES].transpose(0, 2, 3, 1)
                    file.write(chunk.tobytes())
            if labels is not None:
                with archive.open(zipfile.ZipInfo("arr_1.npy"), "w") as file:
                    _write_header(file, (count,), "<i8")
                    file.write(labels.numpy().astype("<i8").tobytes())
        _put_in_place(temporary, path)


WRITERS = {"grid": write_grid, "npz": write_npz}


def _write_header(file: Any, shape: tuple[int, ...], descr: str) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})


def _record_of(path: Path) -> Request | None:
    """The record in a file that :func:`write_grid` or :func:`write_npz` has written; None in any other."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return Request.read(archive.comment)
        with PngImagePlugin.PngImageFile(path) as image:  # Image.open would refuse very large grids
            return Request.read(str(image.info.get(PNG_KEY, "")))
    except (OSError, ValueError, SyntaxError, zipfile.BadZipFile):  # SyntaxError is how Pillow says it is no PNG file
        return None


def _put_in_place(temporary: Path, path: Path) -> None:
    """Name a finished file so that it survives a power cut: the batches that it was made of are removed next."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.writing")
