"""Throughput against micro-batch as a picture: a curve for each layout, its knee, and where memory ends it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ddpm_ds.fit.report import Found
from ddpm_ds.fit.search import KNEE
from ddpm_ds.planner.units import GIB

COLOURS = ("#3b7dd8", "#e07b39", "#4c9f70", "#7d5ba6", "#c0504d", "#8c8c8c")


def draw(found: Sequence[Found], title: str, budget_bytes: int | None, path: Path) -> None:
    """Write the picture as a PNG: images/s above, memory of the fullest process below."""
    figure = Figure(figsize=(9, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    speed, memory = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    sizes = sorted({trial.micro_batch_images for one in found for trial in one.trials})
    for number, one in enumerate(found):
        _draw_layout(speed, memory, one, COLOURS[number % len(COLOURS)])
    if budget_bytes is not None:
        memory.axhline(budget_bytes / GIB, color="black", linewidth=1, linestyle="--")
        memory.annotate(
            "budget", (0.01, budget_bytes / GIB), xycoords=("axes fraction", "data"), fontsize=8, va="bottom"
        )
    speed.set_xscale("log", base=2)
    named = _apart(sizes)
    speed.set_xticks(named, list(map(str, named)), minor=False)
    speed.set_xticks([], minor=True)
    speed.tick_params(labelbottom=True)
    speed.set_ylabel("images/s")
    memory.set_ylabel("GiB, fullest process")
    memory.set_xlabel("images of a micro-batch")
    for axes in (speed, memory):
        axes.margins(x=0.06)
        axes.set_ylim(0, 1.12 * axes.dataLim.ymax)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    speed.set_title(title, fontsize=10)
    speed.legend(handles=[*speed.get_legend_handles_labels()[0], *_signs(found)], frameon=False, fontsize=8, loc="best")
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw_layout(speed: Axes, memory: Axes, one: Found, colour: str) -> None:
    fitting, knee = one.fitting, one.knee
    sizes = [trial.micro_batch_images for trial in fitting]
    rates = [trial.images_per_second for trial in fitting]
    speed.plot(sizes, rates, marker="o", markersize=4, color=colour, label=one.layout.words())
    memory.plot(sizes, [trial.peak_bytes / GIB for trial in fitting], marker="o", markersize=4, color=colour)
    speed.plot(
        knee.micro_batch_images, knee.images_per_second, marker="o", markersize=12, fillstyle="none", color=colour
    )
    memory.plot(
        knee.micro_batch_images, knee.peak_bytes / GIB, marker="o", markersize=12, fillstyle="none", color=colour
    )
    failed = [trial.micro_batch_images for trial in one.trials if not trial.fits]
    if failed:
        speed.plot(min(failed), rates[-1], marker="x", markersize=8, color=colour)
        speed.plot([sizes[-1], min(failed)], [rates[-1]] * 2, color=colour, linestyle=":", linewidth=1)


def _apart(sizes: Sequence[int]) -> list[int]:
    """Those whose names don't lie over each other on a logarithmic axis."""
    named = [sizes[0]]
    for size in sizes[1:]:
        if size >= 1.15 * named[-1]:
            named.append(size)
    return named


def _signs(found: Sequence[Found]) -> list[Line2D]:
    signs = [Line2D([], [], color="black", linestyle="none", marker="o", markersize=10, fillstyle="none")]
    signs[0].set_label(f"knee: the smallest within {KNEE:.0%} of the fastest")
    if not all(trial.fits for one in found for trial in one.trials):
        signs.append(Line2D([], [], color="black", linestyle="none", marker="x", label="does not fit"))
    return signs
