"""Images in one array: numpy's ``.npy`` and ``.npz`` files, the digits and CIFAR-10."""

import contextlib
import errno
import io
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from filelock import FileLock

from ddpm_ds.data.sources.base import (
    BROKEN,
    MOST_CLASSES,
    NETWORK_TIMEOUT_SECONDS,
    UNLABELLED,
    Labels,
    Pixels,
    labelled,
    map_array,
    network_limit,
    one_line,
    read_path,
)
from ddpm_ds.data.sources.variables import Array, Variable, Variables
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError

IMAGES, LABELS = ("images", "arr_0"), ("labels", "arr_1")
"""Names of the images and of the labels in a .npz."""
COPY_BYTES = 2**22


@dataclass
class ArraySource:
    """Source of images in one array, in memory or mapped from a file; read by one process, since nothing is decoded."""

    classes: tuple[str, ...]
    labels: Labels = field(repr=False)
    images: Pixels = field(repr=False)  # (N, H, W), (N, H, W, C) or (N, C, H, W)

    def name(self, i: int, /) -> str:
        """Return the position in the array."""
        return f"image {i}"

    def read(self, i: int, /) -> Pixels:
        """Return the pixels of one image, (H, W) or (H, W, C)."""
        channels_first = self.images.ndim == 4 and self.images.shape[3] not in (1, 3)
        return self.images[i].transpose(1, 2, 0) if channels_first else self.images[i]


def open_digits(spec: DataSpec, progress: bool) -> ArraySource:
    """Open the 1,797 handwritten digits that come with scikit-learn, grey images of 8x8 pixels."""
    package = find_spec("sklearn")  # importing it would take seconds
    assert package is not None and package.origin is not None, "this package requires scikit-learn"
    table = np.loadtxt(Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz", delimiter=",")
    images = np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8)  # stored as 0..16, the label last
    return ArraySource(tuple(map(str, range(10))), table[:, -1].astype(np.int64), images.reshape(-1, 8, 8))


def open_arrays(spec: DataSpec, progress: bool) -> ArraySource:
    """Open a ``.npy`` of images or a ``.npz`` of images and labels, memory-mapped; compressed arrays are first unpacked
    into an unnamed file in ``store_root``.

    Images are ``images`` or ``arr_0``, uint8 (N, H, W), (N, H, W, C) or (N, C, H, W) with one or three channels; labels
    are ``labels`` or ``arr_1``, whole numbers from 0. The names ``arr_0`` and ``arr_1`` are guided-diffusion's.
    """
    path = read_path(spec, "a .npy or .npz file")
    try:
        found = _mapped(path, spec.store_root, [*IMAGES, *LABELS])
        if twice := next((names for names in (IMAGES, LABELS) if all(name in found for name in names)), None):
            raise ValueError(f"it has {' or '.join(twice)} twice")
        images, labels = (next((found[name] for name in names if name in found), None) for names in (IMAGES, LABELS))
        if images is None:
            raise ValueError(f"it has no array {' or '.join(IMAGES)}")
    except BROKEN as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # the disk of store_root is full
        raise DataError(f"data.path = {path} can't be read ({one_line(error)}); write it again with numpy") from error
    fits = images.ndim == 3 or (images.ndim == 4 and {images.shape[1], images.shape[3]} & {1, 3})
    if images.dtype != np.uint8 or not fits or not images.size:
        raise DataError(
            f"data.path = {path} holds images of {images.dtype} {images.shape}; use uint8 (N, H, W), (N, H, W, C) or "
            "(N, C, H, W) with 1 or 3 channels C"
        )
    if labels is None:
        return ArraySource(*labelled(np.full(len(images), UNLABELLED)), images)
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise DataError(
            f"data.path = {path} holds labels of {labels.dtype} {labels.shape} for {len(images):,} images; use one "
            "whole number for each"
        )
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= MOST_CLASSES:
        raise DataError(f"data.path = {path} holds labels from {least} to {most}; number classes from 0")
    return ArraySource(*labelled(labels.astype(np.int64)), images)


def _mapped(path: Path, folder: Path, names: Sequence[str] | None = None) -> dict[str, Array]:
    """Return all arrays of a numpy file, or those of some ``names``, mapped; ``.npz`` are unpacked into ``folder``."""
    if path.suffix != ".npz":
        return {IMAGES[0]: map_array(path)}
    folder.mkdir(parents=True, exist_ok=True)
    found = dict[str, Array]()
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in found:
                raise ValueError(f"it has {name} twice")
            if names is None or name in names:
                with tempfile.TemporaryFile(dir=folder) as file, archive.open(member) as packed:
                    shutil.copyfileobj(packed, file, COPY_BYTES)
                    file.flush()
                    found[name] = map_array(Path(f"/proc/self/fd/{file.fileno()}"))
    return found


def open_numpy(path: Path, spec: DataSpec) -> Variables:
    """Open the arrays of a ``.npz``, unpacked into ``store_root``, or a ``.npy``, named images."""
    arrays = _mapped(path, spec.store_root)
    return {name: Variable(name, each.shape, each.dtype, each.__getitem__) for name, each in arrays.items()}


def open_cifar10(spec: DataSpec, progress: bool) -> ArraySource:
    """Open the 50,000 training images of CIFAR-10, which torchvision downloads into ``store_root``."""
    from torchvision.datasets import CIFAR10  # imports torch

    folder = spec.store_root / "downloads"
    # torchvision's progress bar has no switch of its own
    silent = contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # hosts that share the folder take turns, since two downloads would write the same files
        with FileLock(folder / ".lock"), network_limit(NETWORK_TIMEOUT_SECONDS), silent:
            opened = CIFAR10(str(folder), download=True)
    except (OSError, HTTPException, RuntimeError) as error:
        raise DataError(
            f"data.source = cifar10 can't be downloaded ({one_line(error)}); get {CIFAR10.url} by hand and put it at "
            f"{folder / CIFAR10.filename}"
        ) from error
    return ArraySource(tuple(opened.classes), np.array(opened.targets, np.int64), opened.data)
