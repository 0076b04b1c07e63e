"""Timeline: traces chosen steps of a run on every rank, and writes them on rank 0 when they are over.

RUN_DIR/trace/steps-20-22.json   for ui.perfetto.dev: a row for each rank, a slice for each event
RUN_DIR/trace/steps-20-22.png    the step of median length, if there are several stages: a row for each rank, a box for
                                 each instruction, grey where the rank waits; readable at a width of 400 pixels
RUN_DIR/trace/summary.json       settings of the run, and each rank's :func:`rank_seconds`
"""

import contextlib
import io
import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO

from ddpm_ds.ground.errors import faults_logged
from ddpm_ds.ground.host import processes_on_host
from ddpm_ds.ground.units import Precision, rounded
from ddpm_ds.observe.device_speed import shared_peak
from ddpm_ds.observe.observer import WAIT_FOR_RANKS, Observer, RankTrace, Recording, Report, aligned, keep
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.messages import gather_objects
from ddpm_ds.pipeline.schedule import PASSES, Event
from ddpm_ds.unet.layers import PASSES_PER_STEP

Summary = Mapping[str, Any]
"""Content of ``summary.json``, or of one rank in it."""
PAUSES = {"checkpoint": ["checkpoint"], "sampling": ["sampling"]}
"""Events between steps, by the name under which their seconds are summed."""
OWN = {
    "data_wait": ["DataWait"],
    "load": ["LoadMicroBatch"],
    "reduce": ["ReduceGrads"],
    "optimizer": ["OptimizerStep"],
    "agreement_wait": [WAIT_FOR_RANKS],  # for other ranks, in ReduceGrads and OptimizerStep
}
"""Events that belong to no phase of a rank, by the name under which their seconds are summed."""
PHASES = {
    "forward": ["ForwardPass"],
    "backward": ["BackwardPass", "InputGradients", "WeightGradients"],
    "wait": ["RecvActivation", "RecvGrad"],  # for messages
    "send": ["SendActivation", "SendGrad"],
}
"""Events of one phase of a rank, by the name under which their seconds are summed."""

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
    "sampling": ("sampling and validation", "#cbbf9f"),
}
"""Name of an event and the colour of its box by phase; an event without a colour is a wait."""
WAITING = "#e4e4e4"
PROCESS, STEPS_ROW = 1, 1  # ids in a trace: the process of all, and the thread above the ranks, which shows the steps
NUMBERED_BOXES = 600  # maximum number of boxes for which micro-batches are numbered
CHARACTER = 0.014  # width of a character as a share of the step; a box with a number has room for one more
VISIBLE = 0.001  # smallest width of a visible box, as a share of the step
TITLE_CHARACTERS = 72
LEGEND_LINE, LABELS = 0.17, 0.7  # inches of the picture's height: a line of legend or title; the labels below the axis
MOST_ROWS = 32  # maximum number of rows for which the picture grows, and of ranks that are named at its side


