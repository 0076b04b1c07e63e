"""Folder of a run's checkpoints: names, the ones to delete, atomic changes; and the groups of ranks that share one: how
they complete a checkpoint together, and which ones are complete. Does not import torch.

::

    RUN_DIR/checkpoints/
        images-000012800/                 complete
            manifest.json                 Manifest
            state.json                    scalars
            stage0-replica0.safetensors   a rank's fragments, keys as of :class:`Span`; on its own host at least
        latest                            the folder name of the last one written, for people and tools
        abandoned-images-000019200/       left behind by a resume from an older checkpoint; never read
        .writing-*  .deleting-*  .replaced-*  .probe-*    work that a killed process may leave
    RUN_DIR/snapshots/                    the same for the averages of ``ema.profiles`` alone, in fp16, none deleted

Names that begin with a dot or ``abandoned-`` are not checkpoints. Hosts that share no folder have one each, with the
same ``manifest.json`` and ``state.json`` beside the fragments of their own ranks. Functions that change the folder
raise OSError if the file system refuses.

Hosts, folders and groups::

    host a   rank 0 ┐ RUN_DIR/checkpoints      a group, led by rank 0
             rank 1 ┘
    host b   rank 2 ┐ RUN_DIR/checkpoints      another folder of the same name: a group, led by rank 2
             rank 3 ┘

On a shared file system all ranks are one group. The ranks communicate through a key-value store, and rank 0 decides::

    rank 0                                        other ranks
    all parts: covered once?   ◀────── part       its file is on the disk
                                                  a leader of another folder goes on
    manifest, state            ──────▶            writes them beside the files of its group, and flushes
    all ready?                 ◀────── ready
    ready                      ──────▶            renames the folder
    all placed?                ◀────── placed
    placed                     ──────▶            older checkpoints may go

No folder is renamed before all are ready, and no later operation needs disk space. No call blocks inside the store,
whose client the watchdog also uses. Later the parts on several hosts are one checkpoint::

    host a   images-000012800/  manifest.json  state.json  stage0-replica0.safetensors
    host b   images-000012800/  manifest.json  state.json  stage1-replica0.safetensors      together: whole

All functions that take ``gather`` are collective: every rank calls them, and all ranks get the same result or raise.
Each group's leader inspects its folder. A rank reads the files of its own host alone.
"""

from __future__ import annotations

import contextlib
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
    Span,
    State,
    check_coverage,
    check_headers,
    damages,
    files_here,
    lacking,
    parse_state,
    read_bytes,
    read_manifest,
    unusable,
)
from ddpm_ds.errors import CheckpointError, NoCheckpointError
from ddpm_ds.files import sync, write_file
from ddpm_ds.unet.shards import Shard

if TYPE_CHECKING:
    from torch.distributed import Store

LATEST = "latest"
WRITING, REPLACED, PROBE = ".writing-", ".replaced-", ".probe-"
_DELETING, _ABANDONED = ".deleting-", "abandoned-"
_NAME = re.compile(r"images-(\d+)")
POLL_SECONDS = 0.05
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


def unfinished(folder: Path, prefix: str) -> dict[tuple[str, str], Path]:
    """Return folders with a manifest that begin with ``prefix``, by checkpoint name and checksum of the manifest.

    With prefix ``WRITING`` they only need to be renamed; with ``REPLACED`` another checkpoint has taken their name.
    """
    found = {}
    for path in folder.glob(f"{prefix}*"):
        with contextlib.suppress(CheckpointError):
            name = path.name.removeprefix(prefix).split(".")[0]
            found[name, read_manifest(path).sha256] = path
    return found


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


def take_back(target: Path) -> None:
    """Undo :func:`put_in_place`, as long as :func:`tidy` has not been called."""
    before = target.with_name(REPLACED + target.name)
    deleting = _hide(target)
    if before.exists():
        before.rename(target)
    sync(target.parent)
    shutil.rmtree(deleting, ignore_errors=True)


def tidy(folder: Path, newest: str, keep_last: int | None, keep_every_images: int | None) -> None:
    """Replace ``latest`` after a checkpoint was written, and apply the keep rules."""
    write_file(folder / LATEST, f"{newest}\n".encode())
    shutil.rmtree(folder / f"{REPLACED}{newest}", ignore_errors=True)
    for name in to_delete(names(folder), keep_last, keep_every_images):
        shutil.rmtree(_hide(folder / name))


