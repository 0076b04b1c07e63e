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
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from ddpm_ds.command_line import aligned, writing
from ddpm_ds.planning import RunPlan
from ddpm_ds.tracking.run_folder import OUTPUT_ROOT
from ddpm_ds.tracking.tracker import RunLink, Tracker
from ddpm_ds.version import __version__
from rivals.measure import Spread
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
    block: int = 0
    """Number of the table in which the row is; rows of one table are compared with each other."""

    def metrics(self) -> dict[str, float]:
        """Return the measured numbers for MLflow; of a spread the median, and ``_low`` and ``_high`` quartiles."""
        found: dict[str, float] = {}
        for name, value in self.numbers.items():
            if isinstance(value, Spread):
                found |= {name: value.median, f"{name}_low": value.low, f"{name}_high": value.high}
            elif isinstance(value, (int, float)):
                found[name] = value
        return found

    def series(self) -> dict[str, list[float]]:
        """Return the measurements by round, step or rank."""
        return {name: value for name, value in self.numbers.items() if isinstance(value, list)}


@dataclass(frozen=True)
class Report:
    """Facts that a reader needs to judge and repeat the numbers."""

    about: dict[str, Any]
    """Facts for JSON: what was run, how, where and when."""
    head: Sequence[str]
    """Lines above the table."""
    rows: Sequence[Result]
    remarks: Sequence[str] = ()
    """Lines below the table, besides the rows' notes and the rows that did not run."""

    def table(self) -> str:
        """Return the report as text."""
        numbers = [row.numbers for row in self.rows]
        below = [f"{row['row']}: {row['note']}" for row in numbers if row["note"]]
        below += [*self.remarks, *(f"{row['row']} did not run: {row['reason']}" for row in self.about["not_run"])]
        blocks = [_columns([row.cells for row in self.rows if row.block == number]) for number in (0, 1)]
        return "\n\n".join("\n".join(block) for block in (self.head, *blocks, below) if block)

    def json(self) -> str:
        """Return the report as the text of a file."""
        return json.dumps({**self.about, "rows": [row.numbers for row in self.rows]}, indent=2, default=asdict) + "\n"

    def publish(self, plan: RunPlan, options: argparse.Namespace) -> None:
        """Print the table, write the file and log the MLflow runs that were asked for."""
        print(self.table(), flush=True)
        if options.json is not None:
            with writing(options.json, overwrite=options.overwrite) as file:
                file.write(self.json().encode())
        if options.mlflow:
            print(f"MLflow: {record(self, plan, OUTPUT_ROOT).open_with}", flush=True)


def _columns(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return aligned lines below their heading; a column that no row has anything in is left out."""
    names = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    return aligned([names, *([row[name] for name in names] for row in rows)], left=range(len(names))) if rows else []


def about(
    setting: Setting,
    overrides: Sequence[str],
    not_run: Mapping[str, str],
    packages: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return the facts of every report in JSON, the versions of some ``packages`` among them, and ``more``."""
    words = [word for word in sys.argv if not word.startswith(("--local_rank", "--local-rank"))]
    return {
        "name": setting.plan.spec.name,
        "command": shlex.join(["deepspeed", "--num_gpus", os.environ["LOCAL_WORLD_SIZE"], *words]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(setting.device),
        "versions": {
            "ddpm_ds": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "deepspeed", *packages)},
        },
        "load_before": setting.load_before,
        "spec": str(setting.plan.spec_path),
        "overrides": list(overrides),
        "deepspeed_config": str(setting.plan.ds_path),
        "activation_checkpoint_interval": setting.plan.ds.layout.checkpoint_interval,
        "not_run": [{"row": row, "reason": reason} for row, reason in not_run.items()],
        **more,
    }


def recomputing(about: Mapping[str, Any]) -> str:
    """Return the table's text on activation checkpointing."""
    interval = about["activation_checkpoint_interval"]
    return f"activation checkpointing {f'every {interval} layers' if interval else 'off'}"


def common_lines(about: Mapping[str, Any]) -> list[str]:
    """Return the lines that stand above every table."""
    return [
        f"machine      {about['machine']}, load {about['load_before']:.1f} before",
        f"versions     {', '.join(f'{name} {number}' for name, number in about['versions'].items())}",
        f"times        {about['rounds']} rounds of {about['steps_per_round']} steps, rows in turn: medians (quartiles)",
    ]


def machine(device: torch.device) -> str:
    """Return the GPU, or the processor, with its cores and the threads that compute."""
    path = Path("/proc/cpuinfo")  # Python knows the name on few systems
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count()
    host = f"{names[0] if names else platform.machine()}, {cores} cores, {torch.get_num_threads()} threads per process"
    return f"{torch.cuda.get_device_name(device)} ({host})" if device.type == "cuda" else host


def record(report: Report, plan: RunPlan, root: Path) -> RunLink:
    """Log a run with the table, and under it one for each row.

    Records that MLflow does not take are left in ``root``, where its store is if none is named.
    """
    root.mkdir(parents=True, exist_ok=True)
    facts, whole = report.about, uuid.uuid4().hex
    shared = {
        "spec": plan.spec.model_dump(mode="json"),
        "ds_config": plan.ds.as_json(),
        "layout": plan.ds.layout.sizes,
        "machine": facts["machine"],
    }
    tags = {"kind": "benchmark", "mlflow.source.name": "launch/bench.py"}
    tags |= {f"version.{name}": number for name, number in facts["versions"].items()}
    start = partial(Tracker.start, EXPERIMENT, output_root=root, run_dir=root, tags=tags)
    params = shared | {"command": facts["command"]}
    parent = start(f"{facts['name']} {facts['layout']}", params=params, identity=whole)
    for row in report.rows:
        parent.metrics({f"{row.numbers['row']}.{metric}": value for metric, value in row.metrics().items()}, 0)
    parent.text(report.table() + "\n", "table.txt")
    parent.text(report.json(), "report.json")
    link = parent.finish("FINISHED")  # before its children, which look for it
    children = []
    for row in report.rows:
        params = shared | {name: row.numbers[name] for name in ("row", "name", "note")}
        child = start(row.numbers["row"], params=params, parent=whole)
        child.metrics(row.metrics(), 0)
        for name, values in row.series().items():
            for number, value in enumerate(values):
                child.metrics({name: value}, number)
        children.append(child)
    for child in children:
        child.finish("FINISHED")
    return link
