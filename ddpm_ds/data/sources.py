"""Sources of images: digits, CIFAR-10, a folder. Each gives every image in the size and colours of the spec.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ddpm_ds.errors import DataError
from ddpm_ds.files import open_regular

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
    """Source that fits in memory."""

    classes: tuple[str, ...]
    images: Pixels = field(repr=False)  # (N, H, W) or (N, H, W, 3)
    labels: list[int] = field(repr=False)
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


class FolderSource:
    """Image files of a folder and its subfolders, sorted by path; a first-level subfolder is a class.

    Images that lie in the folder itself are of class ``.``; names that begin with a dot are skipped. Images are turned
    as their EXIF orientation says, and scaled up where they are smaller than asked (:func:`fit`); of several frames the
    first counts; 16-bit grey becomes 8-bit. An image that can't be read, or is no regular file, or would take too much
    memory, raises :class:`UnreadableImage`.
    """

    def __init__(self, spec: DataSpec, progress: bool = False) -> None:
        assert spec.path is not None  # the run spec checks it
        if not spec.path.is_dir():
            what = "is not a folder" if spec.path.exists() else "does not exist"
            raise DataError(f"data.path = {spec.path} {what}; give a folder of images with --set data.path=FOLDER")
        self.root = spec.path
        self.size = spec.stored_size
        self.channels = spec.channels
        self.files = sorted(_image_files(self.root))
        if not self.files:
            raise DataError(
                f"data.path = {self.root} holds no image files (.png, .jpg, .webp, ...), nor do its subfolders; "
                "give a folder of images with --set data.path=FOLDER"
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
            pixels = self._read(self.root / self.files[i])
        except Exception as error:  # a decoder may raise anything on broken bytes
            raise UnreadableImage(_printable(str(self.files[i])), _one_line(error)) from error
        return pixels, self.labels[i]

    def _read(self, path: Path) -> Pixels:
        """Return the pixels of an image file; raises whatever a decoder does."""
        from PIL import Image

        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_IMAGE_BYTES:
                raise ValueError(f"{size:,} bytes, more than {MOST_IMAGE_BYTES:,}; save it smaller")
            with Image.open(file, formats=_formats()) as image, self._budget.of(image.width * image.height):
                return fit(_decode(image, self.size), self.size, self.channels)


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


def _image_files(root: Path) -> Iterator[Path]:
    """Yield the relative paths of the files under ``root`` that Pillow can decode, by their extension."""
    from PIL import Image

    extensions = {extension for extension, kind in Image.registered_extensions().items() if kind in _formats()}
    visited = set()
    for folder, subfolders, names in os.walk(root, onerror=_refuse, followlinks=True):
        if os.path.realpath(folder) in visited:  # a link that leads back
            subfolders.clear()
            continue
        visited.add(os.path.realpath(folder))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in names:
            if os.path.splitext(name)[1].lower() in extensions and not name.startswith("."):
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
}
"""Sources by `data.source`."""
