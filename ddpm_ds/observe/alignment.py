"""The events of all ranks on one clock, and how long ranks waited for each other where all have to be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddpm_ds.observe.clocks import clock_offset
from ddpm_ds.observe.recording import RankTrace, TracedStep

WAIT_FOR_RANKS = "WaitForRanks"
"""The event of waiting for other ranks that must agree on a step, or whose gradients are to be added."""


def aligned(traces: Sequence[RankTrace]) -> tuple[tuple[RankTrace, ...], float]:
    """The traces of all ranks on one clock, which begins with the first step, and by how much it may be wrong.

    Ranks leave ReduceGrads, where they add gradients, and OptimizerStep, where all agree on overflow and norm, when the
    last has come: what comes before becomes an event of its own, :data:`WAIT_FOR_RANKS`.
    """
    traces = sorted(traces, key=lambda trace: trace.rank)
    offsets = [clock_offset(trace.meetings, traces[0].meetings) for trace in traces]
    start = min(trace.steps[0].start - offset for trace, (offset, _) in zip(traces, offsets, strict=True))
    moved = [
        [_moved(step, offset + start) for step in trace.steps]
        for trace, (offset, _) in zip(traces, offsets, strict=True)
    ]
    replicas = [
        [rank for rank, trace in enumerate(traces) if trace.pipeline_rank == number]
        for number in sorted({trace.pipeline_rank for trace in traces})
    ]
    meetings = [("ReduceGrads", members) for members in replicas] + [("OptimizerStep", list(range(len(traces))))]
    for number in range(len(traces[0].steps)):
        for name, members in meetings:
            shared = _with_waits([moved[rank][number] for rank in members], name)
            for rank, step in zip(members, shared, strict=True):
                moved[rank][number] = step
    return (
        tuple(replace(trace, steps=tuple(steps)) for trace, steps in zip(traces, moved, strict=True)),
        max(error for _, error in offsets[1:]) if len(offsets) > 1 else 0.0,
    )


def _moved(step: TracedStep, back: float) -> TracedStep:
    return replace(
        step,
        start=step.start - back,
        end=step.end - back,
        events=tuple(event._replace(start=event.start - back, end=event.end - back) for event in step.events),
    )


def _with_waits(steps: Sequence[TracedStep], name: str) -> list[TracedStep]:
    """The same step on several ranks, its instruction ``name`` beginning on each when the last rank has come to it.

    Where a rank was through before the last one came, nobody has waited.
    """
    found = [event for step in steps for event in step.events if event.instruction == name]
    latest = max((event.start for event in found), default=0.0)
    if any(event.end < latest for event in found):
        return list(steps)
    return [
        replace(
            step,
            events=tuple(
                part
                for event in step.events
                for part in (
                    (event._replace(instruction=WAIT_FOR_RANKS, end=latest), event._replace(start=latest))
                    if event.instruction == name and event.start < latest
                    else (event,)
                )
            ),
        )
        for step in steps
    ]
