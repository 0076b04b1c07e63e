"""Losses, times and memory between two log points, combined over all ranks, and the names of the logged metrics.

Reading the loss each step would stop the host until the device has caught up. A meter adds losses up on the device
and reads them once, at the log point.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.messages import all_gather_objects
from ddpm_ds.unet.layers import PASSES_PER_STEP

Batch = TypeVar("Batch")


def is_due(every: int | None, before: int, images_seen: int, done: bool = False) -> bool:
    """Return whether a step from ``before`` to ``images_seen`` passed a multiple of ``every``, or was the last."""
    return every is not None and (done or images_seen // every > before // every)


@dataclass(frozen=True)
class Interval:
    """Means and sums over the steps between two log points, of a rank or of all; times leave out pauses."""

    steps: int
    images: int
    seconds: float
    loss: float
    """Mean per image over the steps whose loss was finite; NaN if there was none."""
    non_finite_steps: int
    """Steps whose loss was infinite or NaN."""
    data_wait_seconds: float
    """Sum of the times spent waiting for the next batch."""
    stage_peak_memory_bytes: Sequence[Sequence[int]] = ()
    """Peak bytes of each device, by stage; only in gathered intervals."""
    peak_reserved_bytes: int = 0
    """Maximum bytes that any device's allocator has reserved, 0 on CPUs; only in gathered intervals."""


class Meter:
    """Accumulator of steps until :meth:`read`. Only ``read``, ``so_far`` and ``paused`` wait for the device."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sums: Tensor | None = None  # over steps of finite loss: (loss x images, images, steps)
        self._begin_interval(clock())

    def _begin_interval(self, now: float) -> None:
        self._begin = now
        self._steps, self._images, self._data_wait_seconds = 0, 0, 0.0
        if self._sums is not None:
            self._sums.zero_()

    def timed(self, batches: Iterator[Batch] | None) -> Iterator[Batch]:
        """Yield the same batches, or none for None, counting the time spent waiting for them as data wait."""
        while batches is not None:
            begin = self._clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._data_wait_seconds += self._clock() - begin
            yield batch

    def step(self, loss: Tensor, images: int) -> None:
        """Count an optimizer step over ``images`` images with its mean loss, a scalar on any device."""
        loss = loss.detach().double()
        finite = loss.isfinite()
        ones = torch.stack((torch.where(finite, loss, 0.0) * images, finite * float(images), finite.double()))
        self._sums = ones if self._sums is None else self._sums.add_(ones)
        self._steps += 1
        self._images += images

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time in this context out of the interval; first waits for steps that the device still computes."""
        if self._sums is not None:
            self._sums.tolist()
        begin = self._clock()
        try:
            yield
        finally:
            self._begin += self._clock() - begin

    def read(self) -> Interval:
        """Return the interval that ends now, and start the next. Synchronises host and device, once."""
        interval = self.so_far()
        self._begin_interval(self._begin + interval.seconds)
        return interval

    def so_far(self) -> Interval:
        """Return the interval from its start until now. Synchronises host and device, once."""
        weighted, images, finite_steps = (0.0, 0.0, 0.0) if self._sums is None else self._sums.tolist()
        now = self._clock()  # after the device has caught up, so that its work is in the time
        return Interval(
            steps=self._steps,
            images=self._images,
            seconds=now - self._begin,
            loss=weighted / images if images else float("nan"),
            non_finite_steps=self._steps - int(finite_steps),
            data_wait_seconds=self._data_wait_seconds,
        )


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes of this process: of tensors on a CUDA ``device``, or its resident set (``VmHWM``)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def peak_reserved_bytes(device: torch.device) -> int:
    """Return the peak bytes of PyTorch's allocator on ``device``, to which context and NCCL add; 0 on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def gather(interval: Interval, engine: UnetPipelineEngine) -> Interval:
    """Combine the ranks' intervals: the last stage's mean loss, longest data wait, slowest clock. Collective."""
    device = engine.device
    waits = [interval.data_wait_seconds, interval.seconds]
    memory = [peak_memory_bytes(device), peak_reserved_bytes(device)]
    numbers = [engine.stage_id, interval.loss, interval.non_finite_steps, *waits, *memory]
    everyone = all_gather_objects(numbers, list[float])
    stages, losses, bad, data_waits, seconds, peaks, reserved = zip(*everyone, strict=True)
    by_stage = [[rank for rank, own in enumerate(stages) if own == stage] for stage in range(engine.num_stages)]
    last = by_stage[engine.loss_stage]
    return dataclasses.replace(
        interval,
        loss=sum(losses[rank] for rank in last) / len(last),
        non_finite_steps=int(max(bad[rank] for rank in last)),
        data_wait_seconds=max(data_waits),
        seconds=max(seconds),
        stage_peak_memory_bytes=[[int(peaks[rank]) for rank in ranks] for ranks in by_stage],
        peak_reserved_bytes=int(max(reserved)),
    )


def metrics(interval: Interval, engine: UnetPipelineEngine, macs_per_image: int) -> dict[str, float]:
    """Return one log point of a run whose U-Net takes ``macs_per_image`` in a forward.

    Its names are a contract: dashboards and comparisons read them.
    """
    images_per_second, devices = interval.images / interval.seconds, sum(map(len, interval.stage_peak_memory_bytes))
    peaks = [float(max(ranks)) for ranks in interval.stage_peak_memory_bytes]
    flops_per_second = 2 * macs_per_image * PASSES_PER_STEP * images_per_second
    values = {
        "train/loss": interval.loss,
        "train/lr": engine.step_rate,
        "train/loss_scale": float(engine.gradients.scale),
        "train/skipped_steps": float(engine.count_skipped_steps()),
        "train/seen_images": float(engine.images_seen),
        "perf/images_per_second": images_per_second,
        "usage/step_seconds": interval.seconds / interval.steps,
        "usage/data_wait_seconds": interval.data_wait_seconds / interval.steps,
        "usage/model_tflops_per_device": flops_per_second / devices / 1e12,
        "usage/peak_memory_bytes": max(peaks),
    }
    if math.isfinite(norm := engine.gradients.norm()):
        values["train/total_grad_norm"] = norm
    if interval.peak_reserved_bytes:
        values["usage/peak_reserved_bytes"] = float(interval.peak_reserved_bytes)
    return values | {f"usage/stage{stage}_peak_memory_bytes": peak for stage, peak in enumerate(peaks)}
