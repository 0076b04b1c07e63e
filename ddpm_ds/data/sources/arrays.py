"""Images in one array: numpy's ``.npy`` and ``.npz`` files, the digits and CIFAR-10."""

import contextlib
import io
import shutil
import tempfile
import zipfile
from dataclasses import dataclass, field
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from filelock import FileLock

from ddpm_ds.data.sources import base
from ddpm_ds.data.sources.variables import Variable, Variables, open_at
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError

IMAGES = ("images", "arr_0")  # names of the images in a .npz


@dataclass
class ArraySource:
    """Source of images in one array, in memory or mapped from a file."""

    classes: tuple[str, ...]
    labels: base.Labels = field(repr=False)
    images: base.Pixels = field(repr=False)  # (N, H, W), (N, H, W, C) or (N, C, H, W)

    def name(self, i: int, /) -> str:
        return f"image {i}"

    def read(self, i: int, /) -> base.Pixels:
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
    """Open a ``.npy`` of images or a ``.npz`` of images and labels, memory-mapped.

    Images are ``images`` or ``arr_0``, uint8 (N, H, W), (N, H, W, C) or (N, C, H, W) with one or three channels; labels
    are ``labels`` or ``arr_1``, whole numbers from 0. The names ``arr_0`` and ``arr_1`` are guided-diffusion's.
    """
    arrays = open_at("data.path", base.read_path(spec, "a .npy or .npz file"), spec, open_numpy)
    found = [arrays.found[name] for name in IMAGES if name in arrays.found]
    if len(found) != 1:
        raise DataError(f"{arrays} has {'two arrays' if found else 'no array'} {' or '.join(IMAGES)}; use one")
    (images,) = arrays.checked(found)
    fits = len(images.shape) == 3 or (len(images.shape) == 4 and {images.shape[1], images.shape[3]} & {1, 3})
    if images.dtype != np.uint8 or not fits or not all(images.shape):
        raise DataError(
            f"{arrays} holds images of {images.dtype} {images.shape}; use uint8 (N, H, W), (N, H, W, C) or "
            "(N, C, H, W) with 1 or 3 channels C"
        )
    return ArraySource(*base.labelled(arrays.labels(images.shape[0], strict=True)), arrays.read_all(images))


def open_numpy(path: Path, spec: DataSpec) -> Variables:
    """Open the array of a ``.npy`` or all arrays of a ``.npz``, unpacked into unnamed files in ``store_root``."""
    if path.suffix != ".npz":
        found = {IMAGES[0]: base.map_array(path)}
    else:
        found = {}
        spec.store_root.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name in found:
                    raise ValueError(f"it has {name} twice")
                with tempfile.TemporaryFile(dir=spec.store_root) as file, archive.open(member) as packed:
                    shutil.copyfileobj(packed, file)
                    file.flush()
                    found[name] = base.map_array(Path(f"/proc/self/fd/{file.fileno()}"))
    return {name: Variable(name, each.shape, each.dtype, each.__getitem__) for name, each in found.items()}


def open_cifar10(spec: DataSpec, progress: bool) -> ArraySource:
    """Open the 50,000 training images of CIFAR-10, which torchvision downloads into ``store_root``."""
    from torchvision.datasets import CIFAR10  # imports torch

    folder = spec.store_root / "downloads"
    # torchvision's progress bar has no switch of its own
    silent = contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # hosts that share the folder take turns, since two downloads would write the same files
        with FileLock(folder / ".lock"), base.network_limit(base.NETWORK_TIMEOUT_SECONDS), silent:
            opened = CIFAR10(str(folder), download=True)
    except (OSError, HTTPException, RuntimeError) as error:
        raise DataError(
            f"data.source = cifar10 can't be downloaded ({base.one_line(error)}); get {CIFAR10.url} by hand and put it "
            f"at {folder / CIFAR10.filename}"
        ) from error
    return ArraySource(tuple(opened.classes), np.array(opened.targets, np.int64), opened.data)
