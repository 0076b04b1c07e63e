"""Metrics as they are compared: which direction is better, which of a run's values counts, how it is written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

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
