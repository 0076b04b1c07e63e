"""Training loop: step, average, log, validate and save; roll back or stop if the numbers are bad. A rehearsal is a few
steps and one picture, to learn their time and memory.
"""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.device import wait_for_device
from ddpm_ds.errors import BadNumbersError, LauncherLostError, Preempted
from ddpm_ds.files import REHEARSAL, write_file
from ddpm_ds.observe.observer import Observer
from ddpm_ds.pipeline.engine import CAUTIOUS_STEPS, UnetPipelineEngine
from ddpm_ds.pipeline.exchange import all_gather_objects
from ddpm_ds.pipeline.messages import runs_behind
from ddpm_ds.processes.requests import Requests
from ddpm_ds.processes.watchdog import Watchdog
from ddpm_ds.tracking.recorder import Recorder
from ddpm_ds.train.meters import Interval, Meter, gather, is_due, metrics, peak_memory_bytes, peak_reserved_bytes
from ddpm_ds.train.saving import Saver
from ddpm_ds.train.validation import Validation

OVERFLOWS_AT_FLOOR = 8
"""Optimizer steps in a row that may overflow at the lowest loss scale before the numbers count as bad."""
FLOOR_STEPS = 100
"""Maximum number of steps until the host looks whether they overflow; it looks at each log point too."""
SPIKE_POINTS = 10
"""Number of log points whose mean loss is the reference for ``bad_numbers.spike_factor``."""
REMEDIES = "try a lower optimizer.learning_rate, a longer optimizer.warmup_images or gradient_clipping 1.0"


class Rehearsal(Observer):
    """Observer that ends a run after ``steps`` timed steps, and writes their seconds and all ranks' peak memory.

    Before the first timed step the optimizer has updated the weights, for which it allocates its moments, and the
    pipeline has sent its first messages, which it does in another way.
    """

    def __init__(self, engine: UnetPipelineEngine, run_dir: Path, steps: int, checkpoint_interval: int) -> None:
        self._engine, self._file, self._steps = engine, run_dir / REHEARSAL, steps
        self._checkpoint_interval = checkpoint_interval
        self._warm_up = CAUTIOUS_STEPS if runs_behind(engine.device) else 1
        self._began, self._seconds = 0.0, list[float]()

    def begin_step(self, step: int) -> None:
        wait_for_device(self._engine.device)
        self._began = time.perf_counter()

    def ended(self) -> bool:
        """Count the step that has ended, and return whether it was the last; the same on all ranks."""
        wait_for_device(self._engine.device)
        if not self._warm_up:
            self._seconds.append(time.perf_counter() - self._began)
        elif self._engine.was_step_applied():
            self._warm_up -= 1
        return len(self._seconds) >= self._steps

    def finish(self) -> None:
        device = self._engine.device
        peak = peak_reserved_bytes(device) or peak_memory_bytes(device)
        seconds, peaks = zip(*all_gather_objects([self._seconds, peak], Any), strict=True)
        if dist.get_rank() == 0:
            found = {
                "step_seconds": [max(step) for step in zip(*seconds, strict=True)],  # of the slowest rank
                "rank_peak_bytes": peaks,
                "checkpoint_interval": self._checkpoint_interval,
            }
            write_file(self._file, f"{json.dumps(found)}\n".encode())


