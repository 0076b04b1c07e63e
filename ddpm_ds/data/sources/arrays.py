"""Images in one array: numpy's ``.npy`` and ``.npz`` files, the digits, and torchvision's data sets of images with one
class each, which it downloads or which are put by hand; some of these hold image files instead.
"""

import contextlib
import difflib
import errno
import inspect
import io
import os
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from ddpm_ds.data.sources.base import (
    BROKEN,
    MOST_CLASSES,
    NETWORK_TIMEOUT_SECONDS,
    UNLABELLED,
    Labels,
    Pixels,
    Source,
    labelled,
    map_array,
    network_limit,
    one_line,
    read_path,
)
from ddpm_ds.data.sources.files import FolderSource
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


def open_torchvision(spec: DataSpec, progress: bool) -> Source:
    """Open split ``data.split`` of the data set ``data.name`` in ``torchvision.datasets``, or CIFAR-10's."""
    from torchvision import datasets  # imports torch

    name = "CIFAR10" if spec.name is None else spec.name
    key = f"data.source = {spec.source}" if spec.name is None else f"data.name = {name}"
    kind: Any = getattr(datasets, name, None) if name in datasets.__all__ else None
    known = inspect.isclass(kind)  # a name of its own, else mypy takes the kind for object
    if not known:
        near = difflib.get_close_matches(name, datasets.__all__, 1, 0.0)[0]
        raise DataError(f"{key} is no data set of torchvision; did you mean {near}?")
    folder = spec.store_root / "downloads"
    parameters = inspect.signature(kind).parameters
    options: dict[str, object] = {}
    if "download" not in parameters and "kwargs" not in parameters:
        raise DataError(f"{key} is not downloaded by torchvision; use source folder for files that you have")
    if "split" in parameters:
        options = {} if spec.split is None else {"split": spec.split}
    elif "train" not in parameters and spec.split is not None:
        raise DataError(f"data.split = {spec.split}: {key} has no parts; remove it")
    elif spec.split not in (None, "train", "test"):
        raise DataError(f"data.split = {spec.split}: the parts of {key} are train and test")
    elif "train" in parameters:
        options = {"train": spec.split != "test"}
    # torchvision's progress bar has no switch of its own
    silent = contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # hosts that share the folder take turns, since two downloads would write the same files
        with FileLock(folder / ".lock"), network_limit(NETWORK_TIMEOUT_SECONDS), silent:
            opened = kind(str(folder), download=True, **options)
    except (OSError, HTTPException, RuntimeError) as error:
        url, file = getattr(kind, "url", None), getattr(kind, "filename", None)
        by_hand = (
            f"get {url} by hand and put it at {folder / file}" if url and file else f"put its files below {folder}"
        )
        raise DataError(f"{key} can't be downloaded ({one_line(error)}); {by_hand}") from error
    except (TypeError, ValueError) as error:
        raise DataError(f"{key} with data.split = {spec.split}: {one_line(error)}") from error
    except ImportError as error:
        raise DataError(f"{key} needs another package ({one_line(error)}); install it with pip") from error
    return _torchvision_source(opened, key)


def _torchvision_source(opened: object, key: str) -> Source:
    """Return the source of an opened data set, from attributes alone, so that no image is decoded."""
    found = vars(opened)
    pairs: Any = next((found[name] for name in ("samples", "_samples", "imgs") if name in found), [])
    images: Any = next((found[name] for name in ("data", "_image_files", "_images") if name in found), None)
    labels: Any = next((found[name] for name in ("targets", "labels", "_labels") if name in found), None)
    if images is None and pairs:
        images, labels = zip(*pairs, strict=True)
    try:
        numbers = np.array([UNLABELLED if label is None else int(label) for label in labels], np.int64)
        files = isinstance(images, list | tuple) and all(isinstance(image, str | os.PathLike) for image in images)
        pixels = None if files else np.asarray(images)
        if len(images) != len(numbers) or not len(numbers) or numbers.min() < 0 <= numbers.max():
            raise ValueError
        if pixels is not None and pixels.dtype != np.uint8:
            raise ValueError
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor that is not a number
        raise DataError(f"{key} is no data set of images with one class each; use one such as CIFAR100") from None
    names = getattr(opened, "classes", None)
    named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    classes, numbers = labelled(numbers, names if named else None)
    if pixels is None:
        return FolderSource(classes, numbers, Path("/"), [os.path.abspath(image).lstrip("/") for image in images])
    return ArraySource(classes, numbers, pixels)
