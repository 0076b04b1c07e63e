"""WebDataset's tar shards, read in place: their headers are listed once, and nothing is unpacked.

The webdataset library streams shards in its own order, which a resumed run could not continue. Here every image has a
number, as in any source.
"""

from __future__ import annotations

import os
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from ddpm_ds.config.spec import DataSpec
from ddpm_ds.data.sources.base import (
    BROKEN,
    MOST_CLASSES,
    UNLABELLED,
    Captions,
    Labels,
    Names,
    check_size,
    is_image,
    labelled,
    one_line,
    printable,
    texts_of,
    under_other_keys,
)
from ddpm_ds.errors import DataError
from ddpm_ds.files import CHUNK_BYTES, MOST_RECORD_BYTES, check_digits, open_regular, parse_json

LABELS = ("cls", "json")
"""Extensions of labels: a whole number, or a block with a whole number named label or cls. The first one counts."""
CAPTIONS = ("json", "txt", "caption")
"""Extensions of captions. The first one counts."""
LEFT_OUT = (
    "its key ends at the first dot of its name, so it is no image of its own; rename it",
    "its key has a label, but no image (KEY.jpg, KEY.png, KEY.webp, ...)",
)
"""Reasons why a member is left out, by its offset; the size of such a member is -1."""
COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst")


@dataclass
class WebDatasetSource:
    """Images of tar shards, ordered by shard name and then by member; each process opens a shard at its first read."""

    classes: tuple[str, ...]
    labels: Labels = field(repr=False)
    shards: tuple[Path, ...]
    files: Names = field(repr=False)
    places: npt.NDArray[np.int64] = field(repr=False)
    """Index of each image's shard, the offset of its content in bytes and its size, or as LEFT_OUT says: (N, 3)."""
    captions: Captions | None = field(default=None, repr=False)

    def name(self, i: int, /) -> str:
        """Return the names of shard and member."""
        return printable(f"{self.shards[self.places[i, 0]].name}/{self.files[i]}")

    def read(self, i: int, /) -> bytes:
        """Read a member of a shard."""
        shard, offset, size = self.places[i].tolist()
        if size < 0:
            raise ValueError(LEFT_OUT[offset])
        check_size(size)
        with open_regular(self.shards[shard]) as file:
            content = os.pread(file.fileno(), size, offset)
        if len(content) < size:
            raise ValueError("its shard was cut since it was listed")
        return content


def open_webdataset(spec: DataSpec, progress: bool) -> WebDatasetSource:
    """List the images of the shards at ``data.path``; members of one name up to its first dot belong together."""
    shards = _shards(spec)
    places, labels = array("q"), array("q")
    captions, others = list[Sequence[str] | None](), dict[str, str]()
    key = None if spec.text is None else spec.text.captions

    def names() -> Iterator[str]:
        with tqdm(total=total, desc="listing shards", unit="B", unit_scale=True, delay=1, disable=not progress) as bar:
            for number, shard in enumerate(shards):
                for name, offset, size, label, texts in _images(shard, bar, key):
                    places.extend((number, offset, size))
                    labels.append(label)
                    if key is not None:
                        captions.append(None if isinstance(texts, dict) else texts)
                        others.update(texts if isinstance(texts, dict) else {})
                    yield name

    total = sum(shard.stat().st_size for shard in shards)
    files = Names(names())
    table, found = np.array(places, np.int64).reshape(-1, 3), np.array(labels, np.int64)
    if not (table[:, 2] >= 0).any():
        why = f"; {printable(files[0])}: {LEFT_OUT[table[0, 1]]}" if len(files) else ""
        raise DataError(f"data.path = {spec.path} holds no images (KEY.jpg, KEY.png, KEY.webp, ...) in its shards{why}")
    classes, found = labelled(found)
    known = None if key is None else Captions(captions)
    if known is not None and key is not None and others:
        known.advice = under_other_keys(others, key)
    source = WebDatasetSource(classes, np.maximum(found, 0), shards, files, table, known)
    if len(without := np.flatnonzero((found == UNLABELLED) & (table[:, 2] >= 0))):
        raise DataError(
            f"data.path = {spec.path}: {len(without):,} of {len(found):,} images have no label, first "
            f"{source.name(int(without[0]))}; give each a .cls, or none"
        )
    return source


def _shards(spec: DataSpec) -> tuple[Path, ...]:
    """Return the tar files at ``data.path``, sorted by name."""
    path = spec.path
    assert path is not None  # the run spec checks it
    fix = "give a .tar file or a folder of them with --set data.path=PATH"
    if not path.exists():
        raise DataError(f"data.path = {path} does not exist; {fix}")
    try:
        found = sorted(one for one in path.iterdir() if one.name[0] != ".") if path.is_dir() else [path]
    except OSError as error:
        raise DataError(f"data.path = {path} can't be listed ({error.strerror}); {fix}") from error
    if packed := [one.name for one in found if one.suffix in COMPRESSED]:
        raise DataError(f"data.path = {path}: {printable(packed[0])} is compressed; decompress it, to read it in place")
    shards = tuple(one for one in found if one.suffix == ".tar" or one == path)
    if not shards:
        raise DataError(f"data.path = {path} holds no .tar files; {fix}")
    return shards


