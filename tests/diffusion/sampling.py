"""Samplers, and a whole drawing with one, step by step."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ddpm_ds.diffusion.choices import TARGETS
from ddpm_ds.diffusion.levels import NoiseLevel
from ddpm_ds.diffusion.samplers import Sampler
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec

SPACINGS: tuple[Any, ...] = ("trailing", "leading", "linspace")
EDM = DiffusionSpec(schedule="edm", objective="v")
FLOW = DiffusionSpec(schedule="flow", objective="velocity")


def sampler_of(diffusion: DiffusionSpec | None = None, **values: Any) -> Sampler:
    return Sampler(SamplerSpec(**values), diffusion or DiffusionSpec())


def best_prediction(objective: str, x_t: Tensor, level: NoiseLevel, mu: float, s: float) -> Tensor:
    """The best prediction for data ~ N(mu, s^2), in an objective."""
    variance, centred = (level.signal * s) ** 2 + level.noise**2, x_t - level.signal * mu
    x0, eps = mu + level.signal * s**2 / variance * centred, level.noise / variance * centred
    return TARGETS[objective].target(x0, eps, level)


def sample(
    sampler: Sampler, denoise: Callable[[Tensor, Any], Tensor], x: Tensor, noise: Callable[[Any], Tensor]
) -> Tensor:
    """The image (N, C, H, W) that begins as the noise `x` (N, C, H, W), in the dtype of `x`.

    ``denoise(x_t, t)`` is the U-Net's prediction; ``noise(t)`` is the standard normal noise (N, C, H, W) that is added
    on leaving timestep t, asked for where it is needed.
    """
    previous_x0 = None
    for number, t in enumerate(sampler.times):
        added = noise(t) if sampler.needs_noise(number) else None
        x, previous_x0 = sampler.step(number, x, denoise(x, t), noise=added, previous_x0=previous_x0)
    return x
