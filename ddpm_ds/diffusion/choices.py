"""Noise schedules, objectives and samplers: the mathematics behind the names in :mod:`ddpm_ds.schema.choices`.

A schedule has timesteps (DDPM) or continuous noise levels (EDM, flow matching). To add a choice, write its function
here, an entry in NOISE, TARGETS or STEPS, and one of the same name there; training, sampling and export read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ddpm_ds.ground.errors import SpecError
from ddpm_ds.schema.choices import SCHEDULES

if TYPE_CHECKING:
    from torch import Tensor

    from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec

Share = TypeVar("Share", "Tensor", float)
MAX_BETA = 0.999
"""Largest beta, which avoids a singularity at the last step (Nichol and Dhariwal 2021, section 3.2)."""


class NoiseLevel(NamedTuple):
    """Factors of the image and of the noise in x_t; each broadcasts over (N, C, H, W)."""

    signal: Tensor
    """Factor of the image; with timesteps sqrt(alpha_bar)."""
    noise: Tensor
    """Factor of the noise; with timesteps sqrt(1 - alpha_bar)."""
    data: float = 1.0
    """Assumed standard deviation of images; except in flow matching, (signal data)^2 + noise^2 is 1."""

    @classmethod
    def of(cls, alpha_bar: Tensor) -> NoiseLevel:
        """Return the level for a float64 alpha_bar, in the same shape and dtype."""
        return cls(alpha_bar.sqrt(), (1.0 - alpha_bar).sqrt())

    def each(self) -> NoiseLevel:
        """Return levels (N,) reshaped to (N, 1, 1, 1)."""
        return NoiseLevel(self.signal[:, None, None, None], self.noise[:, None, None, None], self.data)


@dataclass(frozen=True)
class NoiseSchedule:
    """Variance of the noise that each of T steps of the forward process adds; the U-Net takes the timestep."""

    betas: Callable[[DiffusionSpec], Tensor]
    """Function that returns the variances, (T,) float64 on the CPU."""
    diffusers: str | None
    """Name as a `beta_schedule` of diffusers, or `trained_betas` to export the list of betas; None is not exported."""


@dataclass(frozen=True)
class ContinuousSchedule:
    """Continuous noise levels; the U-Net takes `t`, a function of the level."""

    time: Callable[[DiffusionSpec, Tensor], Tensor]
    """Function of standard normal draws that returns the t of training, in their shape and dtype."""
    level: Callable[[DiffusionSpec, Tensor], NoiseLevel]
    """Function of t that returns the noise level, in its shape and dtype."""
    visited: Callable[[DiffusionSpec, SamplerSpec, int], Sequence[float]]
    """Function of process, sampler and its number of steps that returns t at each evaluation, from noise to image."""
    diffusers: str | None
    """Name as a class of schedulers of diffusers; None is not exported."""


def _rising(spec: DiffusionSpec) -> Tensor:
    """Return betas that rise on a line (Ho et al. 2020, section 4), or whose roots do (code of Rombach et al. 2022)."""
    import torch

    for key in ("beta_start", "beta_end"):
        if getattr(spec, key) >= 1.0:
            raise SpecError(f"diffusion.{key} = {getattr(spec, key)} is not below 1; DDPM uses 1e-4 to 0.02")
    root = SCHEDULES[spec.schedule].beta_root
    first, last = (beta ** (1 / root) for beta in (spec.beta_start, spec.beta_end))
    return torch.linspace(first, last, spec.timesteps, dtype=torch.float64) ** root


def _curved(spec: DiffusionSpec, curve: Callable[[Tensor], Tensor]) -> Tensor:
    """Return betas whose alpha_bar follows a ``curve`` of t / T, stretched so that it falls from 1 to 0."""
    import torch

    f = curve(torch.linspace(0.0, 1.0, spec.timesteps + 1, dtype=torch.float64))
    alpha_bar = (f - f[-1]) / (f[0] - f[-1])
    return (1.0 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=MAX_BETA)


def _noise(spec: DiffusionSpec, normal: Tensor, mean: float, std: float) -> Tensor:
    """Scale standard normal draws to the mean and standard deviation of the spec, or to these where it has null."""
    mean = mean if spec.noise_mean is None else spec.noise_mean
    std = std if spec.noise_std is None else spec.noise_std
    return mean + std * normal


def edm_level(spec: DiffusionSpec, t: Tensor) -> NoiseLevel:
    """Return the level sigma = exp(4 t), scaled to unit variance. Source: Karras et al. 2022, table 1."""
    sigma = (4.0 * t).exp()
    scale = (sigma**2 + spec.sigma_data**2).rsqrt()  # c_in
    return NoiseLevel(scale, scale * sigma, spec.sigma_data)


def edm_visited(spec: DiffusionSpec, sampler: SamplerSpec, steps: int) -> Sequence[float]:
    """Return t at falling sigmas. Source: Karras et al. 2022, eq. 5."""
    high, low = sampler.sigma_max ** (1.0 / sampler.rho), sampler.sigma_min ** (1.0 / sampler.rho)
    sigmas = [(high + number / max(steps - 1, 1) * (low - high)) ** sampler.rho for number in range(steps)]
    return [math.log(sigma) / 4.0 for sigma in sigmas]


FLOW_TIMES = 1000.0
"""Time at which flow matching reaches pure noise, on the scale for which the sinusoidal embedding is made."""


def flow_time(spec: DiffusionSpec, normal: Tensor) -> Tensor:
    """Return times of standard normal draws, logit-normal or uniform, shifted. Source: Esser et al. 2024, eq. 19."""
    import torch

    uniform = spec.times == "uniform"
    share = torch.special.ndtr(normal) if uniform else _noise(spec, normal, mean=0.0, std=1.0).sigmoid()
    return FLOW_TIMES * shifted(share, spec.shift)


def flow_visited(spec: DiffusionSpec, sampler: SamplerSpec, steps: int) -> Sequence[float]:
    """Return even times from noise to image, shifted."""
    shift = sampler.shift or spec.shift
    return [FLOW_TIMES * shifted((steps - number) / steps, shift) for number in range(steps)]


def shifted(share: Share, shift: float) -> Share:
    """Return a share of noise, from 0 to 1, whose noise over signal is ``shift`` times as large. Source: Esser et al.
    2024, "Scaling Rectified Flow Transformers", eq. 23.
    """
    return shift * share / (1.0 + (shift - 1.0) * share)


NOISE: dict[str, NoiseSchedule | ContinuousSchedule] = {
    "linear": NoiseSchedule(_rising, "linear"),
    "scaled_linear": NoiseSchedule(_rising, "scaled_linear"),
    # Nichol and Dhariwal 2021, eq. 17, with s = 0.008.
    "cosine": NoiseSchedule(
        lambda spec: _curved(spec, lambda t: ((t + 0.008) / (1.0 + 0.008) * math.pi / 2.0).cos() ** 2),
        "squaredcos_cap_v2",
    ),
    # Jabri et al. 2022; Chen 2023, algorithm 1, from -3 to 3 with tau = 1. diffusers' "sigmoid" is a sigmoid of betas.
    "sigmoid": NoiseSchedule(lambda spec: _curved(spec, lambda t: (-3.0 + 6.0 * t).sigmoid()), "trained_betas"),
    "edm": ContinuousSchedule(
        time=lambda spec, normal: _noise(spec, normal, mean=-1.2, std=1.2) / 4.0,  # c_noise = log(sigma) / 4
        level=edm_level,
        visited=edm_visited,
        diffusers="EDMEulerScheduler",
    ),
    "flow": ContinuousSchedule(
        time=flow_time,
        # The line from image (t = 0) to noise (t = 1000): Lipman et al. 2023.
        level=lambda spec, t: NoiseLevel(1.0 - t / FLOW_TIMES, t / FLOW_TIMES),
        visited=flow_visited,
        diffusers=None,
    ),
}
"""Noise schedules by `diffusion.schedule`."""


def timestep_schedules() -> dict[str, NoiseSchedule]:
    """Return the schedules with timesteps, by name."""
    return {name: kind for name, kind in NOISE.items() if isinstance(kind, NoiseSchedule)}


@dataclass(frozen=True)
class Target:
    """Prediction target of the U-Net, and how the clean image and the loss weight follow from it."""

    target: Callable[[Tensor, Tensor, NoiseLevel], Tensor]
    """Function of x0 and eps (N, C, H, W) and the noise level that returns the target, (N, C, H, W)."""
    to_x0: Callable[[Tensor, Tensor, NoiseLevel], Tensor]
    """Function of prediction and x_t (N, C, H, W) and the noise level that returns the clean image, (N, C, H, W)."""
    error: Callable[[Tensor], Tensor]
    """Function of the signal-to-noise ratio that returns this prediction's squared error over the clean image's."""
    diffusers: str | None
    """Name as a `prediction_type` of diffusers; None is not exported."""


TARGETS = {
    "eps": Target(
        target=lambda x0, eps, level: eps,
        to_x0=lambda prediction, x_t, level: (x_t - level.noise * prediction) / level.signal,
        error=lambda ratio: ratio,
        diffusers="epsilon",
    ),
    "x0": Target(
        target=lambda x0, eps, level: x0,
        to_x0=lambda prediction, x_t, level: prediction,
        error=lambda ratio: ratio * 0.0 + 1.0,
        diffusers="sample",
    ),
    "v": Target(
        target=lambda x0, eps, level: level.signal * level.data * eps - level.noise / level.data * x0,
        to_x0=lambda prediction, x_t, level: level.data * (level.signal * level.data * x_t - level.noise * prediction),
        error=lambda ratio: ratio + 1.0,
        diffusers="v_prediction",
    ),
    "velocity": Target(
        target=lambda x0, eps, level: eps - x0,
        to_x0=lambda prediction, x_t, level: (x_t - level.noise * prediction) / (level.signal + level.noise),
        error=lambda ratio: (ratio.sqrt() + 1.0) ** 2,
        diffusers=None,
    ),
}
TARGETS["regression"] = replace(TARGETS["x0"], diffusers=None)
"""Prediction targets of the U-Net, by `diffusion.objective`.

