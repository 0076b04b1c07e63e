"""Noisy images, and distances of predictions from their targets: pure functions of tensors."""

from __future__ import annotations

from typing import Literal, assert_never

import torch.nn.functional as F
from torch import Tensor

from ddpm_ds.diffusion.levels import NoiseLevel

Loss = Literal["l1", "l2", "huber"]


def add_noise(x0: Tensor, eps: Tensor, level: NoiseLevel) -> Tensor:
    """Return x_t (N, C, H, W). Source: DDPM (Ho et al. 2020), eq. 4."""
    return level.signal * x0 + level.noise * eps


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
