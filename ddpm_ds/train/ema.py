"""An exponential moving average of the weights, kept in fp32 beside the optimizer's own tensors.

Under ZeRO each rank averages the partition that it owns, so there is one average and no second full copy anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ddpm_ds.config.spec import EmaSpec
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.engine import UnetPipelineEngine


def decay(spec: EmaSpec, images_seen: int, batch_images: int) -> float:
    """Return the weight of the old average in a step that ends at ``images_seen``.

    Half of the average is younger than ``halflife_images``, early in training than ``rampup_fraction`` of all images
    seen, so that the first, random weights are forgotten. Source: Karras et al. 2022 (EDM), appendix F.
    """
    halflife: float = spec.halflife_images
    if spec.rampup_fraction:
        halflife = min(halflife, spec.rampup_fraction * images_seen)
    return 0.5 ** (batch_images / max(halflife, 1e-8))


class Ema:
    """The average of an engine's weights; ``shadows`` lie beside :func:`deepspeed_insides.masters`, in their order."""

    def __init__(self, engine: UnetPipelineEngine, spec: EmaSpec) -> None:
        self._engine, self._spec = engine, spec
        self._masters = insides.masters(engine)
        self.shadows: list[Tensor] = [master.detach().clone() for master in self._masters]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of the step that has just ended."""
        engine = self._engine
        weight = 1.0 - decay(self._spec, engine.images_seen, engine.train_batch_size())
        torch._foreach_lerp_(self.shadows, self._masters, weight)

    def shadow_of(self, master: Tensor) -> Tensor:
        """Return the average of one of the optimizer's tensors."""
        return next(shadow for own, shadow in zip(self._masters, self.shadows, strict=True) if own is master)

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
        for master, shadow in zip(self._masters, self.shadows, strict=True):
            held = master.clone()
            master.copy_(shadow)
            shadow.copy_(held)
        insides.refresh_weights(self._engine)
