"""Losses held equal, then times taken in turn.

A machine's speed drifts: other work, heat, frequency. So the rows take turns within each round, a ratio is of two
neighbours in one round, and what is reported is the median over the rounds with its quartiles. What would disturb a
clock, counting bytes and busy time, is done in steps of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ddpm_ds.device import wait_for_device, wait_for_stream
from ddpm_ds.errors import BadNumbersError
from rivals.busy import busy_time
from rivals.rows import Row
from rivals.traffic import SentBytes

Value = TypeVar("Value")

LOSS_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
"""Relative difference from the first row's loss that rounding explains in the first steps, by precision. Over 50 steps
of the digits, rounding was seen to make 1e-7, 3e-4 and 1e-3."""


@dataclass(frozen=True)
class Observation:
    """What one process was seen to do in a step of one row."""

    message_bytes: int
    """Sent in messages to one other process."""
    collective_bytes: int
    """Sent as a part of collectives, see :data:`rivals.traffic.RING_SHARE`."""
    idle: float
    """Share of the step's time outside of forward and backward."""


def sum_over_processes(values: list[float]) -> list[float]:
    """Element by element; every process calls this and gets the same."""
    return [sum(parts) for parts in zip(*of_all_processes(values), strict=True)]


def of_all_processes(value: Value) -> list[Value]:
    """The values of all processes, by rank; every process calls this."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def first_losses(
    rows: Sequence[Row], steps: int, total: Callable[[list[float]], list[float]] = sum_over_processes
) -> list[list[float]]:
    """Each row's losses over its first ``steps`` steps, which also warm it up; ``total`` of all processes' parts."""
    return [total([float(row.step()) for _ in range(steps)]) for row in rows]


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


class Stepping(Protocol):
    """Whatever takes steps."""

    @property
    def step(self) -> Callable[[], object]: ...


def time_rounds(
    rows: Sequence[Stepping],
    *,
    rounds: int,
    steps: int,
    synchronize: Callable[[], object],
    after_round: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Seconds per step of each row in each round: ``[row][round]``. Each round begins with another row.

    ``synchronize`` waits until this process's device and all other processes have done what they were given.
    """
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


def observe(row: Row, steps: int, device: torch.device) -> Observation:
    """Count what one step of ``row`` sends, then watch ``steps`` steps; every process calls this.

    The steps end when the last process is done with them.
    """
    with SentBytes() as traffic:
        row.step()
    wait_for_device(device)
    dist.barrier()
    begin = time.perf_counter()
    with busy_time(lambda: wait_for_stream(device)) as busy:
        for _ in range(steps):
            row.step()
    wait_for_device(device)
    dist.barrier()
    seconds = time.perf_counter() - begin
    return Observation(traffic.message_bytes, round(traffic.collective_bytes), 1 - busy.seconds / seconds)
