"""Folder of a run's checkpoints: names, keep rules, atomic changes, and how ranks complete a checkpoint together. Does
not import torch.

::

    RUN_DIR/checkpoints/
        images-000012800/                 complete
            manifest.json                 Manifest
            state.json                    scalars
            stage0-replica0.safetensors   a rank's fragments, keys as of :class:`Span`
        latest                            the folder name of the last one written, for people and tools
        abandoned-images-000019200/       left behind by a resume from an older checkpoint; never read
        .writing-*  .deleting-*  .replaced-*  .probe-*    work that a killed process may leave

Names that begin with a dot or ``abandoned-`` are not checkpoints. All hosts see one folder. Functions that change it
raise OSError if the file system refuses.

Each rank writes a file and sends rank 0 its record, through a key-value store; once rank 0 has all, it writes state and
manifest and renames the folder. Rank 0 alone inspects and verifies checkpoints, and the others learn what it found.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_ds.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Manifest,
    State,
    check_coverage,
    check_headers,
    parse_state,
    read_bytes,
    read_manifest,
    reading,
    unusable,
    verify,
)
from ddpm_ds.ground.errors import CheckpointError, NoCheckpointError, OutputError
from ddpm_ds.ground.files import sync, write_file

if TYPE_CHECKING:
    from torch.distributed import Store

LATEST = "latest"
WRITING, REPLACED, PROBE = ".writing-", ".replaced-", ".probe-"
_DELETING, _ABANDONED = ".deleting-", "abandoned-"
_NAME = re.compile(r"images-(\d+)")
POLL_SECONDS = 0.05
_START = "checkpoint/start"
Gather = Callable[[Any], list[Any]]
"""Collective function from this rank's JSON value to the values of all ranks, by rank."""


def checkpoint_name(images: int) -> str:
    """Return the folder name of the checkpoint after ``images`` images."""
    return f"images-{images:09d}"