def set_aside(folder: Path, after: int) -> list[str]:
    """Rename checkpoints of more than ``after`` images, so that they are never read again; return the new names.

    They are damaged, or were abandoned when the run resumed from an older checkpoint, and the next resume must not use
    them.
    """
    abandoned = [f"{_ABANDONED}{name}" for name in names(folder) if (images_of(name) or 0) > after]
    for name in abandoned:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name.removeprefix(_ABANDONED)).rename(folder / name)
    return abandoned


def _hide(checkpoint: Path) -> Path:
    """Rename a checkpoint before its deletion, so that a kill can't leave one with missing files."""
    deleting = checkpoint.with_name(_DELETING + checkpoint.name)
    shutil.rmtree(deleting, ignore_errors=True)
    return checkpoint.rename(deleting)


@dataclass(frozen=True)
class Groups:
    """Ranks grouped by the folder that they see, and the position of this rank."""

    rank: int
    hosts: tuple[str, ...]
    """Name of the host of every rank."""
    leader_of: tuple[int, ...]
    """Lowest rank that sees the same folder, for every rank."""

    @classmethod
    def one_folder(cls, rank: int = 0, world_size: int = 1) -> Groups:
        """Return the group in which all ranks see one folder; by default a single process."""
        return cls(rank, ("",) * world_size, (0,) * world_size)

    @property
    def leaders(self) -> tuple[int, ...]:
        """Leaders of all groups; rank 0 is always the first."""
        return tuple(sorted(set(self.leader_of)))

    @property
    def leads(self) -> bool:
        """Whether this rank acts for its group."""
        return self.leader_of[self.rank] == self.rank

    @property
    def shared(self) -> bool:
        """Whether all ranks see one folder."""
        return len(self.leaders) == 1

    def name(self, rank: int) -> str:
        """Return a rank's name for users: ``rank 2``, with its host if there are several folders."""
        return f"rank {rank}" if self.shared else f"rank {rank} on host {self.hosts[rank]}"


def find_groups(folder: Path, rank: int, hosts: Sequence[str], gather: Gather) -> Groups:
    """Find which ranks see the same ``folder``; collective. Ranks of one host that can't write there form one group.

    Every rank creates an empty file and looks up the others' files by name. Names are new each time, since a network
    file system may cache a folder's list or the answer for a name.
    """
    token = gather(secrets.token_hex(8))[0]
    probes = [folder / f"{PROBE}{token}-{other}" for other in range(len(hosts))]
    with contextlib.suppress(OSError):
        probes[rank].touch()
    gather(None)
    seen = next((other for other, probe in enumerate(probes) if _is_there(probe)), None)
    marks = [host if mark is None else mark for mark, host in zip(gather(seen), hosts, strict=True)]
    with contextlib.suppress(OSError):
        probes[rank].unlink()
    return Groups(rank, tuple(hosts), tuple(map(marks.index, marks)))


def _is_there(file: Path) -> bool:
    try:
        file.open("rb").close()
    except OSError:
        return False
    return True


class NotSaved(Exception):
    """Error: there is no checkpoint; the reason is shown to users."""


class CalledOff(NotSaved):
    """Error: rank 0 has decided that there is no checkpoint."""


