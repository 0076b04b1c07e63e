"""Report of the search: table, numbers, picture, and the layout and micro-batch to train with. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from ddpm_ds.command_line import GIB, aligned, gib
from ddpm_ds.fit.task import Task, TrialLayout
from ddpm_ds.fit.trial import TriedSize

KNEE = 0.05
"""Maximum share of the best throughput that training with a smaller micro-batch may give up."""
COLOURS = ("#3b7dd8", "#e07b39", "#4c9f70", "#7d5ba6", "#c0504d", "#8c8c8c")


@dataclass(frozen=True)
class Found:
    """Trials of a layout on which at least the smallest micro-batch fits."""

    task: Task
    trials: tuple[TriedSize, ...]
    """Trials in ascending order of size."""

    @property
    def layout(self) -> TrialLayout:
        return self.task.layout

    @property
    def fitting(self) -> tuple[TriedSize, ...]:
        return tuple(trial for trial in self.trials if trial.fits)

    @property
    def is_limit(self) -> bool:
        """Whether the largest micro-batch that could be tried fits, so that the memory's limit is unknown."""
        return self.trials[-1].fits

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
    """Return the trials of the layout whose knee has the most images per second."""
    return max(found, key=lambda one: one.knee.images_per_second)


def table(found: Sequence[Found]) -> str:
    """Return a table with a line for each trial; it marks each layout's knee and largest, and stars the winner."""
    rows = [("layout", "micro-batch", "micro-batches", "images/s", "step ms", "GiB/process", "recompute", "fits", "")]
    best = winner(found)
    for one in found:
        for trial in one.trials:
            marks = ["knee"] * (trial is one.knee) + ["largest"] * (trial is one.largest)
            sizes = str(one.layout), str(trial.micro_batch_images), str(trial.micro_batches)
            if not trial.fits:
                rows.append((*sizes, "-", "-", "-", "", "no", trial.why))
                continue
            rows.append(
                (
                    *sizes,
                    f"{trial.images_per_second:,.4g}",
                    f"{1e3 * trial.median_seconds:,.5g}",
                    f"{trial.peak_bytes / GIB:.3f}",
                    f"every {trial.checkpoint_interval}" if trial.checkpoint_interval else "-",
                    "yes",
                    ("* " if one is best and trial is one.knee else "") + ", ".join(marks),
                )
            )
    return "\n".join(aligned(rows, left={len(rows[0]) - 1}))


def why(found: Sequence[Found]) -> str:
    """Return a few sentences that say what to train with, and what limits each layout."""
    best = winner(found)
    chosen, fastest, largest = best.knee, best.fastest, best.largest

    def told(trial: TriedSize) -> str:
        return f"{trial.images_per_second:,.4g} images/s in {gib(trial.peak_bytes)}"

    near = f"within {KNEE:.0%} of the fastest ({fastest.micro_batch_images}: {told(fastest)})"
    size = chosen.micro_batch_images
    sentences = [
        f"* Train with {best.layout.words()} and micro-batches of {size}: {told(chosen)}, "
        f"{'the fastest that was tried' if chosen is fastest else near}."
    ]
    if largest is not chosen:
        sentences.append(f"The largest that fits is {largest.micro_batch_images}: {told(largest)}.")
    if others := [one for one in found if one is not best]:
        second = winner(others)
        share = second.knee.images_per_second / chosen.images_per_second
        sentences.append(f"The next best layout, {second.layout}, reaches {share:.0%} of these images/s.")
    sentences += [
        f"{one.layout}: {one.largest.micro_batch_images} is the largest that could be tried, not the memory's limit."
        for one in found
        if one.is_limit
    ]
    return " ".join(sentences)


def numbers(found: Sequence[Found], **about: Any) -> dict[str, Any]:
    """Return all results for ``--json``, after the facts ``about`` the search."""
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


def draw(found: Sequence[Found], title: str, budget_bytes: int | None, file: BinaryIO) -> None:
    """Write a PNG that plots images/s and the memory of the fullest process against the micro-batch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # every verb of ddpm-ds imports this module
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    speed, memory = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for number, one in enumerate(found):
        colour, knee = COLOURS[number % len(COLOURS)], one.fitting.index(one.knee)
        sizes = [trial.micro_batch_images for trial in one.fitting]
        rates = [trial.images_per_second for trial in one.fitting]
        held = [trial.peak_bytes / GIB for trial in one.fitting]
        for axes, values in ((speed, rates), (memory, held)):
            axes.plot(sizes, values, "o-", markersize=4, color=colour, label=one.layout.words())
            axes.plot(sizes[knee], values[knee], "o", markersize=12, fillstyle="none", color=colour)
        for trial in one.trials:
            if trial.step_seconds and not trial.fits:  # timed, but over the budget
                speed.plot(trial.micro_batch_images, trial.images_per_second, "x", color=colour)
                memory.plot(trial.micro_batch_images, trial.peak_bytes / GIB, "x", color=colour)
    if budget_bytes is not None:
        memory.axhline(budget_bytes / GIB, color="black", linewidth=1, linestyle="--", label="budget")
    speed.set_xscale("log", base=2)
    speed.xaxis.set_major_formatter("{x:g}")
    speed.set_ylabel("images per second")
    memory.set_ylabel("memory of the fullest process, GiB")
    memory.set_xlabel("images in a micro-batch")
    for axes in (speed, memory):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    marks = f"ring: smallest within {KNEE:.0%} of the fastest; cross: measured, over the budget"
    speed.set_title(f"{title}\n{marks}", fontsize=10)
    figure.savefig(file, format="png", metadata={"Software": None})