def images_of(name: str) -> int | None:
    """Return the images seen at checkpoint ``name``; None if it is not the name of a checkpoint."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def names(folder: Path) -> list[str]:
    """Return the names of complete checkpoints, oldest first, without verifying their checksums."""
    found = [path.name for path in folder.glob("images-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda name: int(name.removeprefix("images-")))


def to_delete(names: Sequence[str], keep_last: int | None, keep_every_images: int | None) -> list[str]:
    """Return the checkpoints among ``names``, oldest first, that the keep rules delete.

    The rules keep the last ``keep_last`` (None keeps all) and, for every multiple of ``keep_every_images``, the first
    checkpoint at or after it. After the deletion a second call returns none.
    """
    if keep_last is None:
        return []
    kept = set(names[-max(keep_last, 1) :])
    if keep_every_images:
        first_after = {(images_of(name) or 0) // keep_every_images: name for name in reversed(names)}
        kept |= {name for milestone, name in first_after.items() if milestone}
    return [name for name in names if name not in kept]


def restore(folder: Path) -> None:
    """Restore the name of a checkpoint whose replacement was interrupted."""
    for path in folder.glob(f"{REPLACED}*"):
        if not (original := folder / path.name.removeprefix(REPLACED)).exists():
            path.rename(original)


def clean(folder: Path) -> None:
    """Finish, undo or remove the unfinished work of killed processes. No process may be writing."""
    restore(folder)
    for probe in folder.glob(f"{PROBE}*"):
        probe.unlink(missing_ok=True)
    for prefix in (WRITING, _DELETING, REPLACED):
        for leftover in folder.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def put_in_place(written: Path, target: Path) -> None:
    """Rename ``written`` to ``target``, replacing a checkpoint of that name; :func:`clean` repairs an interruption."""
    before = target.with_name(REPLACED + target.name)
    if target.exists():
        shutil.rmtree(before, ignore_errors=True)
        target.rename(before)
    try:
        written.rename(target)
        sync(target.parent)
    except OSError:
        if not written.exists():
            target.rename(written)
        if before.exists():
            before.rename(target)
        raise


def tidy(folder: Path, newest: str, keep_last: int | None, keep_every_images: int | None) -> None:
    """Replace ``latest`` after a checkpoint was written, and apply the keep rules."""
    write_file(folder / LATEST, f"{newest}\n".encode())
    shutil.rmtree(folder / f"{REPLACED}{newest}", ignore_errors=True)
    for name in to_delete(names(folder), keep_last, keep_every_images):
        deleting = folder / f"{_DELETING}{name}"  # so that a kill can't leave a checkpoint with missing files
        shutil.rmtree(deleting, ignore_errors=True)
        shutil.rmtree((folder / name).rename(deleting))


def set_aside(folder: Path, after: int) -> list[str]:
    """Rename checkpoints of more than ``after`` images, damaged or abandoned by a resume; return the new names."""
    abandoned = [f"{_ABANDONED}{name}" for name in names(folder) if (images_of(name) or 0) > after]
    for name in abandoned:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name.removeprefix(_ABANDONED)).rename(folder / name)
    return abandoned


def check_shared(folder: Path, rank: int, hosts: Sequence[str], gather: Gather) -> None:
    """Check that all ranks see the same ``folder``, by a file that rank 0 makes there; collective.

    The file's name is new each time, since a network file system may cache the answer for a name. Raises OutputError on
    all ranks if hosts don't share the folder, or rank 0 can't write there.
    """
    token = folder / f"{PROBE}{gather(secrets.token_hex(8))[0]}"
    with contextlib.suppress(OSError):
        if rank == 0:
            token.touch()
    gather(None)
    seen = gather(token.exists())
    with contextlib.suppress(OSError):
        if rank == 0:
            token.unlink()
    if not seen[0]:
        raise OutputError(f"{folder} can't be written; make it writable, or name another --run-dir")
    if blind := sorted({host for host, sees in zip(hosts, seen, strict=True) if not sees}):
        raise OutputError(
            f"{folder} of host {hosts[0]} is not seen on {', '.join(blind)}; name a --run-dir that all hosts share"
        )


class NotSaved(Exception):
    """Error: there is no checkpoint; the reason is shown to users."""


class Completion:
    """One rank's part in completing checkpoints: all send rank 0 a text, for which it waits ``seconds``."""

    def __init__(self, rank: int, world_size: int, store: Store, seconds: float) -> None:
        self._rank, self._others, self._store, self._seconds = rank, range(1, world_size), store, seconds
        self.attempt = 0
        """Number of the checkpoint that all keys in the store belong to, the same on all ranks."""
        if rank == 0:
            store.set(_START, secrets.token_hex(4))

    @property
    def start(self) -> str:
        """Name of this start of the run, the same on all ranks, which no rank of an earlier start has."""
        return self._store.get(_START).decode()

    def send(self, text: str) -> None:
        self._store.set(self._key("part", self._rank), text)

    def collect(self, own: str, scratch: Path) -> list[str]:
        """Return the texts of all ranks on rank 0, its ``own`` first; raises NotSaved if one is missing.

        Rank 0 waits again if files of the folder ``scratch`` have grown meanwhile.
        """
        if not self._others:
            return [own]
        keys, trouble = {rank: self._key("part", rank) for rank in self._others}, self._key("trouble", 0)
        deadline, size = time.monotonic() + self._seconds, _size_of(scratch)
        while not self._store.check([*keys.values()]):
            if self._store.check([trouble]):
                raise NotSaved(self._store.get(trouble).decode())
            if time.monotonic() > deadline:
                deadline, before, size = time.monotonic() + self._seconds, size, _size_of(scratch)
                if size != before:
                    continue
                missing = [f"rank {rank}" for rank, key in keys.items() if not self._store.check([key])]
                listed = ", ".join([*missing[:8], "..."][: len(missing)])
                raise NotSaved(f"{listed} gave no answer in {self._seconds:g} s")
            time.sleep(POLL_SECONDS)
        found = [self._store.get(key).decode() for key in keys.values()]
        for key in keys.values():
            self._store.delete_key(key)
        return [own, *found]

    def fail(self, reason: str) -> None:
        """Report a problem to rank 0."""
        with contextlib.suppress(Exception):  # the store may raise anything once rank 0 has ended
            self._store.set(self._key("trouble", 0), reason)

    def _key(self, topic: str, rank: int) -> str:
        return f"checkpoint/{self.attempt}/{topic}/{rank}"


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@dataclass(frozen=True)
class CompleteCheckpoint:
    """Checkpoint with all files intact."""

    path: Path
    manifest: Manifest
    state: State
    verified: bool = True
    """Whether all files were compared with their checksums, by rank 0 for all hosts that see the same files."""


