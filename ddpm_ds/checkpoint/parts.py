"""What the ranks tell each other of the files that they have written, and the manifest that follows from it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict

import ddpm_ds
from ddpm_ds.checkpoint.leaders import NotSaved
from ddpm_ds.checkpoint.manifest import FORMAT, STATE, Description, FileEntry, Manifest, Place, check_coverage


class Part(BaseModel):
    """What a rank tells its leader when its file is safe on the disk."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    file: str
    entry: FileEntry
    fragments: list[tuple[str, str, int, int]]


class GroupParts(BaseModel):
    """What a leader tells rank 0 when all files of its group are safe on its disk."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    place: Place
    parts: list[Part]


def manifest_of(description: Description, state: bytes, groups: Sequence[str]) -> Manifest:
    """The manifest of what all groups (:class:`GroupParts` as JSON) have written, and of ``state.json``.

    Raises:
        ValueError: not every element was written once.
        NotSaved: two ranks wrote files of one name.
    """
    written = [GroupParts.model_validate_json(text) for text in groups]
    parts = [part for group in written for part in group.parts if part.fragments]
    kinds = check_coverage(description.parameters, (fragment for part in parts for fragment in part.fragments))
    files = {part.file: part.entry for part in parts}
    if len(files) != len(parts):
        raise NotSaved("two ranks wrote parts of one name")
    files[STATE] = FileEntry(bytes=len(state), sha256=hashlib.sha256(state).hexdigest())
    places = {part.file: group.place for group in written for part in group.parts if part.fragments}
    return Manifest(
        **dict(description),
        format=FORMAT,
        version=ddpm_ds.__version__,
        created=datetime.now(UTC),
        kinds=kinds,
        files=dict(sorted(files.items())),
        places=dict(sorted(places.items())) if len(written) > 1 else {},
    )
