"""Runs found in MLflow by folder, id or name. Imports no torch, and MLflow only when needed."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from ddpm_ds.command_line import file_path
from ddpm_ds.config.spec import FilePath, GivenPath
from ddpm_ds.errors import OutputError, UserError
from ddpm_ds.files import SPEC, expanded
from ddpm_ds.secret import public_address
from ddpm_ds.tracking.address import MLFLOW, reason, resolve_uri, sqlite_file, uri_fault
from ddpm_ds.tracking.run_folder import (
    FOLDER_TAG,
    KIND_TAG,
    NOTE_TAG,
    OUTPUT_ROOT,
    PARENT_TAG,
    START_TAG,
    RunFolder,
    identity_of,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

SWEEP = "sweep"
"""Kind of the run whose children are the trials of a sweep."""
VARIED_TAG = "sweep.keys"
"""Tag of a trial with the settings that its sweep varies, separated by spaces."""
NOTE_CHARACTERS = 8000  # MLflow's limit for the value of a tag
SHORTEST_ID = 6  # hexadecimal digits that are taken for the beginning of an id
NEAR_NAMES = 3
MOST_FOUND = 50_000  # runs, or experiments, that MLflow returns for one question


class ExperimentError(UserError):
    """Error: a named run or experiment can't be found, read or made."""


def open_run(run: GivenPath, *, root: FilePath = OUTPUT_ROOT) -> RunFolder:
    """Return the run in a folder or, of that id or name, in MLflow as :func:`find_run` finds it.

    Raises:
        ExperimentError: there is no such run, or its folder is not on this machine.
    """
    name = os.path.expanduser(run)
    if os.path.isfile(Path(name) / SPEC):  # False also for a name that is too long for a path
        return RunFolder(Path(name))
    return find_run(name, root=expanded(root)).open()


@dataclass(frozen=True)
class RecordedRun:
    """Run as recorded in MLflow."""

    id: str
    name: str
    tags: dict[str, str]
    folder: Path | None
    """Folder of the run, if it is on this machine."""
    tracking_uri: str
    """URI of the store that the run was read from."""

    @property
    def note(self) -> str:
        """Text on why the run was made and what was learned; empty if there is none."""
        return self.tags.get(NOTE_TAG, "")

    def open(self) -> RunFolder:
        """Return the run as recorded in its folder.

        Raises:
            ExperimentError: the folder is not on this machine.
        """
        if self.folder is None:
            raise ExperimentError(
                f"the folder of run {self.name} is not on this machine; go on where it was trained, or copy it here"
            )
        return RunFolder(self.folder)

    def add_note(self, text: str) -> None:
        """Add a paragraph with the date to the note, which MLflow shows as Markdown.

        Raises:
            ExperimentError: it is longer than MLflow takes, which would cut it, or MLflow does not answer.
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


def add_runs_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--runs``, the place of runs that are not named by their folder."""
    parser.add_argument(
        "--runs",
        type=file_path,
        default=OUTPUT_ROOT,
        metavar="DIR",
        help=f"folder of the runs, with MLflow's store, unless MLFLOW_TRACKING_URI names one (default {OUTPUT_ROOT})",
    )


def find_run(text: str, *, root: Path = OUTPUT_ROOT) -> RecordedRun:
    """Find the run with this folder, id, beginning of an id, or name.

    The store is ``MLFLOW_TRACKING_URI``, else the one beside the folder, else the one in ``root``.

    Raises:
        ExperimentError: there is none, there are several, or MLflow does not answer.
    """
    found, uri = _search(text, root)
    if len(found) != 1:
        raise _unclear("run", text, found, uri)
    return found[0]


def find_runs(text: str, *, root: Path = OUTPUT_ROOT) -> list[RecordedRun]:
    """Find training runs, in the order of their start: the trials of a sweep, one run, or all of an experiment.

    ``text`` is a run as in :func:`find_run`, or the name of an experiment.

    Raises:
        ExperimentError: there are none, or MLflow does not answer.
    """
    found, uri = _search(text, root)
    if len(found) == 1 and found[0].tags.get(KIND_TAG) != SWEEP:
        return found
    if len(found) == 1:
        among = _runs(uri, f"tags.`{PARENT_TAG}` = '{found[0].id}'")
        problem = f"run {found[0].name} in {public_address(uri)} has no trials yet; start it"
    else:
        with _client_of(uri) as client:
            experiment = client.get_experiment_by_name(text)
        if experiment is None:
            raise _unclear("run and no experiment", text, found, uri)
        among = _runs(uri, "", [experiment.experiment_id])
        problem = f"experiment {text} in {public_address(uri)} has no training runs; name another"
    runs = [run for run in among if KIND_TAG not in run.tags]
    if not runs:
        raise ExperimentError(problem)
    return runs


