"""What a checkpoint says about itself, and whether its files are what it says. No torch.

How the hosts that share no folder complete a checkpoint together: through a key-value store, and rank 0 decides.

::

    rank 0                                        leader of another folder
    all parts: covered once?   ◀────── parts      its ranks' files are on the disk
    manifest, state            ──────▶            writes them beside its files, and flushes
    all ready?                 ◀────── ready
    ready                      ──────▶            renames the folder
    all placed?                ◀────── placed
    placed                     ──────▶            older checkpoints may go

Until all are ready no name has changed anywhere, and once one has, nothing is left to do that can run out of space.
Older checkpoints go when the new one has its name everywhere. Nothing waits inside the store, whose client the watchdog
uses as well.

What the ranks tell each other of the files that they have written, and the manifest that follows from it.

The header of a safetensors file, written by hand so that the tensors after it can be streamed.

Eight bytes little-endian length, JSON, then the raw tensors without gaps, in the header's order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict
from tqdm import tqdm

import ddpm_ds
from ddpm_ds.checkpoint.groups import Groups
from ddpm_ds.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import Store

FORMAT = 2
MANIFEST, STATE = "manifest.json", "state.json"
BAR_BYTES = 10**9
"""Checking fewer bytes than this takes about a second and shows no bar."""
CHUNK_BYTES = 2**20
_BLANK = "0" * 64


class DamagedFileError(CheckpointError):
    """One file of a checkpoint is not what was written."""

    def __init__(self, message: str, file: str) -> None:
        super().__init__(message)
        self.file = file


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Description(_Record):
    """What the run knows about a checkpoint that it asks for."""

    images: int
    """Images seen."""
    step: int
    """Optimizer steps taken."""
    spec: dict[str, Any]
    ds_config: dict[str, Any]
    """What DeepSpeed was given."""
    layout: dict[str, Any]
    """Processes, stages, replicas and batch of the run that wrote it."""
    data_sha256: dict[str, str]
    """Checksums of the prepared store that the run learns from."""
    parameters: dict[str, tuple[int, ...]]
    """Shape of every parameter by global name, in the order of the layers."""


class FileEntry(_Record):
    """A file as it was written."""

    bytes: int
    sha256: str


class Place(_Record):
    """Where a file was written."""

    host: str
    folder: str
    """That of the checkpoints, as this host knows it."""


class Manifest(Description):
    """``manifest.json``: the last file of a checkpoint to be written."""

    sha256: str = _BLANK
    """Of ``manifest.json`` itself with this value blanked by zeros."""
    format: int
    version: str
    """Of ddpm_ds."""
    created: datetime
    kinds: tuple[str, ...]
    """What is kept of every parameter, such as ``master``, ``exp_avg``, ``exp_avg_sq`` and ``ema``."""
    files: dict[str, FileEntry]
    """Every other file of the checkpoint."""
    places: dict[str, Place] = {}
    """Where each file was written, ``state.json`` apart, which is everywhere; empty where all hosts share a folder."""

    @property
    def total_bytes(self) -> int:
        """Size of all files but ``manifest.json``."""
        return sum(entry.bytes for entry in self.files.values())

    def dump(self) -> bytes:
        """The bytes of ``manifest.json``."""
        left_out = {"sha256"} if self.places else {"sha256", "places"}
        values = {"sha256": _BLANK, **self.model_dump(mode="json", exclude=left_out)}
        blank = (json.dumps(values, indent=2) + "\n").encode()
        return blank.replace(_BLANK.encode(), hashlib.sha256(blank).hexdigest().encode(), 1)


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint, every byte of it checked.

    Raises:
        CheckpointError: it is missing, damaged or of another format.
    """
    raw = read_bytes(checkpoint, MANIFEST)
    try:
        values = json.loads(raw)
        if hashlib.sha256(raw.replace(values["sha256"].encode(), _BLANK.encode(), 1)).hexdigest() != values["sha256"]:
            raise ValueError("checksum")
        if values["format"] == FORMAT:
            return Manifest.model_validate_json(raw)
    except (ValueError, KeyError, TypeError, AttributeError):  # whatever a flipped byte makes of JSON
        raise unusable(checkpoint, f"{MANIFEST} is damaged") from None
    raise unusable(
        checkpoint,
        f"its format is {values['format']}, this version reads format {FORMAT}; go on with the ddpm_ds "
        f"{values.get('version', 'version')} that wrote it",
    )


def read_bytes(checkpoint: Path, name: str) -> bytes:
    """All bytes of a small file of a checkpoint.

    Raises:
        CheckpointError: it can't be read.
    """
    try:
        return (checkpoint / name).read_bytes()
    except OSError as error:
        raise unusable(checkpoint, f"{name} can't be read ({error.strerror})") from None


