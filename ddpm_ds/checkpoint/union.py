"""Checkpoints whose files are spread over hosts: which are complete, and what is missing where. Does not import torch.

::

    host a   images-000012800/  manifest.json  state.json  stage0-replica0.safetensors
    host b   images-000012800/  manifest.json  state.json  stage1-replica0.safetensors      together: whole

All functions are collective: every rank calls them, and all ranks get the same result or raise. Each group's leader
inspects its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    parse_state,
    read_bytes,
    read_manifest,
    unusable,
    written,
)
from ddpm_ds.errors import CheckpointError, NoCheckpointError

BRING_BACK = "start the run with that host as well, or copy the folder from there to a host of this run"


@dataclass(frozen=True)
class CompleteCheckpoint:
    """Checkpoint of which every file is intact on at least one host of this run."""

    path: Path
    """Path of the checkpoint, the same on all hosts; missing on hosts without any of its files."""
    manifest: Manifest
    state: State
    """Scalars of the run."""
    here: tuple[str, ...]
    """Names of its files on this rank's host."""
    groups: Groups
    """Groups of ranks by the folder that they see."""


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
    looks = {rank: look for rank, look in enumerate(gather(_look(path, groups))) if look is not None}
    lines = [_on_host(groups, rank, look["damage"]) for rank, look in looks.items() if "damage" in look]
    created = {look["sha256"]: look["created"] for look in looks.values() if "sha256" in look}
    for sha256 in sorted(created, key=created.__getitem__, reverse=True):
        holders = {rank: look["here"] for rank, look in looks.items() if look.get("sha256") == sha256}
        outcome = _assemble(path, holders, groups, gather, progress)
        if isinstance(outcome, CompleteCheckpoint):
            return outcome
        lines += outcome
    return lines or [str(unusable(path, f"{MANIFEST} can't be read (No such file or directory)"))]


def _look(path: Path, groups: Groups) -> dict[str, Any] | None:
    """Describe this group's part of a checkpoint: its manifest's checksum, age and files, or the manifest's fault; None
    on ranks that are not leaders.
    """
    if not groups.leads or not path.exists():
        return None
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return {"damage": str(error)}
    created = manifest.created.timestamp()
    return {"sha256": manifest.sha256, "created": created, "here": files_here(path, manifest)}


def _assemble(
    path: Path, holders: dict[int, list[str]], groups: Groups, gather: Gather, progress: bool
) -> CompleteCheckpoint | list[str]:
    """Return the checkpoint of a manifest, from the files that each of the ``holders``, leaders by rank, has."""
    manifest = Manifest.model_validate_json(_read(path, MANIFEST, min(holders), groups, gather))
    if gone := _in_none(manifest, holders):
        return [_lacks(path, manifest, gone, holders, groups)]
    damaged, spans = zip(*gather(_check_files(path, manifest, holders.get(groups.rank, ()), progress)), strict=True)
    for rank, here in holders.items():
        holders[rank] = [name for name in here if name not in dict(damaged[rank])]
    if _in_none(manifest, holders):
        return [_on_host(groups, rank, text) for rank, found in enumerate(damaged) for _, text in found]
    source = min(rank for rank, here in holders.items() if STATE in here)
    try:
        state = parse_state(path, _read(path, STATE, source, groups, gather))
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
    return CompleteCheckpoint(path, manifest, state, tuple(holders.get(groups.leader_of[groups.rank], ())), groups)


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


def _in_none(manifest: Manifest, holders: Mapping[int, Sequence[str]]) -> list[str]:
    """Return the files that no group has."""
    there = {name for here in holders.values() for name in here}
    return [name for name in manifest.files if name not in there]


def _lacks(
    path: Path, manifest: Manifest, gone: Sequence[str], holders: Mapping[int, Sequence[str]], groups: Groups
) -> str:
    """Describe what is missing, where it was written, and which hosts have the rest."""

    def about(host: str) -> str:
        return " (where it no longer is)" if host in groups.hosts else " (a host that is not in this run)"

    rest = ", ".join(
        f"host {groups.hosts[rank]} has {', '.join(name for name in here if name != STATE) or 'none of the others'}"
        for rank, here in holders.items()
    )
    parts = [f"checkpoint {path.name} lacks {written(manifest, gone, about)}"]
    if any(groups.hosts):
        parts.append(rest)
    if any(name in manifest.places and manifest.places[name].host not in groups.hosts for name in gone):
        parts.append(BRING_BACK)
    return "; ".join(parts)


def _read(path: Path, name: str, source: int, groups: Groups, gather: Gather) -> bytes:
    """Return a small file of the checkpoint on all ranks, sent by rank ``source`` if there are several folders."""
    if groups.shared:
        return read_bytes(path, name)
    text: str = gather(read_bytes(path, name).decode() if groups.rank == source else None)[source]
    return text.encode()


def _on_host(groups: Groups, rank: int, text: str) -> str:
    return text if groups.shared else f"host {groups.hosts[rank]}: {text}"


def _digest(checkpoint: Path) -> str | None:
    """Return the checksum of the manifest of a checkpoint in place; None if it can't be read."""
    try:
        return read_manifest(checkpoint).sha256
    except CheckpointError:
        return None
