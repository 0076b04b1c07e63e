"""A benchmark in MLflow: one run with the table, and under it one for each row."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict
from pathlib import Path

from ddpm_ds.benchmark.report import Report, RowResult, table
from ddpm_ds.train.plan import RunPlan
from ddpm_ds.train.tracking import RunLink, Tracker

EXPERIMENT = "benchmarks"


def record(report: Report, plan: RunPlan, root: Path) -> RunLink:
    """Log ``report``; what MLflow does not take is left in ``root``, where its store is if none is named."""
    root.mkdir(parents=True, exist_ok=True)
    identity = uuid.uuid4().hex
    shared = {
        "spec": plan.spec.model_dump(mode="json"),
        "ds_config": plan.ds.config,
        "layout": asdict(plan.ds.layout),
        "machine": report.machine,
    }
    tags = {"kind": "benchmark", "mlflow.source.name": "launch/bench.py"}
    tags |= {f"version.{name}": number for name, number in report.versions.items()}
    name = f"{report.name} {report.layout}"
    parent = Tracker.start(
        EXPERIMENT,
        name,
        output_root=root,
        run_dir=root,
        params={**shared, "command": report.command},
        tags=tags,
        identity=identity,
        system_metrics=False,
    )
    for row in report.rows:
        parent.metrics({f"{row.row}.{metric}": value for metric, value in _metrics(row).items()}, 0)
    parent.text(table(report) + "\n", "table.txt")
    parent.text(json.dumps(asdict(report), indent=2) + "\n", "report.json")
    link = parent.finish("FINISHED")  # before its children, which look for it
    children = [
        Tracker.start(
            EXPERIMENT,
            row.row,
            output_root=root,
            run_dir=root,
            params={**shared, "row": row.row, "name": row.name, "note": row.note},
            tags=tags,
            parent=identity,
            system_metrics=False,
        )
        for row in report.rows
    ]
    for row, child in zip(report.rows, children, strict=True):
        child.metrics(_metrics(row), 0)
        for number, seconds in enumerate(row.round_step_seconds):
            child.metrics({"round_step_ms": 1e3 * seconds}, number)
        for number, loss in enumerate(row.first_losses):
            child.metrics({"first_loss": loss}, number)
    for child in children:
        child.finish("FINISHED")
    return link


def _metrics(row: RowResult) -> dict[str, float]:
    metrics = {
        "step_ms": 1e3 * row.step_seconds.median,
        "images_per_second": row.images_per_second,
        "time_ratio": row.ratio.median,
        "time_ratio_low": row.ratio.low,
        "time_ratio_high": row.ratio.high,
        "sent_mb": row.sent_bytes / 1e6,
        "loss_difference": row.largest_loss_difference,
    }
    if row.bubble is not None:
        metrics["bubble"] = row.bubble
    if row.rank_peak_bytes is not None:
        metrics["peak_mb"] = max(row.rank_peak_bytes) / 1e6
    return metrics
