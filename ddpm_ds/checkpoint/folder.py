"""Folder of a run's checkpoints: names, the ones to delete, and atomic changes.

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
"""

import contextlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from ddpm_ds.checkpoint.manifest import read_manifest
from ddpm_ds.errors import CheckpointError
from ddpm_ds.files import sync, write_file

LATEST = "latest"
WRITING, REPLACED, PROBE = ".writing-", ".replaced-", ".probe-"
_DELETING, _ABANDONED = ".deleting-", "abandoned-"
_NAME = re.compile(r"images-(\d+)")


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
