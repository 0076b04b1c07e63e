"""Image files of a zip archive, such as EDM's and StyleGAN's tools write; nothing is unpacked.

Python's zipfile keeps an object for each member, which for a million images is a gigabyte in each process that decodes;
so the directory of the archive is read here into arrays, which processes are sent.
"""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ddpm_ds.data.sources.base import (
    MOST_CLASSES,
    Labels,
    Names,
    check_size,
    is_image,
    numbered,
    one_line,
    printable,
    read_path,
)
from ddpm_ds.data.sources.folder import class_of
from ddpm_ds.errors import DataError
from ddpm_ds.files import open_regular, parse_json

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ddpm_ds.config.spec import DataSpec

LABELS = "dataset.json"
"""File of labels in an archive that the tools of EDM and StyleGAN have written."""
LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Before a member's content: a signature, and the lengths of the name and of the extras that follow."""
ENTRY = struct.Struct("<4s4xHH4xLLLHHH8xL")
"""In the directory at the end: a signature, flags, method, checksum, stored and whole size, lengths of the name, of the
extras and of the comment that follow, and the offset of the member's header."""
END, END_64, LOCATOR_64 = struct.Struct("<4s8xLL2x"), struct.Struct("<4s36xQQ"), struct.Struct("<4s4xQ4x")
"""Behind the directory: its size and offset, in 32 bits, in 64 bits, and where those are."""
LONGEST_COMMENT, IN_64_BITS, EXTRA_64 = 2**16, 2**32 - 1, 1
ENCRYPTED, UTF_8 = 1, 0x800
STORED, DEFLATED = 0, 8


@dataclass
class ZipSource:
    """Images of an archive, sorted by path. A process opens the archive as it reads from it."""

    classes: tuple[str, ...]
    labels: Labels = field(repr=False)
    path: Path
    files: Names = field(repr=False)
    places: npt.NDArray[np.int64] = field(repr=False)
    """Offset of each image's header, its stored and whole size in bytes, checksum, method and flags: (N, 6)."""

    def name(self, i: int, /) -> str:
        """Return the path in the archive."""
        return printable(self.files[i])

    def read(self, i: int, /) -> bytes:
        """Read a member, whose checksum is compared."""
        with open_regular(self.path) as file:
            return _content(file, self.places[i].tolist())


def open_zip(spec: DataSpec, progress: bool) -> ZipSource:
    """List the images of the archive ``data.path``. Their labels are those of its ``dataset.json``, ``{"labels":
    [[path, number], ...]}``, where it has any, else folders.
    """
    import numpy as np

    path = read_path(spec, "a zip archive of images")
    names: list[str] = []
    numbers = array("q")
    try:
        with open_regular(path) as file:
            for name, place in _directory(file):
                names.append(name)
                numbers.extend(place)
    except (OSError, ValueError) as error:
        raise DataError(f"data.path = {path} can't be read ({one_line(error)}); write it again") from error
    keys = [name.replace("/", "\0") for name in names]  # a folder comes before names that go on otherwise
    order = sorted(range(len(names)), key=keys.__getitem__)
    if any(keys[one] == keys[next_one] for one, next_one in pairwise(order)):
        raise DataError(f"data.path = {path} has a name twice; write it again")
    if outside := [name for name in names if name.startswith("/") or ".." in name.split("/")]:
        raise DataError(f"data.path = {path} points outside itself ({printable(outside[0])}); write it again")
    order = [number for number in order if is_image(os.path.basename(names[number]))]
    if not order:
        raise DataError(
            f"data.path = {path} holds no image files (.png, .jpg, .webp, ...); give an archive of images with "
            "--set data.path=FILE"
        )
    files, table = Names(names[number] for number in order), np.array(numbers, np.int64).reshape(-1, len(place))
    labels = None
    if LABELS in names:
        try:
            with open_regular(path) as file:
                labels = _labels(_content(file, table[names.index(LABELS)].tolist()), files)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"{LABELS} of data.path = {path}: {one_line(error)}; write it again") from error
    if labels is None:
        return ZipSource(*numbered(map(class_of, files)), path, files, table[order])
    return ZipSource(tuple(map(str, range(int(labels.max()) + 1))), labels, path, files, table[order])


