"""The program of a start, changed; DeepSpeed's launcher or a test starts it as a module.

``PLANTED=kill``: rank 1 is killed when a micro-batch is large, while the other rank waits for it. ``PLANTED=budget``:
first some trials without a budget, of which the budget is made: room for 5 images.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from ddpm_ds.fit import measure, trial
from ddpm_ds.fit.child import Answer
from ddpm_ds.fit.task import Task
from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.processes.ranks import recorded

KILLED_FROM = 4
measured, searched = measure.measure, trial.search


def dying(plan: RunPlan, *others: Any) -> Answer:
    """Instead of :func:`ddpm_ds.fit.measure.measure`."""
    if plan.ds.layout.micro_batch_images >= KILLED_FROM and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return measured(plan, *others)


def budgeted(task: Task, folder: Path, rank: int) -> dict[str, object]:
    """Instead of :func:`ddpm_ds.fit.trial.search`."""
    first = trial.Trials(task, folder / "first", rank)
    low, high = (first.run(size, None).peak_bytes for size in (2, 8))
    budget = low + (high - low) * 7 // 12  # of 5.5 images
    return {**searched(task.model_copy(update={"budget_bytes": budget}), folder, rank), "planted": [low, high, budget]}


if os.environ["PLANTED"] == "kill":
    measure.measure = dying  # type: ignore[assignment]
else:
    trial.search = budgeted

if __name__ == "__main__":
    sys.exit(recorded(trial.main))
