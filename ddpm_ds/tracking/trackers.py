"""What a run's events become in each tracker: MLflow, TensorBoard, Weights & Biases, with the same names of metrics.

Each takes a start, which opens the run, and then its records up to its end. MLflow is safe to send to again: it then
has what it had.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from PIL import Image  # at the top, since two threads that import it at once may see it half-imported

from ddpm_ds.errors import SpecError
from ddpm_ds.files import open_regular
from ddpm_ds.secret import public_address
from ddpm_ds.tracking.address import DATABASES, SQLITE, deleted_experiment, resolve_uri, sqlite_file
from ddpm_ds.tracking.run_folder import IDENTITY, NOTE_TAG, PARENT_TAG, START_TAG, Record

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Run

EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}  # by which MLflow's UI chooses its mode
DIGEST_CHARACTERS = 36  # MLflow's limit for the digest of a data set
TENSORBOARD_FOLDER = "tensorboard"  # folder of a run's folder that TensorBoard reads


class MlflowRun:
    """Run of MLflow's that a start names. ``told`` hears the ids of run and experiment, ``log`` a line to show."""

    def __init__(self, told: Callable[[Record], None], log: Callable[[str, str], None]) -> None:
        self._told, self._log = told, log
        self._start: Record = {}
        self._client: MlflowClient
        self._run: Run

    def send(self, batch: Sequence[Record]) -> None:
        """Send some log points, or one record of another kind."""
        from mlflow.entities import Metric, RunTag

        if "start" in batch[0]:
            self._start = batch[0]["start"]
            return self._open(resumes="time" in batch[0])
        client, run = self._client, self._run.info.run_id
        match batch[0]:
            case {"metrics": _}:
                points = [(point, item) for point in batch for item in point["metrics"].items()]
                metrics = [Metric(name, value, point["time"], self._step(point)) for point, (name, value) in points]
                client.log_batch(run, metrics=metrics, synchronous=True)
            case {"artifact": path, "folder": folder}:
                self._check_files()
                client.log_artifact(run, path, folder or None)
            case {"image": path, "key": key, "step": step, "time": at}:
                self._check_files()
                name = rf"images/{re.sub('/', '.', key)}\Wstep\W{step}\Wtimestamp\W{at}\W.*compressed"
                if not any(re.match(name, file.path) for file in client.list_artifacts(run, "images")):
                    with Image.open(path) as image:
                        client.log_image(run, image, key=key, step=step, timestamp=at, synchronous=True)
            case {"text": text, "name": name}:
                self._check_files()
                client.log_text(run, text, name)
            case {"tags": tags} | {"numbers": tags}:
                tags = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in tags.items()}
                client.log_batch(run, tags=[RunTag(*tag) for tag in tags.items()], synchronous=True)
            case {"finish": status, "time": at}:
                if self._alone and not self._join_parent():
                    place = f"MLflow at {public_address(resolve_uri(self._start['output_root']))}"
                    self._log(
                        "orphan", f"{place} does not have the parent of {self._start['run_dir']}; it stands alone"
                    )
                client.set_terminated(run, status, at)

    def _step(self, point: Record) -> int:
        """Return the record's step; else the seconds since the run began, which continue to rise when it is resumed."""
        return int(point["step"] if "step" in point else (point["time"] - self._run.info.start_time) // 1000)

    def _open(self, resumes: bool) -> None:
        """Find or make the run of the start record; ``resumes`` says that a run which has ended is now running."""
        from mlflow.entities import Param, RunTag

        start, uri = self._start, resolve_uri(self._start["output_root"])
        with opened_store(Path(start["output_root"])) as client:
            self._client = client
            if experiment := client.get_experiment_by_name(start["experiment"]):
                experiment_id = experiment.experiment_id
                if experiment.lifecycle_stage == "deleted":
                    raise SpecError(deleted_experiment(experiment.name, experiment_id, uri))
            else:
                # A server knows where artifacts go; a bare database would have them in the working folder.
                bare = uri.split(":")[0].split("+")[0] in DATABASES
                location = (Path(start["output_root"]) / "mlartifacts").as_uri() if bare else None
                experiment_id = client.create_experiment(start["experiment"], location, EXPERIMENT_TAGS)
            if found := self._find(experiment_id, start["id"]):
                if resumes:
                    client.update_run(found.info.run_id, status="RUNNING")
            else:
                tags = {START_TAG: start["id"]}
                found = client.create_run(experiment_id, start["time"], tags, start["run_name"])
            self._run, run_id = found, found.info.run_id
            new = {} if found.data.params else start["params"]
            tags = dict(start["tags"])
            if NOTE_TAG in found.data.tags:  # which may have been edited
                tags.pop(NOTE_TAG, None)
            params, run_tags = [Param(*param) for param in new.items()], [RunTag(*tag) for tag in tags.items()]
            client.log_batch(run_id, params=params, tags=run_tags, synchronous=True)
            if start.get("dataset"):
                client.log_inputs(run_id, [_dataset_input(**start["dataset"])])
        self._told({"run": {"run_id": run_id, "experiment_id": experiment_id}})
        self._alone = bool(start.get("parent")) and PARENT_TAG not in found.data.tags and not self._join_parent()

    def _join_parent(self) -> bool:
        """Make the run a child of its parent; return False if MLflow does not have that, perhaps not yet."""
        parent = self._find(self._run.info.experiment_id, self._start["parent"])
        if parent is not None:
            self._client.set_tag(self._run.info.run_id, PARENT_TAG, parent.info.run_id)
        return parent is not None

    def _check_files(self) -> None:
        """Raise FileNotFoundError if a server keeps files in a folder of its own, which this host does not have."""
        where = urlsplit(self._run.info.artifact_uri)
        folders = Path(where.path).parents[1:3]  # of the experiment, and of all
        if not resolve_uri(self._start["output_root"]).startswith("http") or where.scheme not in ("", "file"):
            return
        if not any(os.access(folder, os.W_OK) for folder in folders):
            raise FileNotFoundError(
                f"the server keeps files in {folders[0]}, a folder that is not on this host; start it with "
                "--artifacts-destination, not --default-artifact-root, and name a new experiment: logging.experiment"
            )

    def _find(self, experiment_id: str, identity: str) -> Run | None:
        found = self._client.search_runs([experiment_id], f"tags.`{START_TAG}` = '{identity}'", max_results=1)
        return found[0] if found else None


def _dataset_input(name: str, digest: str, source: str) -> DatasetInput:
    """Return a run's training images for MLflow, which shows the whole digest beside their location."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    where = json.dumps({"uri": source, "sha256": digest})
    dataset = Dataset(name, digest[:DIGEST_CHARACTERS], "local", where)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])


@contextmanager
def opened_store(output_root: Path) -> Iterator[MlflowClient]:
    """Yield a client of the store for runs in a folder, which keeps other processes out; its database is made first."""
    import mlflow

    uri = resolve_uri(output_root)
    mlflow.set_tracking_uri(uri)
    file = sqlite_file(uri)
    with _one_at_a_time(output_root if file is None else file.parent) if uri.startswith("sqlite") else nullcontext():
        if file is not None:
            _make_database(file)
        yield mlflow.MlflowClient(uri)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Lock out other workers of the same folder, since two that create one database at once corrupt it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open_regular(folder / ".mlflow.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_database(path: Path) -> None:
    """Make a missing database under a temporary name first, so that a killed process leaves no incomplete one."""
    import mlflow

    if not path.exists():
        new = path.with_name(f".{path.name}.new")
        new.unlink(missing_ok=True)
        mlflow.MlflowClient(f"{SQLITE}{new}").search_experiments(max_results=1)
        new.replace(path)


class TensorBoard:
    """Event files in the folder ``tensorboard`` of the run's folder; a resumed run adds one to them."""

    def send(self, batch: Sequence[Record]) -> None:
        match batch[0]:
            case {"start": start}:
                self._open(start)
            case {"metrics": values, "time": at} | {"numbers": values, "time": at}:
                step = int(batch[0].get("step", at / 1000 - self._began))
                for name, value in values.items():
                    self._writer.add_scalar(name, value, step, walltime=at / 1000)
            case {"image": path, "key": key, "step": step, "time": at}:
                import numpy as np

                with Image.open(path) as image:
                    pixels = np.asarray(image.convert("RGB"))
                self._writer.add_image(key, pixels, step, walltime=at / 1000, dataformats="HWC")
            case {"finish": _}:
                return self._writer.close()
        self._writer.flush()  # what is sent is kept, even if this process is killed

    def _open(self, start: Record) -> None:
        from torch.utils.tensorboard import SummaryWriter

        run_dir = Path(start["run_dir"])
        identity = run_dir / IDENTITY  # as old as the run, which may have been resumed
        self._began = identity.stat().st_mtime if identity.exists() else start["time"] / 1000
        self._writer = SummaryWriter(str(run_dir / TENSORBOARD_FOLDER))
        rows = "".join(f"| {name} | {value} |\n" for name, value in start["params"].items())
        self._writer.add_text("parameters", f"| name | value |\n|---|---|\n{rows}", 0)


class WeightsAndBiases:
    """Run of the project with the experiment's name, under the run's identity, so that a resume continues it.

    Account and mode are the environment's: ``wandb login``, or ``WANDB_MODE=offline`` for a run that is sent later.
    """

    def send(self, batch: Sequence[Record]) -> None:
        match batch[0]:
            case {"start": start}:
                self._open(start)
            case {"metrics": values, "step": step}:
                self._run.log({**values, "step": step})
            case {"metrics": values, "time": at}:
                self._run.log({**values, "time": at / 1000})
            case {"image": path, "key": key, "step": step}:
                self._run.log({key: self._image(path), "step": step})
            case {"numbers": values}:
                self._run.summary.update(values)
            case {"tags": tags}:
                self._run.config.update(tags, allow_val_change=True)
            case {"finish": status}:
                self._run.finish(exit_code=0 if status == "FINISHED" else 1)

    def _open(self, start: Record) -> None:
        import wandb

        self._image = wandb.Image
        self._run = wandb.init(
            project=start["experiment"],
            name=start["run_name"],
            id=start["id"],
            resume="allow",
            dir=start["run_dir"],
            config=start["params"],
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="step")  # a resumed run repeats steps, which its own may not
        self._run.define_metric("system/*", step_metric="time")


KINDS: dict[str, type[TensorBoard | WeightsAndBiases]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
"""Trackers by their names in ``logging.trackers``, which are also those of their packages."""