class Timeline(Observer):
    """Observer that traces some steps once; if a rollback interrupts them, they are traced when they are repeated."""

    def __init__(
        self,
        engine: UnetPipelineEngine,
        steps: range,
        folder: Path,
        report: Report,
        precision: Precision,
        macs_per_image: int,
    ) -> None:
        """Trace ``steps`` into ``folder``; ``macs_per_image`` counts the whole U-Net's forward pass."""
        self._engine, self._folder, self._report = engine, folder, report
        self._precision, self._macs, self._steps = precision, macs_per_image, steps
        self._recording: Recording | None = None
        self._done = not steps

    def begin_step(self, step: int) -> None:
        if self._recording is not None and step != self._recording.step + 1:
            self._recording.abandon()
            self._recording = None
        if self._recording is None:
            if step in self._steps and not self._done:
                self._recording = Recording(self._engine, step)
        elif step in self._steps:
            self._recording.begin_step(step)
        else:
            self.finish()

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        return self._recording.span(name) if self._recording is not None else contextlib.nullcontext()

    def finish(self) -> None:
        """Write the trace, if one is being recorded; collective."""
        if self._recording is None:
            return
        own, self._recording, self._done = self._recording.close(), None, True
        peak = shared_peak(self._engine.device, self._precision)
        traces = gather_objects(own, RankTrace)
        if traces is not None:
            with faults_logged("timeline", self._report.log):
                ranks, error = aligned(traces)
                summary = self._summary(ranks, error, peak)
                first, last = summary["first_step"], summary["last_step"]
                self._report.observed(timeline_metrics(summary, self._macs), last)
                if keep(self._report, "trace", self._files(ranks, summary)):
                    suffixes = ".png and .json" if self._engine.num_stages > 1 else ".json"
                    self._report.log(f"traced steps {first}-{last}: {self._folder / f'steps-{first}-{last}'}{suffixes}")

    def _summary(self, traces: Sequence[RankTrace], clock_error_seconds: float, peak: float) -> Summary:
        engine, ranks = self._engine, [rank_seconds(trace) for trace in traces]
        return {
            "schedule": engine.schedule,
            "micro_batches": engine.micro_batches,  # of a replica's step
            "micro_batch_images": engine.micro_batch_size,
            "pipeline_ranks": engine.num_stages,
            "replicas": engine.replicas,
            "tensor_size": engine.module.tensor.size,
            "space_size": engine.ranks_of_image,
            "device": engine.device.type,
            "zero_stage": engine.zero_optimization_stage(),
            "precision": self._precision,
            "graphs": not engine.graph.why_eager,  # other steps are CUDA graphs; traced ones are not
            "world_size": len(ranks),
            "host_processes": processes_on_host(len(ranks)),
            "first_step": traces[0].steps[0].number,
            "last_step": traces[0].steps[-1].number,
            "step_seconds": fmean(rank["step_seconds"] for rank in ranks),
            "peak_flops_per_second": peak,  # of one device
            "clock_error_seconds": clock_error_seconds,  # by which the clocks of two ranks may differ
            "ranks": ranks,
        }

    def _files(self, ranks: Sequence[RankTrace], summary: Summary) -> dict[Path, str | bytes]:
        replicas = f" x {summary['replicas']} replicas" if summary["replicas"] > 1 else ""
        tensor = f" x {summary['tensor_size']} tensor ranks" if summary["tensor_size"] > 1 else ""
        passes = f"{summary['micro_batches']} micro-batches of {summary['micro_batch_images']}"
        space = f" x {summary['space_size']} space ranks" if summary["space_size"] > 1 else ""
        title = f"{summary['schedule']}, {summary['pipeline_ranks']} ranks{tensor}{space}{replicas}, {passes}"
        name = self._folder / f"steps-{summary['first_step']}-{summary['last_step']}"
        files: dict[Path, str | bytes] = {name.with_suffix(".json"): trace_json(ranks, title)}
        if self._engine.num_stages > 1:
            files[name.with_suffix(".png")] = draw_median_step(ranks, title)
        return files | {self._folder / "summary.json": json.dumps(summary, indent=2) + "\n"}


