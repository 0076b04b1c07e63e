"""The learning rate of a step where the run spec decides it, `optimizer.decay`; else DeepSpeed's scheduler does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import assert_never

from ddpm_ds.config.spec import RunSpec


def learning_rate(spec: RunSpec, images: float) -> float:
    """Return the learning rate after so many images of the run; `optimizer.decay` must be given.

    A function of the images alone, so that a resumed run goes on as if it had never stopped. Source: Loshchilov and
    Hutter 2017 (SGDR), eq. 5, for one period without restart (cosine); Karras et al. 2024 (EDM2), eq. 67, and their
    linear ramp-up (inverse_sqrt).
    """
    optimizer = spec.optimizer
    warmup = optimizer.warmup_images
    match optimizer.decay:
        case "cosine":
            progress = (images - warmup) / max(spec.train.images - warmup, 1)
            wave = (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2.0
            share = optimizer.decay_to + (1.0 - optimizer.decay_to) * wave
        case "inverse_sqrt":
            assert optimizer.reference_images is not None, "the spec refuses it"
            share = max(images / optimizer.reference_images, 1.0) ** -0.5
        case None:
            raise AssertionError("DeepSpeed's scheduler decides the learning rate")
        case unknown:
            assert_never(unknown)
    return optimizer.learning_rate * share * (min(images / warmup, 1.0) if warmup else 1.0)


def rate_of(spec: RunSpec) -> Callable[[int, int], float] | None:
    """Return a function of the images seen before a step and of those of the step, which returns its learning rate.

    That is the rate at the middle of the step's images, so that neither the first step of a warm-up nor the last one of
    a decay is lost. None leaves it to DeepSpeed's scheduler.
    """
    if spec.optimizer.decay is None:
        return None
    return lambda before, batch: learning_rate(spec, before + batch / 2)