Sources: DDPM, eq. 14 and 15 (eps); Salimans and Ho 2022, section 4 (v), whose v is the -F of Karras et al. 2022, eq. 8,
for images of standard deviation 1; Lipman et al. 2023 (velocity).
"""


class Coefficients(NamedTuple):
    """Factors of the terms of a sampler's step."""

    x_t: float
    x0: float
    previous_x0: float = 0.0
    noise: float = 0.0


@dataclass(frozen=True)
class Steps:
    """Steps of one kind of sampler."""

    coefficients: Callable[[SamplerSpec, Sequence[float]], list[Coefficients]]
    """Function of the spec and the visited alpha_bars that returns the coefficients of all steps but the last."""
    leaves_out_zero: bool = False
    """Whether leading and linspace spacing compute one step more and leave out timestep 0."""


def ancestral(here: float, there: float, *, large: bool) -> Coefficients:
    """Return the DDPM step from alpha_bar `here` to `there`, with the posterior's variance or, if `large`, beta.

    Source: DDPM (Ho et al. 2020), eq. 6 and 7, and section 3.2 for the variances; over more than one timestep alpha is
    here / there, Improved DDPM (Nichol and Dhariwal 2021), section 4.
    """
    alpha = here / there
    return Coefficients(
        x_t=math.sqrt(alpha) * (1.0 - there) / (1.0 - here),
        x0=math.sqrt(there) * (1.0 - alpha) / (1.0 - here),
        noise=math.sqrt(1.0 - alpha if large else _posterior_variance(here, there)),
    )


