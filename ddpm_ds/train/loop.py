"""The training loop: load, step, log, and stop when the numbers have gone bad."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddpm_ds.errors import BadNumbersError
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.train.exchange import gather
from ddpm_ds.train.meters import Interval, Meter, metrics
from ddpm_ds.train.plan import RunPlan
from ddpm_ds.train.progress import ProgressLine
from ddpm_ds.train.tracking import Tracker

OVERFLOWS_AT_FLOOR = 8
"""Optimizer steps in a row that may overflow at the lowest loss scale before the run is given up."""

REMEDIES = "try a lower optimizer.learning_rate, a longer optimizer.warmup_images or gradient_clipping 1.0"


@dataclass
class Run:
    """What the loop works with; ``tracker`` and ``line`` exist on rank 0 only, ``batches`` where data is read."""

    plan: RunPlan
    engine: UnetPipelineEngine
    batches: Iterator[Any] | None
    tracker: Tracker | None
    line: ProgressLine | None


def train(run: Run) -> Interval:
    """Train until ``train.images`` have been seen; returns the last interval of the loss curve. Every rank calls this.

    Raises:
        BadNumbersError: on all ranks alike.
    """
    engine, spec = run.engine, run.plan.spec
    meter = Meter()
    batches = None if run.batches is None else meter.timed(run.batches)
    every = spec.logging.log_every_images
    while True:
        before = engine.images_seen
        meter.step(engine.train_batch(batches), images=engine.train_batch_size())
        if run.line is not None:
            run.line.step(engine.images_seen)
        _stop_at_scale_floor(engine)
        done = engine.images_seen >= spec.train.images
        if done or engine.images_seen // every > before // every:
            interval = _log(run, meter)
            _stop_at_bad_loss(run, interval)
            if done:
                return interval


def _log(run: Run, meter: Meter) -> Interval:
    """One log point; waits for the device, and for the other ranks."""
    engine = run.engine
    gathered = gather(meter.read(), engine)
    norm = engine.gradient_norm()
    values = metrics(
        gathered.interval,
        images_seen=engine.images_seen,
        learning_rate=engine.get_lr()[0],
        grad_norm=norm if math.isfinite(norm) else None,
        loss_scale=engine.loss_scale(),
        skipped_steps=engine.skipped_steps,
        macs_per_image=run.plan.macs,
        stage_peak_memory_bytes=gathered.stage_peak_memory_bytes,
    )
    if run.tracker is not None:
        run.tracker.metrics(values, step=engine.global_steps)
    if run.line is not None:
        run.line.log_point(
            engine.images_seen,
            loss=gathered.interval.loss,
            images_per_second=values["perf/images_per_second"],
            loss_scale=engine.loss_scale() if engine.fp16_enabled() else None,
        )
    return gathered.interval


def _stop_at_scale_floor(engine: UnetPipelineEngine) -> None:
    if engine.consecutive_overflows_at_floor >= OVERFLOWS_AT_FLOOR:
        raise BadNumbersError(
            f"fp16 overflowed in {OVERFLOWS_AT_FLOOR} steps running at the lowest loss scale, {engine.loss_scale():g}, "
            f"after {engine.images_seen:,} images; {REMEDIES}, or bf16"
        )


def _stop_at_bad_loss(run: Run, interval: Interval) -> None:
    """In fp16 a loss that is not finite makes the scaler skip the step, and its floor ends the run."""
    if interval.non_finite_steps and not run.engine.fp16_enabled():
        raise BadNumbersError(
            f"train/loss was not finite in {interval.non_finite_steps} of the last {interval.steps} steps, after "
            f"{run.engine.images_seen:,} images; {REMEDIES}"
        )