def rank_seconds(trace: RankTrace) -> Summary:
    """Sum up one rank's aligned trace: seconds per step, means over the traced steps.

    ``step_seconds`` is the sum of disjoint parts: the rank's own ``{kind}_seconds`` by :data:`OWN`, ``other_seconds``
    that are in no event (logging, Python between instructions, waiting for deliveries), and ``{kind}_seconds`` of each
    of its ``phases`` by :data:`PHASES`; but not those of :data:`PAUSES`. A phase also has its ``stage``, seconds per
    micro-batch of its passes, and the bytes of its messages to the next stage and the one before, 0 if it has none.
    """
    steps = len(trace.steps)
    taken: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for event in (event for step in trace.steps for event in step.events):
        taken[event.instruction, event.phase].append(event.end - event.start)

    def total(names: Sequence[str], phase: int) -> float:
        return sum(sum(taken[name, phase]) for name in names)

    def seconds(kinds: Mapping[str, Sequence[str]], phase: int = 0) -> dict[str, float]:
        return {f"{kind}_seconds": total(names, phase) / steps for kind, names in kinds.items()}

    def each(names: Sequence[str], phase: int) -> float:
        return total(names, phase) / max(len(taken["ForwardPass", phase]), 1)  # one for each micro-batch

    whole = sum(step.end - step.start for step in trace.steps) / steps
    pauses = seconds(PAUSES)
    return {
        "rank": trace.rank,
        "pipeline_rank": trace.pipeline_rank,
        "replica": trace.replica,
        "part": trace.part,
        "step_seconds": whole - sum(pauses.values()),
        "swap_seconds": trace.swap_seconds,  # a part of the passes
        **seconds(OWN),
        **pauses,
        "other_seconds": whole - sum(map(sum, taken.values())) / steps,
        "phases": [
            {
                "stage": stage,
                **seconds(PHASES, phase),
                "forward_seconds_per_micro_batch": each(PHASES["forward"], phase),
                "backward_seconds_per_micro_batch": each(PHASES["backward"], phase),
                "weight_seconds_per_micro_batch": each(["WeightGradients"], phase),
                "activation_bytes": activation_bytes,
                "gradient_bytes": gradient_bytes,
            }
            for phase, (stage, (activation_bytes, gradient_bytes)) in enumerate(
                zip(trace.stages, trace.message_bytes, strict=True)
            )
        ],
    }


def timeline_metrics(summary: Summary, macs_per_image: int) -> dict[str, float]:
    """Return the metrics of a trace's summary; metrics of a whole rank are under its stage of phase 0."""
    ranks, step_seconds = summary["ranks"], summary["step_seconds"]
    values: dict[str, float] = {}
    for number in range(summary["pipeline_ranks"]):
        replicas = [rank for rank in ranks if rank["pipeline_rank"] == number]
        for phases in zip(*(rank["phases"] for rank in replicas), strict=True):
            for kind in PHASES:
                name = f"stage{phases[0]['stage']}/{kind}_seconds"
                values[name] = fmean(phase[f"{kind}_seconds"] for phase in phases)
        own = {kind: fmean(rank[f"{kind}_seconds"] for rank in replicas) for kind in OWN}
        stage = f"stage{replicas[0]['phases'][0]['stage']}"
        values[f"{stage}/wait_seconds"] += own["agreement_wait"]
        values[f"{stage}/load_seconds"] = own["data_wait"] + own["load"]
        for kind in ("reduce", "optimizer"):
            values[f"{stage}/{kind}_seconds"] = own[kind]

    def phases_of(rank: Summary, *kinds: str) -> float:
        return sum(phase[f"{kind}_seconds"] for phase in rank["phases"] for kind in kinds)

    computing = [phases_of(rank, "forward", "backward") for rank in ranks]
    images = summary["micro_batches"] * summary["micro_batch_images"] * summary["replicas"]
    flops = 2 * macs_per_image * PASSES_PER_STEP * images
    values |= {
        "perf/traced_step_seconds": step_seconds,
        "perf/bubble_fraction": fmean(
            (rank["agreement_wait_seconds"] + phases_of(rank, "wait")) / rank["step_seconds"] for rank in ranks
        ),
        "perf/imbalance": max(computing) / fmean(computing) - 1,
        "perf/mfu": flops / step_seconds / (summary["peak_flops_per_second"] * len(ranks)),
        "perf/data_wait_fraction": max(rank["data_wait_seconds"] / rank["step_seconds"] for rank in ranks),
    }
    return values


