"""Parts of a step that depend only on image indices: a replica's micro-batches, denoising and the learning rate.

So the first and the last stage draw the same, and a resumed run continues as if it had never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ddpm_ds.config.ds_config import Layout
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.loader import Indices, MicroBatch, micro_batches, on_device
from ddpm_ds.diffusion.augmentation import augmented, coloured
from ddpm_ds.diffusion.process import Diffusion


class Noised(NamedTuple):
    """Micro-batch as training needs it, on the device."""

    x0: Tensor
    """(N, C, H, W) fp32, pixels in [-1, 1] or latents"""
    t: Tensor
    """(N,) int64, or float32 if noise levels are continuous"""
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
        images, labels, index = (tensor.to(self._device, non_blocking=True) for tensor in micro_batch[:3])
        size = spec.data.size
        draws = self._diffusion.draws(index, (*images.shape[:2], *size))
        x0 = self._diffusion.prepare(images, draws, flips=spec.data.horizontal_flips, size=size)
        conditions = []
        if spec.unet.augmentation:
            x0, numbers = augmented(x0, index, spec.train.seed, spec.unet.augmentation)
            conditions.append(numbers)
        if spec.unet.colour_augmentation:
            x0, numbers = coloured(x0, index, spec.train.seed, spec.unet.colour_augmentation)
            conditions.append(numbers)
        condition = torch.cat(conditions, dim=1) if conditions else None
        t, eps = self._diffusion.draw(draws, x0.shape)
        if spec.unet.classes is None:
            return Noised(x0, t, eps, None, condition, index)
        labels = self._diffusion.drop_labels(labels, draws, spec.train.label_drop, spec.unet.classes)
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
    spec: RunSpec,
    layout: Layout,
    store: DatasetCache,
    device: torch.device,
    *,
    replicas: int,
    replica: int,
    among: Indices | None = None,
    start_images: int = 0,
) -> Iterator[MicroBatch]:
    """Yield the endless micro-batches of one of ``replicas``, of the layout's sizes, on the device; see
    :func:`ddpm_ds.data.loader.micro_batches`.
    """
    batches = micro_batches(
        store,
        among=among,
        seed=spec.train.seed,
        window=spec.data.shuffle_images,
        batch_images=layout.batch_images,
        micro_batch_images=layout.micro_batch_images,
        replicas=replicas,
        replica=replica,
        start_images=start_images,
        workers=spec.data.workers,
        pin_memory=device.type == "cuda",
    )
    return on_device(batches, device)


def learning_rate(spec: RunSpec, images: float) -> float:
    """Return the learning rate after so many images of the run; `optimizer.decay` must be given.

    Source: Loshchilov and Hutter 2017 (SGDR), eq. 5, for one period without restart (cosine); Karras et al. 2024
    (EDM2), eq. 67, and their linear ramp-up (inverse_sqrt).
    """
    optimizer, warmup = spec.optimizer, spec.optimizer.warmup_images
    if optimizer.decay == "cosine":
        progress = (images - warmup) / max(spec.train.images - warmup, 1)
        wave = (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2.0
        share = optimizer.decay_to + (1.0 - optimizer.decay_to) * wave
    else:
        assert optimizer.decay == "inverse_sqrt" and optimizer.reference_images is not None, "the spec refuses it"
        share = max(images / optimizer.reference_images, 1.0) ** -0.5
    return optimizer.learning_rate * share * (min(images / warmup, 1.0) if warmup else 1.0)


def rate_of(spec: RunSpec) -> Callable[[int, int], float] | None:
    """Return a function from the images seen before a step and the images in it to its learning rate.

    It is the rate at the middle of the step's images, so that neither the first step of a warm-up nor the last of a
    decay has rate 0. Returns None if DeepSpeed's scheduler decides.
    """
    if spec.optimizer.decay is None:
        return None
    return lambda before, batch: learning_rate(spec, before + batch / 2)
