"""Moving averages of the weights, kept in fp32 beside the optimizer's own tensors, or in host memory.

Under ZeRO each rank averages the partition that it owns, so there is no second full copy of an average anywhere.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ddpm_ds.config.spec import EmaSpec
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.engine import UnetPipelineEngine

PIECE = 2**26
"""Largest number of elements that are page-locked together: 256 MiB."""


def decay(spec: EmaSpec, images_seen: int, batch_images: int) -> float:
    """Return the weight of the old average in a step that ends at ``images_seen``.

    Half of the weight is on the last ``halflife_images``; early on, on the last ``rampup_fraction`` of all images, so
    that the first, random weights are forgotten. Source: Karras et al. 2022 (EDM), appendix F.
    """
    halflife: float = spec.halflife_images
    if spec.rampup_fraction:
        halflife = min(halflife, spec.rampup_fraction * images_seen)
    return 0.5 ** (batch_images / max(halflife, 1e-8))


class Ema:
    """Exponential average of an engine's weights, which its steps update."""

    def __init__(self, engine: UnetPipelineEngine, spec: EmaSpec) -> None:
        self._engine, self._spec = engine, spec
        self._masters = insides.masters(engine)
        self._places = {master: place for place, master in enumerate(self._masters)}
        self._averages = [self._copy_of(master.detach()) for master in self._masters]
        self._pieces: tuple[list[Tensor], ...] = self._masters, self._averages
        """Weights and averages as they are updated and swapped."""
        self._weight = torch.zeros((), device=self._averages[0].device)  # of the new weights

    def _copy_of(self, master: Tensor) -> Tensor:
        return master.to(torch.float32, copy=True)

    @property
    def shadows(self) -> list[Tensor]:
        """Averages after all steps that were begun, in the order of :func:`deepspeed_insides.masters`."""
        return self._averages

    def begin_step(self, images_seen: int, batch_images: int) -> None:
        """Set the weight of the new weights in a step that ends at ``images_seen``."""
        self._weight.fill_(1.0 - decay(self._spec, images_seen, batch_images))

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Surround the optimizer's step, and update the averages after it."""
        yield
        self._update(self._pieces[0], self._weight)

    def end_step(self) -> None:
        """Run the host's work that a CUDA graph cannot hold."""

    @torch.no_grad()
    def _update(self, new: list[Tensor], weight: Tensor) -> None:
        averages = self._pieces[1]
        if insides.is_partitioned(self._engine):  # few tensors
            for average, one in zip(averages, new, strict=True):
                for part, own in zip(average.split(PIECE), one.split(PIECE), strict=True):
                    part.lerp_(own.to(part.dtype), weight)
        else:  # foreach takes no tensor as the weight of a lerp
            differences = torch._foreach_sub(new, averages)
            torch._foreach_mul_(differences, weight)
            torch._foreach_add_(averages, differences)

    def of(self, master: Tensor) -> Tensor:
        """Return the average of one of the optimizer's tensors, or another tensor itself: it is not trained."""
        return self.shadows[self._places[master]] if master in self._places else master

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averaged weights inside this context, and restore the others exactly afterwards. Collective."""
        kept = self._swap()
        try:
            yield
        finally:
            self._swap(kept)

    @torch.no_grad()
    def _swap(self, kept: Sequence[Tensor] = ()) -> list[Tensor]:
        """Exchange weights and averages; return weights of 16 bits, for which averages in fp32 have no place, to be
        given back.
        """
        _ = self.shadows  # after all steps that were begun
        narrow = list[Tensor]()
        for master, shadow, spare in zip(*self._pieces, kept or self._spares(), strict=True):
            if kept:
                master.copy_(spare)
                continue
            spare.copy_(master)
            master.copy_(shadow)
            if master.dtype == shadow.dtype:
                shadow.copy_(spare)
            else:
                narrow.append(spare)
        self._engine.gradients.refresh_weights()
        return narrow

    def _spares(self) -> Iterable[Tensor]:
        """Return memory for the weights while the averages are used."""
        return map(torch.empty_like, self._masters)


class HostEma(Ema):
    """Averages in host memory, which a thread updates while the device computes the next step::

        device    step n ─┬─ passes of step n + 1 ─ its optimizer, once the copy is complete
        stream            └─ copy of the weights ─┐
        thread                                    └─ averages of step n

    The averages have the same bits as on a device that rounds as the host does. The copy is page-locked, and no part of
    a CUDA graph; the optimizer's wait for it is. The host waits for a step's averages before it copies new weights.

    The copy has memory for all weights: a graph waits for an event that is recorded before the graph's launch, so no
    part of a copy can begin later, in memory that is free again. PyTorch rounds page-locked memory up to a power of
    two, so the weights lie end to end in pieces of such a size, and only the last piece is rounded.
    """

    def __init__(self, engine: UnetPipelineEngine, spec: EmaSpec) -> None:
        self._thread, self._running = ThreadPoolExecutor(1), Future[None]()
        self._running.set_result(None)
        super().__init__(engine, spec)
        self._pieces = tuple(map(_cut, self._pieces))
        parts, pin = self._pieces[0], self._masters[0].is_cuda
        *starts, total = itertools.accumulate(map(len, parts), initial=0)
        kind: Any = {"dtype": self._masters[0].dtype, "pin_memory": pin}
        locked = [torch.empty(min(PIECE, total - start), **kind) for start in range(0, total, PIECE)]
        places = zip(starts, parts, strict=True)
        self._new = [locked[start // PIECE][start % PIECE :][: len(part)] for start, part in places]
        self._stream = self._copied = None
        if self._masters[0].is_cuda:
            self._stream = torch.cuda.Stream(engine.device)
            self._copied = torch.cuda.Event(blocking=True, external=True)
            self._copied.record()

    def _copy_of(self, master: Tensor) -> Tensor:
        return master.to("cpu", torch.float32, copy=True)

    @property
    def shadows(self) -> list[Tensor]:
        self._running.result()
        return self._averages

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Surround the optimizer's step, which must not change weights that are being copied."""
        if self._copied is not None:
            torch.cuda.current_stream(self._engine.device).wait_event(self._copied)
        yield

    def end_step(self) -> None:
        """Begin to copy the weights and to update the averages."""
        self._running.result()
        weight = self._weight.clone()
        if self._stream is None:
            self._copy()
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._engine.device))
            with torch.cuda.stream(self._stream):
                self._copy()
        self._running = self._thread.submit(self._update_copied, weight)

    @torch.no_grad()
    def _copy(self) -> None:
        for new, part in zip(self._new, self._pieces[0], strict=True):
            new.copy_(part, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _update_copied(self, weight: Tensor) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._update(self._new, weight)

    def _spares(self) -> Iterable[Tensor]:
        return self._new


def _cut(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return flat views of tensors that lie end to end, cut at the multiples of :data:`PIECE`."""
    found, start = list[Tensor](), 0
    for flat in (tensor.detach().view(-1) for tensor in tensors):
        room = -start % PIECE
        found += [part for part in (flat[:room], *flat[room:].split(PIECE)) if len(part)]
        start += len(flat)
    return found


def averages_of(engine: UnetPipelineEngine, spec: EmaSpec) -> Ema:
    """Return the averages of an engine's weights; with offload they are in host memory in any case."""
    return HostEma(engine, spec) if spec.on_host and not insides.offloads(engine) else Ema(engine, spec)
