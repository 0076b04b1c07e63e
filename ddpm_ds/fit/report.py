"""Report of the search: table, numbers, and the layout and micro-batch to train with. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ddpm_ds.command_line import GIB, aligned
from ddpm_ds.fit.search import KNEE
from ddpm_ds.fit.trial import Found


def winner(found: Sequence[Found]) -> Found:
    """Return the trials of the layout whose knee has the most images per second."""
    return max(found, key=lambda one: one.knee.images_per_second)


def table(found: Sequence[Found]) -> str:
    """Return a table with a line for each trial, with marks at each layout's knee, its largest and the winner."""
    rows = [("layout", "micro-batch", "micro-batches", "images/s", "GiB/process", "recompute", "")]
    best = winner(found)
    for one in found:
        for trial in one.trials:
            sizes = one.task.name, str(trial.micro_batch_images), str(trial.micro_batches)
            if not trial.fits:
                rows.append((*sizes, "-", "-", "-", f"does not fit: {trial.why}"))
                continue
            largest = "largest that could be tried" if one.is_limit else "largest that fits"
            marks = [f"within {KNEE:.0%} of the fastest"] * (trial is one.knee) + [largest] * (trial is one.largest)
            recompute = f"every {trial.checkpoint_interval}" if trial.checkpoint_interval else "-"
            star = "* " if one is best and trial is one.knee else ""
            measured = f"{trial.images_per_second:,.4g}", f"{trial.peak_bytes / GIB:.3f}", recompute
            rows.append((*sizes, *measured, star + ", ".join(marks)))
    return "\n".join(aligned(rows, left={len(rows[0]) - 1}))


def numbers(found: Sequence[Found], **about: Any) -> dict[str, Any]:
    """Return all results for ``--json``, after the facts ``about`` the search."""

    def layout(one: Found) -> dict[str, int]:
        return {"stages": one.task.stages, "replicas": one.task.replicas}

    best = winner(found)
    return {
        **about,
        "layouts": [
            {
                "layout": layout(one),
                "largest_micro_batch_images": one.largest.micro_batch_images,
                "knee_micro_batch_images": one.knee.micro_batch_images,
                "ended_by_memory": not one.is_limit,
                "trials": [
                    {"fits": trial.fits, **asdict(trial)}
                    | ({"images_per_second": trial.images_per_second} if trial.fits else {})
                    for trial in one.trials
                ],
            }
            for one in found
        ],
        "best": {"layout": layout(best), "micro_batch_images": best.knee.micro_batch_images},
    }
