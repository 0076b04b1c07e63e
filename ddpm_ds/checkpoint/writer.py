"""Asynchronous writer of checkpoints: tensors are copied at once, files are written by a thread.

::

    training   begin: copy to host memory ─┐ ...trains on...
    thread                                 └ own file ─ its record ─▶ rank 0: records of all? every value once?
                                                        manifest, state, fsync, rename, latest ◀─────────┘

Ranks use a key-value store (:class:`~ddpm_ds.checkpoint.folder.Completion`); no thread runs a collective.
"""

import contextlib
import json
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import HashStore, Store

from ddpm_ds.checkpoint.folder import (
    WRITING,
    Completion,
    NotSaved,
    checkpoint_name,
    clean,
    names,
    put_in_place,
    set_aside,
    tidy,
)
from ddpm_ds.checkpoint.manifest import (
    CODES,
    MANIFEST,
    NARROW,
    STATE,
    VALUES,
    Description,
    Part,
    Span,
    manifest_of,
    readable,
)
from ddpm_ds.checkpoint.reader import Header, write_tensors
from ddpm_ds.ground.errors import UserError
from ddpm_ds.ground.files import replace_file, write_file
from ddpm_ds.ground.units import gib
from ddpm_ds.unet.shards import Shard


class Fragment(NamedTuple):
    """Piece of a parameter, or of one kind of its state, that only this rank owns; see :class:`Span`."""

    kind: str
    name: str
    start: int
    values: Tensor  # (length,) fp32, bf16, or codes of 8 bits, any device
    scales: Tensor | None = None  # of the codes' blocks, fp32
    shard: Shard | None = None


STAGING_BYTES = 2**28
"""Largest size of a page-locked buffer, a power of two, to which PyTorch rounds it."""


class HostCopy:
    """Concatenated copy of tensors in fp32, then in bf16, then of 8-bit codes, in memory that is reused for the next::

        CUDA device ─▶ two page-locked buffers, in turn ─▶ copy

    Only the buffers are page-locked, since PyTorch never returns such memory.
    """

    def __init__(self) -> None:
        self._bytes, self._buffers = torch.empty(0, dtype=torch.uint8), list[Tensor]()
        self._used = 0

    def take(self, pieces: Sequence[Tensor]) -> None:
        """Copy all values; return when the tensors may change again. Without memory, :meth:`raw` says so."""
        dtypes = [piece.dtype if piece.dtype in (torch.uint8, torch.bfloat16) else torch.float32 for piece in pieces]
        sizes = [piece.numel() * dtype.itemsize for piece, dtype in zip(pieces, dtypes, strict=True)]
        self._used, buffer_bytes = sum(sizes), min(STAGING_BYTES, sum(sizes))
        try:
            if len(self._bytes) < self._used:
                self._bytes = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
                self._bytes = torch.empty(self._used, dtype=torch.uint8)
            if any(piece.is_cuda for piece in pieces) and sum(map(len, self._buffers)) < 2 * buffer_bytes:
                self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        except RuntimeError:
            self._bytes = torch.empty(0, dtype=torch.uint8)
            return
        under_way = deque[tuple[Tensor, Tensor, torch.cuda.Event]]()

        def arrive() -> None:
            target, here, copied = under_way.popleft()
            copied.synchronize()
            target.copy_(here)

        for raw, dtype, piece in zip(self._bytes[: self._used].split(sizes), dtypes, pieces, strict=True):
            if not piece.is_cuda:  # torch would restart its threads for every piece
                piece, kind = piece.detach(), torch.int16 if dtype is torch.bfloat16 else dtype
                raw.view(kind).numpy()[:] = (piece.view(kind) if dtype is torch.bfloat16 else piece).numpy()
                continue
            most = buffer_bytes // dtype.itemsize
            for target, part in zip(raw.view(dtype).split(most), piece.detach().split(most), strict=True):
                if len(under_way) == 2:
                    arrive()
                self._buffers.reverse()
                under_way.append((target, self._buffers[0][: target.nbytes].view(dtype), torch.cuda.Event()))
                under_way[-1][1].copy_(part, non_blocking=True)
                under_way[-1][2].record(torch.cuda.current_stream(part.device))
        while under_way:
            arrive()

    def raw(self) -> memoryview:
        """Return the copied bytes; raises NotSaved if there was no memory for them."""
        if len(self._bytes) < self._used:
            raise NotSaved(f"the host has no {gib(self._used)} left for a copy of the values")
        return self._bytes.numpy()[: self._used].data


