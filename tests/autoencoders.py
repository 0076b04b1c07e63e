"""Tiny autoencoders of diffusers with random weights."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL


def save_autoencoder(folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Save an autoencoder whose latents are a half as high and as wide as their pixels, and return it."""
    torch.manual_seed(seed)
    values = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (4, 8),
        "norm_num_groups": 2,
        "latent_channels": 4,
        "scaling_factor": 0.7,
        "shift_factor": 0.25,
    }
    model: Any = AutoencoderKL(**(values | changes))
    model.eval().requires_grad_(False).save_pretrained(folder)
    return model