@dataclass
class Training:
    """State that the training loop works with, on every rank."""

    spec: RunSpec
    macs: int
    """Multiply-accumulates of one image's forward."""
    engine: UnetPipelineEngine
    batches: Callable[[], Iterator[Any] | None]
    """Function that opens the micro-batches from the engine's progress on; returns None on a stage without data."""
    saver: Saver | None
    """None in a rehearsal, which saves nothing."""
    requests: Requests
    watchdog: Watchdog
    validation: Validation
    observer: Observer
    recorder: Recorder
    ended: Callable[[], bool]
    """Function that returns whether a step was the last; called once after each step."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=SPIKE_POINTS))


def train(run: Training) -> Interval:
    """Train until the run has ended; return the last interval of the loss curve.

    Raises:
        BadNumbersError: the policy is to stop, or the run was rolled back often enough; on all ranks alike.
        Preempted: the run was asked to stop, or its launcher is gone, and it is saved; on all ranks alike.
    """
    engine, spec = run.engine, run.spec
    run.validation.before_first_step()
    meter = Meter()
    batches = meter.timed(run.batches())
    first = True
    while True:
        before = engine.images_seen
        run.observer.begin_step(engine.global_steps + 1)
        with run.recorder.doing("taking the first step") if first else contextlib.nullcontext():
            meter.step(engine.train_batch(batches), images=engine.train_batch_size())
        run.watchdog.progress()
        run.recorder.step(engine.images_seen)
        if first:  # the loss is on the screen before the first log point
            run.recorder.first_loss(gather(meter.so_far(), engine).loss)
            first = False
        asked = run.requests.poll()
        seen = engine.images_seen
        done = run.ended()
        save = asked.save or asked.stop or done or is_due(spec.checkpoint.every_images, before, seen)
        keep = is_due(spec.ema.snapshot_images, before, seen, done)
        read = save or keep or is_due(spec.logging.log_every_images, before, seen)
        trouble = _scale_floor(engine) if read or engine.global_steps % FLOOR_STEPS == 0 else None
        if read and not trouble:
            interval = _log(run, meter)
            trouble = _bad_loss(run, interval, done)
        if trouble:
            if spec.bad_numbers.policy == "stop" or run.saver is None:
                raise BadNumbersError(trouble)
            with run.watchdog.pause():  # a checkpoint is read as fast as the disk is
                what = run.saver.roll_back(trouble, spec.bad_numbers.max_rollbacks)
            run.recorder.rolled_back(what, run.saver.rollbacks, engine.images_seen, engine.global_steps)
            run.recent.clear()
            meter = Meter()
            batches = meter.timed(run.batches())
            continue
        if run.validation.due(before, done):  # before the save: a run that dies in between draws again
            with meter.paused(), run.observer.span("inspection"):
                run.validation.after_step(before, done)
        if run.saver is not None and keep:
            with meter.paused(), run.observer.span("checkpoint"), run.watchdog.pause():
                run.saver.keep_snapshot()
        if run.saver is not None and save:
            with meter.paused(), run.observer.span("checkpoint"), run.watchdog.pause():  # waits for the one before
                seconds = run.saver.save()
            run.recorder.checkpoint(seconds, engine.global_steps)
            run.requests.saved()
        if done or asked.stop:
            run.observer.finish()
        if done:
            return interval
        if asked.abandoned:
            raise LauncherLostError(
                f"what started {asked.abandoned} is gone: all ranks have saved and stopped after "
                f"{seen:,} images; the run can be resumed"
            )
        if asked.stop:
            raise Preempted(f"asked to stop after {seen:,} images")


def _log(run: Training, meter: Meter) -> Interval:
    """Make one log point; waits for the device, and for the other ranks."""
    engine = run.engine
    interval = gather(meter.read(), engine)
    values = metrics(interval, engine, run.macs)
    run.recorder.point(values, engine.global_steps, fp16=engine.fp16_enabled())
    return interval


def _scale_floor(engine: UnetPipelineEngine) -> str | None:
    """Describe the problem if fp16 overflows even at the lowest loss scale, else return None."""
    if not engine.fp16_enabled() or (overflows := engine.gradients.overflows_at_floor()) < OVERFLOWS_AT_FLOOR:
        return None
    return (
        f"fp16 overflowed in {overflows} steps in a row at the lowest loss scale, "
        f"{engine.next_loss_scale():g}, after {engine.images_seen:,} images; {REMEDIES}, or bf16"
    )


def _bad_loss(run: Training, interval: Interval, done: bool) -> str | None:
    """Describe the problem with the last interval's loss, or return None.

    In fp16 the scaler skips a step whose loss is not finite, so only its floor is checked, unless the run is ``done``:
    it must not succeed without a finite loss in its last interval.
    """
    after = f"after {run.engine.images_seen:,} images; {REMEDIES}"
    if done and not math.isfinite(interval.loss):
        return f"train/loss was not finite in any of the last {interval.steps} steps, {after}"
    if interval.non_finite_steps and not run.engine.fp16_enabled():
        return f"train/loss was not finite in {interval.non_finite_steps} of the last {interval.steps} steps, {after}"
    factor = run.spec.bad_numbers.spike_factor
    usual = sum(run.recent) / max(len(run.recent), 1)
    if factor and len(run.recent) == SPIKE_POINTS and interval.loss > factor * usual:
        return (
            f"train/loss = {interval.loss:.4g} is over {factor:g} times the {usual:.4g} of the points before, {after}"
        )
    if math.isfinite(interval.loss):
        run.recent.append(interval.loss)
    return None