def ddim(here: float, there: float, *, eta: float) -> Coefficients:
    """Return the DDIM step from alpha_bar `here` to `there`. Source: DDIM (Song et al. 2021), eq. 12 and 16."""
    variance = eta**2 * _posterior_variance(here, there)
    eps = math.sqrt(max(0.0, 1.0 - there - variance))
    x_t = eps / math.sqrt(1.0 - here)  # eps = (x_t - sqrt(here) x0) / sqrt(1 - here)
    return Coefficients(x_t=x_t, x0=math.sqrt(there) - x_t * math.sqrt(here), noise=math.sqrt(variance))


def dpm_solver(here: float, there: float, before: float | None) -> Coefficients:
    """Return the DPM-Solver++ step (2M, midpoint) from alpha_bar `here` to `there`, after a step from `before`.

    The first-order step is DDIM's; the second order extrapolates x0 from the previous step's x0, by half the ratio of
    the two steps in log(signal / noise). Source: Lu et al. 2022, "DPM-Solver++", algorithm 2.
    """
    first = ddim(here, there, eta=0.0)
    if before is None:
        return first
    lean = (_log_snr(there) - _log_snr(here)) / (_log_snr(here) - _log_snr(before)) / 2.0
    return first._replace(x0=first.x0 * (1.0 + lean), previous_x0=-first.x0 * lean)


def _posterior_variance(here: float, there: float) -> float:
    """Return the variance of x at `there` given x at `here` and the clean image. Source: DDPM, eq. 7."""
    return (1.0 - there) / (1.0 - here) * (1.0 - here / there)


def _log_snr(alpha_bar: float) -> float:
    """Return the logarithm of the signal-to-noise ratio, 2 log(signal / noise); -inf for pure noise."""
    return math.log(alpha_bar / (1.0 - alpha_bar)) if alpha_bar else -math.inf


STEPS = {
    "ddpm": Steps(lambda spec, levels: [ancestral(*pair, large=spec.variance == "large") for pair in pairwise(levels)]),
    "ddim": Steps(lambda spec, levels: [ddim(*pair, eta=spec.eta) for pair in pairwise(levels)]),
    # k-diffusion's steps, of x_t divided by the signal: its sigma_up^2 is DDIM's variance over alpha_bar.
    "euler": Steps(lambda spec, levels: [ddim(*pair, eta=0.0) for pair in pairwise(levels)]),
    "euler_ancestral": Steps(lambda spec, levels: [ddim(*pair, eta=1.0) for pair in pairwise(levels)]),
    "dpm_solver": Steps(
        lambda spec, levels: [
            dpm_solver(*pair, before) for before, pair in zip([None, *levels], pairwise(levels), strict=False)
        ],
        leaves_out_zero=True,
    ),
}
"""Steps of samplers, by `sampler.kind`."""
