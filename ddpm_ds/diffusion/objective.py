"""What the U-Net predicts and how far off it is: pure functions of tensors.

A noise level is given as the pair (signal, noise) = (sqrt(alpha_bar), sqrt(1 - alpha_bar)) rather than as
alpha_bar, because in float32 1 - alpha_bar has lost three digits at the first timesteps.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpm_ds.diffusion.schedule import snr
from ddpm_ds.spec import DiffusionSpec

Objective = Literal["eps", "x0", "v"]
Loss = Literal["l1", "l2", "huber"]


class NoiseLevel(NamedTuple):
    """How much of the image and of the noise x_t holds; each broadcasts over (N, C, H, W)."""

    signal: Tensor
    """sqrt(alpha_bar)"""
    noise: Tensor
    """sqrt(1 - alpha_bar)"""

    @classmethod
    def of(cls, alpha_bar: Tensor) -> NoiseLevel:
        """The level of a float64 alpha_bar, in the same shape and dtype."""
        return cls(alpha_bar.sqrt(), (1.0 - alpha_bar).sqrt())


def add_noise(x0: Tensor, eps: Tensor, level: NoiseLevel) -> Tensor:
    """x_t (N, C, H, W). Source: DDPM (Ho et al. 2020), eq. 4."""
    return level.signal * x0 + level.noise * eps


def target(objective: Objective, x0: Tensor, eps: Tensor, level: NoiseLevel) -> Tensor:
    """What the U-Net should return, (N, C, H, W). Source: DDPM, eq. 14 (eps); Salimans and Ho 2022, section 4 (v)."""
    if objective == "eps":
        return eps
    if objective == "x0":
        return x0
    return level.signal * eps - level.noise * x0


def to_x0(objective: Objective, prediction: Tensor, x_t: Tensor, level: NoiseLevel) -> Tensor:
    """The clean image that a prediction stands for, (N, C, H, W).

    From eps, an error in the prediction grows by noise / signal: more than a hundredfold at the last timesteps.
    Source: DDPM, eq. 15 (eps); Salimans and Ho 2022, section 4 (v).
    """
    if objective == "eps":
        return (x_t - level.noise * prediction) / level.signal
    if objective == "x0":
        return prediction
    return level.signal * x_t - level.noise * prediction


def to_eps(objective: Objective, prediction: Tensor, x_t: Tensor, level: NoiseLevel) -> Tensor:
    """The noise that a prediction stands for, (N, C, H, W).

    From x0, an error in the prediction grows by signal / noise: a hundredfold at the first timesteps.
    Source: DDPM, eq. 4 solved for eps (x0); Salimans and Ho 2022, appendix D (v).
    """
    if objective == "eps":
        return prediction
    if objective == "x0":
        return (x_t - level.signal * prediction) / level.noise
    return level.noise * x_t + level.signal * prediction


def weights(spec: DiffusionSpec, alpha_bar: Tensor) -> Tensor:
    """Weight of each timestep's loss, in the shape and dtype of alpha_bar (float64).

    min_snr is min(snr, gamma) as a weight of the squared error of x0. The error of eps is snr times, that of v
    snr + 1 times the error of x0, so their weights are divided by it. Source: Hang et al. 2023 (Min-SNR-gamma).
    """
    if spec.weighting == "uniform":
        return torch.ones_like(alpha_bar)
    ratio, gamma = snr(alpha_bar), spec.min_snr_gamma
    if spec.objective == "eps":
        return (gamma / ratio).clamp(max=1.0)  # min(snr, gamma) / snr, without 0 / 0
    if spec.objective == "x0":
        return ratio.clamp(max=gamma)
    return ratio.clamp(max=gamma) / (ratio + 1.0)


def distance(loss: Loss, prediction: Tensor, target: Tensor, delta: float) -> Tensor:
    """Distance of each image's prediction from its target, averaged over pixels in float32, (N,).

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
