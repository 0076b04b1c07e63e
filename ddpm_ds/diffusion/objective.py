"""Noise schedules, targets of the U-Net's prediction, and losses: pure functions of tensors.

Schedules are float64 on the CPU, because betas of 1e-4 and signals of 1e-9 meet in 1 - alpha_bar. Index 0 is the
paper's t = 1: the least noise, never none. A noise level is given as the pair (signal, noise) = (sqrt(alpha_bar),
sqrt(1 - alpha_bar)) rather than as alpha_bar: in float32 1 - alpha_bar loses three digits at the first timesteps.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpm_ds.config.spec import DiffusionSpec
from ddpm_ds.errors import SpecError

MAX_BETA = 0.999
"""Largest beta, which keeps the last step from being a singularity (Nichol and Dhariwal 2021, section 3.2)."""
Objective = Literal["eps", "x0", "v"]
Loss = Literal["l1", "l2", "huber"]


def betas(spec: DiffusionSpec) -> Tensor:
    """Return the variance of the noise that each step adds, (T,) float64.

    linear: betas on a line (DDPM, Ho et al. 2020, section 4). cosine: Improved DDPM (Nichol and Dhariwal 2021), eq. 17,
    s = 0.008. sigmoid: Jabri et al. 2022; Chen 2023, algorithm 1, from -3 to 3 with tau = 1.

    Raises:
        SpecError: a beta of the linear schedule is not below 1.
    """
    if spec.schedule == "linear":
        for key in ("beta_start", "beta_end"):
            if getattr(spec, key) >= 1.0:
                raise SpecError(f"diffusion.{key} = {getattr(spec, key)} is not below 1; DDPM uses 1e-4 to 0.02")
        return torch.linspace(spec.beta_start, spec.beta_end, spec.timesteps, dtype=torch.float64)
    progress = torch.linspace(0.0, 1.0, spec.timesteps + 1, dtype=torch.float64)  # t / T, (T + 1,)
    if spec.schedule == "cosine":
        offset = 0.008
        f = torch.cos((progress + offset) / (1.0 + offset) * math.pi / 2.0) ** 2
        remaining = f / f[0]
    else:
        start, end, tau = -3.0, 3.0, 1.0
        curve = torch.sigmoid((start + (end - start) * progress) / tau)
        remaining = (curve[-1] - curve) / (curve[-1] - curve[0])
    return (1.0 - remaining[1:] / remaining[:-1]).clamp(max=MAX_BETA)


def alpha_bars(spec: DiffusionSpec) -> Tensor:
    """Return the share of the image's variance that is left, strictly falling, (T,) float64. Source: DDPM, above eq. 4.

    Raises:
        SpecError: a beta of the linear schedule is not below 1.
    """
    return torch.cumprod(1.0 - betas(spec), dim=0)


class NoiseLevel(NamedTuple):
    """Shares of the image and of the noise in x_t; each broadcasts over (N, C, H, W)."""

    signal: Tensor
    """sqrt(alpha_bar)"""
    noise: Tensor
    """sqrt(1 - alpha_bar)"""

    @classmethod
    def of(cls, alpha_bar: Tensor) -> NoiseLevel:
        """Return the level of a float64 alpha_bar, in the same shape and dtype."""
        return cls(alpha_bar.sqrt(), (1.0 - alpha_bar).sqrt())


def add_noise(x0: Tensor, eps: Tensor, level: NoiseLevel) -> Tensor:
    """Return x_t (N, C, H, W). Source: DDPM (Ho et al. 2020), eq. 4."""
    return level.signal * x0 + level.noise * eps


def target(objective: Objective, x0: Tensor, eps: Tensor, level: NoiseLevel) -> Tensor:
    """Return the target of the prediction, (N, C, H, W). Source: DDPM, eq. 14 (eps); Salimans and Ho 2022, section 4
    (v).
    """
    if objective == "eps":
        return eps
    if objective == "x0":
        return x0
    return level.signal * eps - level.noise * x0


def to_x0(objective: Objective, prediction: Tensor, x_t: Tensor, level: NoiseLevel) -> Tensor:
    """Return the clean image that a prediction implies, (N, C, H, W).

    From eps, an error in the prediction grows by noise / signal: more than a hundredfold at the last timesteps.
    Source: DDPM, eq. 15 (eps); Salimans and Ho 2022, section 4 (v).
    """
    if objective == "eps":
        return (x_t - level.noise * prediction) / level.signal
    if objective == "x0":
        return prediction
    return level.signal * x_t - level.noise * prediction


def weights(spec: DiffusionSpec, alpha_bar: Tensor) -> Tensor:
    """Return the weight of each timestep's loss, in the shape and dtype of alpha_bar (float64).

    min_snr is min(snr, gamma) as a weight of the squared error of x0. The error of eps is snr times, that of v
    snr + 1 times the error of x0, so their weights are divided by it. Source: Hang et al. 2023 (Min-SNR-gamma).
    """
    if spec.weighting == "uniform":
        return torch.ones_like(alpha_bar)
    ratio, gamma = alpha_bar / (1.0 - alpha_bar), spec.min_snr_gamma
    if spec.objective == "eps":
        return (gamma / ratio).clamp(max=1.0)  # min(snr, gamma) / snr, without 0 / 0
    if spec.objective == "x0":
        return ratio.clamp(max=gamma)
    return ratio.clamp(max=gamma) / (ratio + 1.0)


def distance(loss: Loss, prediction: Tensor, target: Tensor, delta: float) -> Tensor:
    """Return the distance of each image's prediction from its target, averaged over pixels in float32, (N,).

    Huber is d^2 / 2 for |d| <= delta, else delta (|d| - delta / 2). Source: Huber 1964; DDPM, eq. 14 (l2).
    """
    # (N, H, W, C), views: PyTorch's losses give gradients that lie in the order of the dimensions.
    prediction, target = prediction.float().permute(0, 2, 3, 1), target.float().permute(0, 2, 3, 1)
    if loss == "l1":
        pixels = F.l1_loss(prediction, target, reduction="none")
    elif loss == "l2":
        pixels = F.mse_loss(prediction, target, reduction="none")
    else:
        pixels = F.huber_loss(prediction, target, reduction="none", delta=delta)
    return pixels.flatten(1).mean(dim=1)  # (N,)