def newest(
    folder: Path, log: Callable[[str], None], *, until: int | None = None, progress: bool = False
) -> CompleteCheckpoint | None:
    """Return the newest complete checkpoint of at most ``until`` images; None if there is no checkpoint.

    Skipped checkpoints are reported through ``log``, with their fault. Raises NoCheckpointError if all are skipped:
    starting from scratch would not be a resume.
    """
    usable = [name for name in names(folder) if until is None or (images_of(name) or 0) <= until]
    problems: list[str] = []
    for name in reversed(usable):
        try:
            return whole(folder / name, progress=progress)
        except CheckpointError as error:
            problems.append(str(error))
            log(problems[-1])
    if not problems:
        return None
    none = f"none of the {len(problems)} checkpoints in {folder} can be used; restore one from a copy"
    raise NoCheckpointError(f"{none}: {problems[0]}")


def agreed(find: Callable[[], CompleteCheckpoint | None], rank: int, gather: Gather) -> CompleteCheckpoint | None:
    """Return on all ranks the checkpoint that ``find`` returns on rank 0, which has verified it; collective.

    A rank that sees other sizes or times of change of the files, in a cache of its host for example, has to verify them
    itself. Raises CheckpointError if ``find`` did, or a rank can't read the manifest.
    """
    found, why, none = None, "", False
    if rank == 0:
        try:
            found = find()
        except CheckpointError as error:
            why, none = str(error), isinstance(error, NoCheckpointError)
    seen = None if found is None else _seen(found.path, found.manifest)
    answer = gather({"path": found and str(found.path), "why": why, "none": none, "seen": seen})[0]
    if answer["why"]:
        raise (NoCheckpointError if answer["none"] else CheckpointError)(answer["why"])
    if rank and answer["path"]:
        path = Path(answer["path"])
        state, manifest = parse_state(path, read_bytes(path, STATE)), read_manifest(path)
        found = CompleteCheckpoint(path, manifest, state, answer["seen"] == _seen(path, manifest))
    return found


def _seen(path: Path, manifest: Manifest) -> str:
    """Return a checksum of the manifest and of all files' sizes and times of change, as this host sees them."""
    with reading(path, "one of its files"):
        files = [(path / name).stat() for name in sorted(manifest.files)]
    seen = manifest.sha256, [(file.st_size, file.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def checkpoint_at(path: Path, log: Callable[[str], None]) -> Path:
    """Return ``path`` or, if it is a run's folder, its newest good checkpoint; raises NoCheckpointError if none is."""
    folder = path / "checkpoints"
    if (path / MANIFEST).exists() or not folder.is_dir():
        return path
    found = newest(folder, log)
    if found is None:
        raise NoCheckpointError(f"run {path} has no checkpoint yet; name a run that has saved, or a checkpoint")
    return found.path


def whole(path: Path, *, progress: bool = False) -> CompleteCheckpoint:
    """Return the checkpoint at ``path``, after comparing every byte with its manifest; raises CheckpointError."""
    manifest = read_manifest(path)
    verify(path, manifest, progress)
    spans = {span for name in manifest.files if name != STATE for span in check_headers(path, manifest, name)}
    state = parse_state(path, read_bytes(path, STATE))
    try:
        if check_coverage(manifest.parameters, spans) != manifest.kinds:
            raise ValueError(f"its files hold other kinds of values than {MANIFEST} says")
        if (state.images_seen, state.steps) != (manifest.images, manifest.step):
            raise ValueError(f"{STATE} counts other images or steps than {MANIFEST}")
    except ValueError as error:
        raise unusable(path, str(error)) from None
    return CompleteCheckpoint(path, manifest, state)
