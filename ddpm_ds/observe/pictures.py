"""Traced steps as files: for ui.perfetto.dev or chrome://tracing, and as a picture.

The trace has a row for each rank and a slice for each event. The picture shows one step: a row for each rank, a box for
each instruction, grey where the rank waits; it can be read 400 pixels wide. Both need aligned traces.
"""

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ddpm_ds.files import replace_file
from ddpm_ds.observe.recording import RankTrace
from ddpm_ds.pipeline.schedule import PASSES, Event

LOOKS: dict[str, tuple[str, ...]] = {
    "ForwardPass": ("forward", "#3b7dd8", "#8fbcf0"),
    "BackwardPass": ("backward", "#e07b39", "#f5bd8b"),
    "InputGradients": ("input gradients", "#e07b39", "#f5bd8b"),
    "WeightGradients": ("weight gradients", "#b5542a", "#d98e63"),
    "DataWait": ("wait for data", "#c22f2f"),
    "LoadMicroBatch": ("load", "#d8a8a8"),
    "SendActivation": ("send activations", "#2b2b2b", "#2b2b2b"),
    "SendGrad": ("send gradients", "#2b2b2b", "#2b2b2b"),
    "RecvActivation": ("wait for activations",),
    "RecvGrad": ("wait for gradients",),
    "WaitForRanks": ("wait for other ranks",),
    "ReduceGrads": ("reduce gradients", "#4c9f70"),
    "OptimizerStep": ("optimizer step", "#7d5ba6"),
    "checkpoint": ("checkpoint", "#8a7a5c"),
    "inspection": ("sampling and validation", "#cbbf9f"),
}
"""Name of an event and the colour of its box by phase; an event without a colour is a wait."""
WAITING = "#e4e4e4"
PROCESS, STEPS_ROW = 1, 1  # ids in a trace: the process of all, and the thread above the ranks, which shows the steps
NUMBERED_BOXES = 600  # maximum number of boxes for which micro-batches are numbered
CHARACTER = 0.014  # width of one, as a share of the picture's; a box that shows its number has room for one more
VISIBLE = 0.001  # smallest width of a box that can be seen, as a share of the picture's
TITLE_CHARACTERS = 72
MOST_ROWS = 32  # maximum number of rows for which the picture grows, and of ranks that are named at its side


def write_trace(ranks: Sequence[RankTrace], title: str, path: Path) -> None:
    """Write traces in the Chrome trace event format: microseconds, complete events, a thread for each rank."""
    records = [_named("process_name", 0, title), _named("thread_name", STEPS_ROW, "steps")]
    for step in ranks[0].steps:
        records.append(_slice(f"step {step.number}", "step", STEPS_ROW, step.start, step.end, {}))
    for trace in ranks:
        row = STEPS_ROW + 1 + trace.rank
        records.append(_named("thread_name", row, rank_name(trace, ranks)))
        records.append({**_named("thread_sort_index", row, ""), "args": {"sort_index": row}})
        for step in trace.steps:
            for event in step.events:
                name = LOOKS.get(event.instruction, (event.instruction,))[0]
                arguments = {"step": step.number, "stage": trace.stages[event.phase]}
                if event.micro_batch >= 0:
                    arguments["micro-batch"] = event.micro_batch
                    name = f"{name} {event.micro_batch}"  # last: Perfetto leaves numbers out when it chooses a colour
                records.append(_slice(name, event.instruction, row, event.start, event.end, arguments))
    replace_file(path, json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}, separators=(",", ":")).encode())


def rank_name(trace: RankTrace, ranks: Sequence[RankTrace]) -> str:
    """Return a rank's name for a user: ``rank 2: stages 1 and 2, replica 0, tensor part 1``."""
    stages = " and ".join(map(str, trace.stages))
    return f"rank {trace.rank}: stage{'s' if len(trace.stages) > 1 else ''} {stages}{_place(trace, ranks)}"


def _place(trace: RankTrace, ranks: Sequence[RankTrace]) -> str:
    """Return a rank's replica and its part of a tensor group, as far as there are several among the ``ranks``."""
    replica = f", replica {trace.replica}" if any(other.replica for other in ranks) else ""
    return replica + (f", tensor part {trace.part}" if any(other.part for other in ranks) else "")


