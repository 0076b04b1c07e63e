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
from ddpm_ds.benchmark.measure import Spread
from ddpm_ds.train.plan import RunPlan


@dataclass(frozen=True)
class RowResult:
    """One row; lists have an entry per round, losses one per compared step."""

    name: str
    images_per_second: float
    step_seconds: Spread
    ratio: Spread
    """Step time over that of the first row."""
    round_step_seconds: list[float]
    first_losses: list[float]
    largest_loss_difference: float
    """Relative, from the first row's."""


@dataclass(frozen=True)
class Report:
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
    batch: str
    activation_checkpoint_interval: int
    rounds: int
    steps_per_round: int
    rows: list[RowResult]


def machine(device: torch.device) -> str:
    """Processor or GPU, and how many cores and threads compute."""
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    host = f"{_processor()}, {cores} cores, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name(device)} ({host})" if device.type == "cuda" else host


def versions() -> dict[str, str]:
    """What was run."""
    packages = {name: version(name) for name in ("torch", "deepspeed")}
    return {"ddpm_ds": ddpm_ds.__version__, "python": platform.python_version(), **packages}


def batch_line(plan: RunPlan) -> str:
    """How a step's images are split."""
    layout = plan.ds.layout
    return f"{layout.batch_images} images = {layout.micro_batch_images} x {layout.micro_batches} micro-batches"


def table(report: Report) -> str:
    """The report as text."""
    recompute = report.activation_checkpoint_interval
    lines = [
        f"U-Net        {report.parameters:,} parameters: {report.name} with {report.deepspeed_config}",
        f"batch        {report.batch}; activation checkpointing {f'every {recompute} layers' if recompute else 'off'}",
        f"machine      {report.machine}, load {report.load_before:.1f} before",
        f"versions     {', '.join(f'{name} {number}' for name, number in report.versions.items())}",
        f"losses       of the first {len(report.rows[0].first_losses)} steps: largest relative difference",
        f"times        {report.rounds} rounds of {report.steps_per_round} steps, rows in turn: medians (quartiles)",
        "",
    ]
    return "\n".join(lines + _columns(report.rows))


def _columns(rows: Sequence[RowResult]) -> list[str]:
    cells = [("row", "step ms", "images/s", "time ratio", "loss difference")]
    for row in rows:
        time, ratio = row.step_seconds, row.ratio
        first = row is rows[0]
        cells.append(
            (
                row.name,
                f"{1e3 * time.median:.4g} ({1e3 * time.low:.4g}-{1e3 * time.high:.4g})",
                f"{row.images_per_second:,.4g}",
                "1" if first else f"{ratio.median:.3f} ({ratio.low:.3f}-{ratio.high:.3f})",
                "" if first else f"{row.largest_loss_difference:.1e}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _processor() -> str:
    """The processor's name; Python knows it on few systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
