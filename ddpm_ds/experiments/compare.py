"""Metrics as they are compared: which direction is better, which of a run's values counts, how it is written.

The course of a run's metrics, against images and against time, in as few points as a picture shows.

Recorded runs beside each other, as data: what differs between them and what came of it.

Values are of MLflow, so a comparison needs neither the runs' folders nor the machine they ran on.
"""

from __future__ import annotations

import difflib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from ddpm_ds.errors import UserError
from ddpm_ds.tracking.runs import Point, RecordedRun

Direction = Literal["lower", "higher", ""]

PROGRESS = "progress/images"
DEFAULT = (
    PROGRESS,
    "train/loss",
    "eval/loss",
    "perf/images_per_second",
    "perf/step_seconds",
    "perf/peak_memory_bytes",
    "perf/bubble_fraction",
    "perf/mfu",
    "perf/data_wait_fraction",
)
"""What is compared where nothing else is asked for; what no run has is left out, and progress where all are as far."""

DIRECTIONS: tuple[tuple[str, Direction], ...] = (
    ("*loss", "lower"),
    ("*_seconds", "lower"),
    ("*_bytes", "lower"),
    ("*_fraction", "lower"),
    ("*_ms", "lower"),
    ("*fid", "lower"),
    ("*kid", "lower"),
    ("perf/imbalance", "lower"),
    ("train/skipped_steps", "lower"),
    ("train/rewinds", "lower"),
    ("*_per_second", "higher"),
    ("perf/*tflops*", "higher"),
    ("perf/mfu", "higher"),
)
SHARES = ("*_fraction", "perf/mfu", "perf/imbalance")
PACES = ("perf/*_seconds", "perf/*_per_second", "perf/*tflops*")
"""Measured anew at each log point, and different at each: the median counts, without the first, which warms up."""


def direction(name: str) -> Direction:
    """Which values of a metric are better; empty where neither is."""
    return next((better for pattern, better in DIRECTIONS if fnmatchcase(name, pattern)), "")


def is_pace(name: str) -> bool:
    """Whether the median of a run's log points counts, rather than the last one."""
    return _matches(name, PACES)


def typical(values: Sequence[float]) -> float:
    """The median of a run's log points, without the first one where there are others."""
    return statistics.median(values[1:] or values)


def ratio(value: float | None, baseline: float | None) -> float | None:
    """``value / baseline``; None where either is missing or not a number, or the baseline is 0."""
    if value is None or baseline is None or not math.isfinite(value) or not math.isfinite(baseline) or baseline == 0:
        return None
    return value / baseline


def judged(name: str, times: float | None) -> Literal["better", "worse", ""]:
    """What a ratio to the baseline means; within half a percent it means nothing."""
    better = direction(name)
    if times is None or not better or abs(times - 1) < 0.005:
        return ""
    return "better" if (times < 1) == (better == "lower") else "worse"


def number(name: str, value: float | None) -> str:
    """A metric's value with four digits, in the unit that suits its name and size; ``-`` where there is none."""
    if value is None:
        return "-"
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if _matches(name, SHARES):
        return f"{value:.1%}"
    if name.endswith("_bytes"):
        return _scaled(value, ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))
    if name.endswith("_seconds"):
        return _scaled(value, ((1, "s"), (1e-3, "ms"), (1e-6, "µs")))
    return plain(value)


def plain(value: float) -> str:
    """Four digits without a unit: ``12,345``, ``0.03125``, ``1.2e-07``."""
    return f"{value:,.0f}" if abs(value) >= 1000 and abs(value) < 1e12 else f"{value:.4g}"


def times(value: float | None) -> str:
    """A ratio, ``1.34x`` or ``0.904x``; ``-`` where there is none."""
    if value is None:
        return "-"
    if 0.01 <= abs(value) < 100:
        return f"{value:.3f}x" if abs(value) < 0.9995 else f"{value:.2f}x"
    return f"{plain(value)}x"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    size, unit = next(((size, unit) for size, unit in units if abs(value) >= size), units[-1])
    return f"{plain(value / size)} {unit}"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Curve:
    """Lists of equal length, in the order of steps."""

    images: list[int] | None
    """Seen until then; None where the run does not say how many a step has."""
    seconds: list[float]
    """Since the run was started, pauses included."""
    values: list[float | None]
    """None where the value is not finite."""


def curve(run: RecordedRun, name: str, most_points: int) -> Curve | None:
    """The course of one metric in at most so many points; None where the run never logged it."""
    points = fewer(run.history(name), most_points)
    if not points:
        return None
    batch = run.params.get("train.batch_images", "")
    return Curve(
        images=[point.step * int(batch) for point in points] if batch.isdecimal() else None,
        seconds=[(point.time_ms - run.start_ms) / 1e3 for point in points],
        values=[float(f"{point.value:.6g}") if math.isfinite(point.value) else None for point in points],
    )


def fewer(points: Sequence[Point], most: int) -> list[Point]:
    """At most ``most`` of the points, with the lowest and the highest of each stretch, so that no peak is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    stretches = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [point for stretch in stretches for point in sorted({min(stretch, key=_height), max(stretch, key=_height)})]


def _height(point: Point) -> float:
    return point.value if math.isfinite(point.value) else -math.inf


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
class MetricChange:
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
    verdict: MetricChange | None


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


def _verdict(tags: Mapping[str, str]) -> MetricChange | None:
    top = tags.get("verdict.top", "")
    if not top:
        return None
    return MetricChange(top, tags.get("verdict.share", ""), tags.get("verdict.try", ""))
