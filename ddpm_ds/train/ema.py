"""Moving averages of the weights, kept in fp32 beside the optimizer's own tensors.

Under ZeRO each rank averages the partition that it owns, so there is no second full copy of an average anywhere.
"""

import contextlib
from collections.abc import Iterator

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

    ``averages`` has the tensors of each by its kind in a checkpoint, such as ``ema`` and ``ema-0.05``, in the order of
    :func:`deepspeed_insides.masters`.
    """

    def __init__(self, engine: UnetPipelineEngine, spec: EmaSpec) -> None:
        self._engine, self._spec = engine, spec
        self._masters = insides.masters(engine)
        self._gammas = {profile_kind(length): gamma_of(length) for length in spec.profiles}
        self.averages: dict[str, list[Tensor]] = {
            kind: [master.detach().clone() for master in self._masters] for kind in (EMA, *self._gammas)
        }
        self._weights = {kind: torch.zeros((), device=engine.device) for kind in self.averages}

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

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the weights of the optimizer's step."""
        for kind, averages in self.averages.items():
            if len(averages) == 1:
                averages[0].lerp_(self._masters[0], self._weights[kind])
            else:  # foreach takes no tensor as the weight of a lerp
                differences = torch._foreach_sub(self._masters, averages)
                torch._foreach_mul_(differences, self._weights[kind])
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
        for master, shadow in zip(self._masters, self.shadows, strict=True):
            held = master.clone()
            master.copy_(shadow)
            shadow.copy_(held)
        insides.refresh_weights(self._engine)
