"""Scores of evaluations that differ in one variable, such as guidance, as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ddpm_ds.command_line import aligned
from ddpm_ds.evaluate.scores import Score, rounded
from ddpm_ds.files import temporary_beside

COLUMNS = 3
"""Most panels of a picture beside each other."""

Variants = Mapping[str, Sequence[Score]]
"""Scores by the value of the variable, which is a number; all have the same ones in the same order."""


def of_drawn(scores: Sequence[Score]) -> list[tuple[Score, float]]:
    """Return the scores that drawn images have, with their values: without classes none are read as their label."""
    return [(score, score.value) for score in scores if score.value is not None]


def variants_table(variable: str, variants: Variants) -> str:
    """Return a line for each value, and one for real images, with a column for each score."""
    first = of_drawn(next(iter(variants.values())))
    rows = [(variable, *(score.name for score, _ in first))]
    rows += [(value, *(rounded(found) for _, found in of_drawn(scores))) for value, scores in variants.items()]
    rows.append(("real images", *(rounded(score.real) for score, _ in first)))
    return "\n".join(aligned(rows, {0}))


def draw_variants(variable: str, variants: Variants, path: Path) -> None:
    """Write a PNG with a panel for each score of drawn images: its value over the variable's, and dashed that of real
    images.

    Raises:
        OSError: the file system refuses.
    """
    scores = [score for score, _ in of_drawn(next(iter(variants.values())))]
    columns = min(COLUMNS, len(scores))
    rows = math.ceil(len(scores) / columns)
    figure = Figure(figsize=(3.2 * columns, 2.5 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for number, score in enumerate(scores):
        axes = figure.add_subplot(rows, columns, number + 1)
        points = sorted((float(value), of_drawn(found)[number][1]) for value, found in variants.items())
        axes.plot(*zip(*points, strict=True), marker="o", color="#3b7dd8")
        if score.real is not None:
            axes.axhline(score.real, color="#7a7a7a", linestyle="--", linewidth=1, label="real images")
            axes.legend(frameon=False, fontsize=7)
        axes.set_title(score.title, fontsize=8)
        axes.set_xlabel(variable, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    temporary = temporary_beside(path)
    figure.savefig(temporary, format="png", metadata={"Software": None})  # no version in it: equal scores, equal files
    temporary.replace(path)
