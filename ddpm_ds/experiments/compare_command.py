"""``ddpm-ds compare``: recorded runs beside each other."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_ds.command_line import check_writable
from ddpm_ds.errors import OutputError
from ddpm_ds.experiments.runs import add_runs_option, find_run, find_runs, keep_with

if TYPE_CHECKING:
    from ddpm_ds.experiments.compare import Comparison

DESCRIPTION = """\
Print what differs between runs - parameters, metrics with their ratios to a baseline, notes, verdicts - as MLflow has
it. A RUN is a folder, an id, the beginning of one or a name; instead of runs an experiment may be named, or the run of
a grid, whose cells are compared. Children of one run are compared in that run's artifacts too, in comparison/.
"""

EXAMPLES = """\
examples
  ddpm-ds compare runs/digits-1 runs/digits-2 --baseline runs/digits-1
  ddpm-ds compare digits --html digits.html --markdown digits.md
      every training run of the experiment digits
  ddpm-ds compare digits-1 digits-2 --metrics train/loss,perf/bubble_fraction,stage0/wait_seconds

docs/compare.md says how to read it.
"""

FOLDER = "comparison"
"""Of the parent's artifacts."""


def add_compare(verbs: argparse._SubParsersAction[Any]) -> None:
    """The verb ``compare``."""
    parser = verbs.add_parser(
        "compare",
        help="show what differs between runs, and what came of it",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("recorded_runs", nargs="+", metavar="RUN | EXPERIMENT")
    parser.add_argument("--baseline", metavar="RUN", help="what ratios are to (default: the first that has metrics)")
    parser.add_argument("--metrics", type=_names, metavar="A,B,C", help="the metrics to compare")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the comparison as Markdown")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as one page with curves and timelines")
    add_runs_option(parser)
    parser.set_defaults(run=_compare)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name; write A,B,C")
    return names


def _compare(options: argparse.Namespace) -> None:
    for name, path in (("--markdown", options.markdown), ("--html", options.html)):
        if path is not None:
            check_writable(name, path)
    from ddpm_ds.experiments.compare import comparison
    from ddpm_ds.experiments.compare_html import page
    from ddpm_ds.experiments.compare_text import markdown, terminal

    runs = [run for text in options.recorded_runs for run in find_runs(text, root=options.runs)]
    baseline = None
    if options.baseline is not None:
        named = [run for run in runs if options.baseline in (run.name, run.id)]
        baseline = named[0] if len(named) == 1 else find_run(options.baseline, root=options.runs)
    compared = comparison(runs, baseline, options.metrics)
    print(terminal(compared, shutil.get_terminal_size((120, 24)).columns))
    asked_for = {"comparison.md": options.markdown, "comparison.html": options.html}
    makers: dict[str, Callable[[Comparison], str]] = {"comparison.md": markdown, "comparison.html": page}
    for name, path in asked_for.items():
        if path is None and compared.parent is None:
            continue
        text = makers[name](compared)
        if path is not None:
            _write(path, text)
        if compared.parent is not None:
            _keep(compared.parent, runs[0].tracking_uri, name, text)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} can't be written ({error.strerror}); name a file in another folder") from None
    print(f"\n{path}: {len(text.encode()) / 2**10:,.0f} KiB")


def _keep(parent: str, tracking_uri: str, name: str, text: str) -> None:
    """Log a file with the runs' parent; one that can't be written to, such as somebody else's, costs nothing else."""
    if missing := keep_with(parent, tracking_uri, {f"{FOLDER}/{name}": text}):
        print(f"ddpm-ds: {name} could not be kept with run {parent} ({missing})", file=sys.stderr)
