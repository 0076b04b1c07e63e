"""What was found, as a table, as numbers and as the DeepSpeed JSON to train with. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddpm_ds.fit.answer import Trial
from ddpm_ds.fit.search import KNEE, knee
from ddpm_ds.fit.task import Layout
from ddpm_ds.planner.units import GIB, gib
from ddpm_ds.table import aligned


@dataclass(frozen=True)
class Found:
    """The trials of one layout; the smallest micro-batch fits."""

    layout: Layout
    trials: tuple[Trial, ...]
    """Ascending."""
    is_limit: bool
    """No larger micro-batch could be tried than the largest that fits."""

    @property
    def fitting(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.fits)

    @property
    def largest(self) -> Trial:
        """The largest that fits."""
        return self.fitting[-1]

    @property
    def fastest(self) -> Trial:
        return max(self.fitting, key=lambda trial: trial.images_per_second)

    @property
    def knee(self) -> Trial:
        """The smallest that is nearly as fast as the fastest."""
        size = knee({trial.micro_batch_images: trial.images_per_second for trial in self.fitting})
        return next(trial for trial in self.fitting if trial.micro_batch_images == size)


def winner(found: Sequence[Found]) -> Found:
    """The layout whose knee is fastest."""
    return max(found, key=lambda one: one.knee.images_per_second)


def table(found: Sequence[Found]) -> str:
    """A line for each trial; the knee of a layout is marked, and that of the winner."""
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
    """In a few sentences which one to train with, and what ends each layout's curve."""
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
        rate = largest.images_per_second / chosen.images_per_second
        sentences.append(
            f"The largest that fits, {largest.micro_batch_images}, is {_faster(rate)} and takes "
            f"{gib(largest.peak_bytes)}."
        )
    others = [one for one in found if one is not best]
    if others:
        second = winner(others)
        share = second.knee.images_per_second / chosen.images_per_second
        sentences.append(f"Of the other layouts {second.layout} comes nearest, with {share:.0%} of its images/s.")
    for one in found:
        if one.is_limit:
            sentences.append(
                f"{one.layout}: {one.largest.micro_batch_images} is the largest that could be tried, not the memory's "
                f"limit."
            )
    return " ".join(sentences)


def numbers(found: Sequence[Found], **about: Any) -> dict[str, Any]:
    """Everything, for a file."""
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


def _faster(rate: float) -> str:
    if abs(rate - 1) < 0.005:
        return "as fast"
    return f"{abs(rate - 1):.0%} {'faster' if rate > 1 else 'slower'}"
