"""Child runs in MLflow for the scores, samples and exports of a run's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.tracking.address import check_tracking_uri
from ddpm_ds.tracking.run_folder import RunFolder
from ddpm_ds.tracking.tracker import Tracker, print_to_stderr
from ddpm_ds.version import __version__


def check_recordable(trained: Trained) -> None:
    """Raise SpecError, before any work is done, if MLflow can't keep it as a child of the run of ``trained``."""
    if trained.run_dir is not None:
        check_tracking_uri(trained.run_dir.parent)


def record_child(
    trained: Trained,
    kind: Literal["evaluate", "export", "sample"],
    params: Mapping[str, object],
    *,
    metrics: Mapping[str, float] | None = None,
    artifacts: Mapping[Path, str],
    model_name: str | None = None,
) -> None:
    """Record finished work as a child of the run that ``trained`` was saved by, and print where it is.

    Weights outside a run's folder have no parent, so nothing is recorded and one line says so. Records that MLflow does
    not accept stay in the run's folder, as in training.

    ``params`` may be nested. The step of ``metrics`` is the checkpoint's number of images seen. ``artifacts`` are
    files and folders, each with its destination among the artifacts. ``model_name`` registers the artifacts' folder
    ``export`` as a version of that model.
    """
    if trained.run_dir is None or trained.spec is None:
        print_to_stderr(f"{trained.origin} is not in the folder of a run, so nothing is recorded in MLflow")
        return
    try:
        parent = RunFolder(trained.run_dir).identity()
    except OSError as error:  # such as a copied run without an identity, on a read-only disk
        path = error.filename or trained.run_dir
        print_to_stderr(f"{path} can't be written ({error.strerror}), so nothing is recorded in MLflow")
        return
    checkpoint = Path(trained.origin).name
    tracker = Tracker.start(
        trained.spec.logging.experiment,
        f"{kind} {checkpoint}",
        output_root=trained.run_dir.parent,
        run_dir=trained.run_dir,
        params=params,
        tags={
            "kind": kind,
            "checkpoint": checkpoint,
            "weights": trained.weights,
            "digest": trained.digest,
            "images_seen": str(trained.images_seen),
            "mlflow.source.name": f"ddpm-ds {kind}",
            "version.ddpm_ds": __version__,
        },
        parent=parent,
    )
    if metrics:
        tracker.metrics(metrics, trained.images_seen or 0)
    for path, folder in artifacts.items():
        tracker.artifact(path, folder)
    if model_name is not None:
        tracker.register(model_name, "export")
    link = tracker.finish("FINISHED")
    if link.run_id is None:
        print(f"MLflow was not reached at {link.tracking_uri}")
    else:
        print(f"MLflow run {link.run_id}\nopen with  {link.open_with}")
