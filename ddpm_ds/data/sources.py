"""Sources of images: digits, CIFAR-10, files. Each gives every image in the size and colours of the spec.

To add one, write it here with an entry in SOURCES. The run spec reads the entries without numpy and Pillow, so this
module imports them only to read images.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import socket
import threading
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias

from ddpm_ds.errors import DataError
from ddpm_ds.files import MOST_RECORD_BYTES, open_regular, parse_json

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image

    from ddpm_ds.config.spec import DataSpec

Pixels: TypeAlias = "npt.NDArray[np.uint8]"

NOT_PICTURES = {"BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "WMF"}
"""Formats that Pillow recognises by name but can't decode by itself, or that hold no pictures."""
MOST_IMAGE_PIXELS = 2**26
"""Most pixels of an image as it is decoded: each takes 4 bytes, several times over while it is scaled. A JPEG is scaled
down while it is decoded, so it may have more."""
MOST_IMAGE_BYTES = 2**28
"""Most bytes of an image file, which some decoders read at once."""
MOST_CLASSES = 10**6
"""Most classes of a source, as of a U-Net."""
ARRAY_NAMES = (("images", "arr_0"), ("labels", "arr_1"))
"""Names of the images and of the labels in a .npz."""
ZIP_LABELS = "dataset.json"
"""File of labels in an archive that the tools of EDM and StyleGAN have written."""
NETWORK_TIMEOUT_SECONDS = 20.0
"""Time limit for each answer of the network; a network that drops packets would delay a launch for minutes."""


class UnreadableImage(Exception):
    """Error for an image of a source that can't be read. It is skipped; too many of them are an error."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


class Source(Protocol):
    """Opened source of images, whose items may be asked for by several threads.

    ``self[i]`` is ``(pixels, label)``: uint8 ``(stored_size, stored_size, channels)`` and an index into ``classes``; it
    raises :class:`UnreadableImage` for an image to skip.
    """

    @property
    def classes(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> tuple[Pixels, int]: ...


@dataclass(frozen=True)
class SourceKind:
    """Kind of source, and what it reads besides the size and the channels of the spec."""

    about: str
    """Words for the documentation of the spec."""
    open: Callable[[DataSpec, bool], Source]
    """Function that opens it; the second argument shows a bar while it is downloaded. Raises DataError."""
    path: str | None = None
    """Word for what `data.path` names, such as FOLDER; None means that it reads no path."""


def open_source(spec: DataSpec, progress: bool = False) -> Source:
    """Open the source that ``spec.source`` names; ``progress`` shows a bar while it is downloaded.

    Raises:
        DataError: folder missing or without images, download impossible.
    """
    return SOURCES[spec.source].open(spec, progress)


@contextlib.contextmanager
def network_limit(seconds: float) -> Iterator[None]:
    """Limit every wait for an answer of the network; downloads by torchvision and torch.hub have no limit."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def fit(image: Image.Image, size: int, channels: int) -> Pixels:
    """Scale the shorter side to ``size`` (up or down, Lanczos) and crop the centre: uint8 ``(size, size, channels)``.

    Transparent pixels become white. An image that already fits is returned unchanged.
    """
    import numpy as np
    from PIL import Image, ImageOps

    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if channels == 1 else "RGB")
    image = ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)
    return np.array(image).reshape(size, size, channels)  # (H, W, C)


@dataclass
class ArraySource:
    """Source of images in one array, in memory or mapped from a file."""

    classes: tuple[str, ...]
    images: Pixels = field(repr=False)  # (N, H, W) or (N, H, W, 3)
    labels: Sequence[int] = field(repr=False)
    size: int
    channels: int

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int, /) -> tuple[Pixels, int]:
        from PIL import Image

        return fit(Image.fromarray(self.images[i]), self.size, self.channels), self.labels[i]


def _digits(spec: DataSpec, progress: bool) -> ArraySource:
    import numpy as np
    from sklearn.datasets import load_digits  # takes a second

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), stored as 0..16
    classes = tuple(str(name) for name in digits.target_names)
    return ArraySource(classes, images, digits.target.tolist(), spec.stored_size, spec.channels)


