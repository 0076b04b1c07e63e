"""A benchmark of ways of training on all processes, from the plan to the table."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import torch
import torch.distributed as dist
from tqdm import tqdm

from ddpm_ds.device import wait_for_device
from ddpm_ds.experiments.data_rate import Spread
from ddpm_ds.pipeline.cuts import Schedule
from ddpm_ds.pipeline.exchange import said_by_all
from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.processes.process_group import process_group
from rivals.choice import ROUNDS, STEPS, TORCH_SCHEDULES
from rivals.deepspeed_rows import OurPipeline, StockPipeline, TracedPipeline, ZeroWithoutPipeline
from rivals.loops import DataParallel, PlainLoop
from rivals.measure import LOSS_TOLERANCE, check_losses, ratios, time_rounds
from rivals.observation import Observation, observe, peak_in_child, print_peak
from rivals.pipelining import TorchPipeline
from rivals.report import Report, Result, about, common_lines, versions
from rivals.rows import Row, Setting

SCHEDULES: dict[str, Schedule] = {name: name for name in get_args(Schedule)}
"""Schedules of this project's rows, by the rows' names."""


def build_row(name: str, setting: Setting) -> Row:
    """Return the row with a name of :data:`rivals.choice.ROWS`; every process calls this."""
    if name in SCHEDULES:
        return OurPipeline(setting, SCHEDULES[name])
    if name in ("stock", "stock-default"):
        return StockPipeline(setting, default_cuts=name == "stock-default")
    if name in TORCH_SCHEDULES:
        return TorchPipeline(setting, TORCH_SCHEDULES[name])
    rows: dict[str, Callable[[Setting], Row]] = {
        "plain": PlainLoop,
        "traced": TracedPipeline,
        "ddp": DataParallel,
        "zero2": ZeroWithoutPipeline,
    }
    return rows[name](setting)


def run_layout(
    plan: RunPlan, device: torch.device, names: Sequence[str], not_run: Mapping[str, str], options: argparse.Namespace
) -> None:
    """Compare the losses of all rows, time them in turn, and publish the report; every process calls this.

    Raises:
        UserError: something given is wrong; raised before any process group exists.
        BadNumbersError: the rows' losses differ by more than rounding.
    """
    setting = Setting.prepare(plan, device, verbose=options.verbose)
    layout = plan.ds.layout
    rounds, steps = options.rounds or ROUNDS["layout"], options.steps_per_round or STEPS["layout"]
    with process_group():
        if options.memory_of is not None:
            print_peak(lambda: build_row(options.memory_of, setting), device)
        else:
            results = _measure(setting, names, rounds, steps, options)
        dist.barrier()
    if options.memory_of is not None or int(os.environ["RANK"]) != 0:
        return
    replicas = f" x {layout.replicas} replicas" if layout.replicas > 1 else ""
    split = f"{layout.micro_batch_images} x {layout.micro_batches} micro-batches{replicas}"
    facts = about(
        setting,
        options.overrides,
        not_run,
        versions=versions(),
        parameters=plan.parameters,
        layout=f"{layout.world_size} processes = {layout.stages} stages x {layout.replicas} replicas",
        batch=f"{layout.batch_images} images = {split}",
        rounds=rounds,
        steps_per_round=steps,
    )
    head = [
        f"U-Net        {plan.parameters:,} parameters: {plan.spec.name} with {plan.ds_path}",
        f"layout       {facts['layout']}",
        f"batch        {facts['batch']}; {setting.recomputing()}",
        *common_lines(facts),
        f"losses       largest relative difference in the first {options.compared_steps} steps",
        "sent         in one step by the rank that sends most; of collectives what a ring of processes sends",
        "bubble       share of a step that a rank spends outside of forward and backward, mean over ranks",
        *(["peak         memory of the fullest rank, in processes that train one row each"] * options.memory),
    ]
    Report(facts, head, results).publish(plan, options)


def _measure(
    setting: Setting, names: Sequence[str], rounds: int, steps: int, options: argparse.Namespace
) -> list[Result]:
    device, silent = setting.device, None if dist.get_rank() == 0 else True
    peaks = [said_by_all(peak_in_child(name), int) if options.memory else None for name in names]
    rows = [build_row(name, setting) for name in names]
    parts = [[float(row.step()) for _ in range(options.compared_steps)] for row in rows]  # which warms them up, too
    losses = [[sum(of_ranks) for of_ranks in zip(*said_by_all(part, list[float]), strict=True)] for part in parts]
    differences = check_losses([row.name for row in rows], losses, LOSS_TOLERANCE[setting.plan.ds.precision])
    gc.collect()

    def synchronize() -> None:
        wait_for_device(device)
        dist.barrier()

    with tqdm(total=rounds, desc="measuring", unit="round", disable=silent) as bar:
        seconds = time_rounds([row.step for row in rows], rounds, steps, synchronize, bar.update)
    images = setting.plan.ds.layout.batch_images

    def observed(row: Row) -> list[Observation]:
        return said_by_all(observe(row, steps, device), Observation)

    return [
        layout_result(name, row, images, own, seconds[0], observed(row), *others)
        for name, row, own, *others in zip(names, rows, seconds, losses, differences, peaks, strict=True)
    ]


def layout_result(
    name: str,
    row: Row,
    images: int,
    seconds: list[float],
    reference: list[float],
    observed: Sequence[Observation],
    losses: list[float],
    loss_difference: float,
    peaks: list[int] | None,
) -> Result:
    """Return the report of a row.

    ``images`` are those of a batch; ``seconds`` of a step and those of the first row, the ``reference``, are by round;
    ``observed`` and peak bytes are by rank.
    """
    step, ratio = Spread.of(seconds), Spread.of(ratios(seconds, reference))
    sent = max(seen.message_bytes + seen.collective_bytes for seen in observed) / 1e6
    bubble = sum(seen.idle for seen in observed) / len(observed) if row.is_pipeline else None
    first = seconds is reference
    numbers = {
        "row": name,
        "name": row.name,
        "note": row.note,
        "images_per_second": images / step.median,
        "step_seconds": step,
        "ratio": ratio,
        "round_step_seconds": seconds,
        "first_losses": losses,
        "largest_loss_difference": loss_difference,
        "rank_message_bytes": [seen.message_bytes for seen in observed],
        "rank_collective_bytes": [seen.collective_bytes for seen in observed],
        "bubble": bubble,
        "rank_peak_bytes": peaks,
    }
    cells = {
        "row": name,
        "step ms": step.as_milliseconds(),
        "images/s": f"{images / step.median:,.4g}",
        "time ratio": "1" if first else ratio.as_ratio(),
        "sent MB": f"{sent:.2f}",
        "bubble": "-" if bubble is None else f"{bubble:.1%}",
        "peak MB": "" if peaks is None else f"{max(peaks) / 1e6:.0f}",
        "loss difference": "" if first else f"{loss_difference:.1e}",
        "what": row.name,
    }
    return Result(numbers, cells)
