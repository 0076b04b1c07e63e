"""Image files of a zip archive, such as EDM's and StyleGAN's tools write; nothing is unpacked."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ddpm_ds.data.sources.base import (
    MOST_CLASSES,
    MOST_IMAGE_BYTES,
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
from ddpm_ds.files import MOST_RECORD_BYTES, open_regular, parse_json

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ddpm_ds.config.spec import DataSpec

LABELS = "dataset.json"
"""File of labels in an archive that the tools of EDM and StyleGAN have written."""
LOCAL_HEADER = struct.Struct("<4s22xHH")
"""What stands before a member's content: a signature, and the lengths of the name and of the extras that follow."""
BROKEN = (OSError, ValueError, TypeError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What zipfile and json raise on broken archives."""


@dataclass
class ZipSource:
    """Images of an archive, sorted by path. Each process opens the archive by its path and reads by ``places``, since
    Python's objects for millions of members would take more memory than anything else.
    """

    classes: tuple[str, ...]
    labels: Labels = field(repr=False)
    path: Path
    files: Names = field(repr=False)
    places: npt.NDArray[np.int64] = field(repr=False)
    """Of each member the offset of its header, stored and whole size in bytes, checksum, method and flags: (N, 6)."""

    def name(self, i: int, /) -> str:
        """Return the path in the archive."""
        return printable(self.files[i])

    def read(self, i: int, /) -> bytes:
        """Read a member, whose checksum is compared."""
        offset, stored, size, checksum, method, flags = self.places[i].tolist()
        if flags & 1:
            raise ValueError("it is encrypted; write it without a password")
        if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"it is compressed by method {method}; write it stored or deflated")
        check_size(size)
        check_size(stored)
        with open_regular(self.path) as file:
            file.seek(offset)
            header = file.read(LOCAL_HEADER.size)
            if len(header) < LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
                raise ValueError("the archive is damaged; write it again")
            file.seek(sum(LOCAL_HEADER.unpack(header)[1:]), os.SEEK_CUR)
            content = file.read(stored)
        if method == zipfile.ZIP_DEFLATED:
            try:
                content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, MOST_IMAGE_BYTES)
            except zlib.error as error:
                raise ValueError(one_line(error)) from error
        if len(content) != size or zlib.crc32(content) != checksum:
            raise ValueError("its checksum is wrong: the archive is damaged; write it again")
        return content


def open_zip(spec: DataSpec, progress: bool) -> ZipSource:
    """List the images of the archive ``data.path``. Their labels are those of its ``dataset.json``, ``{"labels":
    [[path, number], ...]}``, where it has any, else folders.
    """
    import numpy as np

    path = read_path(spec, "a zip archive of images")
    try:
        archive = zipfile.ZipFile(path)
    except BROKEN as error:
        raise DataError(f"data.path = {path} can't be read ({one_line(error)}); write it again") from error
    with archive:
        entries = sorted(
            (entry for entry in archive.infolist() if not entry.is_dir()), key=lambda entry: entry.filename.split("/")
        )
        names = [entry.filename for entry in entries]
        if len(set(names)) < len(names):
            raise DataError(f"data.path = {path} has a name twice; write it again")
        if outside := [name for name in names if name.startswith("/") or ".." in name.split("/")]:
            raise DataError(f"data.path = {path} points outside itself ({printable(outside[0])}); write it again")
        entries = [entry for entry in entries if is_image(os.path.basename(entry.filename))]
        if not entries:
            raise DataError(
                f"data.path = {path} holds no image files (.png, .jpg, .webp, ...); give an archive of images with "
                "--set data.path=FILE"
            )
        files = Names(entry.filename for entry in entries)
        places = np.array(
            [
                (one.header_offset, one.compress_size, one.file_size, one.CRC, one.compress_type, one.flag_bits)
                for one in entries
            ],
            np.int64,
        )
        try:
            labels = _labels(archive, [entry.filename for entry in entries]) if LABELS in names else None
        except BROKEN as error:
            raise DataError(f"{LABELS} of data.path = {path}: {one_line(error)}; write it again") from error
    if labels is None:
        return ZipSource(*numbered(map(class_of, files)), path, files, places)
    return ZipSource(tuple(map(str, range(int(labels.max()) + 1))), labels, path, files, places)


def _labels(archive: zipfile.ZipFile, files: Sequence[str]) -> Labels | None:
    """Return the labels of ``dataset.json``, None where it has none; raises ValueError where an image has none."""
    import numpy as np

    if (size := archive.getinfo(LABELS).file_size) > (most := 64 * MOST_RECORD_BYTES):
        raise ValueError(f"{size:,} bytes, more than {most:,}")
    labels = parse_json(archive.read(LABELS))["labels"]
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
