"""A trace as a file for ui.perfetto.dev or chrome://tracing: a row for each rank, a slice for each event."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpm_ds.observe.recording import RankTrace
from ddpm_ds.pipeline.simulate import Event

WORDS = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "LoadMicroBatch": "load",
    "DataWait": "wait for data",
    "SendActivation": "send activations",
    "SendGrad": "send gradients",
    "RecvActivation": "wait for activations",
    "RecvGrad": "wait for gradients",
    "WaitForRanks": "wait for other ranks",
    "ReduceGrads": "reduce gradients",
    "OptimizerStep": "optimizer step",
}
PROCESS = 1
STEPS_ROW = 1
"""Thread id of the row above the ranks, in which the steps are."""


def write_trace(ranks: Sequence[RankTrace], title: str, path: Path) -> None:
    """Write aligned traces in the Chrome trace event format: microseconds, complete events, a thread for each rank."""
    records: list[dict[str, Any]] = [_named("process_name", 0, title), _named("thread_name", STEPS_ROW, "steps")]
    for step in ranks[0].steps:
        records.append(_slice(f"step {step.number}", "step", STEPS_ROW, step.start, step.end, {}))
    for trace in ranks:
        row = STEPS_ROW + 1 + trace.rank
        records.append(_named("thread_name", row, rank_name(trace, ranks)))
        records.append({**_named("thread_sort_index", row, ""), "args": {"sort_index": row}})
        for step in trace.steps:
            for event in step.events:
                arguments = {"step": step.number, "stage": trace.stages[event.phase]}
                if event.micro_batch >= 0:
                    arguments["micro-batch"] = event.micro_batch
                records.append(_slice(_name(event), event.instruction, row, event.start, event.end, arguments))
    with path.open("w") as file:
        json.dump({"traceEvents": records, "displayTimeUnit": "ms"}, file, separators=(",", ":"))


def rank_name(trace: RankTrace, ranks: Sequence[RankTrace]) -> str:
    """As a user knows it: ``rank 2: stages 1 and 2, replica 0``."""
    stages = " and ".join(map(str, trace.stages))
    replica = f", replica {trace.replica}" if any(other.replica for other in ranks) else ""
    return f"rank {trace.rank}: stage{'s' if len(trace.stages) > 1 else ''} {stages}{replica}"


def _name(event: Event) -> str:
    """The number comes last: Perfetto leaves numbers out when it chooses a colour."""
    name = WORDS.get(event.instruction, event.instruction)
    return f"{name} {event.micro_batch}" if event.micro_batch >= 0 else name


def _slice(name: str, kind: str, row: int, start: float, end: float, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": PROCESS,
        "tid": row,
        "ts": round(1e6 * start, 3),
        "dur": round(1e6 * (end - start), 3),
        "args": arguments,
    }


def _named(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": row, "args": {"name": name}}