def _search(text: str, root: Path) -> tuple[list[RecordedRun], str]:
    """Return all runs that ``text`` may mean, and the store that was searched."""
    folder = Path(text)
    identity = identity_of(folder)
    root = folder.resolve().parent if identity else root.resolve()
    uri = resolve_uri(root)
    if identity:
        found = _runs(uri, f"tags.`{START_TAG}` = '{identity}'")
        if not found:
            raise ExperimentError(
                f"run {text} is not in {public_address(uri)}; set MLFLOW_TRACKING_URI to the store it was logged to"
            )
        return found, uri
    if re.fullmatch(rf"[0-9a-f]{{{SHORTEST_ID},32}}", text) and (found := _runs(uri, f"run_id LIKE '{text}%'")):
        return found, uri
    quote = '"' if "'" in text else "'"
    return _runs(uri, f"run_name = {quote}{text}{quote}"), uri


def _unclear(what: str, text: str, found: Sequence[RecordedRun], uri: str) -> ExperimentError:
    if found:
        ids = ", ".join(run.id for run in found[:NEAR_NAMES])
        return ExperimentError(f"{len(found)} runs are called {text} in {public_address(uri)}: {ids}; name one by id")
    with _client_of(uri) as client:
        experiments = [experiment.name for experiment in client.search_experiments(max_results=MOST_FOUND)]
    runs = [run.name for run in _runs(uri, "")]
    near = difflib.get_close_matches(text, list(dict.fromkeys([*runs, *experiments])), n=NEAR_NAMES, cutoff=0.5)
    latest = list(dict.fromkeys(reversed(runs)))[:NEAR_NAMES]
    hint = f"did you mean {' or '.join(near)}?" if near else f"the latest are {', '.join(latest) or 'none'}"
    return ExperimentError(f"{text} is no {what} of {public_address(uri)}; {hint}")


def _runs(uri: str, filter_string: str, experiment_ids: Sequence[str] | None = None) -> list[RecordedRun]:
    """Return the runs of a store that match a filter, in the order of their start."""
    with _client_of(uri) as client:
        if experiment_ids is None:
            experiment_ids = [found.experiment_id for found in client.search_experiments(max_results=MOST_FOUND)]
        by_start = ["attributes.start_time ASC"]
        found = client.search_runs(list(experiment_ids), filter_string, order_by=by_start, max_results=MOST_FOUND)
    named = ((run.info.run_id, run.info.run_name, dict(run.data.tags)) for run in found)
    return [RecordedRun(run_id, name, tags, _folder(tags, name, uri), uri) for run_id, name, tags in named]


def _folder(tags: Mapping[str, str], name: str, uri: str) -> Path | None:
    """Return the run's folder, checked by its identity: where it was trained, or beside a store that was moved."""
    places = [Path(tags[FOLDER_TAG])] if FOLDER_TAG in tags else []
    if (database := sqlite_file(uri)) is not None:
        places.append(database.parent / name)
    for place in places:
        with contextlib.suppress(OSError, OutputError):  # such as somebody else's folder
            if tags.get(START_TAG) == identity_of(place) is not None:
                return place
    return None


@contextlib.contextmanager
def _client_of(uri: str) -> Iterator[MlflowClient]:
    """Yield MLflow's client; its errors become one line.

    Raises:
        ExperimentError: there is no such store, or it does not answer.
    """
    if fault := uri_fault(uri):
        raise ExperimentError(fault)
    if (database := sqlite_file(uri)) is not None and not database.is_file():
        raise ExperimentError(
            f"there is no MLflow store {public_address(uri)}; name its folder by --runs or set MLFLOW_TRACKING_URI"
        )
    for name, value in MLFLOW.items():
        os.environ.setdefault(name, value)
    for talkative in ("mlflow", "alembic"):
        logging.getLogger(talkative).setLevel(logging.ERROR)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield MlflowClient(uri)
    except (MlflowException, SQLAlchemyError, OSError, ImportError, ValueError) as error:
        raise ExperimentError(
            f"MLflow at {public_address(uri)} fails ({reason(error)}); nothing is lost, try again when it answers"
        ) from None