def _cifar10(spec: DataSpec, progress: bool) -> ArraySource:
    from torchvision.datasets import CIFAR10  # imports torch

    folder = spec.store_root / "downloads"
    # torchvision's progress bar has no switch of its own
    silent = contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO())
    try:
        with network_limit(NETWORK_TIMEOUT_SECONDS), silent:
            cifar = CIFAR10(str(folder), train=True, download=True)
    except (OSError, HTTPException, RuntimeError) as error:
        raise DataError(
            f"data.source = cifar10 can't be downloaded ({_one_line(error)}); "
            f"get {CIFAR10.url} by hand and put it at {folder / CIFAR10.filename}"
        ) from error
    return ArraySource(tuple(cifar.classes), cifar.data, cifar.targets, spec.stored_size, spec.channels)


def _arrays(spec: DataSpec, progress: bool) -> ArraySource:
    """Open a ``.npy`` of images, which is mapped, or a ``.npz`` of images and labels, which is read into memory.

    Images are ``images`` or ``arr_0``, uint8 (N, H, W), (N, H, W, C) or (N, C, H, W) with one or three channels; labels
    are ``labels`` or ``arr_1``, whole numbers from 0. The names ``arr_0`` and ``arr_1`` are guided-diffusion's.
    """
    import numpy as np

    path = _file(spec, "a .npy or .npz file")
    try:
        images, labels = _stored_arrays(path)
    except (OSError, ValueError, EOFError, OverflowError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"data.path = {path} can't be read ({_one_line(error)}); write it again with numpy") from error
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or not images.size:
        raise DataError(
            f"data.path = {path} holds images of {images.dtype} {images.shape}; use uint8 (N, H, W), (N, H, W, C) or "
            "(N, C, H, W)"
        )
    if images.ndim == 4:
        if images.shape[3] not in (1, 3):
            images = np.moveaxis(images, 1, 3)
        if images.shape[3] not in (1, 3):
            raise DataError(f"data.path = {path} holds images of {images.shape[3]} channels; use 1 or 3")
        images = images[..., 0] if images.shape[3] == 1 else images
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
    return ArraySource(classes, images, labels.tolist(), spec.stored_size, spec.channels)


def _stored_arrays(path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    """Return the images and the labels of a numpy file; raises whatever numpy does, and ValueError."""
    import numpy as np
    import psutil

    if path.suffix != ".npz":
        return np.load(path, mmap_mode="r"), None
    with zipfile.ZipFile(path) as archive:
        needed = sum(info.file_size for info in archive.infolist())
    if needed > (free := psutil.virtual_memory().available):
        raise ValueError(
            f"it takes {needed:,} bytes of memory, and {free:,} are free; save the images as a .npy, which is mapped"
        )
    with np.load(path) as archive:
        found = [next((name for name in names if name in archive), None) for names in ARRAY_NAMES]
        if found[0] is None:
            raise ValueError(f"it has no array {' or '.join(ARRAY_NAMES[0])}")
        return archive[found[0]], None if found[1] is None else archive[found[1]]


def _file(spec: DataSpec, what: str) -> Path:
    """Return the path of a source that is one file."""
    assert spec.path is not None  # the run spec checks it
    if not spec.path.is_file():
        wrong = "is not a file" if spec.path.exists() else "does not exist"
        raise DataError(f"data.path = {spec.path} {wrong}; give {what} with --set data.path=FILE")
    return spec.path


class PictureSource:
    """Encoded images with relative paths, sorted by them; the first part of a path is a class, unless labels say so.

    Images without a folder are of class ``.``. They are turned as their EXIF orientation says, and scaled up where they
    are smaller than asked (:func:`fit`); of several frames the first counts; 16-bit grey becomes 8-bit. An image that
    can't be read, or would take too much memory, raises :class:`UnreadableImage`.
    """

    def __init__(self, spec: DataSpec, files: Sequence[PurePath]) -> None:
        self.size, self.channels, self.files = spec.stored_size, spec.channels, sorted(files)
        if not self.files:
            asked = SOURCES[spec.source].path
            raise DataError(
                f"data.path = {spec.path} holds no image files (.png, .jpg, .webp, ...), nor do its subfolders; "
                f"give {'a folder' if asked == 'FOLDER' else 'an archive'} of images with --set data.path={asked}"
            )
        folders = ["." if len(file.parts) == 1 else _printable(file.parts[0]) for file in self.files]
        self._budget = _Budget(MOST_IMAGE_PIXELS)
        self.classes = tuple(sorted(set(folders)))
        labels = {name: label for label, name in enumerate(self.classes)}
        self.labels = [labels[name] for name in folders]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int, /) -> tuple[Pixels, int]:
        try:
            with self.opened(self.files[i]) as file:
                pixels = self._decoded(file)
        except Exception as error:  # a decoder may raise anything on broken bytes
            raise UnreadableImage(_printable(str(self.files[i])), _one_line(error)) from error
        return pixels, self.labels[i]

    def opened(self, file: PurePath) -> IO[bytes]:
        """Open one of the files, of at most MOST_IMAGE_BYTES."""
        raise NotImplementedError

    def _decoded(self, file: IO[bytes]) -> Pixels:
        """Return the pixels of an image file; raises whatever a decoder does."""
        from PIL import Image

        with Image.open(file, formats=_formats()) as image, self._budget.of(image.width * image.height):
            return fit(_decode(image, self.size), self.size, self.channels)


