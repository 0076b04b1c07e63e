"""Results of a benchmark: as a table, as JSON and in MLflow."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

import ddpm_ds
from ddpm_ds.command_line import aligned
from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.tracking.run_folder import OUTPUT_ROOT
from ddpm_ds.tracking.tracker import RunLink, Tracker
from rivals.rows import Setting

EXPERIMENT = "benchmarks"
"""The MLflow experiment."""


@dataclass(frozen=True)
class Result:
    """Results of one row."""

    numbers: dict[str, Any]
    """Values for JSON: "row" as ``--rows`` takes it, its "name" and "note", and the measurements."""
    cells: dict[str, str]
    """Texts by column of the table."""
    metrics: dict[str, float | None]
    """Values for MLflow; None was not measured."""
    series: dict[str, Sequence[float]]
    """Series for MLflow, by round or by step."""
    block: int = 0
    """Number of the table in which the row is; rows of one table are compared with each other."""

    @property
    def measured(self) -> dict[str, float]:
        return {name: value for name, value in self.metrics.items() if value is not None}


@dataclass(frozen=True)
class Report:
    """Everything a reader needs to judge the numbers and to repeat them."""

    about: dict[str, Any]
    """Facts for JSON: what was run, how, where and when."""
    head: Sequence[str]
    """Lines above the table."""
    rows: Sequence[Result]
    remarks: Sequence[str] = ()
    """Lines below the table, besides the rows' notes and the rows that did not run."""

    def table(self) -> str:
        """The report as text."""
        numbers = [row.numbers for row in self.rows]
        below = [f"{row['row']}: {row['note']}" for row in numbers if row["note"]]
        below += [*self.remarks, *(f"{row['row']} did not run: {row['reason']}" for row in self.about["not_run"])]
        blocks = [_columns([row.cells for row in self.rows if row.block == number]) for number in (0, 1)]
        return "\n\n".join("\n".join(block) for block in (self.head, *blocks, below) if block)

    def json(self) -> str:
        """The report as a file."""
        return json.dumps({**self.about, "rows": [row.numbers for row in self.rows]}, indent=2) + "\n"

    def publish(self, plan: RunPlan, options: argparse.Namespace) -> None:
        """Print the table, write the file and log the MLflow runs that were asked for."""
        print(self.table(), flush=True)
        if options.json is not None:
            options.json.write_text(self.json())
        if options.mlflow:
            print(f"MLflow: {record(self, plan, OUTPUT_ROOT).open_with}", flush=True)


def about(setting: Setting, overrides: Sequence[str], not_run: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """Return the facts of every report in JSON, and ``more``; ``load_before`` is the Unix load average of the minute
    before.
    """
    words = [word for word in sys.argv if not word.startswith("--local_rank")]
    return {
        "name": setting.plan.spec.name,
        "command": shlex.join(["deepspeed", "--num_gpus", os.environ["LOCAL_WORLD_SIZE"], *words]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(setting.device),
        "load_before": setting.load_before,
        "spec": str(setting.plan.spec_path),
        "overrides": list(overrides),
        "deepspeed_config": str(setting.plan.ds_path),
        "activation_checkpoint_interval": setting.checkpoint_interval,
        "not_run": [{"row": row, "reason": reason} for row, reason in not_run.items()],
        **more,
    }


def common_lines(about: Mapping[str, Any]) -> list[str]:
    """Lines that stand above every table."""
    return [
        f"machine      {about['machine']}, load {about['load_before']:.1f} before",
        f"versions     {', '.join(f'{name} {number}' for name, number in about['versions'].items())}",
        f"times        {about['rounds']} rounds of {about['steps_per_round']} steps, rows in turn: medians (quartiles)",
    ]


def machine(device: torch.device) -> str:
    """Processor or GPU, and how many cores and threads compute."""
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    path = Path("/proc/cpuinfo")  # Python knows the name on few systems
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    host = f"{processor}, {cores} cores, {torch.get_num_threads()} threads per process"
    return f"{torch.cuda.get_device_name(device)} ({host})" if device.type == "cuda" else host


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    """Versions of what was run: this project, Python, PyTorch, DeepSpeed and some more ``packages``."""
    known = {"ddpm_ds": ddpm_ds.__version__, "python": platform.python_version()}
    return known | {name: version(name) for name in ("torch", "deepspeed", *packages)}


def milliseconds(seconds: Sequence[float]) -> list[float]:
    return [1e3 * value for value in seconds]


def record(report: Report, plan: RunPlan, root: Path) -> RunLink:
    """Log a run with the table, and under it one for each row.

    What MLflow does not take is left in ``root``, where its store is if none is named.
    """
    root.mkdir(parents=True, exist_ok=True)
    whole = uuid.uuid4().hex
    shared = {
        "spec": plan.spec.model_dump(mode="json"),
        "ds_config": plan.ds.as_json(),
        "layout": vars(plan.ds.layout),
        "machine": report.about["machine"],
    }
    tags = {"kind": "benchmark", "mlflow.source.name": "launch/bench.py"}
    tags |= {f"version.{name}": number for name, number in report.about["versions"].items()}

    def start(run_name: str, params: dict[str, object], identity: str | None = None) -> Tracker:
        return Tracker.start(
            EXPERIMENT,
            run_name,
            output_root=root,
            run_dir=root,
            params={**shared, **params},
            tags=tags,
            identity=identity,
            parent=None if identity else whole,
        )

    layout, command = report.about["layout"], report.about["command"]
    parent = start(f"{report.about['name']} {layout}", {"command": command}, identity=whole)
    for row in report.rows:
        parent.metrics({f"{row.numbers['row']}.{metric}": value for metric, value in row.measured.items()}, 0)
    parent.text(report.table() + "\n", "table.txt")
    parent.text(report.json(), "report.json")
    link = parent.finish("FINISHED")  # before its children, which look for it
    children = []
    for row in report.rows:
        params = {name: row.numbers[name] for name in ("row", "name", "note")}
        children.append(start(params["row"], params))
    for row, child in zip(report.rows, children, strict=True):
        child.metrics(row.measured, 0)
        for metric, values in row.series.items():
            for number, value in enumerate(values):
                child.metrics({metric: value}, number)
    for child in children:
        child.finish("FINISHED")
    return link


def _columns(rows: Sequence[dict[str, str]]) -> list[str]:
    """Aligned lines below their heading; a column that no row has anything in is left out."""
    if not rows:
        return []
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    return aligned([names, *([row[name] for name in names] for row in rows)], left=range(len(names)))
