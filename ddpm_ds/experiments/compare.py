"""Comparison of recorded runs: parameters that differ, and metrics with their ratios to a baseline, as tables.

Values are MLflow's, so a comparison needs neither the runs' folders nor the machine they ran on.
"""

import difflib
import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal
from urllib.parse import quote

from ddpm_ds.command_line import aligned
from ddpm_ds.errors import UserError
from ddpm_ds.tracking.address import page_of
from ddpm_ds.tracking.runs import FAILURES, RecordedRun, mean_of_points

ARTIFACT_FOLDER = "comparison"
"""Folder among the parent run's artifacts that holds the comparison of its children."""
FILE = "comparison.md"
"""Name of the Markdown document of a comparison."""

PROGRESS = "train/seen_images"
DEFAULT = (
    PROGRESS,
    "train/loss",
    "eval/loss",
    "perf/images_per_second",
    "usage/step_seconds",
    "usage/peak_memory_bytes",
    "perf/bubble_fraction",
    "perf/mfu",
    "perf/data_wait_fraction",
)
"""Metrics that are compared by default. Those that no run has are left out; so is progress if it is the same in all
runs.
"""
OF_CHANNELS = "validation/loss_channel_*"
"""Metrics that are compared by default after these: the held-out loss of each channel, of runs that have channels."""

LOWER = (
    *("*loss", OF_CHANNELS, "*_seconds", "*_bytes", "*_fraction", "*_ms", "*fid", "*kid"),
    *("perf/imbalance", "train/skipped_steps", "train/rollbacks"),
)
HIGHER = ("*_per_second", "usage/*tflops*", "perf/mfu")
SHARES = ("*_fraction", "perf/mfu", "perf/imbalance")
PACES = ("perf/*_per_second", "usage/*_seconds", "usage/*tflops*")
"""Metrics compared by :func:`~ddpm_ds.tracking.runs.mean_of_points` instead of their last log point."""
UNITS = {
    "_bytes": ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " B")),
    "_seconds": ((1, " s"), (1e-3, " ms"), (1e-6, " µs")),
}

REPEATED = {
    "derived.batch_images": "ds_config.train_batch_size",
    "derived.micro_batch_images": "ds_config.train_micro_batch_size_per_gpu",
    "derived.micro_batches": "ds_config.gradient_accumulation_steps",
    "derived.stages": "ds_config.pipeline.stages",
    "derived.zero_stage": "ds_config.zero_optimization.stage",
}
"""Parameters that are left out if the DeepSpeed JSON already gives them, with its keys."""


class ComparisonError(UserError):
    """Error: the runs have nothing that can be compared."""


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def direction(name: str) -> Literal["lower", "higher", ""]:
    """Return which values of a metric are better; empty if neither."""
    return "lower" if _matches(name, LOWER) else "higher" if _matches(name, HIGHER) else ""


def ratio(value: float | None, baseline: float | None) -> float | None:
    """Return ``value / baseline``; None if either is missing or not finite, or the baseline is 0."""
    if value is None or not baseline or not math.isfinite(value) or not math.isfinite(baseline):
        return None
    return value / baseline


def number(name: str, value: float | None) -> str:
    """Return a metric's value with four digits, in the unit that suits it; ``-`` for no value."""
    if value is None:
        return "-"
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if _matches(name, SHARES):
        return f"{value:.1%}"
    units = next((units for ending, units in UNITS.items() if name.endswith(ending)), ((1, ""),))
    size, word = next(((size, word) for size, word in units if abs(value) >= size), units[-1])
    return f"{plain(value / size)}{word}"


