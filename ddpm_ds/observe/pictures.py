"""A trace as a file for ui.perfetto.dev or chrome://tracing: a row for each rank, a slice for each event.

One step as a picture: a row for each rank, a box for each instruction, gaps where it waits.

One of the traced steps as a picture.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ddpm_ds.observe.recording import WAIT_FOR_RANKS, RankTrace
from ddpm_ds.pipeline.schedule import Event

SLICE_NAMES = {
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
    name = SLICE_NAMES.get(event.instruction, event.instruction)
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


COLOURS = {
    ("ForwardPass", 0): "#3b7dd8",
    ("ForwardPass", 1): "#8fbcf0",
    ("BackwardPass", 0): "#e07b39",
    ("BackwardPass", 1): "#f5bd8b",
    ("DataWait", 0): "#c22f2f",
    ("LoadMicroBatch", 0): "#d8a8a8",
    ("SendActivation", 0): "#2b2b2b",
    ("SendActivation", 1): "#2b2b2b",
    ("SendGrad", 0): "#2b2b2b",
    ("SendGrad", 1): "#2b2b2b",
    ("ReduceGrads", 0): "#4c9f70",
    ("OptimizerStep", 0): "#7d5ba6",
    ("EMA", 0): "#c79fe0",
    ("checkpoint", 0): "#8a7a5c",
    ("inspection", 0): "#cbbf9f",
}
"""By instruction and phase; what is not here is waiting, and stays empty."""
WORDS = {
    "DataWait": "wait for data",
    "LoadMicroBatch": "load",
    "SendActivation": "send",
    "SendGrad": "send",
    "ReduceGrads": "reduce gradients",
    "OptimizerStep": "optimizer step",
    "EMA": "EMA",
    "checkpoint": "checkpoint",
    "inspection": "samples, held-out loss",
}
NAMED_BOXES = 600
"""Most boxes of a picture into which the number of the micro-batch is written."""
CHARACTER = 0.006
"""Width of a character as a share of the picture's; a box has room for its number and one more."""
VISIBLE = 0.001
"""Width of a box that can be seen, likewise."""
NUMBERED = ("ForwardPass", "BackwardPass")


def draw_step(rows: Sequence[Sequence[Event]], seconds: float, names: Sequence[str], title: str, path: Path) -> None:
    """Write a step of so many ``seconds`` as a PNG, with a row of events, in seconds from its start, for each name."""
    figure = Figure(figsize=(12, 1.6 + 0.45 * min(len(rows), 32)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    numbered = [event for events in rows for event in events if event.instruction in NUMBERED]
    for row, events in enumerate(rows):
        for kind, colour in COLOURS.items():
            spans = [
                (1e3 * event.start, 1e3 * (event.end - event.start))
                for event in events
                if (event.instruction, event.phase) == kind
            ]
            axes.broken_barh(spans, (row - 0.42, 0.84), facecolors=colour, edgecolors="white", linewidth=0.5)
        for event in events if len(numbered) <= NAMED_BOXES else ():
            number = str(event.micro_batch)
            if event.instruction in NUMBERED and event.end - event.start > CHARACTER * (1 + len(number)) * seconds:
                middle = 1e3 * (event.start + event.end) / 2
                axes.text(middle, row, number, ha="center", va="center", fontsize=7, color="black")
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, 1e3 * seconds)
    axes.set_xlabel("ms from the start of the step; numbers are micro-batches, gaps are waiting")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles=_legend(rows, VISIBLE * seconds), loc="outside lower center", ncols=6, frameon=False, fontsize=8
    )
    figure.savefig(path, format="png", metadata={"Software": None})  # no version in it: equal steps, equal files


def _legend(rows: Sequence[Sequence[Event]], visible: float) -> list[Patch]:
    """Of what has a box that takes ``visible`` seconds or more."""
    there = {
        (event.instruction, event.phase) for events in rows for event in events if event.end - event.start >= visible
    }
    folds = any(phase for _, phase in there)
    labels = {_label(*kind, folds=folds): colour for kind, colour in COLOURS.items() if kind in there}
    return [Patch(color=colour, label=label) for label, colour in labels.items()]


def _label(instruction: str, phase: int, *, folds: bool) -> str:
    if instruction in WORDS:
        return WORDS[instruction]
    half = (", encoder half" if phase == 0 else ", decoder half") if folds else ""
    return f"{instruction.removesuffix('Pass').lower()}{half}"


WAITS = ("RecvActivation", "RecvGrad", WAIT_FOR_RANKS)


def draw_median_step(ranks: Sequence[RankTrace], title: str, path: Path) -> None:
    """Write the step of median length of aligned traces as a PNG."""
    steps = sorted(range(len(ranks[0].steps)), key=lambda step: ranks[0].steps[step].end - ranks[0].steps[step].start)
    chosen = [trace.steps[steps[(len(steps) - 1) // 2]] for trace in ranks]
    start = min(step.start for step in chosen)
    seconds = max(step.end for step in chosen) - start
    rows = [
        [event._replace(start=event.start - start, end=event.end - start) for event in step.events] for step in chosen
    ]
    waited = sum(event.end - event.start for events in rows for event in events if event.instruction in WAITS)
    bubble = waited / sum(step.end - step.start for step in chosen)
    title = f"step {chosen[0].number}: {title}\n{1e3 * seconds:,.4g} ms, bubble {bubble:.1%}"
    draw_step(rows, seconds, [rank_name(trace, ranks) for trace in ranks], title, path)