class Completion:
    """One rank's part in completing checkpoints.

    Rank 0 waits for ``seconds``, the others until it must have finished waiting. ``what`` names the writer's output, so
    that writers use different keys.
    """

    def __init__(self, groups: Groups, store: Store, seconds: float, what: str) -> None:
        self._groups, self._store, self._what = groups, store, what
        self._seconds = seconds if groups.rank == 0 else 4 * seconds
        self._answers: list[str] = []  # keys of rank 0's, until all have read them
        self.attempt = 0
        """Number of the checkpoint that all keys in the store belong to, the same on all ranks."""

    def agree(
        self, topic: str, ranks: Sequence[int], text: str = "", answer: Callable[[list[str]], str] = lambda texts: ""
    ) -> str:
        """Send ``text`` to rank 0, which answers the leaders once it has the texts of all ``ranks``; return the answer.

        Ranks that are not leaders wait for no answer.

        Raises:
            CalledOff: on rank 0, another rank has failed or not answered; on others, rank 0 has cancelled the
                checkpoint.
            NotSaved: on others, rank 0 has not answered.
        """
        if self._groups.rank:
            self._store.set(self._key(topic, self._groups.rank), text)
            return self._wait(topic, [0], "called off")[0] if self._groups.leads else ""
        others = [rank for rank in ranks if rank]
        answered = answer([text, *self._wait(topic, others, "problem")])
        for read in (*self._answers, *(self._key(topic, rank) for rank in others)):
            self._store.delete_key(read)
        self._answers = [self._key(topic, 0)]
        self._store.set(self._key(topic, 0), answered)
        return answered

    def fail(self, reason: str) -> None:
        """Report a problem to rank 0; on rank 0, cancel the checkpoint."""
        with contextlib.suppress(Exception):  # the store may raise anything once rank 0 has ended
            self._store.set(self._key("problem" if self._groups.rank else "called off", 0), reason)

    def _wait(self, topic: str, ranks: Sequence[int], trouble: str) -> list[str]:
        """Return the texts of ranks as soon as they exist, polling, since reading a missing key would block."""
        if not ranks:
            return []
        store, keys = self._store, {rank: self._key(topic, rank) for rank in ranks}
        deadline = time.monotonic() + self._seconds
        while not store.check(list(keys.values())):
            if store.check([self._key(trouble, 0)]):
                raise CalledOff(store.get(self._key(trouble, 0)).decode())
            if time.monotonic() > deadline:
                missing = [self._groups.name(rank) for rank, key in keys.items() if not store.check([key])]
                reason = f"{', '.join(missing[:8])}{', ...' * (len(missing) > 8)} gave no answer in {self._seconds:g} s"
                raise NotSaved(reason) if self._groups.rank else CalledOff(reason)
            time.sleep(POLL_SECONDS)
        return [store.get(key).decode() for key in keys.values()]

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._what}/{self.attempt}/{topic}/{rank}"


@dataclass(frozen=True)
class CompleteCheckpoint:
    """Checkpoint that every host of this run knows, and of which every file is intact on one of them."""

    path: Path
    """Path of the checkpoint, the same on all hosts."""
    manifest: Manifest
    state: State
    """Scalars of the run."""
    here: tuple[str, ...]
    """Names of its files on this rank's host."""


def settle(folder: Path, groups: Groups, gather: Gather) -> None:
    """Finish, undo or remove the work of killed processes in every group's folder. No process may be writing.

    If one group has put a checkpoint in place, so do the others, which have already written it. If one of them can't,
    groups that replaced an older checkpoint of that name undo it.

    Raises:
        CheckpointError: a folder can't be changed.
    """

    def in_place_anywhere(asked: Sequence[Sequence[Sequence[str]]]) -> set[tuple[str, str]]:
        """Return the checkpoints (name, checksum of the manifest) in ``asked`` that are in place in any group."""
        pairs = sorted({(name, sha256) for theirs in asked for name, sha256 in theirs})
        here = [pair for pair in pairs if groups.leads and _digest(folder / pair[0]) == pair[1]]
        return {(name, sha256) for theirs in gather(here) for name, sha256 in theirs}

    try:
        if groups.leads:
            restore(folder)
        pending, old = (unfinished(folder, prefix) if groups.leads else {} for prefix in (WRITING, REPLACED))
        said = gather([list(pending), list(old)])
        for pair in in_place_anywhere([pairs for pairs, _ in said]) & pending.keys():
            put_in_place(pending[pair], folder / pair[0])
        for pair in in_place_anywhere([pairs for _, pairs in said]) & old.keys():
            take_back(folder / pair[0])
        if groups.leads:
            clean(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} can't be changed ({error.strerror}); make it writable") from None


def newest(
    folder: Path,
    groups: Groups,
    gather: Gather,
    log: Callable[[str], None],
    *,
    until: int | None = None,
    progress: bool = False,
) -> CompleteCheckpoint | None:
    """Return the newest complete checkpoint of at most ``until`` images; None if no host has any checkpoint.

    Skipped checkpoints are reported through ``log`` on rank 0, with what is missing where. Call :func:`settle` first.

    Raises:
        NoCheckpointError: there are checkpoints, but none can be used; starting from scratch would not be a resume.
        CheckpointError: a file was lost or damaged while it was read, at least on this rank.
    """
    found = {name for group in gather(names(folder) if groups.leads else []) for name in group}
    counted = {name: images_of(name) or 0 for name in found}
    usable = [name for name in counted if until is None or counted[name] <= until]
    problems: list[list[str]] = []
    for name in sorted(usable, key=counted.__getitem__, reverse=True):
        outcome = _examine(folder / name, groups, gather, progress)
        if isinstance(outcome, CompleteCheckpoint):
            return outcome
        problems.append(outcome)
        for line in outcome if groups.rank == 0 else ():
            log(line)
    if not problems:
        return None
    none = f"none of the {len(problems)} checkpoints in {folder} can be used; restore one from a copy"
    raise NoCheckpointError(f"{none}: {problems[0][-1]}")


