"""WebDataset's tar shards, read in place: their headers are listed once, and nothing is unpacked.

The webdataset library streams shards in its own order, which a resumed run could not continue. Here every image has a
number, as in any source.
"""

from __future__ import annotations

import os
import tarfile
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from ddpm_ds.data.sources.base import (
    BROKEN,
    MOST_CLASSES,
    UNLABELLED,
    Captions,
    Labels,
    check_size,
    is_image,
    labelled,
    one_line,
    outside,
    printable,
    texts_in,
    under_other_keys,
)
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError
from ddpm_ds.ground.files import CHUNK_BYTES, MOST_RECORD_BYTES, open_regular
from ddpm_ds.ground.formats import check_digits, parse_json

LABELS = ("cls", "json")
"""Extensions of labels: a whole number, or a block with a whole number named label or cls. The first one counts."""
CAPTIONS = ("json", "txt", "caption")
"""Extensions of captions. The first one counts."""
IMAGE = "/"  # no extension
COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst")

_Texts: TypeAlias = "list[str] | dict[str, str]"
_Members: TypeAlias = "dict[str, tuple[str, int, int]]"
"""Name, offset and size of the members of a key, by extension; that of the image is IMAGE."""


@dataclass
class WebDatasetSource:
    """Images of tar shards, ordered by shard name and then by member."""

    classes: tuple[str, ...]
    labels: Labels = field(repr=False)
    shards: tuple[Path, ...]
    files: Sequence[str] = field(repr=False)
    places: npt.NDArray[np.int64] = field(repr=False)
    """Index of each image's shard, the offset of its content and its size in bytes: (N, 3)."""
    captions: Captions | None = field(default=None, repr=False)

    def name(self, i: int, /) -> str:
        """Return the names of shard and member."""
        return printable(f"{self.shards[self.places[i, 0]].name}/{self.files[i]}")

    def read(self, i: int, /) -> bytes:
        """Read a member of a shard."""
        shard, offset, size = self.places[i].tolist()
        check_size(size)
        with open_regular(self.shards[shard]) as file:
            content = os.pread(file.fileno(), size, offset)
        if len(content) < size:
            raise ValueError("its shard was cut since it was listed")
        return content


def open_webdataset(spec: DataSpec, progress: bool) -> WebDatasetSource:
    """List the images of the shards at ``data.path``; members of one name up to its first dot belong together."""
    path, key = spec.path, None if spec.text is None else spec.text.captions
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
    names, labels, places, texts = list[str](), array("q"), array("q"), list[_Texts]()
    with tqdm(shards, desc="listing shards", delay=1, disable=not progress) as bar:
        for number, shard in enumerate(bar):
            for name, offset, size, label, captioned in _images(shard, key):
                names.append(name)
                places.extend((number, offset, size))
                labels.append(label)
                texts.append(captioned)
    if not names:
        raise DataError(f"data.path = {spec.path} holds no images (KEY.jpg, KEY.png, KEY.webp, ...) in its shards")
    classes, numbers = labelled(np.array(labels, np.int64))
    captions = None
    if key is not None:
        captions = Captions(each if isinstance(each, list) else None for each in texts)
        others = {name: place for each in texts if isinstance(each, dict) for name, place in each.items()}
        captions.advice = under_other_keys(others, key) if others else ""
    table = np.array(places, np.int64).reshape(-1, 3)
    source = WebDatasetSource(classes, numbers, shards, names, table, captions)
    if len(without := np.flatnonzero(numbers == UNLABELLED)):
        raise DataError(
            f"data.path = {spec.path}: {len(without):,} of {len(names):,} images have no label, first "
            f"{source.name(int(without[0]))}; give each a .cls, or none"
        )
    return source


def _images(shard: Path, captions: str | None) -> list[tuple[str, int, int, int, _Texts]]:
    """Return name, offset, size, label and captions of the images in a shard, masks left out."""
    found, dotted = defaultdict[str, _Members](dict), dict[str, str]()
    try:
        with open_regular(shard) as file, tarfile.TarFile(fileobj=file) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # else each stays in memory
                if member.isdir():
                    continue
                name = printable(member.name)
                if outside(member.name) or not member.isreg() or member.issparse() or member.size < 0:
                    raise ValueError(f"{name} points outside it, or is a link, a device or has holes, not a file")
                folder, base = os.path.split(member.name)
                stem, _, extension = base.partition(".")
                key, kind = os.path.join(folder, stem), IMAGE if is_image(base) else extension.lower()
                if kind == IMAGE and "." in extension:
                    dotted.setdefault(key, name)
                elif kind in (IMAGE, *LABELS, *CAPTIONS):
                    if kind in found[key]:
                        raise ValueError(f"{printable(found[key][kind][0])} and {name} are of one key")
                    found[key][kind] = member.name, member.offset_data, member.size
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # else tarfile would end silently
                raise ValueError(f"it ends early, or is damaged, at byte {archive.offset:,}")
            while rest := file.read(CHUNK_BYTES):
                if rest.strip(b"\0"):
                    raise ValueError("it has more behind its end; several tar files in one are not read")
            if alone := [name for key, name in dotted.items() if IMAGE not in found[key]]:
                raise DataError(f"data.path: shard {shard}: the key of {alone[0]} ends at its first dot; rename it")
            return [
                (*members[IMAGE], *_beside(file, members, captions)) for members in found.values() if IMAGE in members
            ]
    except BROKEN as error:
        raise DataError(f"data.path: shard {shard}: {one_line(error)}; write it again") from error


def _beside(file: IO[bytes], members: _Members, captions: str | None) -> tuple[int, _Texts]:
    """Return label and captions among the members of a key; raises ValueError."""

    def content(kind: str) -> bytes:
        name, offset, size = members[kind]
        if size > MOST_RECORD_BYTES:
            raise ValueError(f"{printable(name)} has more than {MOST_RECORD_BYTES:,} bytes")
        return os.pread(file.fileno(), size, offset)

    def label_in(kind: str) -> int:
        """Return the label in a member, UNLABELLED if its block has none."""
        text = content(kind)
        try:
            if kind == "json":
                block = parse_json(text)
                label = next((block[key] for key in ("label", "cls") if block.get(key) is not None), UNLABELLED)
            else:
                label = int(check_digits(text.decode("ascii").strip()))
        except (ValueError, AttributeError):
            label = None
        if type(label) is not int or not UNLABELLED <= label < MOST_CLASSES:
            name = printable(members[kind][0])
            raise ValueError(f"the label in {name} is no whole number from 0 to {MOST_CLASSES - 1:,}")
        return label

    labels = (label_in(kind) for kind in LABELS if kind in members)
    kinds = [kind for kind in CAPTIONS if kind in members] if captions is not None else []
    texts = [texts_in(printable(members[kind][0]), partial(content, kind), captions or "") for kind in kinds]
    label = next((label for label in labels if label != UNLABELLED), UNLABELLED)
    return label, next((each for each in texts if isinstance(each, list)), texts[0] if texts else {})
