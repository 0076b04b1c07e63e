"""Recorded runs beside each other, as data: what differs between them and what came of it.

Values are of MLflow, so a comparison needs neither the runs' folders nor the machine they ran on.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpm_ds.errors import UserError
from ddpm_ds.experiments.compare_measures import DEFAULT, PROGRESS, is_pace, ratio, typical
from ddpm_ds.experiments.runs import RecordedRun

HEALTHY = "healthy"
GRID_TAG = "vary.name"
FAILURES = ("FAILED", "KILLED")
REPEATED = {
    "derived.batch_images": "ds_config.train_batch_size",
    "derived.micro_batch_images": "ds_config.train_micro_batch_size_per_gpu",
    "derived.micro_batches": "ds_config.gradient_accumulation_steps",
    "derived.stages": "ds_config.pipeline.stages",
    "derived.zero_stage": "ds_config.zero_optimization.stage",
}
"""What is left out where the JSON that was trained with says the same."""
SECTIONS = ("ds_config.", "derived.")  # what comes after the spec's own parameters


class ComparisonError(UserError):
    """The runs have nothing that can be compared."""


@dataclass(frozen=True)
class Verdict:
    """What cost a run most."""

    top: str
    """A short name such as `data wait`; ``healthy`` where no loss is worth a change."""
    share: str
    """Of the time, as it is shown; may be empty."""
    change: str
    """The one to try next; may be empty."""

    @property
    def words(self) -> str:
        """The loss and its share of the time."""
        if self.top == HEALTHY:
            return f"{HEALTHY}; the largest loss takes {self.share}" if self.share else HEALTHY
        return f"{self.top}, {self.share}" if self.share else self.top


@dataclass(frozen=True)
class Compared:
    """One run of a comparison. All mappings have the comparison's parameters or measures as keys."""

    run: RecordedRun
    label: str
    """The run's name, for cells of one grid without the grid's; with the beginning of its id where two are the same."""
    parameters: Mapping[str, str]
    """Only those that differ; the ones that this run lacks are left out."""
    values: Mapping[str, float]
    """By measure; those that this run lacks are left out."""
    ratios: Mapping[str, float]
    """Value over that of the baseline; left out where there is none, and where there is only one run."""
    verdict: Verdict | None


@dataclass(frozen=True)
class Comparison:
    """Runs in the order in which they were given."""

    runs: tuple[Compared, ...]
    baseline: Compared
    parameters: tuple[str, ...]
    measures: tuple[str, ...]

    @property
    def title(self) -> str:
        """What is compared, in a few words."""
        experiments = list(dict.fromkeys(one.run.experiment for one in self.runs))
        runs = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        return f"{runs} of {', '.join(experiments)}"

    @property
    def parent(self) -> str | None:
        """The id of the run that all of these are children of; they are in one store then."""
        (parent, *others) = {(one.run.parent, one.run.tracking_uri) for one in self.runs}
        return None if others else parent[0]


def comparison(
    runs: Sequence[RecordedRun], baseline: RecordedRun | None = None, metrics: Sequence[str] | None = None
) -> Comparison:
    """Compare runs by ``metrics``, else by those of :data:`DEFAULT` that any of them has, and how far they are.

    The baseline is by default the first run that has any of the metrics. A run that failed may lack all of them.

    Raises:
        ComparisonError: a metric of ``metrics`` is in no run, or two runs that did not fail have none in common.
    """
    runs = list({run.id: run for run in (*runs, *([] if baseline is None else [baseline]))}.values())
    measures = _measures(runs, metrics)
    values = {run.id: {name: _value(run, name) for name in measures if name in run.metrics} for run in runs}
    _check_common(runs, values, metrics or DEFAULT)
    if baseline is None:
        baseline = next((run for run in runs if values[run.id]), runs[0])
    differing = _differing(runs)
    labels = _labels(runs)
    base = values[baseline.id]
    compared = {
        run.id: Compared(
            run=run,
            label=labels[run.id],
            parameters={name: run.params[name] for name in differing if name in run.params},
            values=values[run.id],
            ratios={
                name: times
                for name, value in values[run.id].items()
                if len(runs) > 1 and (times := ratio(value, base.get(name))) is not None
            },
            verdict=_verdict(run.tags),
        )
        for run in runs
    }
    return Comparison(tuple(compared.values()), compared[baseline.id], differing, measures)


def _measures(runs: Sequence[RecordedRun], metrics: Sequence[str] | None) -> tuple[str, ...]:
    there = {name for run in runs for name in run.metrics}
    if metrics is None:
        as_far = len({run.metrics.get(PROGRESS) for run in runs}) == 1
        return tuple(name for name in DEFAULT if name in there and not (name == PROGRESS and as_far))
    for name in metrics:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=3, cutoff=0.4) or sorted(there)[:3]
            known = f"use one such as {', '.join(near)}" if near else "they have no metrics at all"
            raise ComparisonError(f"--metrics {name}: no run has this metric; {known}")
    return tuple(dict.fromkeys(metrics))


def _value(run: RecordedRun, name: str) -> float:
    if is_pace(name) and (points := run.history(name)):
        return typical([point.value for point in points])
    return run.metrics[name]


def _check_common(
    runs: Sequence[RecordedRun], values: Mapping[str, Mapping[str, float]], asked_for: Iterable[str]
) -> None:
    """Runs that did not fail must have a metric, and two of them the same one."""
    held = [run for run in runs if values[run.id] or run.status not in FAILURES]
    counts = Counter(name for run in held for name in values[run.id])
    if held and max(counts.values(), default=0) < min(len(held), 2):
        names = ", ".join(run.name for run in held[:4]) + (", ..." if len(held) > 4 else "")
        have = f"{names} has no metric" if len(held) == 1 else f"{names} have no metric in common"
        raise ComparisonError(f"{have} among {', '.join(asked_for)}; name another with --metrics")


def _differing(runs: Sequence[RecordedRun]) -> tuple[str, ...]:
    """Parameters that are not the same in all runs: the spec's first, then the JSON's and what follows from both."""
    values = {name: [run.params.get(name) for run in runs] for run in runs for name in run.params}
    differing = [
        name
        for name, of_runs in values.items()
        if len(set(of_runs)) > 1 and of_runs != values.get(REPEATED.get(name, ""))
    ]
    return tuple(sorted(differing, key=lambda name: (_section(name), name)))


def _section(name: str) -> int:
    return next((number for number, prefix in enumerate(SECTIONS, start=1) if name.startswith(prefix)), 0)


def _labels(runs: Sequence[RecordedRun]) -> dict[str, str]:
    grids = {run.tags.get(GRID_TAG, "") for run in runs}
    prefix = f"{grids.pop()}." if len(grids) == 1 else ""
    names = {run.id: run.name.removeprefix(prefix) for run in runs}
    counts = Counter(names.values())
    return {run: name if counts[name] == 1 else f"{name} ({run[:6]})" for run, name in names.items()}


def _verdict(tags: Mapping[str, str]) -> Verdict | None:
    top = tags.get("verdict.top", "")
    if not top:
        return None
    return Verdict(top, tags.get("verdict.share", ""), tags.get("verdict.try", ""))
