"""Asynchronous writer of checkpoints: tensors are copied at once, files are written by a thread.

::

    training   begin: copy to host memory ─┐ ...trains on...
    thread                                 └ own file ─ its record ─▶ rank 0: records of all? every value once?
                                                        leader: manifest, state, fsync, rename, latest ◀─┘

Ranks use a key-value store (:class:`~ddpm_ds.checkpoint.folder.Completion`); no thread runs a collective.
"""

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import HashStore, Store

from ddpm_ds.checkpoint.folder import (
    WRITING,
    CalledOff,
    Completion,
    Groups,
    NotSaved,
    checkpoint_name,
    clean,
    names,
    put_in_place,
    set_aside,
    take_back,
    tidy,
)
from ddpm_ds.checkpoint.manifest import (
    CODES,
    MANIFEST,
    STATE,
    Description,
    Part,
    Span,
    StoredDtype,
    manifest_of,
)
from ddpm_ds.checkpoint.reader import STORED, Header, write_tensors
from ddpm_ds.files import replace_file, write_file
from ddpm_ds.unet.shards import Shard


class Fragment(NamedTuple):
    """Piece of a parameter, or of one kind of its state, that only this rank owns; see :class:`Span`."""

    kind: str
    name: str
    start: int
    values: Tensor  # (length,) fp32, or codes of 8 bits, any device
    scales: Tensor | None = None  # of the codes' blocks, fp32
    shard: Shard | None = None


