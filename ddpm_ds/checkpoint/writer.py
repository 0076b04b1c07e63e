"""Writes checkpoints beside training: the tensors are copied at once, the files are written by a thread.

::

    training   begin: copy to host memory ─┐ ...trains on...
    thread                                 └ own file ─ part record ─▶ rank 0: all parts there? covered once?
                                                                     └ state, manifest, fsync, rename, latest

Ranks meet in the file system only: no thread runs a collective.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

import ddpm_ds
from ddpm_ds.checkpoint.folder import (
    checkpoint_name,
    clean,
    names,
    put_in_place,
    remove_scratch_before,
    scratch,
    sync,
    tidy,
    write_file,
)
from ddpm_ds.checkpoint.fragments import Fragment, HostCopy
from ddpm_ds.checkpoint.manifest import FORMAT, MANIFEST, STATE, Description, FileEntry, Manifest, check_coverage
from ddpm_ds.checkpoint.safetensors_header import header

SECONDS_BETWEEN_LOOKS = 0.02


class _Part(BaseModel):
    """What a rank tells rank 0 when its file is safe on the disk."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    file: str
    entry: FileEntry
    fragments: list[tuple[str, str, int, int]]


class _NotSaved(Exception):
    """Why there is no checkpoint; shown to people."""


@dataclass(frozen=True)
class _Work:
    """One checkpoint as it was when it was asked for."""

    part: str
    fragments: list[tuple[str, str, int, int]]
    """(kind, name, start, length), in the order of the host copy."""
    description: Description
    state: bytes
    scratch: Path

    @property
    def name(self) -> str:
        return checkpoint_name(self.description.images)


