"""Runs and trained weights that nobody trained: a U-Net with random weights, in memory or saved as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ddpm_ds.checkpoint.manifest import Description
from ddpm_ds.checkpoint.writer import Fragment, Writer
from ddpm_ds.config.spec import RunSpec, SamplerSpec
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.model import UNet
from tests.launching import tiny_spec

FAST = ("--sampler", "ddim", "--steps", "3", "--eta", "1", "--device", "cpu")
"""Options of a drawing that takes no time and has noise in every step."""
FAST_SAMPLER = SamplerSpec(kind="ddim", steps=3, eta=1.0)
"""The same."""
UNLABELLED: dict[str, Any] = {"unet": {"classes": None}, "train": {"label_drop": 0.0}}
"""Sections of a run without classes."""
KINDS = {"ema": 1, "master": 2}
"""Kinds of weights that a planted checkpoint has, each with another seed."""


def unet_of(spec: RunSpec, seed: int) -> UNet:
    """A U-Net all of whose weights are random, those that begin at zero too."""
    unet = UNet(unet_layers(spec.unet, image_channels=spec.data.channels, image_size=spec.data.image_size), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return unet.eval().requires_grad_(False)


def trained_of(spec: RunSpec, seed: int = 1, dtype: torch.dtype = torch.float32) -> Trained:
    """Weights in memory."""
    return Trained(
        unet=unet_of(spec, seed).to(dtype),
        unet_spec=spec.unet,
        diffusion=spec.diffusion,
        sampler=spec.sampler,
        image_shape=(spec.data.channels, spec.data.image_size, spec.data.image_size),
        origin="memory",
        digest=f"{seed:064}",
        weights="ema",
        images_seen=320,
        run_dir=None,
        spec=spec,
    )


def plant(
    run_dir: Path, images: int = 320, data_sha256: dict[str, str] | None = None, **sections: dict[str, Any]
) -> Path:
    """Save a checkpoint of a tiny run, which learned a store of these checksums; returns its folder."""
    spec = tiny_spec(**sections)
    fragments = [
        Fragment(kind, name, 0, parameter.flatten().clone())
        for kind, seed in KINDS.items()
        for name, parameter in unet_of(spec, seed).layers.named_parameters()
    ]
    description = Description(
        images=images,
        step=images // 16,
        spec=spec.model_dump(mode="json"),
        ds_config={},
        layout={"stages": 1, "replicas": 1},
        data_sha256=data_sha256 or {},
        parameters={name: tuple(p.shape) for name, p in unet_of(spec, 1).layers.named_parameters()},
    )
    said: list[str] = []
    writer = Writer(run_dir / "checkpoints", 0, 1, say=said.append)
    writer.begin("stage0-replica0", fragments, description, {})
    assert writer.wait(), said
    return run_dir / "checkpoints" / f"images-{images:09}"