def _labels(content: bytes, files: Names) -> Labels | None:
    """Return the labels of ``dataset.json``, None where it has none; raises ValueError where an image has none."""
    import numpy as np

    labels = parse_json(content)["labels"]
    if labels is None:
        return None
    numbers = dict(labels)
    missing = next((file for file in files if file not in numbers), None)
    if missing is not None:
        raise ValueError(f"{printable(missing)} has no label")
    found = [numbers[file] for file in files]
    if not all(type(number) is int and 0 <= number < MOST_CLASSES for number in found):
        raise ValueError("a label is no whole number from 0")
    return np.array(found, np.int64)


def _directory(file: IO[bytes]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the place of each file of an archive, without folders; raises ValueError."""
    end = file.seek(0, os.SEEK_END)
    start = max(0, end - END.size - LONGEST_COMMENT - LOCATOR_64.size)
    file.seek(start)
    tail = file.read()
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < END.size:
        raise ValueError("its end is not that of a zip file")
    _, length, offset = END.unpack_from(tail, at)
    end = start + at
    if at >= LOCATOR_64.size and tail.startswith(b"PK\6\7", at - LOCATOR_64.size):
        end = LOCATOR_64.unpack_from(tail, at - LOCATOR_64.size)[1]
        file.seek(end)
        length, offset = _unpacked(END_64, file, b"PK\6\6")
    before = end - length - offset  # of another file, which the archive was appended to
    if before < 0:
        raise ValueError("its directory is cut")
    file.seek(end - length)
    while file.tell() < end:
        flags, method, checksum, stored, size, name, extra, comment, header = _unpacked(ENTRY, file, b"PK\1\2")
        path = file.read(name).decode("utf-8" if flags & UTF_8 else "cp437")
        wide = _wide(file.read(extra))
        size, stored, header = (next(wide, 0) if one == IN_64_BITS else one for one in (size, stored, header))
        file.seek(comment, os.SEEK_CUR)
        if not path.endswith("/"):
            yield path, (header + before, stored, size, checksum, method, flags)


def _wide(extras: bytes) -> Iterator[int]:
    """Yield the numbers of 64 bits in an entry's extras."""
    while len(extras) >= 4:
        kind, length = struct.unpack_from("<HH", extras)
        if kind == EXTRA_64:
            yield from (number for (number,) in struct.iter_unpack("<Q", extras[4 : 4 + length // 8 * 8]))
        extras = extras[4 + length :]


def _unpacked(layout: struct.Struct, file: IO[bytes], signature: bytes) -> tuple[Any, ...]:
    """Read a record of the archive, without its signature; raises ValueError where it is none."""
    record = file.read(layout.size)
    if len(record) < layout.size or not record.startswith(signature):
        raise ValueError("the archive is damaged; write it again")
    return layout.unpack(record)[1:]


def _content(file: IO[bytes], place: Sequence[int]) -> bytes:
    """Read a member, whose checksum is compared; raises OSError and ValueError."""
    header, stored, size, checksum, method, flags = place
    if flags & ENCRYPTED:
        raise ValueError("it is encrypted; write it without a password")
    if method not in (STORED, DEFLATED):
        raise ValueError(f"it is compressed by method {method}; write it stored or deflated")
    check_size(max(size, stored))
    file.seek(header)
    file.seek(sum(_unpacked(LOCAL_HEADER, file, b"PK\3\4")), os.SEEK_CUR)
    content = file.read(stored)
    if method == DEFLATED:
        try:
            content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, size + 1)
        except zlib.error as error:
            raise ValueError(one_line(error)) from error
    if len(content) != size or zlib.crc32(content) != checksum:
        raise ValueError("its checksum is wrong: the archive is damaged; write it again")
    return content
