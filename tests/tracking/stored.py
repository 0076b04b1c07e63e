"""A run that is begun in an output root, and what its store has of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

from ddpm_ds.tracking.tracker import Tracker


def start(root: Path, **changes: Any) -> Tracker:
    options: dict[str, Any] = {"params": {}, "tags": {}, "output_root": root, "run_dir": root / "run"} | changes
    return Tracker.start("experiment", "name", **options)


def read_run(root: Path) -> Run:
    """The only run of the store."""
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return run


def history(root: Path, name: str) -> list[tuple[int, float]]:
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    return [(point.step, point.value) for point in client.get_metric_history(read_run(root).info.run_id, name)]
