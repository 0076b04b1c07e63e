"""Images in one array: the ``.npy`` and ``.npz`` files of numpy, and what other sources hold as pixels."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ddpm_ds.data.sources.base import MOST_CLASSES, Labels, Pixels, one_line, read_path
from ddpm_ds.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

    from ddpm_ds.config.spec import DataSpec

ARRAY_NAMES = (("images", "arr_0"), ("labels", "arr_1"))
"""Names of the images and of the labels in a .npz."""
COPY_BYTES = 2**22
BROKEN = (OSError, ValueError, EOFError, OverflowError, MemoryError, NotImplementedError, RuntimeError)
"""What numpy and zipfile raise on broken files, besides errors of their own."""


@dataclass
class ArraySource:
    """Source of images in one array, in memory or mapped from a file: then another process maps it again."""

    classes: tuple[str, ...]
    labels: Labels = field(repr=False)
    images: Pixels = field(repr=False)  # (N, H, W), (N, H, W, C) or (N, C, H, W)
    file: IO[bytes] | None = field(default=None, repr=False)
    """File that ``images`` is mapped from, which may have no name any more."""

    def __getstate__(self) -> dict[str, Any]:
        if self.file is None:
            return vars(self)
        images: Any = self.images
        path = f"/proc/{os.getpid()}/fd/{self.file.fileno()}"
        order = "C" if images.flags.c_contiguous else "F"
        return vars(self) | {"images": (path, images.dtype, "r", images.offset, images.shape, order), "file": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import numpy as np

        vars(self).update(state)
        if isinstance(self.images, tuple):
            self.images = np.memmap(*self.images)

    @property
    def channels_first(self) -> bool:
        """Whether images are (C, H, W): their last dimension is not one or three colours."""
        return self.images.ndim == 4 and self.images.shape[3] not in (1, 3)

    def name(self, i: int, /) -> str:
        """Return the position in the array."""
        return f"image {i}"

    def read(self, i: int, /) -> Pixels:
        """Return the pixels of one image."""
        return self.images[i].transpose(1, 2, 0) if self.channels_first else self.images[i]


def in_file(images: Pixels, folder: Path) -> tuple[Pixels, IO[bytes]]:
    """Return ``images`` mapped from a file of ``folder`` that has no name and goes with this process, and that file.

    Raises:
        OSError: the folder can't be written.
    """
    import numpy as np

    file = _temporary(folder)
    np.ascontiguousarray(images).tofile(file)
    file.flush()
    return np.memmap(file, np.uint8, "r", 0, images.shape), file


def open_arrays(spec: DataSpec, progress: bool) -> ArraySource:
    """Open a ``.npy`` of images or a ``.npz`` of images and labels, which are mapped; what is compressed is unpacked
    into a file without a name in ``store_root`` first.

    Images are ``images`` or ``arr_0``, uint8 (N, H, W), (N, H, W, C) or (N, C, H, W) with one or three channels; labels
    are ``labels`` or ``arr_1``, whole numbers from 0. The names ``arr_0`` and ``arr_1`` are guided-diffusion's.
    """
    import numpy as np

    path = read_path(spec, "a .npy or .npz file")
    try:
        images, labels, file = _stored_arrays(path, spec.store_root)
    except (*BROKEN, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # it is the disk of the store that is full
        raise DataError(f"data.path = {path} can't be read ({one_line(error)}); write it again with numpy") from error
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or not images.size:
        raise DataError(
            f"data.path = {path} holds images of {images.dtype} {images.shape}; use uint8 (N, H, W), (N, H, W, C) or "
            "(N, C, H, W)"
        )
    if images.ndim == 4 and not {images.shape[1], images.shape[3]} & {1, 3}:
        raise DataError(f"data.path = {path} holds images of {images.shape[1]} channels; use 1 or 3")
    labels = np.zeros(len(images), np.int64) if labels is None else labels
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise DataError(
            f"data.path = {path} holds labels of {labels.dtype} {labels.shape} for {len(images):,} images; use one "
            "whole number for each"
        )
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= MOST_CLASSES:
        raise DataError(f"data.path = {path} holds labels from {least} to {most}; number classes from 0")
    classes = tuple(map(str, range(most + 1)))
    return ArraySource(classes, labels.astype(np.int64), images, file)


def _stored_arrays(path: Path, folder: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None, IO[bytes]]:
    """Return the images and the labels of a numpy file, and the file that the images are mapped from; raises many
    kinds of errors.
    """
    if path.suffix != ".npz":
        file: IO[bytes] = path.open("rb")
        return _mapped(file), None, file
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        found = [next((members[name] for name in names if name in members), None) for names in ARRAY_NAMES]
        if found[0] is None:
            raise ValueError(f"it has no array {' or '.join(ARRAY_NAMES[0])}")
        file, *others = [_unpacked(archive, info, folder) for info in found if info is not None]
    return _mapped(file), _mapped(others[0]) if others else None, file


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path) -> IO[bytes]:
    """Copy a member of an archive, whose checksum is compared, into a file without a name."""
    file = _temporary(folder)
    with archive.open(member) as packed:
        shutil.copyfileobj(packed, file, COPY_BYTES)
    file.seek(0)
    return file


def _temporary(folder: Path) -> IO[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryFile(dir=folder)


def _mapped(file: IO[bytes]) -> npt.NDArray[Any]:
    """Map the array of a ``.npy`` file; raises ValueError where the file lacks it."""
    import numpy as np

    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects; save numbers")
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.memmap(file, dtype, "r", file.tell(), shape, "F" if fortran_order else "C")
