"""One benchmark from the plan to the table."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from ddpm_ds.data.prepare import prepare
from ddpm_ds.device import wait_for_device
from ddpm_ds.experiments.data_rate import Spread
from ddpm_ds.pipeline.build import use_host_accelerator
from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.processes.process_group import process_group
from ddpm_ds.tracking.run_folder import OUTPUT_ROOT
from ddpm_ds.train.resolve import decide, share_threads
from ddpm_ds.train.session import check_store
from ddpm_ds.train.setting import Setting
from rivals.build import build_row
from rivals.measure import (
    LOSS_TOLERANCE,
    Observation,
    check_losses,
    first_losses,
    observe,
    of_all_processes,
    ratios,
    time_rounds,
)
from rivals.memory import PeakMemory, peak_in_child, say_peak
from rivals.record import record
from rivals.report import BenchmarkReport, NotRun, RowResult, batch_line, layout_line, machine, table, versions
from rivals.rows import Row


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    steps_per_round: int
    compared_steps: int
    memory: bool


@dataclass(frozen=True)
class Outputs:
    """Where the report goes besides the terminal, and what it says about its making."""

    command: str
    overrides: Sequence[str]
    json_path: Path | None
    mlflow: bool


@dataclass(frozen=True)
class Measured:
    """Of one row, on every process."""

    row: Row
    losses: list[float]
    difference: float
    seconds: list[float]
    observations: list[Observation]
    """By rank."""
    peaks: list[int] | None
    """By rank."""


def run_benchmark(
    plan: RunPlan,
    device: torch.device,
    names: Sequence[str],
    not_run: Mapping[str, str],
    effort: Effort,
    outputs: Outputs,
    *,
    verbose: bool,
) -> None:
    """Compare losses, time the rows in turn, print the table, write the JSON and the MLflow runs.

    Every process calls this. ``not_run`` are the rows left out and why.

    Raises:
        UserError: something given is wrong; raised before any process group exists.
        BadNumbersError: the rows' losses differ by more than rounding.
    """
    load_before = os.getloadavg()[0]
    setting = prepare_setting(plan, device, verbose)
    with process_group():
        measured = _measure(setting, names, effort)
        dist.barrier()
    if int(os.environ["RANK"]) != 0:
        return
    report = BenchmarkReport(
        name=plan.spec.name,
        command=outputs.command,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        machine=machine(device),
        load_before=load_before,
        versions=versions(),
        spec=str(plan.spec_path),
        overrides=list(outputs.overrides),
        deepspeed_config=str(plan.ds_path),
        parameters=plan.parameters,
        layout=layout_line(plan),
        batch=batch_line(plan),
        activation_checkpoint_interval=int(setting.plan.ds.checkpoint_interval),
        rounds=effort.rounds,
        steps_per_round=effort.steps_per_round,
        rows=[
            _result(name, one, measured[0].seconds, plan.ds.layout.batch_images)
            for name, one in zip(names, measured, strict=True)
        ],
        not_run=[NotRun(row, reason) for row, reason in not_run.items()],
    )
    print(table(report), flush=True)
    if outputs.json_path is not None:
        outputs.json_path.write_text(json.dumps(asdict(report), indent=2) + "\n")
    if outputs.mlflow:
        print(f"MLflow: {record(report, plan, OUTPUT_ROOT).open_with}", flush=True)


def measure_memory(plan: RunPlan, device: torch.device, name: str, *, verbose: bool) -> None:
    """What a child does that :func:`rivals.memory.peak_in_child` starts."""
    setting = prepare_setting(plan, device, verbose)
    with process_group():
        memory = PeakMemory(device)
        say_peak(build_row(name, setting), memory)
        dist.barrier()


def prepare_setting(plan: RunPlan, device: torch.device, verbose: bool) -> Setting:
    """The images, threads and filled configuration of this process, before any process group exists.

    Raises:
        UserError: something given is wrong.
    """
    use_host_accelerator()
    share_threads(device)
    store = prepare(plan.spec.data, progress=int(os.environ["LOCAL_RANK"]) == 0)
    check_store(store, plan)
    return Setting(decide(replace(plan, ds=plan.ds.without_reports()), device), store, device, verbose)


def _measure(setting: Setting, names: Sequence[str], effort: Effort) -> list[Measured]:
    device, silent = setting.device, None if dist.get_rank() == 0 else True
    peaks = [of_all_processes(peak_in_child(name)) if effort.memory else None for name in names]
    rows = [build_row(name, setting) for name in names]
    losses = first_losses(rows, effort.compared_steps)
    differences = check_losses(rows, losses, LOSS_TOLERANCE[setting.plan.ds.precision])
    gc.collect()

    def synchronize() -> None:
        wait_for_device(device)
        dist.barrier()

    with tqdm(total=effort.rounds, desc="measuring", unit="round", disable=silent) as bar:
        seconds = time_rounds(
            rows,
            rounds=effort.rounds,
            steps=effort.steps_per_round,
            synchronize=synchronize,
            after_round=bar.update,
        )
    observations = [of_all_processes(observe(row, effort.steps_per_round, device)) for row in rows]
    return [Measured(*one) for one in zip(rows, losses, differences, seconds, observations, peaks, strict=True)]


def _result(name: str, measured: Measured, reference: Sequence[float], batch_images: int) -> RowResult:
    row, seconds, observations = measured.row, measured.seconds, measured.observations
    idle = sum(seen.idle for seen in observations) / len(observations)
    return RowResult(
        row=name,
        name=row.name,
        note=row.note,
        images_per_second=batch_images / Spread.of(seconds).median,
        step_seconds=Spread.of(seconds),
        ratio=Spread.of(ratios(seconds, reference)),
        round_step_seconds=seconds,
        first_losses=measured.losses,
        largest_loss_difference=measured.difference,
        rank_message_bytes=[seen.message_bytes for seen in observations],
        rank_collective_bytes=[seen.collective_bytes for seen in observations],
        bubble=idle if row.is_pipeline else None,
        rank_peak_bytes=measured.peaks,
    )