def _images(
    shard: Path, bar: tqdm[NoReturn], captions: str | None
) -> Iterator[tuple[str, int, int, int, Sequence[str] | dict[str, str] | None]]:
    """Yield the name of each image of a shard, its offset and size in bytes, its label, and its ``captions``, which are
    under this key of its .json, or else in its .txt, or other keys of its .json; then what is left out.

    As webdataset has it, the members of a key, which ends at the first dot, are one sample: its image, its label and
    other things, such as the mask ``KEY.seg.png`` beside ``KEY.png``, which is not read.

    Raises:
        DataError: the shard is damaged or has wrong content; the message names it.
    """
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[tuple[str, str], int] = {}
    others: list[tuple[str, str]] = []
    texts: dict[tuple[str, str], Sequence[str] | dict[str, str]] = {}
    try:
        with open_regular(shard) as file:
            for member in _members(file, bar):
                folder, base = os.path.split(member.name)
                stem, _, extension = base.partition(".")
                key, extension = os.path.join(folder, stem), extension.lower()
                if extension in LABELS:
                    if (key, extension) in labels:
                        raise ValueError(f"{printable(member.name)} is there twice")
                    labels[key, extension] = _label(file, member)
                if captions is not None and extension in CAPTIONS:
                    texts[key, extension] = _captions(file, member, captions)
                if is_image(base) and "." in extension:
                    others.append((key, member.name))
                elif is_image(base):
                    if key in images:
                        raise ValueError(f"{printable(images[key][0])} and {printable(member.name)} are of one key")
                    images[key] = (member.name, member.offset_data, member.size)
    except BROKEN as error:
        raise DataError(f"data.path: shard {shard}: {one_line(error)}; write it again") from error
    for key, image in images.items():
        found = (labels.get((key, kind), UNLABELLED) for kind in LABELS)
        told = [texts[key, kind] for kind in CAPTIONS if (key, kind) in texts]
        told.sort(key=lambda found: isinstance(found, dict))  # captions before other keys
        label = next((label for label in found if label >= 0), UNLABELLED)
        yield *image, label, next(iter(told), None)
    numbered = (name for key, name in others if key not in images or name[len(key) + 1].isdigit())  # x.1.jpg is no mask
    without = (f"{key}.{kind}" for (key, kind), label in labels.items() if label >= 0 and key not in images)
    for reason, left_out in enumerate((numbered, without)):
        for name in left_out:
            yield name, reason, -1, UNLABELLED, ()


def _members(file: IO[bytes], bar: tqdm[NoReturn]) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files of a tar file, or of several in one, as ``cat a.tar b.tar`` writes them.

    Raises tarfile's errors, and ValueError if an end is missing.
    """
    if file.read(2) == b"\x1f\x8b":
        raise ValueError("it is compressed with gzip; decompress it")
    file.seek(0)
    start, rest = bar.n, b""
    while rest or not file.tell():
        try:
            archive = tarfile.TarFile(fileobj=file)
        except tarfile.ReadError as error:
            raise ValueError(f"it is no tar file ({one_line(error)})") from error
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # else each stays in memory
            bar.update(start + member.offset - bar.n)
            if member.isdir():
                continue
            name = printable(member.name)
            if member.name.startswith("/") or ".." in member.name.split("/"):
                raise ValueError(f"{name} points outside it")
            if not member.isreg() or member.issparse() or member.size < 0:
                raise ValueError(f"{name} is a link, a device or has holes, not a file")
            yield member
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # else tarfile would end silently
            raise ValueError(f"it ends early, or is damaged, at byte {archive.offset:,}")
        while (rest := file.read(CHUNK_BYTES)) and not rest.strip(b"\0"):
            pass
        file.seek((file.tell() - len(rest.lstrip(b"\0"))) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE)
    bar.update(start + os.fstat(file.fileno()).st_size - bar.n)


def _content(file: IO[bytes], member: tarfile.TarInfo) -> bytes:
    """Return the content of a small member; raises ValueError."""
    if member.size > MOST_RECORD_BYTES:
        raise ValueError(f"{printable(member.name)} has more than {MOST_RECORD_BYTES:,} bytes")
    content = os.pread(file.fileno(), member.size, member.offset_data)
    if len(content) < member.size:
        raise ValueError("it ends early")
    return content


def _captions(file: IO[bytes], member: tarfile.TarInfo, key: str) -> list[str] | dict[str, str]:
    """Return the captions in a text, or under ``key`` of a .json, or its other keys of texts; raises ValueError."""
    content = _content(file, member)
    try:
        if not member.name.lower().endswith("json"):
            return [content.decode("utf-8-sig").strip()]
        block = parse_json(content)
        return texts_of(block, key, printable(member.name)) if isinstance(block, dict) else {}
    except ValueError as error:
        raise ValueError(f"{printable(member.name)}: {one_line(error)}") from error


def _label(file: IO[bytes], member: tarfile.TarInfo) -> int:
    """Return the label in a member, or UNLABELLED if its block has none; raises ValueError."""
    name, content = printable(member.name), _content(file, member)
    try:
        if name.lower().endswith("json"):
            block = parse_json(content)
            label = next((block[key] for key in ("label", "cls") if block.get(key) is not None), UNLABELLED)
            if label is UNLABELLED:
                return UNLABELLED
        else:
            check_digits(content.decode("ascii").strip())
            label = int(content)
    except (ValueError, AttributeError):
        label = None
    if type(label) is not int or not 0 <= label < MOST_CLASSES:
        raise ValueError(f"the label in {name} is no whole number from 0 to {MOST_CLASSES - 1:,}")
    return label
