"""Runs as training would have left them, without training: in MLflow's store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

BEGIN_MS = 1_790_000_000_000
BATCH = 64
STEPS_PER_POINT = 10
DATABASE = "mlflow.db"

Points = Mapping[str, list[float]]


class PlantedStore:
    """An MLflow store in ``root``, with one experiment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.client = MlflowClient(f"sqlite:///{root / DATABASE}")
        self.experiment = self.client.create_experiment("digits", (root / "mlartifacts").as_uri())
        self.begin = BEGIN_MS

    def run(
        self,
        name: str,
        points: Points | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        parent: str | None = None,
    ) -> str:
        """A finished run with log points a second apart; returns its id."""
        self.begin += 1000
        family = {} if parent is None else {"mlflow.parentRunId": parent}
        run = str(self.client.create_run(self.experiment, self.begin, {**(tags or {}), **family}, name).info.run_id)
        metrics = [
            Metric(metric, value, self.begin + 1000 * number, STEPS_PER_POINT * number)
            for metric, values in (points or {}).items()
            for number, value in enumerate(values, start=1)
        ]
        texts = [Param(key, str(value)) for key, value in {"train.batch_images": BATCH, **(params or {})}.items()]
        self.client.log_batch(run, metrics, texts)
        self.client.set_terminated(run, "FINISHED", self.begin + 1_000_000)
        return run


def losses(points: int, floor: float = 0.03) -> list[float]:
    """A curve that falls to ``floor``, with a ripple."""
    return [floor + 0.9 * math.exp(-number / 12) + 0.01 * math.sin(1.7 * number) ** 2 for number in range(points)]