def checkpoint_at(path: Path, log: Callable[[str], None]) -> Path:
    """Return ``path`` or, if it is a run's folder, its newest good checkpoint.

    Raises:
        NoCheckpointError: the run has no good checkpoint.
    """
    folder = path / "checkpoints"
    if (path / MANIFEST).exists() or not folder.is_dir():
        return path
    found = newest(folder, Groups.one_folder(), lambda value: [value], log)
    if found is None:
        raise NoCheckpointError(f"run {path} has no checkpoint yet; name a run that has saved, or a checkpoint")
    return found.path


def whole(path: Path, groups: Groups, gather: Gather, *, progress: bool = False) -> CompleteCheckpoint:
    """Return the checkpoint at ``path``.

    Raises:
        CheckpointError: something is missing or damaged; the message says what and where.
    """
    outcome = _examine(path, groups, gather, progress)
    if isinstance(outcome, CompleteCheckpoint):
        return outcome
    raise CheckpointError("; ".join(outcome))


def _examine(path: Path, groups: Groups, gather: Gather, progress: bool) -> CompleteCheckpoint | list[str]:
    """Return the checkpoint at ``path``, or the reasons why it can't be used."""
    seen = gather(_look(path, groups))
    looks = [seen[rank] for rank in groups.leaders]
    lines = [
        _on_host(groups, rank, look["damage"])
        for rank, look in zip(groups.leaders, looks, strict=True)
        if "damage" in look
    ]
    if lines:
        return lines
    if len({look["sha256"] for look in looks}) > 1:
        return [f"checkpoint {path.name} is not the same on all hosts: they have saved apart from each other"]
    manifest = read_manifest(path)
    there = {name for look in looks for name in look["here"]}
    if gone := [name for name in manifest.files if name not in there]:
        return [str(lacking(path, gone))]
    here = files_here(path, manifest)
    damaged, spans = zip(*gather(_check_files(path, manifest, here if groups.leads else (), progress)), strict=True)
    if lines := [_on_host(groups, rank, text) for rank, found in enumerate(damaged) for _, text in found]:
        return lines
    try:
        state = parse_state(path, read_bytes(path, STATE))
        # A set, since two hosts may hold copies.
        fragments = {
            Span(kind, name, start, length, shard and Shard(*shard))
            for found in spans
            for kind, name, start, length, shard in found
        }
        if check_coverage(manifest.parameters, fragments) != manifest.kinds:
            raise ValueError(f"its files hold other kinds of values than {MANIFEST} says")
        if (state.images_seen, state.steps) != (manifest.images, manifest.step):
            raise ValueError(f"{STATE} is of another moment than {MANIFEST}")
    except CheckpointError as error:
        return [str(error)]
    except ValueError as error:
        return [str(unusable(path, str(error)))]
    return CompleteCheckpoint(path, manifest, state, tuple(here))


def _look(path: Path, groups: Groups) -> dict[str, Any] | None:
    """Describe this group's part of a checkpoint: its manifest's checksum and files, or a fault; None on ranks that are
    not leaders.
    """
    if not groups.leads:
        return None
    if not groups.shared and not path.exists():
        return {"damage": str(lacking(path, [MANIFEST]))}
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return {"damage": str(error)}
    return {"sha256": manifest.sha256, "here": files_here(path, manifest)}


def _check_files(
    path: Path, manifest: Manifest, names: Sequence[str], progress: bool
) -> tuple[list[tuple[str, str]], list[Span]]:
    """Return the damaged files among ``names``, each with the error, and the fragments in the others."""
    damaged, spans = list(damages(path, manifest, names, progress)), []
    for name in names:
        if name != STATE and name not in dict(damaged):
            try:
                spans += check_headers(path, manifest, name)
            except CheckpointError as error:  # the checksum is right, but the content foreign
                damaged.append((name, str(error)))
    return damaged, spans


def _on_host(groups: Groups, rank: int, text: str) -> str:
    return text if groups.shared else f"host {groups.hosts[rank]}: {text}"


def _digest(checkpoint: Path) -> str | None:
    """Return the checksum of the manifest of a checkpoint in place; None if it can't be read."""
    try:
        return read_manifest(checkpoint).sha256
    except CheckpointError:
        return None
