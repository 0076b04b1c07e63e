"""Scores as functions of a varied quantity, such as the length of the average: a table, a file and a picture."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddpm_ds.command_line import aligned
from ddpm_ds.evaluate.scores import Score, rounded
from ddpm_ds.files import write_file

TITLES = {"ema_length": "relative length of the average", "guidance": "guidance"}
"""Titles of the varied quantities, by name."""
FRECHET = ("fid", "pixel_frechet", "digits_frechet")
"""Prefixes of the names of Fréchet distances, of which less is better."""


@dataclass(frozen=True)
class SweepPoint:
    """Evaluation at one point of a sweep."""

    values: Mapping[str, float]
    """Varied quantities by name, with the same names and order at all points. The picture has the first along x, and a
    line for each value of the others."""
    evaluation: str
    """Name of the evaluation's folder, which is beside the sweep's."""
    scores: Sequence[Score]

    @property
    def numbers(self) -> dict[str, float]:
        """Scores of the drawn images, by name."""
        return {score.name: score.value for score in self.scores if score.value is not None}


def sweep_table(points: Sequence[SweepPoint]) -> str:
    """Return a table with a line of scores for each point; a star marks the least of each Fréchet distance."""
    least = {name: best(points, name) for name in frechet_names(points)}
    rows = [(*points[0].values, *points[0].numbers)]
    for point in points:
        scores = (f"{rounded(value)}{'*' * (least.get(name) is point)}" for name, value in point.numbers.items())
        rows.append((*(f"{value:g}" for value in point.values.values()), *scores))
    return "\n".join(aligned(rows))


def best(points: Sequence[SweepPoint], name: str) -> SweepPoint:
    """Return the point where the Fréchet distance ``name`` is least."""
    return min(points, key=lambda point: point.numbers[name])


def frechet_names(points: Sequence[SweepPoint]) -> list[str]:
    """Return the names of the Fréchet distances that were computed."""
    return [name for name in points[0].numbers if name.startswith(FRECHET)]


def sweep_metrics(points: Sequence[SweepPoint]) -> dict[str, float]:
    """Return the minimum of each Fréchet distance and the varied quantities there, by their names in MLflow."""
    found = {}
    for name in frechet_names(points):
        point = best(points, name)
        found[f"sweep/{name}"] = point.numbers[name]
        found |= {f"sweep/{name}_{variable}": value for variable, value in point.values.items()}
    return found


def write_sweep(folder: Path, points: Sequence[SweepPoint], title: str) -> list[Path]:
    """Write ``sweep.json``, all points with their scores, and ``sweep.png``, a picture of the scores; return both.

    Raises:
        OSError: the file system refuses.
    """
    file, picture = folder / "sweep.json", folder / "sweep.png"
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"title": title, "points": [asdict(point) for point in points]}
    write_file(file, (json.dumps(content, indent=2) + "\n").encode())
    write_file(picture, _drawn(points, title))
    return [file, picture]


def _drawn(points: Sequence[SweepPoint], title: str) -> bytes:
    """Return a PNG with a panel for each Fréchet distance, or for each score if there is none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    least = frechet_names(points)
    names = least or list(points[0].numbers)
    along, *others = points[0].values
    figure = Figure(figsize=(7, 1 + 3.2 * len(names)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0], names, strict=True):
        for line in dict.fromkeys(tuple(point.values[other] for other in others) for point in points):
            own = [point for point in points if tuple(point.values[other] for other in others) == line]
            own.sort(key=lambda point: point.values[along])
            label = ", ".join(f"{TITLES[other]} {value:g}" for other, value in zip(others, line, strict=True))
            axes.plot([point.values[along] for point in own], [point.numbers[name] for point in own], "o-", label=label)
        if name in least:
            point = best(points, name)
            axes.plot(point.values[along], point.numbers[name], "o", markersize=12, fillstyle="none", color="black")
        if others:
            axes.legend(frameon=False, fontsize=8)
        axes.set_ylabel(name)
        axes.grid(alpha=0.25)
    axes.set_xlabel(TITLES[along])
    figure.suptitle(f"{title}{'; ring: least' if least else ''}", fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
