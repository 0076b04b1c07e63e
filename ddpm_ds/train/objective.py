"""Training objective: a replica's micro-batches, and denoising drawn from the image index, so that first and last stage
agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.loader import Indices, MicroBatch, micro_batches, on_device
from ddpm_ds.diffusion.augmentation import augmented, coloured
from ddpm_ds.diffusion.process import Diffusion
from ddpm_ds.predict.plan import RunPlan


class Noised(NamedTuple):
    """Micro-batch as training needs it, on the device."""

    x0: Tensor
    """(N, C, H, W) fp32, pixels in [-1, 1] or latents"""
    t: Tensor
    """(N,) int64, or float32 where noise levels are continuous"""
    eps: Tensor
    """(N, C, H, W) fp32"""
    labels: Tensor | None
    """(N,) int64, dropped labels replaced; None in a run without classes"""
    condition: Tensor | None
    """(N, :func:`ddpm_ds.unet.layers.condition_numbers`) fp32, how images were augmented; None in a run without
    augmentation"""
    images: Tensor
    """(N,) int64, image indices"""


class Denoising:
    """Implements :class:`ddpm_ds.pipeline.engine.Objective` for a run spec."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._diffusion = Diffusion(spec.diffusion, spec.train.seed, device)

    def prepare(self, micro_batch: MicroBatch) -> Noised:
        """Turn stored images into x0, timestep, noise and label, each a function of (seed, image index)."""
        spec = self._spec
        images, labels, index = (tensor.to(self._device, non_blocking=True) for tensor in micro_batch)
        x0 = self._diffusion.prepare(images, index, flips=spec.data.horizontal_flips, size=spec.data.image_size)
        told = []
        if spec.unet.augmentation:
            x0, numbers = augmented(x0, index, spec.train.seed, spec.unet.augmentation)
            told.append(numbers)
        if spec.unet.colour_augmentation:
            x0, numbers = coloured(x0, index, spec.train.seed, spec.unet.colour_augmentation)
            told.append(numbers)
        condition = torch.cat(told, dim=1) if told else None
        t, eps = self._diffusion.draw(index, x0.shape)
        if spec.unet.classes is None:
            return Noised(x0, t, eps, None, condition, index)
        labels = self._diffusion.drop_labels(labels, index, spec.train.label_drop, spec.unet.classes)
        return Noised(x0, t, eps, labels, condition, index)

    def inputs(self, prepared: Noised) -> tuple[Tensor, ...]:
        """Return (x_t, t[, labels][, condition])."""
        eps = self._diffusion.perturbed(prepared.eps, prepared.images)
        x_t = self._diffusion.noised(prepared.x0, prepared.t, eps)
        return (x_t, prepared.t, *(part for part in (prepared.labels, prepared.condition) if part is not None))

    def loss(self, prediction: Tensor, prepared: Noised) -> Tensor:
        """Return the mean loss of the micro-batch, an fp32 scalar."""
        return self._diffusion.loss(prediction, prepared.x0, prepared.eps, prepared.t)


def replica_batches(
    plan: RunPlan,
    store: DatasetCache,
    device: torch.device,
    *,
    replicas: int,
    replica: int,
    among: Indices | None = None,
    start_images: int = 0,
) -> Iterator[MicroBatch]:
    """Yield the endless micro-batches of one of ``replicas`` as planned, on the device; see
    :func:`ddpm_ds.data.loader.micro_batches`.
    """
    layout = plan.ds.layout
    batches = micro_batches(
        store,
        among=among,
        seed=plan.spec.train.seed,
        window=plan.spec.data.shuffle_images,
        batch_images=layout.batch_images,
        micro_batch_images=layout.micro_batch_images,
        replicas=replicas,
        replica=replica,
        start_images=start_images,
        workers=plan.spec.data.workers,
        pin_memory=device.type == "cuda",
    )
    return on_device(batches, device)
