"""Report of the search: table, numbers, picture, and the layout and micro-batch to train with. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_ds.command_line import GIB, aligned, gib
from ddpm_ds.fit.child import TriedSize
from ddpm_ds.fit.task import Task, TrialLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KNEE = 0.05
"""Share of the best throughput that a smaller micro-batch may lack."""
COLOURS = ("#3b7dd8", "#e07b39", "#4c9f70", "#7d5ba6", "#c0504d", "#8c8c8c")


@dataclass(frozen=True)
class Found:
    """Trials of one layout; the smallest micro-batch fits."""

    task: Task
    trials: tuple[TriedSize, ...]
    """Trials in ascending order of size."""
    is_limit: bool
    """Whether no larger micro-batch than the largest that fits could be tried."""

    @property
    def layout(self) -> TrialLayout:
        return self.task.layout

    @property
    def fitting(self) -> tuple[TriedSize, ...]:
        return tuple(trial for trial in self.trials if trial.fits)

    @property
    def largest(self) -> TriedSize:
        """Largest micro-batch that fits."""
        return self.fitting[-1]

    @property
    def fastest(self) -> TriedSize:
        return max(self.fitting, key=lambda trial: trial.images_per_second)

    @property
    def knee(self) -> TriedSize:
        """Smallest micro-batch that is nearly as fast as the fastest."""
        enough = (1 - KNEE) * self.fastest.images_per_second
        return next(trial for trial in self.fitting if trial.images_per_second >= enough)


def winner(found: Sequence[Found]) -> Found:
    """Return the layout whose knee is fastest."""
    return max(found, key=lambda one: one.knee.images_per_second)


def table(found: Sequence[Found]) -> str:
    """Return a line for each trial; the knee of a layout is marked, and that of the winner."""
    rows = [("layout", "micro-batch", "micro-batches", "images/s", "step ms", "GiB/process", "recompute", "fits", "")]
    best = winner(found)
    for one in found:
        for trial in one.trials:
            marks = ["knee"] * (trial is one.knee) + ["largest"] * (trial is one.largest)
            timed = trial.fits
            rows.append(
                (
                    str(one.layout),
                    str(trial.micro_batch_images),
                    str(trial.micro_batches),
                    f"{trial.images_per_second:,.4g}" if timed else "-",
                    f"{1e3 * trial.median_seconds:,.5g}" if timed else "-",
                    f"{trial.peak_bytes / GIB:.3f}" if timed else "-",
                    (f"every {trial.checkpoint_interval}" if trial.checkpoint_interval else "-") if timed else "",
                    "yes" if trial.fits else "no",
                    ("* " if one is best and trial is one.knee else "") + ", ".join(marks) if timed else trial.why,
                )
            )
    return "\n".join(aligned(rows, left={len(rows[0]) - 1}))


def why(found: Sequence[Found]) -> str:
    """Return a few sentences: which one to train with, and what limits each layout."""
    best = winner(found)
    chosen, fastest, largest = best.knee, best.fastest, best.largest
    sentences = [
        f"* Train with {best.layout.words()} and micro-batches of {chosen.micro_batch_images}: "
        f"{chosen.images_per_second:,.4g} images/s in {gib(chosen.peak_bytes)}"
    ]
    if chosen is fastest:
        sentences[0] += ", the fastest that was tried."
    else:
        sentences[0] += (
            f", within {KNEE:.0%} of the fastest ({fastest.micro_batch_images}: {fastest.images_per_second:,.4g} "
            f"images/s in {gib(fastest.peak_bytes)})."
        )
    if largest is not chosen:
        rate = largest.images_per_second / chosen.images_per_second - 1
        faster = "as fast" if abs(rate) < 0.005 else f"{abs(rate):.0%} {'faster' if rate > 0 else 'slower'}"
        sentences.append(
            f"The largest that fits, {largest.micro_batch_images}, is {faster} and takes {gib(largest.peak_bytes)}."
        )
    others = [one for one in found if one is not best]
    if others:
        second = winner(others)
        share = second.knee.images_per_second / chosen.images_per_second
        sentences.append(f"Of the other layouts {second.layout} is next, with {share:.0%} of its images/s.")
    for one in found:
        if one.is_limit:
            sentences.append(
                f"{one.layout}: {one.largest.micro_batch_images} is the largest that could be tried, not the memory's "
                f"limit."
            )
    return " ".join(sentences)


def numbers(found: Sequence[Found], **about: Any) -> dict[str, Any]:
    """Return everything, for ``--json``."""
    best = winner(found)
    return {
        **about,
        "layouts": [
            {
                "layout": asdict(one.layout),
                "largest_micro_batch_images": one.largest.micro_batch_images,
                "knee_micro_batch_images": one.knee.micro_batch_images,
                "ended_by_memory": not one.is_limit and not any(trial.hung for trial in one.trials),
                "trials": [
                    asdict(trial) | ({"images_per_second": trial.images_per_second} if trial.fits else {})
                    for trial in one.trials
                ],
            }
            for one in found
        ],
        "best": {"layout": asdict(best.layout), "micro_batch_images": best.knee.micro_batch_images},
    }


def draw(found: Sequence[Found], title: str, budget_bytes: int | None, path: Path) -> None:
    """Write the picture as a PNG: images/s above, memory of the fullest process below, by micro-batch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # every verb of ddpm-ds imports this module
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    speed, memory = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for number, one in enumerate(found):
        _draw_layout(speed, memory, one, COLOURS[number % len(COLOURS)])
    if budget_bytes is not None:
        at = budget_bytes / GIB
        memory.axhline(at, color="black", linewidth=1, linestyle="--")
        memory.annotate("budget", (0.01, at), xycoords=("axes fraction", "data"), fontsize=8, va="bottom")
    speed.set_xscale("log", base=2)
    ticks: list[int] = []  # whose names don't lie over each other
    for size in sorted({trial.micro_batch_images for one in found for trial in one.trials}):
        if not ticks or size >= 1.15 * ticks[-1]:
            ticks.append(size)
    speed.set_xticks(ticks, list(map(str, ticks)), minor=False)
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
    black: dict[str, Any] = {"color": "black", "linestyle": "none"}
    ring = f"knee: the smallest within {KNEE:.0%} of the fastest"
    signs = [Line2D([], [], marker="o", markersize=10, fillstyle="none", label=ring, **black)]
    if not all(trial.fits for one in found for trial in one.trials):
        signs.append(Line2D([], [], marker="x", label="does not fit", **black))
    speed.legend(handles=[*speed.get_legend_handles_labels()[0], *signs], frameon=False, fontsize=8, loc="best")
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw_layout(speed: Axes, memory: Axes, one: Found, colour: str) -> None:
    sizes = [trial.micro_batch_images for trial in one.fitting]
    rates = [trial.images_per_second for trial in one.fitting]
    held = [trial.peak_bytes / GIB for trial in one.fitting]
    knee = one.fitting.index(one.knee)
    for axes, values, label in ((speed, rates, one.layout.words()), (memory, held, None)):
        axes.plot(sizes, values, marker="o", markersize=4, color=colour, label=label)
        axes.plot(sizes[knee], values[knee], marker="o", markersize=12, fillstyle="none", color=colour)
    failed = [trial.micro_batch_images for trial in one.trials if not trial.fits]
    if failed:
        speed.plot(min(failed), rates[-1], marker="x", markersize=8, color=colour)
        speed.plot([sizes[-1], min(failed)], [rates[-1]] * 2, color=colour, linestyle=":", linewidth=1)
