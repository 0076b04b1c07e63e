"""A run that is begun in an output root, what its store has of it, and a store to be filled without training."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

from ddpm_ds.tracking.run_folder import IDENTITY, START_TAG
from ddpm_ds.tracking.tracker import RunStart, Tracker


class Store:
    """An output root with an empty store, to be filled."""

    def __init__(self, root: Path) -> None:
        self.root, self.client = root, MlflowClient(f"sqlite:///{root}/mlflow.db")
        self.experiment_id = self.client.create_experiment("digits", (root / "mlartifacts").as_uri())

    def run(self, name: str, **tags: str) -> str:
        """A run with a folder; returns its id."""
        identity = f"identity-of-{name.replace(' ', '-')}"
        (self.root / name).mkdir(exist_ok=True)
        (self.root / name / IDENTITY).write_text(f"{identity}\n")
        tags = {START_TAG: identity, **tags}
        return str(self.client.create_run(self.experiment_id, tags=tags, run_name=name).info.run_id)


def start(root: Path, **changes: Any) -> Tracker:
    given = {name: changes.pop(name) for name in ("log", "sender") if name in changes}
    artifacts = changes.pop("artifacts", ())
    options: dict[str, Any] = {"params": {}, "tags": {}, "run_dir": root / "run"} | changes
    tracker = Tracker(RunStart("experiment", name="name", **options), **given)
    for path in artifacts:
        tracker.artifact(path)
    return tracker


def read_run(root: Path) -> Run:
    """The only run of the store."""
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return run


def history(root: Path, name: str) -> list[tuple[int, float]]:
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    return [(point.step, point.value) for point in client.get_metric_history(read_run(root).info.run_id, name)]


def everything(root: Path) -> dict[str, Any]:
    """All that the store has of its only run, with the content of its artifacts."""
    client, run = MlflowClient(f"sqlite:///{root}/mlflow.db"), read_run(root)
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    files = {path: path.read_bytes() for path in (root / "mlartifacts").rglob("*") if path.is_file()}
    assert run.inputs is not None
    return {
        "end": (run.info.status, run.info.start_time, run.info.end_time),
        "params": run.data.params,
        "tags": run.data.tags,
        "points": {name: sorted(repr(dict(p)) for p in points) for name, points in histories.items()},
        "images": [given.dataset.digest for given in run.inputs.dataset_inputs],
        "files": files,
    }


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """A disk on which no file gets longer than ``size`` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
