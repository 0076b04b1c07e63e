"""What a benchmark found, as JSON and as a table."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

import ddpm_ds
from ddpm_ds.command_line import aligned
from ddpm_ds.experiments.data_rate import Spread
from ddpm_ds.predict.plan import RunPlan


@dataclass(frozen=True)
class RowResult:
    """One row; lists have an entry per round, per compared step or per rank, as their names say."""

    row: str
    """As ``--rows`` takes it."""
    name: str
    note: str
    images_per_second: float
    step_seconds: Spread
    ratio: Spread
    """Step time over that of the first row; above 1 it takes longer."""
    round_step_seconds: list[float]
    first_losses: list[float]
    largest_loss_difference: float
    """Relative, from the first row's."""
    rank_message_bytes: list[int]
    """Sent in one step to one other process: activations and gradients of a pipeline."""
    rank_collective_bytes: list[int]
    """Sent in one step as part of collectives, as in a ring."""
    bubble: float | None
    """Share of the step in which a rank is in neither forward nor backward, mean over the ranks of a pipeline."""
    rank_peak_bytes: list[int] | None
    """Of a process that trains this row alone; None where it was not asked for."""

    @property
    def sent_bytes(self) -> int:
        """Of the rank that sends most."""
        return max(map(sum, zip(self.rank_message_bytes, self.rank_collective_bytes, strict=True)))


@dataclass(frozen=True)
class NotRun:
    """A row that can't run in this layout."""

    row: str
    reason: str


@dataclass(frozen=True)
class BenchmarkReport:
    """Everything a reader needs to judge the numbers and to repeat them."""

    name: str
    """Of the spec."""
    command: str
    date: str
    machine: str
    load_before: float
    """Processes that wanted a core in the minute before (Unix load average), this one's start-up included."""
    versions: dict[str, str]
    spec: str
    overrides: list[str]
    deepspeed_config: str
    parameters: int
    layout: str
    batch: str
    activation_checkpoint_interval: int
    rounds: int
    steps_per_round: int
    rows: list[RowResult]
    not_run: list[NotRun]


def machine(device: torch.device) -> str:
    """Processor or GPU, and how many cores and threads compute."""
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    host = f"{_processor()}, {cores} cores, {torch.get_num_threads()} threads per process"
    return f"{torch.cuda.get_device_name(device)} ({host})" if device.type == "cuda" else host


def versions() -> dict[str, str]:
    """What was run."""
    packages = {name: version(name) for name in ("torch", "deepspeed")}
    return {"ddpm_ds": ddpm_ds.__version__, "python": platform.python_version(), **packages}


def layout_line(plan: RunPlan) -> str:
    """Who works on what."""
    layout = plan.ds.layout
    return f"{layout.world_size} processes = {layout.stages} stages x {layout.replicas} replicas"


def batch_line(plan: RunPlan) -> str:
    """How a step's images are split in a pipeline."""
    layout = plan.ds.layout
    replicas = f" x {layout.replicas} replicas" if layout.replicas > 1 else ""
    return (
        f"{layout.batch_images} images = {layout.micro_batch_images} x {layout.micro_batches} micro-batches{replicas}"
    )


def table(report: BenchmarkReport) -> str:
    """The report as text."""
    recompute = report.activation_checkpoint_interval
    lines = [
        f"U-Net        {report.parameters:,} parameters: {report.name} with {report.deepspeed_config}",
        f"layout       {report.layout}",
        f"batch        {report.batch}; activation checkpointing {f'every {recompute} layers' if recompute else 'off'}",
        f"machine      {report.machine}, load {report.load_before:.1f} before",
        f"versions     {', '.join(f'{name} {number}' for name, number in report.versions.items())}",
        f"losses       of the first {len(report.rows[0].first_losses)} steps: largest relative difference",
        f"times        {report.rounds} rounds of {report.steps_per_round} steps, rows in turn: medians (quartiles)",
        "sent         in one step by the rank that sends most; of collectives what a ring of processes sends",
        "bubble       share of a step that a rank spends outside of forward and backward, mean over ranks",
    ]
    if report.rows[0].rank_peak_bytes is not None:
        lines.append("peak         memory of the fullest rank, in processes that train one row each")
    notes = [f"{row.row}: {row.note}" for row in report.rows if row.note]
    missing = [f"{row.row} did not run: {row.reason}" for row in report.not_run]
    return "\n".join([*lines, "", *_columns(report.rows), *([""] if notes or missing else []), *notes, *missing])


def _columns(rows: Sequence[RowResult]) -> list[str]:
    cells = [("row", "step ms", "images/s", "time ratio", "sent MB", "bubble", "peak MB", "loss difference", "what")]
    for row in rows:
        first = row is rows[0]
        cells.append(
            (
                row.row,
                row.step_seconds.as_milliseconds(),
                f"{row.images_per_second:,.4g}",
                "1" if first else row.ratio.as_ratio(),
                f"{row.sent_bytes / 1e6:.2f}",
                "-" if row.bubble is None else f"{row.bubble:.1%}",
                "" if row.rank_peak_bytes is None else f"{max(row.rank_peak_bytes) / 1e6:.0f}",
                "" if first else f"{row.largest_loss_difference:.1e}",
                row.name,
            )
        )
    columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
    return aligned(list(zip(*columns, strict=True)), left=range(len(columns)))


def _processor() -> str:
    """The processor's name; Python knows it on few systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
