"""Moving averages of the weights, kept in fp32 beside the optimizer's own tensors, or in host memory.

Under ZeRO each rank averages the partition that it owns, so there is no second full copy of an average anywhere.
"""

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ddpm_ds.checkpoint.power_ema import EMA, gamma_of, power_decay, profile_kind
from ddpm_ds.config.spec import EmaSpec
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.engine import UnetPipelineEngine


def decay(spec: EmaSpec, images_seen: int, batch_images: int) -> float:
    """Return the weight of the old average in a step that ends at ``images_seen``.

    Half of the average's weight is on the last ``halflife_images``; early in training, on the last ``rampup_fraction``
    of all images seen, so that the first, random weights are forgotten. Source: Karras et al. 2022 (EDM), appendix F.
    """
    halflife: float = spec.halflife_images
    if spec.rampup_fraction:
        halflife = min(halflife, spec.rampup_fraction * images_seen)
    return 0.5 ** (batch_images / max(halflife, 1e-8))


class Ema:
    """Averages of an engine's weights, which its steps update: the exponential average, which is used, and those of
    ``ema.profiles``.
    """

    def __init__(self, engine: UnetPipelineEngine, spec: EmaSpec) -> None:
        self._engine, self._spec = engine, spec
        self._masters = insides.masters(engine)
        self._gammas = {profile_kind(length): gamma_of(length) for length in spec.profiles}
        kinds = EMA, *self._gammas
        self._averages = {kind: [self._copy_of(master.detach()) for master in self._masters] for kind in kinds}
        device = self.shadows[0].device
        self._weights = {kind: torch.zeros((), device=device) for kind in kinds}

    def _copy_of(self, master: Tensor) -> Tensor:
        """Return the first value of an average."""
        return master.clone()

    @property
    def averages(self) -> dict[str, list[Tensor]]:
        """Tensors of each average by its kind in a checkpoint, such as ``ema`` and ``ema-0.05``, in the order of
        :func:`deepspeed_insides.masters`; those of all steps that were begun.
        """
        return self._averages

    @property
    def shadows(self) -> list[Tensor]:
        """Tensors of the exponential average."""
        return self.averages[EMA]

    def begin_step(self, images_seen: int, batch_images: int) -> None:
        """Set the weight of the new weights in a step that ends at ``images_seen``."""
        moment = images_seen, batch_images
        decays = {EMA: decay(self._spec, *moment)}
        decays |= {kind: power_decay(gamma, *moment) for kind, gamma in self._gammas.items()}
        for kind, kept in decays.items():
            self._weights[kind].fill_(1.0 - kept)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Surround the optimizer's step, and update the averages after it."""
        yield
        self._update(self._masters, self._weights)

    def end_step(self) -> None:
        """Do what is not a part of the step on the device."""

    @torch.no_grad()
    def _update(self, masters: list[Tensor], weights: dict[str, Tensor]) -> None:
        """Update the averages with the weights of the optimizer's step."""
        for kind, averages in self._averages.items():
            if len(averages) == 1:
                averages[0].lerp_(masters[0], weights[kind])
            else:  # foreach takes no tensor as the weight of a lerp
                differences = torch._foreach_sub(masters, averages)
                torch._foreach_mul_(differences, weights[kind])
                torch._foreach_add_(averages, differences)

    def of(self, master: Tensor) -> dict[str, Tensor]:
        """Return all averages of one of the optimizer's tensors by kind."""
        index = next(index for index, own in enumerate(self._masters) if own is master)
        return {kind: tensors[index] for kind, tensors in self.averages.items()}

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averaged weights in the layers inside this context, and restore the others exactly afterwards.
        Collective.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for master, shadow, spare in zip(self._masters, self.shadows, self._spares(), strict=True):
            spare.copy_(master)
            master.copy_(shadow)
            shadow.copy_(spare)
        insides.refresh_weights(self._engine)

    def _spares(self) -> Iterable[Tensor]:
        """Yield memory for the weights while the averages are used in their place."""
        return map(torch.empty_like, self._masters)


class HostEma(Ema):
    """Averages in host memory, which a thread updates while the device computes the next step::

        device    step n ─┬─ passes of step n + 1 ─ its optimizer, once the copy is complete
        stream            └─ copy of the weights ─┐
        thread                                    └─ averages of step n

    Every step counts, by the operations of :class:`Ema`, and the averages have the same bits as on a device that
    rounds as the host does. The copy is page-locked, and no part of a CUDA graph; the optimizer's wait for it is. The
    host waits for the averages of a step before it copies the weights of the next.
    """

    def __init__(self, engine: UnetPipelineEngine, spec: EmaSpec) -> None:
        self._thread, self._running = ThreadPoolExecutor(1), Future[None]()
        self._running.set_result(None)
        super().__init__(engine, spec)
        self._new = [torch.empty(master.shape, pin_memory=master.is_cuda) for master in self._masters]
        self._stream = self._copied = None
        if self._masters[0].is_cuda:
            self._stream = torch.cuda.Stream(engine.device)
            self._copied = torch.cuda.Event(blocking=True, external=True)
            self._copied.record()

    def _copy_of(self, master: Tensor) -> Tensor:
        return master.to("cpu", copy=True)

    @property
    def averages(self) -> dict[str, list[Tensor]]:
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
        weights = {kind: weight.clone() for kind, weight in self._weights.items()}
        if self._stream is None:
            self._copy()
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._engine.device))
            with torch.cuda.stream(self._stream):
                self._copy()
        self._running = self._thread.submit(self._update_copied, weights)

    @torch.no_grad()
    def _copy(self) -> None:
        for new, master in zip(self._new, self._masters, strict=True):
            new.copy_(master, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _update_copied(self, weights: dict[str, Tensor]) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._update(self._new, weights)

    def _spares(self) -> Iterable[Tensor]:
        return self._new


def averages_of(engine: UnetPipelineEngine, spec: EmaSpec) -> Ema:
    """Return the averages of an engine's weights; with offload they are in host memory in any case."""
    return HostEma(engine, spec) if spec.on_host and not insides.offloads(engine) else Ema(engine, spec)
