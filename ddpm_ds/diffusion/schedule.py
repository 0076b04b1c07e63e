"""Noise schedules: how much of the image is left at each timestep.

Everything here is float64 on the CPU, because betas of 1e-4 and signals of 1e-9 meet in 1 - alpha_bar. Index 0 is
the paper's t = 1: the least noise, never none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ddpm_ds.errors import SpecError
from ddpm_ds.spec import DiffusionSpec

# Nichol and Dhariwal 2021, section 3.2: keeps the last step from being a singularity.
MAX_BETA = 0.999


def betas(spec: DiffusionSpec) -> Tensor:
    """Variance of the noise that each step adds, (T,) float64.

    Raises:
        SpecError: a beta of the linear schedule is not below 1.
    """
    if spec.schedule == "linear":
        return _linear(spec)
    progress = torch.linspace(0.0, 1.0, spec.timesteps + 1, dtype=torch.float64)  # t / T, (T + 1,)
    remaining = _cosine(progress) if spec.schedule == "cosine" else _sigmoid(progress)
    return (1.0 - remaining[1:] / remaining[:-1]).clamp(max=MAX_BETA)


def alpha_bars(spec: DiffusionSpec) -> Tensor:
    """Share of the image's variance that is left, strictly falling, (T,) float64. Source: DDPM, above eq. 4.

    Raises:
        SpecError: a beta of the linear schedule is not below 1.
    """
    return torch.cumprod(1.0 - betas(spec), dim=0)


def snr(alpha_bar: Tensor) -> Tensor:
    """Signal-to-noise ratio alpha_bar / (1 - alpha_bar). Source: Kingma et al. 2021, section 3.1."""
    return alpha_bar / (1.0 - alpha_bar)


def _linear(spec: DiffusionSpec) -> Tensor:
    """Betas on a line, (T,). Source: DDPM (Ho et al. 2020), section 4."""
    for key in ("beta_start", "beta_end"):
        if getattr(spec, key) >= 1.0:
            raise SpecError(f"diffusion.{key} = {getattr(spec, key)} is not below 1; DDPM uses 1e-4 to 0.02")
    return torch.linspace(spec.beta_start, spec.beta_end, spec.timesteps, dtype=torch.float64)


def _cosine(progress: Tensor) -> Tensor:
    """alpha_bar over t / T. Source: Improved DDPM (Nichol and Dhariwal 2021), eq. 17, s = 0.008."""
    offset = 0.008
    f = torch.cos((progress + offset) / (1.0 + offset) * math.pi / 2.0) ** 2
    return f / f[0]


def _sigmoid(progress: Tensor) -> Tensor:
    """alpha_bar over t / T, from 1 to 0. Source: Jabri et al. 2022; Chen 2023, algorithm 1: -3 to 3, tau = 1."""
    start, end, tau = -3.0, 3.0, 1.0
    curve = torch.sigmoid((start + (end - start) * progress) / tau)
    return (curve[-1] - curve) / (curve[-1] - curve[0])
