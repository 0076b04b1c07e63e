"""A simulated step as a picture: a row for each rank, a box for each instruction, gaps where it waits."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ddpm_ds.pipeline.simulate import Simulation

COLOURS = {
    ("ForwardPass", 0): "#3b7dd8",
    ("ForwardPass", 1): "#8fbcf0",
    ("BackwardPass", 0): "#e07b39",
    ("BackwardPass", 1): "#f5bd8b",
    ("ReduceGrads", 0): "#4c9f70",
    ("OptimizerStep", 0): "#7d5ba6",
}
WORDS = {"ReduceGrads": "reduce gradients", "OptimizerStep": "optimizer step"}
NAMED_BOXES = 600
"""Most boxes of a picture into which the number of the micro-batch is written."""


def draw_timeline(simulation: Simulation, title: str, path: Path) -> None:
    """Write the step as a PNG. Its events must have been kept."""
    ranks = len(simulation.events)
    figure = Figure(figsize=(12, 1.6 + 0.45 * min(ranks, 32)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    boxes = sum(map(len, simulation.events))
    for rank, events in enumerate(simulation.events):
        for kind, colour in COLOURS.items():
            spans = [
                (1e3 * event.start, 1e3 * (event.end - event.start))
                for event in events
                if (event.instruction, event.phase) == kind
            ]
            axes.broken_barh(spans, (rank - 0.42, 0.84), facecolors=colour, edgecolors="white", linewidth=0.5)
        for event in events if boxes <= NAMED_BOXES else ():
            if event.micro_batch >= 0 and event.end - event.start > 0.012 * simulation.step_seconds:
                middle = 1e3 * (event.start + event.end) / 2
                axes.text(middle, rank, str(event.micro_batch), ha="center", va="center", fontsize=7, color="black")
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks - 0.45, -0.55)
    axes.set_xlim(0, 1e3 * simulation.step_seconds)
    axes.set_xlabel("ms from the start of the step; numbers are micro-batches, gaps are waiting")
    axes.set_title(f"{title}\n{1e3 * simulation.step_seconds:,.4g} ms, bubble {simulation.bubble:.1%}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=_legend(simulation), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path, format="png", metadata={"Software": None})  # no version in it: equal steps, equal files


def _legend(simulation: Simulation) -> list[Patch]:
    there = {(event.instruction, event.phase) for events in simulation.events for event in events}
    folds = any(phase for _, phase in there)
    return [Patch(color=colour, label=_label(*kind, folds=folds)) for kind, colour in COLOURS.items() if kind in there]


def _label(instruction: str, phase: int, *, folds: bool) -> str:
    if instruction in WORDS:
        return WORDS[instruction]
    half = (", encoder half" if phase == 0 else ", decoder half") if folds else ""
    return f"{instruction.removesuffix('Pass').lower()}{half}"