def files_here(checkpoint: Path, manifest: Manifest) -> list[str]:
    """Those of its files that lie in the checkpoint's folder on this host, whatever is in them."""
    return [name for name in manifest.files if (checkpoint / name).exists()]


def verify(checkpoint: Path, manifest: Manifest, progress: bool) -> None:
    """Read every byte of a checkpoint and compare; a bar on stderr when there are many.

    Raises:
        CheckpointError: a file is missing, cut short, too long or has another checksum.
    """
    check_all_here(checkpoint, manifest)
    for name in manifest.files:
        check_size(checkpoint, name, manifest)
    for damage in damages(checkpoint, manifest, manifest.files, progress):
        raise damage


def damages(checkpoint: Path, manifest: Manifest, names: Collection[str], progress: bool) -> Iterator[DamagedFileError]:
    """What is wrong with files of a checkpoint, whose every byte is read; a bar on stderr when there are many."""
    total = sum(manifest.files[name].bytes for name in names)
    hidden = not progress or total < BAR_BYTES
    with tqdm(total=total, desc=f"checking {checkpoint.name}", unit="B", unit_scale=True, disable=hidden) as bar:
        for name in names:
            try:
                check_size(checkpoint, name, manifest)
                check_bytes(checkpoint, name, manifest, bar)
            except DamagedFileError as damage:
                yield damage


def check_all_here(checkpoint: Path, manifest: Manifest) -> None:
    """Raises CheckpointError when files were written on another host and are not here."""
    here = files_here(checkpoint, manifest)
    elsewhere = [name for name in manifest.files if name not in here and name in manifest.places]
    if elsewhere:
        raise CheckpointError(
            f"checkpoint {checkpoint} is not whole on this host, which lacks {written(manifest, elsewhere)}; copy what "
            "is missing from there"
        )


def written(manifest: Manifest, names: Iterable[str], about: Callable[[str], str] = lambda host: "") -> str:
    """Files of a checkpoint with where they were written, and what is said ``about`` each host.

    ``stage1-replica0.safetensors, which host b wrote in /data/run/checkpoints``
    """
    by_place: dict[Place | None, list[str]] = defaultdict(list)
    for name in names:
        by_place[manifest.places.get(name)].append(name)
    return ", and ".join(
        f"{', '.join(files)}"
        + (f", which host {place.host} wrote in {place.folder}{about(place.host)}" if place else "")
        for place, files in by_place.items()
    )


def check_size(checkpoint: Path, name: str, manifest: Manifest) -> None:
    """Raises DamagedFileError when a file is missing or has not as many bytes as were written."""
    try:
        found = (checkpoint / name).stat().st_size
    except OSError as error:
        raise _damaged(checkpoint, name, f"{name} can't be read ({error.strerror})") from None
    if found != (expected := manifest.files[name].bytes):
        raise _damaged(checkpoint, name, f"{name} has {found:,} bytes, {expected:,} were written")


def check_bytes(checkpoint: Path, name: str, manifest: Manifest, bar: tqdm[Any] | None = None) -> None:
    """Raises DamagedFileError when a file holds other bytes than were written; advances ``bar`` by its bytes."""
    digest = hashlib.sha256()
    try:
        with (checkpoint / name).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                if bar is not None:
                    bar.update(len(chunk))
    except OSError as error:
        raise _damaged(checkpoint, name, f"{name} can't be read ({error.strerror})") from None
    if digest.hexdigest() != manifest.files[name].sha256:
        raise _damaged(checkpoint, name, f"{name} has another checksum than {MANIFEST} says")


def check_coverage(
    parameters: Mapping[str, tuple[int, ...]], fragments: Iterable[tuple[str, str, int, int]]
) -> tuple[str, ...]:
    """The kinds among ``fragments`` (kind, name, start, length), each of which covers every parameter exactly once.

    Raises:
        ValueError: a kind lacks elements, has some twice, or belongs to a parameter that there is not.
    """
    spans: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for kind, name, start, length in fragments:
        if name not in parameters:
            raise ValueError(f"{kind} of {name} was written, but there is no such parameter")
        spans[kind, name].append((start, length))
    kinds = tuple(sorted({kind for kind, _ in spans}))
    if not kinds:
        raise ValueError("no rank wrote a fragment")
    for kind in kinds:
        for name, shape in parameters.items():
            at = 0
            for start, length in (*sorted(spans[kind, name]), (math.prod(shape), 0)):
                if start != at:
                    what = "was not written" if start > at else "was written twice or beyond its end"
                    raise ValueError(f"{kind} of {name} {what}, from element {min(start, at)} on")
                at = start + length
    return kinds


