"""The training loop: load, step, log, and stop when the numbers have gone bad."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddpm_ds.errors import BadNumbersError
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.train.meters import Meter, Point
from ddpm_ds.train.plan import RunPlan
from ddpm_ds.train.progress import Progress
from ddpm_ds.train.tracking import Tracker

OVERFLOWS_AT_FLOOR = 8
"""Optimizer steps in a row that may overflow at the lowest loss scale before the run is given up."""


@dataclass
class Run:
    """What the loop works with; ``tracker`` exists on rank 0 only."""

    plan: RunPlan
    engine: UnetPipelineEngine
    batches: Iterator[Any] | None
    tracker: Tracker | None


def train(run: Run) -> Point:
    """Train until ``train.images`` have been seen; returns the last point of the loss curve. Every rank calls this.

    Raises:
        BadNumbersError: on all ranks alike.
    """
    engine, spec = run.engine, run.plan.spec
    meter = Meter(engine, macs=run.plan.macs)
    progress = Progress(total_images=spec.train.images, shown=run.tracker is not None)
    every = spec.logging.log_every_images
    while True:
        before = engine.images_seen
        meter.add(engine.train_batch(run.batches))
        _stop_at_scale_floor(engine)
        done = engine.images_seen >= spec.train.images
        if done or engine.images_seen // every > before // every:
            point = meter.read()
            if run.tracker is not None:
                run.tracker.metrics(point.metrics(), step=engine.global_steps)
            progress.show(point)
            _stop_at_bad_loss(point)
        if done:
            progress.close()
            return point


def _stop_at_scale_floor(engine: UnetPipelineEngine) -> None:
    if engine.consecutive_overflows_at_floor >= OVERFLOWS_AT_FLOOR:
        raise BadNumbersError(
            f"fp16 overflowed in {OVERFLOWS_AT_FLOOR} steps running at the lowest loss scale {engine.loss_scale():g}, "
            f"after {engine.images_seen:,} images; try a lower optimizer.learning_rate, a longer "
            "optimizer.warmup_images, gradient_clipping, or bf16"
        )


def _stop_at_bad_loss(point: Point) -> None:
    if not math.isfinite(point.loss):
        raise BadNumbersError(
            f"train/loss is {point.loss} after {point.images:,} images; try a lower optimizer.learning_rate, a longer "
            "optimizer.warmup_images, gradient_clipping 1.0, or fp32 to find the cause"
        )
