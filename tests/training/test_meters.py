"""Meters: means over an interval, data wait, memory, and the names under which they are logged."""

import math
import mmap
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.training.meters import Interval, Meter, metrics, peak_memory_bytes


def ticks(*times: float) -> Callable[[], float]:
    """A clock that shows these times, one at each look."""
    left: Iterator[float] = iter(times)
    return lambda: next(left)


def test_an_interval_has_the_mean_loss_per_image_and_all_of_the_time_and_the_next_begins_anew() -> None:
    meter = Meter(clock=ticks(10.0, 14.0, 19.0))
    meter.step(torch.tensor(1.0), images=300)
    meter.step(torch.tensor(1001.0, dtype=torch.float16), images=100)  # their product is beyond fp16
    assert meter.read() == Interval(2, 400, seconds=4.0, loss=251.0, non_finite_steps=0, data_wait_seconds=0.0)
    meter.step(torch.tensor(2.0), images=4)
    assert meter.read() == Interval(1, 4, seconds=5.0, loss=2.0, non_finite_steps=0, data_wait_seconds=0.0)


def test_pauses_are_left_out_of_an_interval_and_steps_that_the_device_still_computes_are_not() -> None:
    meter = Meter(clock=ticks(0.0, 6.0, 16.0, 20.0, 21.0))
    meter.step(torch.tensor(1.0), images=40)
    with pytest.raises(RuntimeError), meter.paused():
        raise RuntimeError("a pause may end so")
    assert meter.read().seconds == 10.0
    assert meter.so_far().seconds == 1.0, "the next interval begins where this one ends"


def test_losses_that_are_not_finite_are_counted_and_kept_out_of_the_mean() -> None:
    meter, loss = Meter(), torch.tensor(0.0)
    for value in (1.0, math.inf, math.nan, 3.0):
        meter.step(loss.fill_(value), images=2)  # the meter keeps no tensor that it is given
    interval = meter.read()
    assert (interval.loss, interval.non_finite_steps, interval.images) == (2.0, 2, 8)
    meter.step(torch.tensor(math.nan), images=2)
    assert math.isnan(meter.read().loss)


def test_a_step_reads_nothing_from_the_device_but_pauses_and_log_points_wait_for_it() -> None:
    """The meta device has no values: whatever looks at one raises."""
    meter = Meter()
    for _ in range(3):
        meter.step(torch.zeros((), device="meta"), images=2)
    with pytest.raises(NotImplementedError, match="meta"):
        meter.read()
    with pytest.raises(NotImplementedError, match="meta"), meter.paused():
        pass


def test_waiting_for_batches_is_counted_and_work_between_them_is_not() -> None:
    meter = Meter(clock=ticks(0.0, 1.0, 1.5, 7.0, 7.25, 9.0, 9.0))
    assert list(meter.timed(iter("ab"))) == ["a", "b"]
    assert meter.read().data_wait_seconds == 0.75


def grown_by(size: int) -> int:
    """Growth of this process's peak memory, once it has held ``size`` bytes for a moment."""
    held, piece = psutil.Process().memory_info().rss, b"1" * 2**20
    with mmap.mmap(-1, size) as memory:  # of the kernel: what this process has freed and kept would not be new
        while memory.tell() < size:
            memory.write(piece)
    return peak_memory_bytes(torch.device("cpu")) - held


def test_peak_memory_of_a_cpu_process_is_the_most_that_it_has_held() -> None:
    """In a forked process, whose peak begins with what it holds: that of this one may be of another test."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as other:
        assert 0.9 * 2**28 < other.submit(grown_by, 2**28).result() < 1.5 * 2**28


def test_the_names_of_metrics_are_a_contract() -> None:
    """Only on CUDA has an allocator reserved anything."""
    interval = Interval(4, 400, 2.0, 0.5, 0, data_wait_seconds=0.4, stage_peak_memory_bytes=[[5, 7], [6, 4]])
    numbers: dict[str, Any] = {"step_rate": 1e-4, "gradients": SimpleNamespace(scale=65536.0, norm=lambda: 0.25)}
    engine = cast(UnetPipelineEngine, SimpleNamespace(images_seen=4000, count_skipped_steps=lambda: 3, **numbers))
    values = metrics(interval, engine, 10**9)
    reserved = metrics(replace(interval, peak_reserved_bytes=9), engine, 10**9)
    assert reserved == values | {"usage/peak_reserved_bytes": 9.0}
    assert values == {
        "train/loss": 0.5,
        "train/total_grad_norm": 0.25,
        "train/lr": 1e-4,
        "train/loss_scale": 65536.0,
        "train/skipped_steps": 3.0,
        "train/seen_images": 4000.0,
        "perf/images_per_second": 200.0,
        "usage/step_seconds": 0.5,
        "usage/data_wait_seconds": 0.1,
        "usage/model_tflops_per_device": pytest.approx(0.3),  # 6 for each of a forward's multiply-accumulates
        "usage/peak_memory_bytes": 7.0,
        "usage/stage0_peak_memory_bytes": 7.0,
        "usage/stage1_peak_memory_bytes": 6.0,
    }