class Writer:
    """This rank's share in writing checkpoints into ``folder``, which all ranks see.

    To be made on every rank before training communicates: rank 0 removes what killed processes left. Every rank
    calls :meth:`begin` for every checkpoint, one that owns nothing with no fragments. Nothing that can happen to
    the files raises into training: rank 0 tells ``say`` (from a thread) in one line what was lost, and the
    checkpoints before stay. ``keep_last`` and ``keep_every_images``: :func:`ddpm_ds.checkpoint.folder.to_delete`.
    Holds a copy of this rank's fragments in host memory, pinned where they come from CUDA.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        *,
        say: Callable[[str], None],
        keep_last: int | None = None,
        keep_every_images: int | None = None,
        time_limit_seconds: float = 600.0,
    ) -> None:
        self.seconds_blocked = 0.0
        """How long the last :meth:`begin` held training up, waiting for the checkpoint before it included."""
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._say = say
        self._keep = keep_last, keep_every_images
        self._time_limit_seconds = time_limit_seconds
        self._attempt = 0
        self._thread: threading.Thread | None = None
        self._saved = True
        self._host = HostCopy()
        if rank == 0:
            with contextlib.suppress(OSError):
                clean(folder)

    def begin(
        self, part: str, fragments: Sequence[Fragment], description: Description, state: Mapping[str, Any]
    ) -> None:
        """Copy ``fragments`` and start to write them; returns when they and the values may change again.

        ``part`` names this rank's file, such as ``stage0-replica1``; ``description`` and ``state`` (what JSON can
        hold) are those of rank 0. A checkpoint of the same number of images is replaced.

        Raises:
            TypeError, ValueError: a state that JSON can't hold: a bug.
        """
        started = time.monotonic()
        self.wait()
        self._attempt += 1
        fragments = [fragment for fragment in fragments if fragment.values.numel()]
        self._host.take(fragments)
        work = _Work(
            part,
            [(fragment.kind, fragment.name, fragment.start, fragment.values.numel()) for fragment in fragments],
            description.model_copy(deep=True),
            (json.dumps(dict(state), indent=2) + "\n").encode(),
            scratch(self._folder, checkpoint_name(description.images), self._attempt),
        )
        self._thread = threading.Thread(target=self._write, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()
        self.seconds_blocked = time.monotonic() - started

    def wait(self) -> bool:
        """Wait until the last checkpoint is written; on rank 0, whether it is complete, elsewhere, this rank's part."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._saved

    def _write(self, work: _Work) -> None:
        """The life of the thread."""
        self._saved = False
        try:
            if self._rank == 0:
                remove_scratch_before(self._folder, self._attempt)
            self._write_part(work)
            if self._rank == 0:
                self._complete(work)
            self._saved = True
        except Exception as error:
            self._give_up(work, _reason(error))
            return
        if self._rank == 0:
            self._tidy(work.name)

    def _write_part(self, work: _Work) -> None:
        """This rank's file, then its record."""
        work.scratch.mkdir(parents=True, exist_ok=True)
        keys = [(f"{kind}/{name}@{start}", "F32", (n,), n) for kind, name, start, n in work.fragments]
        digest, size = hashlib.sha256(), 0
        file_name = f"{work.part}.safetensors"
        with (work.scratch / file_name).open("wb") as file:
            pieces: tuple[bytes | memoryview, ...] = (header(keys, {}), *self._host.chunks())
            for chunk in pieces:
                digest.update(chunk)
                file.write(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        entry = FileEntry(bytes=size, sha256=digest.hexdigest())
        record = _Part(file=file_name, entry=entry, fragments=work.fragments)
        write_file(work.scratch / _record(self._rank), record.model_dump_json().encode())

    def _complete(self, work: _Work) -> None:
        """On rank 0: wait for all parts, check them, and put the checkpoint in place."""
        parts = self._parts(work.scratch)
        fragments = [fragment for part in parts for fragment in part.fragments]
        kinds = check_coverage(work.description.parameters, fragments)
        files = {part.file: part.entry for part in parts if part.fragments}
        if len(files) != sum(bool(part.fragments) for part in parts):
            raise _NotSaved("two ranks wrote parts of one name")
        write_file(work.scratch / STATE, work.state)
        files[STATE] = FileEntry(bytes=len(work.state), sha256=hashlib.sha256(work.state).hexdigest())
        manifest = Manifest(
            **dict(work.description),
            format=FORMAT,
            version=ddpm_ds.__version__,
            created=datetime.now(UTC),
            kinds=kinds,
            files=dict(sorted(files.items())),
        )
        write_file(work.scratch / MANIFEST, manifest.dump())
        for path in list(work.scratch.iterdir()):
            if path.name not in (*files, MANIFEST):
                path.unlink()
        sync(work.scratch)
        put_in_place(work.scratch, self._folder / work.name)

    def _parts(self, folder: Path) -> list[_Part]:
        """The records of all ranks, as soon as they are there."""
        deadline = time.monotonic() + self._time_limit_seconds
        while True:
            there = {path.name for path in folder.iterdir()}
            for failed in (name for name in there if name.endswith(".failed")):
                raise _NotSaved((folder / failed).read_text())
            missing = [rank for rank in range(self._world_size) if _record(rank) not in there]
            if not missing:
                break
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                raise _NotSaved(f"rank {ranks} had not written its part after {self._time_limit_seconds:g} s")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return [_Part.model_validate_json((folder / _record(rank)).read_bytes()) for rank in range(self._world_size)]

    def _give_up(self, work: _Work, reason: str) -> None:
        """Leave nothing half-written; rank 0 says so, another rank tells rank 0."""
        if self._rank:
            with contextlib.suppress(OSError):
                (work.scratch / f"{work.part}.safetensors").unlink(missing_ok=True)  # makes room for the message
                write_file(work.scratch / f"rank{self._rank}.failed", f"rank {self._rank}: {reason}".encode())
            return
        shutil.rmtree(work.scratch, ignore_errors=True)
        before = names(self._folder)
        lost = f"{before[-1]} stays, only the time since is at risk" if before else "there is none before it"
        self._say(f"checkpoint {work.name} was not saved: {reason}; {lost}")

    def _tidy(self, name: str) -> None:
        try:
            abandoned = tidy(self._folder, name, *self._keep)
        except Exception as error:
            self._say(f"checkpoint {name} is saved, but older ones or `latest` could not be changed: {_reason(error)}")
            return
        if abandoned:
            self._say(f"the run went on from before them: checkpoints renamed to {', '.join(abandoned)}")


def _record(rank: int) -> str:
    return f"rank{rank}.part.json"


def _reason(error: Exception) -> str:
    """What went wrong, in the words of the file system where it was that."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({Path(error.filename).name})" if error.filename else ""
        return error.strerror + where
    return str(error) if isinstance(error, _NotSaved) else f"{type(error).__name__}: {error}"
