"""Checkpoints in a shared folder, or in parts on several hosts: which are complete, and what is missing where. Does not
import torch.

::

    host a   images-000012800/  manifest.json  state.json  stage0-replica0.safetensors
    host b   images-000012800/  manifest.json  state.json  stage1-replica0.safetensors      together: whole

All functions are collective: every rank calls them, and all ranks get the same result or raise. Each group's leader
inspects its folder. A rank reads the files of its own host alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpm_ds.checkpoint.folder import (
    REPLACED,
    WRITING,
    clean,
    images_of,
    names,
    put_in_place,
    restore,
    take_back,
    unfinished,
)
from ddpm_ds.checkpoint.groups import Gather, Groups
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
        fragments = {Span(*span) for found in spans for span in found}
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