def unusable(checkpoint: Path, what: str) -> CheckpointError:
    """The error of a checkpoint in which something is wrong."""
    return CheckpointError(_sentence(checkpoint, what))


def _damaged(checkpoint: Path, name: str, what: str) -> DamagedFileError:
    return DamagedFileError(_sentence(checkpoint, what), name)


def _sentence(checkpoint: Path, what: str) -> str:
    return f"checkpoint {checkpoint} is unusable: {what}; use another of the run (ddpm-ds checkpoint list RUN_DIR)"


POLL_SECONDS = 0.05


class NotSaved(Exception):
    """Why there is no checkpoint; shown to people."""


class CalledOff(NotSaved):
    """Rank 0 has decided that there is no checkpoint."""


class Leaders:
    """This leader's side. Where there is one folder nothing is exchanged, and ``store`` may be None.

    ``seconds`` is what a group is given for its own part: rank 0 waits half as long again, the others for rank 0 to
    have waited for everybody.
    """

    def __init__(self, groups: Groups, store: Store | None, seconds: float) -> None:
        self._groups, self._store = groups, store
        self._seconds = 1.5 * seconds if groups.rank == 0 else 4 * seconds
        self._attempt = 0

    def begin(self, attempt: int) -> None:
        """What follows is about another checkpoint; ``attempt`` is the same number on all ranks."""
        self._attempt = attempt

    def collect(self, topic: str, text: str) -> list[str]:
        """Give ``text`` to rank 0; there, what all leaders have given, elsewhere nothing.

        Raises:
            CalledOff: on rank 0: another leader has a problem, or nothing came from it.
        """
        if self._groups.rank:
            self._at(topic, self._groups.rank).set(text)
            return []
        others = self._groups.leaders[1:]
        return [text, *(self._receive(topic, rank) for rank in others)]

    def publish(self, topic: str, text: str = "") -> str:
        """What rank 0 gives, on every leader.

        Raises:
            CalledOff: on the others: rank 0 has called the checkpoint off.
            NotSaved: on the others: nothing came from rank 0.
        """
        if self._groups.shared:
            return text
        key = self._at(topic)
        if self._groups.rank == 0:
            key.set(text)
            return text
        called_off = self._at("called off")
        self._until(lambda: key.there or called_off.there, "rank 0 has not answered", NotSaved)
        if not key.there:
            raise CalledOff(called_off.text)
        return key.text

    def all_are(self, topic: str) -> None:
        """Meet: goes on when every leader has come here. Raises as :meth:`collect` and :meth:`publish` do."""
        self.collect(topic, "")
        self.publish(topic)

    def forget(self, topic: str) -> None:
        """On rank 0, once all have read it: what it published is needed no more."""
        if self._groups.rank == 0 and not self._groups.shared:
            self._at(topic).delete()

    def fail(self, reason: str) -> None:
        """Tell rank 0 of a problem; on rank 0, call the checkpoint off."""
        if not self._groups.shared:
            with contextlib.suppress(Exception):  # whatever a store raises when rank 0 has gone
                self._at("problem" if self._groups.rank else "called off").set(reason)

    def _receive(self, topic: str, rank: int) -> str:
        key, problem = self._at(topic, rank), self._at("problem")
        self._until(lambda: key.there or problem.there, f"{self._groups.name(rank)} has not answered", CalledOff)
        if problem.there:
            raise CalledOff(problem.text)
        text = key.text
        key.delete()
        return text

    def _until(self, happened: Callable[[], bool], otherwise: str, error: type[NotSaved]) -> None:
        deadline = time.monotonic() + self._seconds
        while not happened():
            if time.monotonic() > deadline:
                raise error(f"{otherwise} for {self._seconds:g} s")
            time.sleep(POLL_SECONDS)

    def _at(self, topic: str, rank: int = 0) -> _Key:
        assert self._store is not None
        return _Key(self._store, f"checkpoint/{self._attempt}/{topic}/{rank}")


class _Key:
    """A place in the store."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name

    @property
    def there(self) -> bool:
        return bool(self._store.check([self._name]))

    @property
    def text(self) -> str:
        """To be read only when it is there."""
        return self._store.get(self._name).decode()

    def set(self, text: str) -> None:
        self._store.set(self._name, text)

    def delete(self) -> None:
        self._store.delete_key(self._name)


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


ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the first tensor; ``tensors`` are (key, dtype, shape, elements) in the order of their bytes."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for key, dtype, shape, elements in tensors:
        end = at + elements * ELEMENT_BYTES[dtype]
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers that map the file want aligned tensors
    return len(text).to_bytes(8, "little") + text
