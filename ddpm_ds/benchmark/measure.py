"""Losses held equal, then times taken in turn.

A machine's speed drifts: other work, heat, frequency. So the rows take turns within each round, a ratio is one of two
neighbours in a round, and what is reported is the median over the rounds with its quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddpm_ds.benchmark.rows import Row
from ddpm_ds.errors import BadNumbersError

LOSS_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
"""Relative difference between two rows' losses that rounding explains, over a few tens of steps, by precision."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a quantity over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def first_losses(rows: Sequence[Row], steps: int) -> list[list[float]]:
    """Each row's losses over its first ``steps`` steps, which also warm it up."""
    return [[float(row.step()) for _ in range(steps)] for row in rows]


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference over the steps; NaN where a loss is."""
    differences = [abs(loss - other) / abs(other) for loss, other in zip(losses, reference, strict=True)]
    return max(differences, key=lambda difference: float("inf") if difference != difference else difference)


def check_losses(rows: Sequence[Row], losses: Sequence[Sequence[float]], tolerance: float) -> list[float]:
    """Each row's largest difference from the first one.

    Raises:
        BadNumbersError: a row does not train the same; its time would mean nothing.
    """
    differences = [largest_difference(row, losses[0]) for row in losses]
    for row, difference, own in zip(rows, differences, losses, strict=True):
        if not difference <= tolerance:
            step = next(
                step
                for step, (loss, other) in enumerate(zip(own, losses[0], strict=True))
                if not abs(loss - other) <= tolerance * abs(other)
            )
            raise BadNumbersError(
                f"{row.name}: loss {own[step]:.6g} in step {step}, where {rows[0].name} has {losses[0][step]:.6g}, so "
                f"the two do not train the same and are not timed; a skipped fp16 step does that: try a lower "
                f"fp16.initial_scale_power"
            )
    return differences


def time_rounds(
    rows: Sequence[Row],
    *,
    rounds: int,
    steps: int,
    synchronize: Callable[[], None],
    after_round: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Seconds per step of each row in each round: ``[row][round]``. The row that begins changes with the round."""
    seconds: list[list[float]] = [[] for _ in rows]
    for number in range(rounds):
        for turn in range(len(rows)):
            which = (number + turn) % len(rows)
            synchronize()
            begin = clock()
            for _ in range(steps):
                rows[which].step()
            synchronize()
            seconds[which].append((clock() - begin) / steps)
        after_round()
    return seconds


def ratios(seconds: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Seconds of one row over those of another, round by round."""
    return [own / other for own, other in zip(seconds, reference, strict=True)]