class HostCopy:
    """Concatenated snapshot of tensors in ``dtype``, and after them of codes of 8 bits, whose memory is reused for the
    next snapshot.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, pieces: Sequence[Tensor]) -> None:
        """Copy all values, to pinned memory if any are on CUDA; return when the tensors may change again."""
        devices = {piece.device for piece in pieces if piece.is_cuda}
        dtypes = [torch.uint8 if piece.dtype is torch.uint8 else self._dtype for piece in pieces]
        sizes = [piece.numel() * dtype.itemsize for piece, dtype in zip(pieces, dtypes, strict=True)]
        self._used = sum(sizes)
        if self._bytes.numel() < self._used:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
            self._bytes = torch.empty(self._used, dtype=torch.uint8, pin_memory=bool(devices))
        for raw, dtype, piece in zip(self._bytes[: self._used].split(sizes), dtypes, pieces, strict=True):
            target = raw.view(dtype)
            if piece.is_cuda:
                target.copy_(piece.detach(), non_blocking=True)
            else:  # torch would restart its threads for every piece
                with np.errstate(over="ignore"):  # overflow gives infinity, which readers refuse
                    target.numpy()[:] = piece.detach().numpy()
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def raw(self) -> memoryview:
        """Return the copied bytes."""
        return self._bytes.numpy()[: self._used].data


class Writer:
    """One rank's share in writing checkpoints into ``folder``.

    ``groups`` tells which ranks see the same folder; several ranks need ``store``, their key-value store. Construct it
    on every rank before training communicates: leaders clean up after killed processes (for several folders,
    :func:`ddpm_ds.checkpoint.folder.settle` has done so). Every rank calls :meth:`begin` for every checkpoint, with no
    fragments if it owns none. File errors are not raised into training: rank 0 reports the loss in one line through
    ``log`` (from a thread), and earlier checkpoints remain. ``keep_last`` and ``keep_every_images`` are as in
    :func:`ddpm_ds.checkpoint.folder.to_delete`. Holds a copy of this rank's fragments in host memory, pinned if they
    come from CUDA. ``what`` selects whole checkpoints in fp32, or snapshots of averages in fp16.
    """

    def __init__(
        self,
        folder: Path,
        groups: Groups,
        *,
        log: Callable[[str], None],
        keep_last: int | None = None,
        keep_every_images: int | None = None,
        time_limit_seconds: float = 600.0,
        store: Store | None = None,
        what: Literal["checkpoint", "snapshot"] = "checkpoint",
    ) -> None:
        self._folder, self._groups, self._log = folder, groups, log
        self._what = what
        self._dtype: StoredDtype = "F32" if what == "checkpoint" else "F16"
        self._completion = Completion(groups, store or HashStore(), time_limit_seconds, what)
        self._keep = keep_last, keep_every_images
        self._thread: threading.Thread | None = None
        self._saved = True
        self.why_not = ""
        """Reason, on rank 0, why the last checkpoint that was not saved was not, and what is there instead."""
        self._host = HostCopy(STORED[self._dtype])
        if groups.leads:
            with contextlib.suppress(OSError):
                clean(folder)

    def begin(
        self, part: str, fragments: Sequence[Fragment], description: Description, state: Mapping[str, Any]
    ) -> float:
        """Copy ``fragments`` and start to write them; return when they may change again.

        Returns the seconds for which training was blocked, including the wait for the previous checkpoint.

        ``part`` names this rank's file, such as ``stage0-replica1``; ``description`` and ``state`` (JSON values) are
        used from rank 0. A checkpoint of the same number of images is replaced.
        """
        started = time.monotonic()
        self.wait()
        self._completion.attempt += 1
        fragments = [fragment for fragment in fragments if fragment.values.numel()]
        spans = [Span(kind, name, start, values.numel(), shard) for kind, name, start, values, _, shard in fragments]
        floats, codes = list[tuple[str, Tensor]](), list[tuple[str, Tensor]]()
        for span, fragment in zip(spans, fragments, strict=True):
            (floats if fragment.scales is None else codes).append((span.key, fragment.values))
            floats += [] if fragment.scales is None else [(span.scales_key, fragment.scales)]
        self._host.take([values for _, values in floats + codes])
        tensors: list[Header] = [(key, self._dtype, (values.numel(),)) for key, values in floats]
        tensors += [(key, CODES, (values.numel(),)) for key, values in codes]
        text = json.dumps(dict(state), indent=2) + "\n"
        copies = f"{part}.safetensors", tensors, spans, description.model_copy(deep=True), text
        self._thread = threading.Thread(target=self._write, args=copies, name=self._what, daemon=True)
        self._thread.start()
        return time.monotonic() - started

    def wait(self) -> bool:
        """Wait for the last checkpoint; return whether it, or on ranks that are not leaders their part, is complete."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._saved

    def _write(self, file: str, tensors: list[Header], spans: list[Span], description: Description, state: str) -> None:
        """Write a checkpoint; runs in the thread."""
        self._saved = False
        name = checkpoint_name(description.images)
        scratch = self._folder / f"{WRITING}{name}.{self._completion.attempt}"  # the same for all ranks
        try:
            if self._groups.leads:
                self._remove_earlier_attempts()
            scratch.mkdir(parents=True, exist_ok=True)
            self._complete(scratch, self._written(scratch / file, tensors, spans), description, state)
            self._saved = True
        except Exception as error:
            self._give_up(scratch, name, error)
            return
        if self._groups.leads:
            self.set_aside(description.images)
            try:
                tidy(self._folder, name, *self._keep)
            except Exception as error:
                changed = "older ones or `latest` could not be changed"
                self._log(f"{self._what} {name} is saved, but {changed}: {_reason(error)}")

    def set_aside(self, images: int) -> None:
        """Rename checkpoints of more than ``images``, since the run has resumed from an earlier one."""
        if not self._groups.leads:
            return
        try:
            abandoned = set_aside(self._folder, images)
        except OSError as error:
            what = f"{self._what}s of more than {images:,} images in {self._folder}"
            self._log(f"{what} can't be renamed ({error.strerror}); remove them: the run went on from before them")
            return
        if abandoned and self._groups.rank == 0:
            self._log(f"the run went on from before them: {self._what}s renamed to {', '.join(abandoned)}")

    def _remove_earlier_attempts(self) -> None:
        """Remove files of this process's earlier attempts, such as parts of ranks that failed later."""
        for path in self._folder.glob(f"{WRITING}*"):
            if path.suffix[1:].isdigit() and int(path.suffix[1:]) < self._completion.attempt:
                shutil.rmtree(path, ignore_errors=True)

    def _written(self, path: Path, tensors: list[Header], spans: list[Span]) -> str:
        """Write this rank's file and return its record; a rank without values writes none."""
        if not spans:
            return ""
        entry = write_tensors(path, tensors, [self._host.raw()])
        return Part(file=path.name, entry=entry, fragments=spans).model_dump_json()

    def _complete(self, scratch: Path, part: str, description: Description, state: str) -> None:
        """Send rank 0 the record of this rank's file; on a leader, put the checkpoint in place once rank 0 has all."""

        def describe(texts: list[str]) -> str:
            parts = [Part.model_validate_json(text) for text in texts if text]
            manifest = manifest_of(description, state.encode(), parts, self._dtype)
            return json.dumps([manifest.dump().decode(), state])

        groups, agree = self._groups, self._completion.agree
        described = agree("manifest", range(len(groups.hosts)), part, describe)
        if not groups.leads:
            return
        manifest, state = json.loads(described)
        replace_file(scratch / STATE, state.encode())
        write_file(scratch / MANIFEST, manifest.encode())
        agree("ready", groups.leaders)
        target = self._folder / checkpoint_name(description.images)
        put_in_place(scratch, target)
        try:
            agree("placed", groups.leaders)
        except CalledOff:
            take_back(target)
            raise

    def _give_up(self, scratch: Path, name: str, error: Exception) -> None:
        """Remove half-written files, tell the other ranks, and report the error on rank 0."""
        rank, reason = self._groups.rank, _reason(error)
        if not isinstance(error, NotSaved) and (rank != 0 or not self._groups.shared):
            reason = f"{self._groups.name(rank)}: {reason}"
        if self._groups.leads:
            shutil.rmtree(scratch, ignore_errors=True)
        if rank == 0 or not isinstance(error, CalledOff):
            self._completion.fail(reason)
        if rank == 0:
            try:
                before = names(self._folder)
                lost = f"{before[-1]} stays, only the time since is at risk" if before else "there is none before it"
            except OSError as error:  # whatever it is, the reason must be known: it decides how the run ends
                lost = f"those before it can't be listed ({error.strerror})"
            if self._what == "snapshot":
                lost = "`ddpm-ds ema` makes averages from the others"
            self.why_not = f"{self._what} {name} was not saved: {reason}; {lost}"
            self._log(self.why_not)


def _reason(error: Exception) -> str:
    """Return the reason for an error, in the file system's words if it caused it."""
    if isinstance(error, NotSaved):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" ({Path(error.filename).name})" if error.filename else ""
        return error.strerror + where
    return f"{type(error).__name__}: {error}"