def _slice(name: str, kind: str, row: int, start: float, end: float, arguments: dict[str, Any]) -> dict[str, Any]:
    ts, dur = round(1e6 * start, 3), round(1e6 * (end - start), 3)
    return {"ph": "X", "name": name, "cat": kind, "pid": PROCESS, "tid": row, "ts": ts, "dur": dur, "args": arguments}


def _named(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": row, "args": {"name": name}}


def draw_median_step(ranks: Sequence[RankTrace], title: str, path: Path) -> None:
    """Write the step of median length as a PNG."""
    steps = sorted(range(len(ranks[0].steps)), key=lambda step: ranks[0].steps[step].end - ranks[0].steps[step].start)
    chosen = [trace.steps[steps[(len(steps) - 1) // 2]] for trace in ranks]
    start = min(step.start for step in chosen)
    seconds = max(step.end for step in chosen) - start
    rows = [step.moved(start).events for step in chosen]
    waits = ("RecvActivation", "RecvGrad", "WaitForRanks")
    waited = sum(event.end - event.start for events in rows for event in events if event.instruction in waits)
    bubble = waited / sum(step.end - step.start for step in chosen)
    title = f"step {chosen[0].number}: {title}\n{1e3 * seconds:,.4g} ms, bubble {bubble:.1%}"
    names = [f"{trace.stages[0]}{_place(trace, ranks)}" for trace in ranks]
    draw_step(rows, seconds, names, title, path)


def draw_step(
    rows: Sequence[Sequence[Event]], seconds: float, names: Sequence[str], title: str, file: Path | BinaryIO
) -> None:
    """Write a step of length ``seconds`` as a PNG, with a row of events, in seconds from its start, for each name.

    The names are those of pipeline ranks.
    """
    figure = Figure(figsize=(4.4, 2.6 + 0.3 * min(len(rows), MOST_ROWS)), dpi=300, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.tick_params(labelsize=7.5)
    for row in range(len(rows)):
        axes.broken_barh([(0, seconds)], (row - 0.42, 0.84), facecolors=WAITING)
    numbered = sum(event.instruction in PASSES for events in rows for event in events) <= NUMBERED_BOXES
    labels: dict[str, str] = {}
    folds = any(event.phase for events in rows for event in events)
    for name, (_, *colours) in LOOKS.items():
        for phase, colour in enumerate(colours):
            for row, events in enumerate(rows):
                boxes = [event for event in events if (event.instruction, event.phase) == (name, phase)]
                spans = [(box.start, box.end - box.start) for box in boxes]
                axes.broken_barh(spans, (row - 0.42, 0.84), facecolors=colour, edgecolors="white", linewidth=0.25)
                if any(box.end - box.start >= VISIBLE * seconds for box in boxes):
                    labels.setdefault(colour, _label(name, phase, folds=folds))
                for box in boxes if numbered and name in PASSES else ():
                    number, middle = str(box.micro_batch), (box.start + box.end) / 2
                    if box.end - box.start > CHARACTER * (1 + len(number)) * seconds:
                        axes.text(middle, row, number, ha="center", va="center", fontsize=7, color="black")
    labels[WAITING] = "waiting"
    named = range(0, len(rows), math.ceil(len(rows) / MOST_ROWS))
    axes.set_yticks(named, [names[row] for row in named])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, seconds)
    axes.set_xlabel("seconds since the start of the step; numbers: micro-batches", fontsize=8)
    axes.set_ylabel("pipeline rank", fontsize=8)
    lines = [line for given in title.splitlines() for line in textwrap.wrap(given, TITLE_CHARACTERS)]
    figure.suptitle("\n".join(lines), fontsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)
    legend = [Patch(color=colour, label=label) for colour, label in labels.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=2, frameon=False, fontsize=7.5)
    figure.savefig(file, format="png", metadata={"Software": None})  # no version in it: equal steps, equal files


def _label(instruction: str, phase: int, *, folds: bool) -> str:
    if instruction in PASSES and folds:
        return f"{LOOKS[instruction][0]}, {('encoder', 'decoder')[phase]} half"
    return "send" if instruction.startswith("Send") else LOOKS[instruction][0]
