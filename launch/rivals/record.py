"""A benchmark in MLflow: one run with the table, and under it one for each row."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.tracking.tracker import RunLink, Tracker
from rivals.one_device_report import OneDeviceReport, OneDeviceResult, one_device_table
from rivals.report import BenchmarkReport, RowResult, table

EXPERIMENT = "benchmarks"


@dataclass(frozen=True)
class _RowRun:
    """The run of one row."""

    row: str
    name: str
    note: str
    metrics: Mapping[str, float]
    series: Mapping[str, Sequence[float]]
    """By round or by step."""


def record(report: BenchmarkReport, plan: RunPlan, root: Path) -> RunLink:
    """Log ``report``; what MLflow does not take is left in ``root``, where its store is if none is named."""
    rows = [
        _RowRun(
            row.row,
            row.name,
            row.note,
            _metrics(row),
            {"round_step_ms": _milliseconds(row.round_step_seconds), "first_loss": row.first_losses},
        )
        for row in report.rows
    ]
    return _record(report, plan, root, table(report), rows)


def record_one_device(report: OneDeviceReport, plan: RunPlan, root: Path) -> RunLink:
    """The same of ``--one-device``."""
    rows = [
        _RowRun(
            row.row,
            row.name,
            row.note,
            _one_device_metrics(row),
            {
                "round_step_ms": _milliseconds(row.round_step_seconds),
                "round_forward_backward_ms": _milliseconds(row.round_forward_backward_seconds),
            },
        )
        for row in report.rows
    ]
    return _record(report, plan, root, one_device_table(report), rows)


def _record(
    report: BenchmarkReport | OneDeviceReport, plan: RunPlan, root: Path, text: str, rows: Sequence[_RowRun]
) -> RunLink:
    root.mkdir(parents=True, exist_ok=True)
    identity = uuid.uuid4().hex
    shared = {
        "spec": plan.spec.model_dump(mode="json"),
        "ds_config": plan.ds.as_json(),
        "layout": asdict(plan.ds.layout),
        "machine": report.machine,
    }
    tags = {"kind": "benchmark", "mlflow.source.name": "launch/bench.py"}
    tags |= {f"version.{name}": number for name, number in report.versions.items()}
    parent = Tracker.start(
        EXPERIMENT,
        f"{report.name} {report.layout}",
        output_root=root,
        run_dir=root,
        params={**shared, "command": report.command},
        tags=tags,
        identity=identity,
    )
    for row in rows:
        parent.metrics({f"{row.row}.{metric}": value for metric, value in row.metrics.items()}, 0)
    parent.text(text + "\n", "table.txt")
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
        )
        for row in rows
    ]
    for row, child in zip(rows, children, strict=True):
        child.metrics(dict(row.metrics), 0)
        for metric, values in row.series.items():
            for number, value in enumerate(values):
                child.metrics({metric: value}, number)
    for child in children:
        child.finish("FINISHED")
    return link


def _milliseconds(seconds: Sequence[float]) -> list[float]:
    return [1e3 * value for value in seconds]


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


def _one_device_metrics(row: OneDeviceResult) -> dict[str, float]:
    metrics = {
        "step_ms": 1e3 * row.step_seconds.median,
        "images_per_second": row.images_per_second,
        "speed": row.speed.median,
        "speed_low": row.speed.low,
        "speed_high": row.speed.high,
        "mfu": row.mfu,
    }
    if row.forward_backward_seconds is not None:
        metrics["forward_backward_ms"] = 1e3 * row.forward_backward_seconds.median
    if row.peak_bytes is not None:
        metrics["peak_mb"] = row.peak_bytes / 1e6
    if row.prediction_difference is not None and row.gradient_norm_difference is not None:
        metrics["prediction_difference"] = row.prediction_difference
        metrics["gradient_norm_difference"] = row.gradient_norm_difference
    return metrics
