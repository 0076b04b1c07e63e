"""Noise levels, targets of the U-Net's prediction, and losses: pure functions of tensors.

Noise schedules are float64 on the CPU, because betas of 1e-4 and signals of 1e-9 meet in 1 - alpha_bar. Index 0 is the
paper's t = 1: the least noise, never none. A noise level is given as the pair (signal, noise) = (sqrt(alpha_bar),
sqrt(1 - alpha_bar)) rather than as alpha_bar: in float32 1 - alpha_bar loses three digits at the first timesteps.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpm_ds.config.spec import DiffusionSpec
from ddpm_ds.diffusion.choices import OBJECTIVES, SCHEDULES

Loss = Literal["l1", "l2", "huber"]


def betas(spec: DiffusionSpec) -> Tensor:
    """Return the variance of the noise that each step adds, (T,) float64; the schedules are in
    :data:`ddpm_ds.diffusion.choices.SCHEDULES`.

    Raises:
        SpecError: a beta of the linear schedule is not below 1.
    """
    return SCHEDULES[spec.schedule].betas(spec)


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


def weights(spec: DiffusionSpec, alpha_bar: Tensor) -> Tensor:
    """Return the weight of each timestep's loss, in the shape and dtype of alpha_bar (float64).

    min_snr is min(snr, gamma) as a weight of the squared error of x0. The error of eps is snr times, that of v
    snr + 1 times the error of x0, so their weights are divided by it. Source: Hang et al. 2023 (Min-SNR-gamma).
    """
    match spec.weighting:
        case "uniform":
            return torch.ones_like(alpha_bar)
        case "min_snr":
            return OBJECTIVES[spec.objective].min_snr(alpha_bar / (1.0 - alpha_bar), spec.min_snr_gamma)
        case unknown:
            assert_never(unknown)


def distance(loss: Loss, prediction: Tensor, target: Tensor, delta: float) -> Tensor:
    """Return the distance of each image's prediction from its target, averaged over pixels in float32, (N,).

    Huber is d^2 / 2 for |d| <= delta, else delta (|d| - delta / 2). Source: Huber 1964; DDPM, eq. 14 (l2).
    """
    # (N, H, W, C), views: PyTorch's losses give gradients that lie in the order of the dimensions.
    prediction, target = prediction.float().permute(0, 2, 3, 1), target.float().permute(0, 2, 3, 1)
    match loss:
        case "l1":
            pixels = F.l1_loss(prediction, target, reduction="none")
        case "l2":
            pixels = F.mse_loss(prediction, target, reduction="none")
        case "huber":
            pixels = F.huber_loss(prediction, target, reduction="none", delta=delta)
        case unknown:
            assert_never(unknown)
    return pixels.flatten(1).mean(dim=1)  # (N,)
