"""Runs by their folders, and additions to them in MLflow. Does not import torch, and MLflow only when needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ddpm_ds.ground.errors import UserError
from ddpm_ds.ground.files import expanded
from ddpm_ds.ground.secret import public_address
from ddpm_ds.schema.types import GivenPath
from ddpm_ds.tracking.address import quiet, reason, resolve_uri, sqlite_file, uri_fault
from ddpm_ds.tracking.run_folder import IDENTITY, SPEC, START_TAG, RunFolder, identity_of

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

SWEEP = "sweep"
"""Kind of a sweep's run, whose children are the trials."""
VARIED_TAG = "sweep.keys"
"""Tag of a trial with the settings that its sweep varies, separated by spaces."""
MOST_FOUND = 50_000  # experiments that MLflow returns for one question


class ExperimentError(UserError):
    """Error: a named run or sweep can't be found, read or made."""


def open_run(run: GivenPath) -> RunFolder:
    """Return the run in a folder; raises ExperimentError if there is none."""
    folder = expanded(run)
    if not os.path.isfile(folder / SPEC):  # False also for a name that is too long for a path
        raise ExperimentError(f"{folder} is not the folder of a run; name one that has a {SPEC}")
    return RunFolder(folder)


@contextlib.contextmanager
def find_run(folder: Path) -> Iterator[tuple[MlflowClient, Run]]:
    """Yield MLflow's client and the run of a folder, from ``MLFLOW_TRACKING_URI`` or else from the store beside it.

    Raises:
        ExperimentError: there is no such run or store, or MLflow does not answer.
    """
    if (identity := identity_of(folder)) is None:
        raise ExperimentError(f"{folder} has no {IDENTITY} of a run in MLflow; name the folder of a run")
    uri = resolve_uri(folder.resolve().parent)
    if fault := uri_fault(uri):
        raise ExperimentError(fault)
    if (database := sqlite_file(uri)) is not None and not database.is_file():
        raise ExperimentError(f"there is no MLflow store {public_address(uri)}; set MLFLOW_TRACKING_URI to the store")
    quiet()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        client = MlflowClient(uri)
        among = [experiment.experiment_id for experiment in client.search_experiments(max_results=MOST_FOUND)]
        found = client.search_runs(among, f"tags.`{START_TAG}` = '{identity}'", max_results=1)
        if not found:
            where = f"{public_address(uri)}; set MLFLOW_TRACKING_URI to the store it was logged to"
            raise ExperimentError(f"run {folder} is not in {where}")
        yield client, found[0]
    except (MlflowException, SQLAlchemyError, OSError, ImportError, ValueError) as error:
        raise ExperimentError(
            f"MLflow at {public_address(uri)} fails ({reason(error)}); nothing is lost, try again when it answers"
        ) from None
