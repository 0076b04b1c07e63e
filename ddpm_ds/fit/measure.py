"""Measurement of real training steps with one layout and micro-batch: time, and memory of a process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.prepare import cache_path
from ddpm_ds.device import choose_device, wait_for_device
from ddpm_ds.pipeline.build import build_engine, use_host_accelerator
from ddpm_ds.pipeline.engine import CAUTIOUS_STEPS
from ddpm_ds.pipeline.messages import runs_behind
from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.processes.process_group import group_timeout, process_group
from ddpm_ds.train.ema import Ema
from ddpm_ds.train.meters import peak_memory_bytes, peak_reserved_bytes
from ddpm_ds.train.objective import Denoising, replica_batches
from ddpm_ds.train.resolve import cut_and_ordered, decide, share_threads

MOST_WARM_UP_STEPS = 40
"""Maximum number of steps before the timed ones; fp16 skips the weight update until it has found a loss scale."""


def measure(
    plan: RunPlan,
    device: str,
    budget_bytes: int | None,
    steps: int,
    hang_seconds: float,
    progress: Callable[[], object],
) -> tuple[list[float], int, int]:
    """Build the engine, train until a step has updated the weights, then time ``steps`` of them.

    Returns the seconds of each timed step, the peak bytes of this process, and the interval of activation
    checkpointing. Every process of the layout calls this. The data-set cache must exist. ``budget_bytes`` limits
    PyTorch's allocator on CUDA; on a CPU the caller enforces it. ``progress`` is called after each step; if
    ``hang_seconds`` pass without a call, the watching process ends this one.
    """
    own = choose_device(device, plan.ds.layout.stages)
    if own.type == "cuda" and budget_bytes is not None:
        share = budget_bytes / torch.cuda.get_device_properties(own).total_memory
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0), own)
    use_host_accelerator()
    share_threads(own)
    store = DatasetCache.open(cache_path(plan.spec.data), verify=False)
    plan = decide(replace(plan, ds=plan.ds.without_reports()), own)
    with process_group(group_timeout(hang_seconds)):
        seconds = _train(cut_and_ordered(plan, own), store, own, steps, progress)
        peak = peak_reserved_bytes(own) or peak_memory_bytes(own)
        dist.barrier()  # a rank that left before the others are done would count as failed
    interval = plan.ds.checkpoint_interval
    assert interval != "auto"
    return seconds, peak, interval


def _train(
    plan: RunPlan, store: DatasetCache, device: torch.device, steps: int, progress: Callable[[], object]
) -> list[float]:
    """Build the engine and train; return the seconds of each timed step."""
    seed, objective = plan.spec.train.seed, Denoising(plan.spec, device)
    engine = build_engine(plan.layers, plan.bounds, plan.ds, objective, seed=seed, programs=plan.programs)
    ema = Ema(engine, plan.spec.ema)
    batches = None
    if engine.reads_data:
        replicas, replica = plan.ds.layout.replicas, engine.grid.get_data_parallel_id()
        batches = replica_batches(plan, store, device, replicas=replicas, replica=replica)

    def step() -> float:
        """Take one step with all processes and return its seconds."""
        dist.barrier()
        begin = time.perf_counter()
        engine.train_batch(batches)
        ema.update()
        wait_for_device(device)
        dist.barrier()
        seconds = time.perf_counter() - begin
        progress()
        return seconds

    least = CAUTIOUS_STEPS if runs_behind(device) else 1  # the first steps send messages in another way
    for number in range(1, MOST_WARM_UP_STEPS + 1):
        step()
        if engine.skipped_steps < number and number >= least:
            break
    return [step() for _ in range(steps)]
