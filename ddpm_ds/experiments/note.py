"""``ddpm-ds note``: what was learned from a run, kept with it in MLflow."""

from __future__ import annotations

import argparse
from datetime import date
from typing import Any

from ddpm_ds.experiments.runs import ExperimentError, add_runs_option, find_run

DESCRIPTION = """\
Add to the note of a run, which MLflow shows as its description, with the date; or print it, where no text is given.
A RUN is a folder, an id, the beginning of one or a name.
"""

EXAMPLES = """\
examples
  ddpm-ds note runs/digits-1 "the loss scale fell four times: try bf16"
  ddpm-ds note digits-1
"""


def add_note(verbs: argparse._SubParsersAction[Any]) -> None:
    """The verb ``note``."""
    parser = verbs.add_parser(
        "note",
        help="write down what was learned from a run",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("recorded_run", metavar="RUN")
    parser.add_argument("text", nargs="?", help="what was learned; may have several lines")
    add_runs_option(parser)
    parser.set_defaults(run=_note)


def _note(options: argparse.Namespace) -> None:
    if options.text is None:
        note = find_run(options.recorded_run, root=options.runs).note
        print(note or f"{options.recorded_run} has no note yet; write one: ddpm-ds note RUN TEXT")
        return
    text = options.text.strip()
    if not text:
        raise ExperimentError(f"the text for the note of {options.recorded_run} is empty; write what was learned")
    run = find_run(options.recorded_run, root=options.runs)
    run.set_note(added(run.note, text, date.today()))
    print(f"{run.name}: noted")


def added(note: str, text: str, day: date) -> str:
    """A note with a dated paragraph more; MLflow shows it as Markdown."""
    paragraph = f"{day.isoformat()}: {text}"
    return f"{note.rstrip()}\n\n{paragraph}" if note.strip() else paragraph
