"""The course of a run's metrics, against images and against time, in as few points as a picture shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddpm_ds.experiments.runs import Point, RecordedRun


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
