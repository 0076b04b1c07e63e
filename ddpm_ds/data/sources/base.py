"""Protocol, limits and helpers shared by sources of images."""

import contextlib
import errno
import functools
import os
import socket
import stat
import struct
import threading
import warnings
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError
from ddpm_ds.ground.files import open_regular

Pixels: TypeAlias = npt.NDArray[np.uint8]
Labels: TypeAlias = npt.NDArray[np.int64]

NOT_PICTURES = {"BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "WMF"}
"""Formats that Pillow knows but can't decode by itself, or that hold no pictures."""
PICTURES = {".avif", ".heic", ".heif", ".hif", ".jxl", ".webp"}
"""Extensions of images that are listed even if this Pillow can't decode them, so that they are reported."""
MOST_IMAGE_BYTES = 2**28  # maximum bytes of an encoded image, which is read at once
MOST_REASON = 300  # maximum characters shown of a library's error
MOST_CLASSES = 10**6  # maximum number of classes, in a source and in a U-Net
UNLABELLED = -1  # placeholder for a missing label while labels are collected
NO_CAPTION = -1  # fills the row of an image that has fewer captions than another
MOST_CAPTIONS = 256  # maximum captions of an image: each image's row is as long as the longest
BROKEN = (
    *(OSError, ValueError, EOFError, OverflowError, MemoryError, NotImplementedError, RuntimeError, LookupError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)
"""Errors that readers of arrays and archives raise for damaged or forged files."""
NETWORK_TIMEOUT_SECONDS = 20.0
"""Time limit for each network response: a network that drops packets could delay a launch for minutes."""


class Captions:
    """Captions of N images: distinct texts once, and their numbers for each image.

    ``found`` has the captions of each image, None where they are missing. Text 0 is always the empty one, which
    replaces dropped captions.
    """

    def __init__(self, found: Iterable[Sequence[str] | None]) -> None:
        seen = {"": 0}
        numbers, ends, missing = array("i"), array("q", [0]), array("q")
        for image, texts in enumerate(found):
            if texts is None:
                missing.append(image)
            for text in texts or ():
                whole = text.encode("utf-8", "replace").decode()  # JSON may hold half of a surrogate pair
                numbers.append(seen.setdefault(whole, len(seen)))
            ends.append(len(numbers))
        self.texts = tuple(seen)
        self.missing: Sequence[int] = missing  # images without captions, which are an error
        counts = np.diff(np.frombuffer(ends, np.int64))
        self.table = np.full((len(counts), int(counts.max(initial=1))), NO_CAPTION, np.int32)
        """Number of each caption of each image, int32 (N, most captions of an image), then :data:`NO_CAPTION`."""
        self.table[np.arange(self.table.shape[1]) < counts[:, None]] = np.frombuffer(numbers, np.int32)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the captions of the images of all ``parts``."""
        rows = ((part.texts, row[row >= 0].tolist()) for part in parts for row in part.table)
        return cls([texts[number] for number in row] if row else None for texts, row in rows)

    def fill(self) -> None:
        """Give the empty text to images without captions."""
        self.table[np.asarray(self.missing, np.int64), 0] = 0
        self.missing = ()


def captions_in(value: object) -> list[str] | None:
    """Return the captions in a text or a list of texts, None without any; raises ValueError for anything else."""
    if value is None or value == []:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("its captions are neither a text nor a list of texts")
    if len(texts) > MOST_CAPTIONS:
        raise ValueError(f"it has {len(texts):,} captions, and an image may have {MOST_CAPTIONS}")
    return texts


class Source(Protocol):
    """Opened source of N images, numbered from 0, which several threads read at once."""

    classes: tuple[str, ...]
    """Names of the labels."""
    labels: Labels
    """Index into ``classes`` of each image, int64 (N,), known before an image is decoded; the number of classes for an
    image without one, since U-Nets read this label as none."""

    def name(self, i: int, /) -> str:
        """Return the name of image ``i`` in reports: a path, a member of an archive, a row."""
        ...

    def read(self, i: int, /) -> bytes | Pixels:
        """Return image ``i`` as stored: the bytes of an image file, or uint8 pixels (H, W) or (H, W, C).

        OSError and ValueError skip this image; any other error is a bug.
        """
        ...


def captions_of(source: Source) -> Captions | None:
    """Return a source's ``captions``, None if it has none or ``data.text`` asks for none."""
    return getattr(source, "captions", None)


def parts_of(source: Source) -> npt.NDArray[np.int32] | None:
    """Return the number of each image's source in the spec, and the repeats in its folder's name or 0, (N, 2) int32."""
    return getattr(source, "parts", None)


WHOLE = ""
"""Stands for the file of a mask that is white."""


def beside_of(source: Source) -> Mapping[str, Sequence[str]]:
    """Return the file of each image's mask and condition, by name; :data:`WHOLE` or ``alpha`` stands for a mask."""
    return getattr(source, "beside", {})


Opener: TypeAlias = "Callable[[DataSpec, bool], Source]"
"""Function that opens a source; its second argument says whether to show bars. Raises DataError."""


@contextlib.contextmanager
def network_limit(seconds: float) -> Iterator[None]:
    """Limit the wait for network responses, since torchvision and torch.hub set no limit."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def numbered(names: Iterable[str | None]) -> tuple[tuple[str, ...], Labels]:
    """Return the distinct names, sorted, and the index of each name among them, int64 (N,), UNLABELLED for None."""
    seen: dict[str | None, int] = {}
    order = np.fromiter((seen.setdefault(name, len(seen)) for name in names), np.int64)
    classes = tuple(sorted(name for name in seen if name is not None))
    place = np.full(len(seen), UNLABELLED)
    place[[seen[name] for name in classes]] = np.arange(len(classes))
    return classes, place[order]


def labelled(labels: Labels, names: Sequence[str] | None = None) -> tuple[tuple[str, ...], Labels]:
    """Return class names, which are numbers unless ``names`` has enough of them, and the labels, int64 (N,).

    If no image has a label, all images have one class, named ``.``.
    """
    most = int(labels.max(initial=UNLABELLED))
    if most < 0:
        return (".",), np.zeros_like(labels)
    if names is None or len(names) <= most:
        names = list(map(str, range(most + 1)))
    return tuple(names), labels


def read_path(spec: DataSpec, what: str, folder: bool = False) -> Path:
    """Return ``data.path``, which must be a file or a ``folder``; raises DataError, which asks for ``what``."""
    path, kind = spec.path, "folder" if folder else "file"
    assert path is not None  # the run spec checks it
    if not (path.is_dir() if folder else path.is_file()):
        wrong = f"is not a {kind}" if path.exists() else "does not exist"
        raise DataError(f"data.path = {path} {wrong}; give {what} with --set data.path={kind.upper()}")
    return path


def check_size(size: int) -> None:
    """Raise ValueError for an encoded image of too many bytes."""
    if size > MOST_IMAGE_BYTES:
        raise ValueError(f"{size:,} bytes, more than {MOST_IMAGE_BYTES:,}; save it smaller")


def read_file(path: Path) -> bytes:
    """Read an image file; raises OSError if it is not a regular file, ValueError if it is too large."""
    with open_regular(path) as file:
        check_size(os.fstat(file.fileno()).st_size)
        return file.read()


def files_below(folder: Path) -> dict[str, os.stat_result]:
    """Return the states of all files below a folder, by relative name; raises OSError for devices, repeated folders."""
    found, below, seen = dict[str, os.stat_result](), [""], set[tuple[int, int]]()
    for above in below:  # which grows
        with os.scandir(folder / above) as entries:
            for entry in entries:
                name = f"{above}{entry.name}"
                try:
                    status = entry.stat()
                except FileNotFoundError:  # a link to nothing
                    continue
                if stat.S_ISREG(status.st_mode):
                    found[name] = status
                elif stat.S_ISDIR(status.st_mode) and (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    below.append(f"{name}/")
                else:
                    raise OSError(errno.EINVAL, f"{printable(name)} is no file, or a repeated folder", str(folder))
    return dict(sorted(found.items()))


ONE_HEADER = threading.Lock()  # CPython 3.11 may fail where two threads parse at once, as numpy does with a header


def map_array(path: Path) -> npt.NDArray[Any]:
    """Memory-map a ``.npy`` file: a forged header can't allocate more than the file holds. Raises OSError."""
    open_regular(path).close()
    try:
        with np.errstate(over="raise"), ONE_HEADER:  # numpy's own count of bytes
            return np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy raises almost anything on a forged header
        reason = one_line(error)[:MOST_REASON]
        raise OSError(errno.EINVAL, f"it is cut short or no .npy file: {reason}", str(path)) from error


@functools.cache
def formats() -> tuple[str, ...]:
    """Return Pillow's names of the readable formats; a file's content decides its format."""
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # our own limit is lower
    Image.init()
    return tuple(kind for kind in Image.OPEN if kind not in NOT_PICTURES)


def is_image(name: str) -> bool:
    """Return whether a file name, without folders, has the extension of an image."""
    extension = os.path.splitext(name)[1].lower()
    readable = Image.registered_extensions().get(extension) in formats()
    return (readable or extension in PICTURES) and not name.startswith(".")


def printable(path: str) -> str:
    """Return a path as UTF-8 text, with escapes for other bytes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def one_line(error: Exception) -> str:
    """Return the reason of an error in one line."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error).split(" <_io.BytesIO")[0]  # Pillow's address
    return " ".join(reason.split()) or type(error).__name__