def plain(value: float) -> str:
    """Return a value with four digits and no unit, such as ``12,345``, ``0.03125`` or ``1.2e-07``."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"


def times(value: float) -> str:
    """Return a ratio in the form ``1.34x`` or ``0.904x``."""
    if 0.01 <= abs(value) < 100:
        return f"{value:.3f}x" if abs(value) < 0.9995 else f"{value:.2f}x"
    return f"{plain(value)}x"


@dataclass(frozen=True)
class Compared:
    """Run of a comparison."""

    run: RecordedRun
    label: str
    """Name of the run; trials of one sweep leave out the sweep's name, and runs of the same name add the beginning of
    their id.
    """
    parameters: Mapping[str, str]
    """Parameters that differ between the runs; those that this run lacks are left out."""
    values: Mapping[str, float]
    """Values by metric; those that this run lacks are left out."""
    ratios: Mapping[str, float]
    """Ratios to the baseline by metric; those that do not exist are left out, and all if there is only one run."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of runs, in the order in which they were given."""

    runs: tuple[Compared, ...]
    baseline: Compared
    parameters: tuple[str, ...]
    metrics: tuple[str, ...]

    @property
    def title(self) -> str:
        """Title for the comparison."""
        experiments = list(dict.fromkeys(one.run.experiment for one in self.runs))
        runs = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        return f"{runs} of {', '.join(experiments)}"

    @property
    def explained(self) -> str:
        """Sentences, two at most, that explain the numbers."""
        sentences = []
        if len(self.runs) > 1:
            same = "" if self.parameters else "; no parameter differs"
            sentences.append(f"Ratios are to {self.baseline.label}{same}.")
        if any(_matches(name, PACES) for name in self.metrics):
            sentences.append("Times and rates are means over all log points but the first, all else is the last value.")
        return " ".join(sentences)

    @property
    def parent(self) -> str | None:
        """Id of the parent run that all runs have in common, in one MLflow store; None if there is none."""
        (parent, *others) = {(one.run.parent, one.run.tracking_uri) for one in self.runs}
        return None if others else parent[0]

    @property
    def mlflow_page(self) -> tuple[str, str | None] | None:
        """Address of MLflow's own comparison of these runs, and the command that serves it if no server does.

        None for one run, or runs of several stores.
        """
        stores = {one.run.tracking_uri for one in self.runs}
        if len(self.runs) < 2 or len(stores) > 1:
            return None
        ids = json.dumps([one.run.id for one in self.runs], separators=(",", ":"))
        experiments = json.dumps(sorted({one.run.experiment_id for one in self.runs}), separators=(",", ":"))
        return page_of(stores.pop(), f"/#/compare-runs?runs={quote(ids)}&experiments={quote(experiments)}")


def comparison(
    runs: Sequence[RecordedRun], baseline: RecordedRun | None = None, metrics: Sequence[str] | None = None
) -> Comparison:
    """Compare runs by ``metrics``, or by those of :data:`DEFAULT` that any run has, and their progress.

    The baseline is by default the first run that has any of the metrics. A run that failed may lack all of them.

    Raises:
        ComparisonError: no run has a metric of ``metrics``, or the runs that did not fail have none in common.
    """
    runs = list({run.id: run for run in (*runs, *([] if baseline is None else [baseline]))}.values())
    names = _metrics(runs, metrics)
    values = {run.id: {name: _value(run, name) for name in names if name in run.metrics} for run in runs}
    _check_common(runs, values, metrics or DEFAULT)
    if baseline is None:
        baseline = next((run for run in runs if values[run.id]), runs[0])
    differing, labels, base = _differing(runs), _labels(runs), values[baseline.id]
    compared = {}
    for run in runs:
        ratios = {name: ratio(value, base.get(name)) for name, value in values[run.id].items() if len(runs) > 1}
        compared[run.id] = Compared(
            run=run,
            label=labels[run.id],
            parameters={name: run.settings[name] for name in differing if name in run.settings},
            values=values[run.id],
            ratios={name: value for name, value in ratios.items() if value is not None},
        )
    return Comparison(tuple(compared.values()), compared[baseline.id], differing, names)


def _metrics(runs: Sequence[RecordedRun], asked_for: Sequence[str] | None) -> tuple[str, ...]:
    there = {name for run in runs for name in run.metrics}
    if asked_for is None:
        as_far = len({run.metrics.get(PROGRESS) for run in runs}) == 1
        usual = [name for name in DEFAULT if name in there and not (name == PROGRESS and as_far)]
        return (*usual, *sorted(name for name in there if fnmatchcase(name, OF_CHANNELS)))
    for name in asked_for:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=3, cutoff=0.4) or sorted(there)[:3]
            known = f"use one such as {', '.join(near)}" if near else "they have no metrics at all"
            raise ComparisonError(f"--metrics {name}: no run has this metric; {known}")
    return tuple(dict.fromkeys(asked_for))


def _value(run: RecordedRun, name: str) -> float:
    """Return the value of a run's metric for the comparison: a mean for :data:`PACES`, else the last."""
    if _matches(name, PACES) and (points := [(point.step, point.value) for point in run.history(name)]):
        return mean_of_points(name, points)
    return run.metrics[name]


def _check_common(
    runs: Sequence[RecordedRun], values: Mapping[str, Mapping[str, float]], asked_for: Sequence[str]
) -> None:
    """Raise ComparisonError if the only run has no metric, or if no two share one; failed runs may have none."""
    shown = [run for run in runs if values[run.id] or run.status not in FAILURES]
    counts = Counter(name for run in shown for name in values[run.id])
    if shown and max(counts.values(), default=0) < min(len(shown), 2):
        names = ", ".join(run.name for run in shown[:4]) + (", ..." if len(shown) > 4 else "")
        have = f"{names} has no metric" if len(shown) == 1 else f"{names} have no metric in common"
        raise ComparisonError(f"{have} among {', '.join(asked_for)}; name another with --metrics")


