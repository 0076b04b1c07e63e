"""A comparison as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ddpm_ds.experiments.compare import FAILURES, Compared, Comparison
from ddpm_ds.experiments.compare_curves import curve
from ddpm_ds.experiments.compare_measures import direction, judged, number, times
from ddpm_ds.experiments.compare_text import about_run, explained
from ddpm_ds.experiments.runs import RecordedRun

FOLDER = Path(__file__).parent
PROGRAMS = ("compare_chart.js", "compare_page.js")
LOSSES = ("train/loss", "eval/loss")
"""Their curves are drawn whatever is compared besides."""
COLOURS, DASHES = 10, 5
"""Of lines: 50 runs differ in one of both."""
POINTS, POINTS_OF_CURVE = 20_000, 600
"""Of all runs' curves of one metric together, and most of one, so that the page stays small."""
TIMELINES = "trace"
PNG = b"\x89PNG\r\n\x1a\n"
MOST_PICTURES, MOST_PICTURE_BYTES = 4, 2**21  # of one run, of one picture


@dataclass(frozen=True)
class Cell:
    """A metric of one run in the table."""

    value: str
    ratio: str
    """To the baseline; empty where there is none."""
    judged: str
    """``better``, ``worse`` or empty."""
    best: bool
    """As written no other run is better, and some are worse; a run that failed never is."""


def page(comparison: Comparison) -> str:
    """The page, with what it draws: the runs' histories and timelines are read from MLflow.

    Raises:
        ExperimentError: MLflow does not answer.
    """
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    program = "".join((FOLDER / name).read_text(encoding="utf-8") for name in PROGRAMS)
    return environment.get_template("compare_page.html").render(
        comparison=comparison,
        explained=explained(comparison),
        rows=[(name, direction(name), _cells(comparison, name)) for name in comparison.measures],
        several=len(comparison.runs) > 1,
        unfinished=any(one.run.status != "FINISHED" for one in comparison.runs),
        about=[about_run(one) for one in comparison.runs],
        timelines=[
            (index, one, pictures) for index, one in enumerate(comparison.runs) if (pictures := timelines(one.run))
        ],
        data=_data(comparison),
        colours=COLOURS,
        style=(FOLDER / "compare_page.css").read_text(encoding="utf-8"),
        program=program,
        program_hash=base64.b64encode(hashlib.sha256(program.encode()).digest()).decode(),
    )


def breakable(name: str) -> Markup:
    """A dotted or slashed name as HTML that may take several lines."""
    return Markup(re.sub(r"([._/])", r"\1<wbr>", str(escape(name))))


def timelines(run: RecordedRun) -> list[tuple[str, str]]:
    """The pictures of traced steps among a run's artifacts, as (name, data URI)."""
    paths = [path for path in run.artifacts(TIMELINES) if path.endswith(".png")][:MOST_PICTURES]
    contents = [(PurePosixPath(path).name, run.read_artifact(path)) for path in paths]
    return [
        (name, f"data:image/png;base64,{base64.b64encode(content).decode()}")
        for name, content in contents
        if content is not None and content.startswith(PNG) and len(content) <= MOST_PICTURE_BYTES
    ]


def _cells(comparison: Comparison, name: str) -> list[Cell]:
    better = direction(name)
    finite = [
        one.values[name]
        for one in comparison.runs
        if one.run.status not in FAILURES and math.isfinite(one.values.get(name, math.nan))
    ]
    written = {number(name, value) for value in finite}
    best = number(name, {"lower": min, "higher": max}[better](finite)) if better and len(written) > 1 else None
    return [_cell(one, name, best) for one in comparison.runs]


def _cell(one: Compared, name: str, best: str | None) -> Cell:
    value, to_baseline = number(name, one.values.get(name)), one.ratios.get(name)
    return Cell(
        value=value,
        ratio="" if to_baseline is None else times(to_baseline),
        judged=judged(name, to_baseline),
        best=value == best and one.run.status not in FAILURES,
    )


def _data(comparison: Comparison) -> dict[str, Any]:
    """What the page's program draws."""
    names = list(dict.fromkeys((*LOSSES, *comparison.measures)))
    points = max(100, min(POINTS // len(comparison.runs), POINTS_OF_CURVE))
    runs = []
    for index, one in enumerate(comparison.runs):
        courses = {name: curve(one.run, name, points) for name in names if name in one.run.metrics}
        runs.append(
            {
                "label": one.label,
                "status": one.run.status,
                "baseline": one is comparison.baseline,
                "colour": index % COLOURS,
                "dash": index // COLOURS % DASHES,
                "curves": {name: asdict(course) for name, course in courses.items() if course is not None},
                "values": {name: value for name, value in one.values.items() if math.isfinite(value)},
                "texts": {name: number(name, value) for name, value in one.values.items()},
                "ratios": {name: times(value) for name, value in one.ratios.items()},
            }
        )
    return {"runs": runs, "curves": _drawn(names, runs), "measures": _measures(comparison.measures)}


def _drawn(names: Sequence[str], runs: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Of the metrics those that a run has logged more than once."""
    points = {
        name: max(len(run["curves"][name]["values"]) if name in run["curves"] else 0 for run in runs) for name in names
    }
    return _measures([name for name in names if points[name] > 1])


def _measures(names: Sequence[str]) -> list[dict[str, str]]:
    return [{"name": name, "better": direction(name)} for name in names]