class Writer:
    """One rank's share in writing checkpoints into ``folder``.

    Several ranks need ``store``, their key-value store. Construct it on every rank before training communicates: rank 0
    cleans up after killed processes. Every rank calls :meth:`begin` for every checkpoint, with no fragments if it owns
    none. File errors are not raised into training: rank 0 reports the loss in one line through ``log`` (from a thread),
    and earlier checkpoints remain. ``keep_last`` and ``keep_every_images`` are those of :func:`to_delete`.
    """

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        world_size: int = 1,
        *,
        log: Callable[[str], None],
        keep_last: int | None = None,
        keep_every_images: int | None = None,
        time_limit_seconds: float = 600.0,
        store: Store | None = None,
    ) -> None:
        self._folder, self._rank, self._log = folder, rank, log
        self._completion = Completion(rank, world_size, store or HashStore(), time_limit_seconds)
        self._keep = keep_last, keep_every_images
        self._thread: threading.Thread | None = None
        self._saved = True
        self.why_not = ""
        """On rank 0: why the last failed checkpoint was not saved, and which one is there instead."""
        self._host = HostCopy()
        if rank == 0:
            with contextlib.suppress(OSError):
                clean(folder)

    def begin(
        self, part: str, fragments: Sequence[Fragment], description: Description, state: Mapping[str, object]
    ) -> float:
        """Copy ``fragments`` and start to write them; return the seconds that this and the last checkpoint blocked.

        ``part`` names this rank's file, such as ``stage0-replica1``; ``description`` and ``state`` (JSON values) are
        used from rank 0. A checkpoint of the same number of images is replaced.
        """
        started = time.monotonic()
        self.wait()
        self._completion.attempt += 1
        fragments = [fragment for fragment in fragments if fragment.values.numel()]
        spans = [Span(kind, name, start, values.numel(), shard) for kind, name, start, values, _, shard in fragments]
        kinds: dict[str, list[tuple[str, Tensor]]] = {VALUES: [], NARROW: [], CODES: []}
        for span, fragment in zip(spans, fragments, strict=True):
            kind = VALUES if fragment.scales is None else CODES
            kinds[NARROW if fragment.values.dtype is torch.bfloat16 else kind].append((span.key, fragment.values))
            kinds[VALUES] += [] if fragment.scales is None else [(span.scales_key, fragment.scales)]
        self._host.take([values for named in kinds.values() for _, values in named])
        tensors: list[Header] = [(key, kind, (len(values),)) for kind, named in kinds.items() for key, values in named]
        text = json.dumps(dict(state), indent=2) + "\n"
        copies = f"{part}.safetensors", tensors, spans, description.model_copy(deep=True), text
        self._thread = threading.Thread(target=self._write, args=copies, name="checkpoint", daemon=True)
        self._thread.start()
        return time.monotonic() - started

    def wait(self) -> bool:
        """Wait for the last checkpoint; return whether it, or on other ranks than 0 their part, is complete."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._saved

    def _write(self, file: str, tensors: list[Header], spans: list[Span], description: Description, state: str) -> None:
        """Write a checkpoint; runs in the thread."""
        self._saved = False
        name, attempt = checkpoint_name(description.images), self._completion.attempt
        scratch = self._folder / f"{WRITING}{name}"
        try:
            start = self._completion.start
            scratch = self._folder / f"{WRITING}{name}.{start}.{attempt}"  # the same for all ranks, in this start alone
            readable(MANIFEST, description.model_dump_json().encode())  # before anything is written
            for path in self._folder.glob(f"{WRITING}*") if self._rank == 0 else ():
                # left by ranks that failed late in an earlier attempt, or of an earlier start
                *_, other, number = path.name.split(".")
                if other != start or int(number) < attempt:
                    shutil.rmtree(path, ignore_errors=True)
            scratch.mkdir(parents=True, exist_ok=True)
            part = ""  # a rank without values writes no file
            if spans:
                entry = write_tensors(scratch / file, tensors, [self._host.raw()])
                part = Part(file=file, entry=entry, fragments=spans).model_dump_json()
            if self._rank:
                self._completion.send(part)
            else:
                parts = [Part.model_validate_json(text) for text in self._completion.collect(part, scratch) if text]
                manifest = manifest_of(description, state.encode(), parts)
                replace_file(scratch / STATE, state.encode())
                write_file(scratch / MANIFEST, manifest.dump())
                put_in_place(scratch, self._folder / name)
            self._saved = True
        except Exception as error:
            why = _reason(error)
            if self._rank:
                return self._completion.fail(f"rank {self._rank}: {why}")
            shutil.rmtree(scratch, ignore_errors=True)
            try:
                before = names(self._folder)
                lost = f"{before[-1]} stays, only the time since is at risk" if before else "there is no earlier one"
            except OSError as other:  # the reason is reported in any case: it decides how the run ends
                lost = f"earlier checkpoints can't be listed ({other.strerror})"
            self.why_not = f"checkpoint {name} was not saved: {why}; {lost}"
            return self._log(self.why_not)
        if self._rank == 0:
            try:
                if abandoned := set_aside(self._folder, description.images):
                    self._log(f"the run went on from before them: checkpoints renamed to {', '.join(abandoned)}")
            except OSError as error:
                what = f"checkpoints of more than {description.images:,} images in {self._folder}"
                self._log(f"{what} can't be renamed ({error.strerror}); remove them: the run went on from before them")
            try:
                tidy(self._folder, name, *self._keep)
            except Exception as error:
                changed = "older ones or `latest` could not be changed"
                self._log(f"checkpoint {name} is saved, but {changed}: {_reason(error)}")


def _reason(error: Exception) -> str:
    """Return the reason for an error, in the file system's words if it caused it."""
    if isinstance(error, NotSaved | UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" ({Path(error.filename).name})" if error.filename else ""
        return error.strerror + where
    return f"{type(error).__name__}: {error}"