def _differing(runs: Sequence[RecordedRun]) -> tuple[str, ...]:
    """Return the names of settings that differ between runs: the spec's first, then the JSON's and those derived from
    both.
    """
    values = {name: [run.settings.get(name) for run in runs] for run in runs for name in run.settings}
    differing = [
        name
        for name, of_runs in values.items()
        if len(set(of_runs)) > 1 and of_runs != values.get(REPEATED.get(name, ""))
    ]
    return tuple(sorted(differing, key=lambda name: (name.startswith("derived."), name.startswith("ds_config."), name)))


def _labels(runs: Sequence[RecordedRun]) -> dict[str, str]:
    sweeps = {run.tags.get("vary.name", "") for run in runs}
    prefix = f"{sweeps.pop()}." if len(sweeps) == 1 else ""
    names = {run.id: run.name.removeprefix(prefix) for run in runs}
    counts = Counter(names.values())
    return {run: name if counts[name] == 1 else f"{name} ({run[:6]})" for run, name in names.items()}


def terminal(comparison: Comparison, width: int = 120) -> str:
    """Return tables with as many runs side by side as fit into ``width`` characters; then notes and verdicts."""
    rows = [[_printable(cell) for cell in row] for row in table_rows(comparison)]
    widths = [max(map(len, cells)) + 2 for cells in zip(*rows, strict=True)]
    parts = [textwrap.fill(_printable(f"{comparison.title}. {comparison.explained}"), width)]
    begin = 2
    while begin < len(widths):
        end = begin + 1
        while end < len(widths) and sum(widths[:2]) + sum(widths[begin : end + 1]) - 2 <= width:
            end += 1
        parts.append("\n".join(aligned([row[:2] + row[begin:end] for row in rows], left={0, 1})))
        begin = end
    if said := [line for one in comparison.runs for line in _about_lines(one, width)]:
        parts.append("\n".join(said))
    return "\n\n".join(parts)


def markdown(comparison: Comparison) -> str:
    """Return the comparison as a Markdown document."""
    header, *rows = ([_inert(cell) for cell in row] for row in table_rows(comparison))
    table = [header, ["---", "---", *["---:" for _ in comparison.runs]], *rows]
    lines = [f"# {_inert(comparison.title)}", "", _inert(comparison.explained), ""]
    lines += [f"| {' | '.join(row)} |" for row in table]
    for one in comparison.runs:
        if said := about(one):
            lines += ["", f"**{_inert(one.label)}**", ""]
            lines += [f"- {title}: {_inert(text, code=title == 'try')}" for title, text in said]
    return "\n".join(lines) + "\n"


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return rows of a name, the better direction and a text per run: status if unfinished, parameters and metrics."""
    runs = comparison.runs
    rows: list[tuple[str, ...]] = [("", "better", *(one.label for one in runs))]
    if any(one.run.status != "FINISHED" for one in runs):
        rows.append(("status", "", *(one.run.status for one in runs)))
    for name in comparison.parameters:
        rows.append((name, "", *(one.parameters.get(name, "-") for one in runs)))
    for name in comparison.metrics:
        rows.append((name, direction(name), *(_cell(name, one) for one in runs)))
    return rows


def _cell(name: str, one: Compared) -> str:
    to_baseline = f" ({times(one.ratios[name])})" if name in one.ratios else ""
    return number(name, one.values.get(name)) + to_baseline


def about(one: Compared) -> list[tuple[str, str]]:
    """Return a run's note, its verdict and the change that the verdict proposes, as (title, text)."""
    top, share, change = (one.run.tags.get(f"verdict.{name}", "") for name in ("top", "share", "try"))
    between = "; the largest cost takes " if top == "healthy" else ", "
    said = [("note", one.run.note.strip()), ("verdict", between.join(filter(None, (top, share)))), ("try", change)]
    return [(title, text) for title, text in said if text and (top or title == "note")]


def _about_lines(one: Compared, width: int) -> list[str]:
    lines = []
    for title, text in about(one):
        for paragraph in text.splitlines():
            indent = f"  {title:9}"
            lines += textwrap.wrap(_printable(paragraph), width, initial_indent=indent, subsequent_indent=" " * 11)
            title = ""
    return [_printable(one.label), *lines] if lines else []


def _printable(text: str) -> str:
    """Remove characters that move the cursor or change colours, and return the text."""
    return "".join(character if character.isprintable() else " " for character in text)


def _inert(text: str, *, code: bool = False) -> str:
    """Return text written by users as one line, escaped for Markdown and HTML."""
    if code and "`" not in text and "\n" not in text:
        return f"`{text}`"
    return re.sub(r"([\\`*_{}\[\]<>|#~&])", r"\\\1", " ".join(text.split()))
