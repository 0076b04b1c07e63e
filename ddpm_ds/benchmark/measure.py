"""Losses held equal, then times taken in turn.

A machine's speed drifts: other work, heat, frequency. So the rows take turns within each round, a ratio is of two
neighbours in one round, and what is reported is the median over the rounds with its quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddpm_ds.benchmark.rows import Row
from ddpm_ds.errors import BadNumbersError

LOSS_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
"""Relative difference from the fp32 loop's loss that rounding explains in the first steps, by precision. Over 50 steps
of the digits, rounding was seen to make 1e-7, 3e-4 and 1e-3."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a quantity over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        one = len(values) == 1
        low, median, high = [values[0]] * 3 if one else statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def first_losses(rows: Sequence[Row], steps: int) -> list[list[float]]:
    """Each row's losses over its first ``steps`` steps, which also warm it up."""
    return [[float(row.step()) for _ in range(steps)] for row in rows]


def check_losses(rows: Sequence[Row], losses: Sequence[Sequence[float]], tolerance: float) -> list[float]:
    """Each row's largest relative difference from the first row's loss.

    Raises:
        BadNumbersError: a row does not train the same; its time would mean nothing.
    """
    largest = []
    for row, own in zip(rows, losses, strict=True):
        differences = [abs(loss - other) / abs(other) for loss, other in zip(own, losses[0], strict=True)]
        for step, difference in enumerate(differences):
            if not difference <= tolerance:  # NaN differs too
                raise BadNumbersError(
                    f"loss {own[step]:.6g} in step {step} of {row.name}, where {rows[0].name} has "
                    f"{losses[0][step]:.6g}: they don't train the same, so nothing is timed; where fp16 skipped a "
                    f"step, try a lower fp16.initial_scale_power"
                )
        largest.append(max(differences))
    return largest


def time_rounds(
    rows: Sequence[Row],
    *,
    rounds: int,
    steps: int,
    synchronize: Callable[[], object],
    after_round: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Seconds per step of each row in each round: ``[row][round]``. Each round begins with another row."""
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