class FolderSource(PictureSource):
    """Image files of a folder and its subfolders; names that begin with a dot are skipped, and so is what is no regular
    file.
    """

    def __init__(self, spec: DataSpec, progress: bool = False) -> None:
        assert spec.path is not None  # the run spec checks it
        if not spec.path.is_dir():
            what = "is not a folder" if spec.path.exists() else "does not exist"
            raise DataError(f"data.path = {spec.path} {what}; give a folder of images with --set data.path=FOLDER")
        self.root = spec.path
        super().__init__(spec, list(_image_files(self.root)))

    def opened(self, file: PurePath) -> IO[bytes]:
        """Open a file of the folder."""
        opened = open_regular(self.root / file)
        try:
            _check_size(os.fstat(opened.fileno()).st_size)
        except ValueError:
            opened.close()
            raise
        return opened


class ZipSource(PictureSource):
    """Image files of a zip archive, such as EDM's and StyleGAN's tools write; nothing is unpacked.

    Labels are those of its ``dataset.json``, ``{"labels": [[path, number], ...]}``, where it has any, else folders.
    """

    def __init__(self, spec: DataSpec, progress: bool = False) -> None:
        path = _file(spec, "a zip archive of images")
        try:
            self._archive = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile, ValueError) as error:
            raise DataError(f"data.path = {path} can't be read ({_one_line(error)}); write it again") from error
        entries = [entry for entry in self._archive.infolist() if not entry.is_dir()]
        self._entries = {PurePath(entry.filename): entry for entry in entries}
        if len(self._entries) < len(entries):
            raise DataError(f"data.path = {path} has a name twice; write it again")
        if outside := [file for file in self._entries if file.is_absolute() or ".." in file.parts]:
            raise DataError(f"data.path = {path} points outside itself ({_printable(str(outside[0]))}); write it again")
        super().__init__(spec, [file for file in self._entries if _is_image(file.name)])
        if PurePath(ZIP_LABELS) in self._entries:
            try:
                self._relabel(self._entries[PurePath(ZIP_LABELS)])
            except (OSError, ValueError, TypeError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
                raise DataError(f"{ZIP_LABELS} of data.path = {path}: {_one_line(error)}; write it again") from error

    def opened(self, file: PurePath) -> IO[bytes]:
        """Read a file of the archive."""
        entry = self._entries[file]
        _check_size(entry.file_size)
        return io.BytesIO(self._archive.read(entry))

    def _relabel(self, entry: zipfile.ZipInfo) -> None:
        """Take the labels of ``dataset.json``, if it has any; raises ValueError where an image has none."""
        if entry.file_size > (most := 64 * MOST_RECORD_BYTES):
            raise ValueError(f"{entry.file_size:,} bytes, more than {most:,}")
        labels = parse_json(self._archive.read(entry))["labels"]
        if labels is None:
            return
        numbers = {PurePath(name): number for name, number in labels}
        missing = next((file for file in self.files if file not in numbers), None)
        if missing is not None:
            raise ValueError(f"{_printable(str(missing))} has no label")
        found = [numbers[file] for file in self.files]
        if not all(type(number) is int and 0 <= number < MOST_CLASSES for number in found):
            raise ValueError("a label is no whole number from 0")
        self.labels, self.classes = found, tuple(map(str, range(max(found) + 1)))


def _check_size(size: int) -> None:
    if size > MOST_IMAGE_BYTES:
        raise ValueError(f"{size:,} bytes, more than {MOST_IMAGE_BYTES:,}; save it smaller")


class _Budget:
    """Pixels that threads decode at the same time; an image above all of it is decoded alone."""

    def __init__(self, pixels: int) -> None:
        self._all = self._left = pixels
        self._freed = threading.Condition()

    @contextlib.contextmanager
    def of(self, pixels: int) -> Iterator[None]:
        """Wait until there are so many pixels, and keep them inside of this context."""
        share = min(pixels, self._all)
        with self._freed:
            self._freed.wait_for(lambda: share <= self._left)
            self._left -= share
        try:
            yield
        finally:
            with self._freed:
                self._left += share
                self._freed.notify_all()


@functools.cache
def _formats() -> tuple[str, ...]:
    """Return Pillow's names of the formats that are read: a file's content, not its name, says which it has."""
    from PIL import Image

    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # our own limit is lower
    Image.init()
    return tuple(kind for kind in Image.OPEN if kind not in NOT_PICTURES)


@functools.cache
def _extensions() -> frozenset[str]:
    """Return the extensions of files that Pillow can decode."""
    from PIL import Image

    return frozenset(extension for extension, kind in Image.registered_extensions().items() if kind in _formats())


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in _extensions() and not name.startswith(".")


def _image_files(root: Path) -> Iterator[Path]:
    """Yield the relative paths of the files under ``root`` that Pillow can decode, by their extension."""
    visited = set()
    for folder, subfolders, names in os.walk(root, onerror=_refuse, followlinks=True):
        if os.path.realpath(folder) in visited:  # a link that leads back
            subfolders.clear()
            continue
        visited.add(os.path.realpath(folder))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in names:
            if _is_image(name):
                yield Path(folder, name).relative_to(root)


def _refuse(error: OSError) -> None:
    raise DataError(f"data.path: {error.filename} can't be listed ({error.strerror}); allow it or move it elsewhere")


def _decode(file: Image.Image, size: int) -> Image.Image:
    import numpy as np
    from PIL import Image, ImageOps

    # JPEG scales down while decoding, several times faster; twice the size keeps Lanczos' quality
    file.draft(None, (2 * size, 2 * size))
    if file.width * file.height > MOST_IMAGE_PIXELS:
        raise ValueError(f"{file.width} x {file.height} pixels are more than {MOST_IMAGE_PIXELS:,}; scale it down")
    image = ImageOps.exif_transpose(file)
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no fixed range; save it with 8 or 16 bits")
    if image.mode.startswith("I;16"):  # Pillow's own conversion clips instead of scaling
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image


def _printable(path: str) -> str:
    """Return a path as text that any file can hold, also where its bytes are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _one_line(error: Exception) -> str:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return " ".join(reason.split()) or type(error).__name__


SOURCES = {
    "digits": SourceKind("scikit-learn's, 8x8 pixels", _digits),
    "cifar10": SourceKind("torchvision's, downloaded", _cifar10),
    "folder": SourceKind("image files, `path` names their folder", FolderSource, path="FOLDER"),
    "zip": SourceKind("image files in the zip archive `path`, as EDM's tools write", ZipSource, path="FILE"),
    "arrays": SourceKind("`path` is a .npy or .npz of images", _arrays, path="FILE"),
}
"""Sources by `data.source`."""
