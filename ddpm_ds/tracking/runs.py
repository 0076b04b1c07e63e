"""Runs by their folders, and additions to them in MLflow. Does not import torch, and MLflow only when needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from ddpm_ds.ground.errors import UserError
from ddpm_ds.ground.files import expanded
from ddpm_ds.ground.secret import public_address
from ddpm_ds.schema.types import GivenPath
from ddpm_ds.tracking.address import quiet, reason, resolve_uri, sqlite_file, uri_fault
from ddpm_ds.tracking.run_folder import IDENTITY, NOTE_TAG, SPEC, START_TAG, RunFolder, identity_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

SWEEP = "sweep"
"""Kind of a sweep's run, whose children are the trials."""
VARIED_TAG = "sweep.keys"
"""Tag of a trial with the settings that its sweep varies, separated by spaces."""
NOTE_CHARACTERS = 8000  # MLflow's limit for the value of a tag
MOST_FOUND = 50_000  # experiments that MLflow returns for one question


class ExperimentError(UserError):
    """Error: a named run or sweep can't be found, read or made."""


def open_run(run: GivenPath) -> RunFolder:
    """Return the run in a folder; raises ExperimentError if there is none."""
    folder = expanded(run)
    if not os.path.isfile(folder / SPEC):  # False also for a name that is too long for a path
        raise ExperimentError(f"{folder} is not the folder of a run; name one that has a {SPEC}")
    return RunFolder(folder)


@dataclass(frozen=True)
class RecordedRun:
    """Run as recorded in MLflow."""

    id: str
    name: str
    tags: dict[str, str]
    tracking_uri: str
    """URI of the store that the run was read from."""

    @property
    def note(self) -> str:
        """Description: the run's result, and its user's note on reason and lessons; empty without any."""
        return self.tags.get(NOTE_TAG, "")

    def add_note(self, text: str) -> None:
        """Add a paragraph with the date to the note, which MLflow shows as Markdown.

        Raises:
            ExperimentError: the note is longer than MLflow keeps, or MLflow does not answer.
        """
        note = f"{self.note.rstrip()}\n\n{date.today().isoformat()}: {text}".lstrip()
        if len(note) > NOTE_CHARACTERS:
            raise ExperimentError(
                f"the note of {self.name} would have {len(note):,} characters, and MLflow keeps {NOTE_CHARACTERS:,}; "
                "write less, or shorten it in MLflow's UI"
            )
        self.keep({}, {NOTE_TAG: note})

    def keep(self, files: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Log texts, by path among the artifacts, and tags; raises ExperimentError if MLflow does not answer."""
        with _client_of(self.tracking_uri) as client:
            for path, text in files.items():
                client.log_text(self.id, text, path)
            for name, value in tags.items():
                client.set_tag(self.id, name, value)


def find_run(folder: Path) -> RecordedRun:
    """Find the run of a folder in ``MLFLOW_TRACKING_URI``, else in the store beside it; raises ExperimentError."""
    if (identity := identity_of(folder)) is None:
        raise ExperimentError(f"{folder} has no {IDENTITY} of a run in MLflow; name the folder of a run")
    uri = resolve_uri(folder.resolve().parent)
    with _client_of(uri) as client:
        among = [experiment.experiment_id for experiment in client.search_experiments(max_results=MOST_FOUND)]
        found = client.search_runs(among, f"tags.`{START_TAG}` = '{identity}'", max_results=1)
    if not found:
        raise ExperimentError(
            f"run {folder} is not in {public_address(uri)}; set MLFLOW_TRACKING_URI to the store it was logged to"
        )
    return RecordedRun(found[0].info.run_id, found[0].info.run_name, dict(found[0].data.tags), uri)


@contextlib.contextmanager
def _client_of(uri: str) -> Iterator[MlflowClient]:
    """Yield MLflow's client; raises ExperimentError if there is no such store, or it does not answer."""
    if fault := uri_fault(uri):
        raise ExperimentError(fault)
    if (database := sqlite_file(uri)) is not None and not database.is_file():
        raise ExperimentError(f"there is no MLflow store {public_address(uri)}; set MLFLOW_TRACKING_URI to the store")
    quiet()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield MlflowClient(uri)
    except (MlflowException, SQLAlchemyError, OSError, ImportError, ValueError) as error:
        raise ExperimentError(
            f"MLflow at {public_address(uri)} fails ({reason(error)}); nothing is lost, try again when it answers"
        ) from None
