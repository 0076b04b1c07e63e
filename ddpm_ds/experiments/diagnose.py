"""``ddpm-ds diagnose``: where a run's time went, and the one change to try next."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ddpm_ds.experiments.runs import ExperimentError, RecordedRun, add_runs_option, find_run, keep_with

DESCRIPTION = """\
Say where the time of a run's devices went - useful work, bubble, imbalance, communication, data wait and so on - what
took most of it, with the numbers that show it, and the one change to try next with what it is predicted to save. It is
what a run says at its end. The run must have traced some steps; steps 20 to 22 are traced unless --trace-steps says
otherwise.
"""

EPILOG = """\
examples
  ddpm-ds diagnose runs/digits
  ddpm-ds diagnose 20261121-101500-digits --runs /data/runs

The verdict is printed, written to verdict.txt in the run's folder, and kept in MLflow as an artifact and as the tags
verdict.top, verdict.share and verdict.try. docs/diagnose.md explains it.
"""


def add_diagnose(verbs: argparse._SubParsersAction[Any]) -> None:
    """The verb ``diagnose``."""
    parser = verbs.add_parser(
        "diagnose",
        help="say where a run's time went and what to change next",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("name", metavar="RUN", help="folder of a run, or its id or name in MLflow")
    add_runs_option(parser)
    parser.set_defaults(run=_diagnose)


def _diagnose(options: argparse.Namespace) -> None:
    folder, run, missing = _find(options.name, options.runs)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing is trained: DeepSpeed need not look for devices
    from ddpm_ds.verdict.conclude import VERDICT  # deepspeed, whose schedules are simulated
    from ddpm_ds.verdict.facts import facts_of
    from ddpm_ds.verdict.verdict import tags, text, verdict

    found = verdict(facts_of(folder))
    print(text(found), end="")
    try:
        (folder / VERDICT).write_text(text(found))
    except OSError as error:
        _say(f"{folder / VERDICT} can't be written ({error.strerror})")
    if run is not None:
        missing = keep_with(run.id, run.tracking_uri, {VERDICT: text(found)}, tags(found))
    if missing:
        _say(f"not kept in MLflow: {missing}")


def _find(name: str, root: Path) -> tuple[Path, RecordedRun | None, str | None]:
    """A run's folder, and the run in MLflow or why there is none.

    Raises:
        ExperimentError: there is no such run, or its folder is elsewhere.
    """
    folder = Path(name)
    try:
        run = find_run(name, root=root)
    except ExperimentError as error:
        if folder.is_dir():
            return folder, None, str(error)
        raise
    if run.folder is None:
        raise ExperimentError(f"the folder of run {run.name} is not on this machine; diagnose it where it was trained")
    return run.folder, run, None


def _say(line: str) -> None:
    print(f"ddpm-ds diagnose: {line}", file=sys.stderr)