def trace_json(ranks: Sequence[RankTrace], title: str) -> str:
    """Return traces in the Chrome trace event format: microseconds, complete events, a thread for each rank."""
    records: list[dict[str, Any]] = []

    def name(row: int, name: str) -> None:
        row_of = {"pid": PROCESS, "tid": row}
        records.append({"ph": "M", "name": "thread_name", **row_of, "args": {"name": name}})
        records.append({"ph": "M", "name": "thread_sort_index", **row_of, "args": {"sort_index": row}})

    def add(name: str, kind: str, row: int, start: float, end: float, **values: object) -> None:
        times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}
        records.append({"ph": "X", "name": name, "cat": kind, "pid": PROCESS, "tid": row, **times, "args": values})

    records.append({"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": title}})
    name(STEPS_ROW, "steps")
    for step in ranks[0].steps:
        add(f"step {step.number}", "step", STEPS_ROW, step.start, step.end)
    for trace in ranks:
        row, stages = STEPS_ROW + 1 + trace.rank, " and ".join(map(str, trace.stages))
        name(row, f"rank {trace.rank}: stage{'s' * (len(trace.stages) > 1)} {stages}{_place(trace, ranks)}")
        for number, event in ((step.number, event) for step in trace.steps for event in step.events):
            what, values = LOOKS.get(event.instruction, (event.instruction,))[0], dict[str, object]()
            if event.micro_batch >= 0:
                values["micro-batch"] = event.micro_batch
                what = f"{what} {event.micro_batch}"  # last: Perfetto leaves numbers out when it chooses a colour
            values |= {"step": number, "stage": trace.stages[event.phase]}
            add(what, event.instruction, row, event.start, event.end, **values)
    return json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _place(trace: RankTrace, ranks: Sequence[RankTrace]) -> str:
    """Return a rank's replica and its part of a tensor group, where there are several."""
    replica = f", replica {trace.replica}" if any(other.replica for other in ranks) else ""
    return replica + (f", tensor part {trace.part}" if any(other.part for other in ranks) else "")


def draw_median_step(ranks: Sequence[RankTrace], title: str) -> bytes:
    """Return the step of median length as a PNG."""
    steps = sorted(range(len(ranks[0].steps)), key=lambda step: ranks[0].steps[step].end - ranks[0].steps[step].start)
    chosen = [trace.steps[steps[(len(steps) - 1) // 2]] for trace in ranks]
    start = min(step.start for step in chosen)
    seconds = max(step.end for step in chosen) - start
    rows = [step.moved(start).events for step in chosen]
    waits = ("RecvActivation", "RecvGrad", "WaitForRanks")
    waited = sum(event.end - event.start for events in rows for event in events if event.instruction in waits)
    bubble = waited / sum(step.end - step.start for step in chosen)
    title = f"step {chosen[0].number}: {title}\n{rounded(1e3 * seconds, 4)} ms, bubble {bubble:.1%}"
    names = [f"{trace.stages[0]}{_place(trace, ranks)}" for trace in ranks]
    picture = io.BytesIO()
    draw_step(rows, seconds, names, title, picture)
    return picture.getvalue()


def draw_step(
    rows: Sequence[Sequence[Event]], seconds: float, names: Sequence[str], title: str, file: Path | BinaryIO
) -> None:
    """Write a step of length ``seconds`` as a PNG, with a row of events, in seconds from its start, for each name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import; needed on rank 0 alone
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(4.4, 4.4), dpi=300, layout="constrained")
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
                    half = f", {('encoder', 'decoder')[phase]} half" if folds and name in PASSES else ""
                    labels.setdefault(colour, "send" if name.startswith("Send") else LOOKS[name][0] + half)
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
    handles = [Patch(color=colour, label=label) for colour, label in labels.items()]
    columns = 2 if folds else 3
    legend = LEGEND_LINE * math.ceil(len(handles) / columns)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=7.5)
    plot = max(legend, 0.3 * min(len(rows), MOST_ROWS))
    figure.set_figheight(LABELS + LEGEND_LINE * len(lines) + plot + legend)
    figure.savefig(file, format="png", metadata={"Software": None})  # no version in it: equal steps, equal files
