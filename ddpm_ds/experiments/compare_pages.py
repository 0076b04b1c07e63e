"""Comparison of runs as a table for the terminal, as Markdown, and as one HTML page that needs no other file."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ddpm_ds.command_line import aligned
from ddpm_ds.experiments.compare import Compared, Comparison, direction, unit
from ddpm_ds.tracking.run_folder import SAMPLES_KEY
from ddpm_ds.tracking.runs import Point, RecordedRun

ARTIFACT_FOLDER = "comparison"
"""Folder among the parent run's artifacts that holds the comparison of its children."""
FOLDER = Path(__file__).parent
LOSSES = ("train/loss", "eval/loss")
"""Metrics whose curves are always drawn."""
COLOURS = 10
DASHES = ("", "8 4", "2 4", "10 4 2 4", "18 4")  # dashes of lines; 50 runs differ in colour or dashes
POINTS, POINTS_OF_CURVE = 20_000, 600
"""Maximum number of points of one metric's curves over all runs, and of one curve, so that the page stays small."""
CLOCK = ((3600, "h"), (60, "min"), (1, "s"))
SAMPLES = re.compile(rf"\b{SAMPLES_KEY.rpartition('/')[2]}\W+step\W+(?P<step>\d+)\W+timestamp\W+(?P<at>\d+)\W.*\.png$")
"""Path of a picture sampled during training; MLflow joins the parts of its name by + or %, and writes # for /."""
PNG = b"\x89PNG\r\n\x1a\n"
MOST_PICTURES, MOST_PICTURE_BYTES = 4, 2**21  # maximum per run and per picture


def terminal(comparison: Comparison, width: int = 120) -> str:
    """Return tables with as many runs side by side as fit into ``width`` characters; then notes and verdicts."""
    rows = [[_printable(cell) for cell in row] for row in table_rows(comparison)]
    widths = [max(map(len, cells)) + 2 for cells in zip(*rows, strict=True)]
    parts = [textwrap.fill(_printable(f"{comparison.title}. {comparison.explained}"), width)]
    begin = 2
    while begin < len(widths):
        end = begin + 1
        while end < len(widths) and sum(widths[:2]) + sum(widths[begin : end + 1]) - 2 <= width:
            end += 1
        parts.append("\n".join(aligned([row[:2] + row[begin:end] for row in rows], left={0, 1})))
        begin = end
    if said := [line for one in comparison.runs for line in _about_lines(one, width)]:
        parts.append("\n".join(said))
    return "\n\n".join(parts)


def markdown(comparison: Comparison) -> str:
    """Return the comparison as a Markdown document."""
    header, *rows = ([_inert(cell) for cell in row] for row in table_rows(comparison))
    table = [header, ["---", "---", *["---:" for _ in comparison.runs]], *rows]
    lines = [f"# {_inert(comparison.title)}", "", _inert(comparison.explained), ""]
    lines += [f"| {' | '.join(row)} |" for row in table]
    for one in comparison.runs:
        if said := about(one):
            lines += ["", f"**{_inert(one.label)}**", ""]
            lines += [f"- {title}: {_inert(text, code=title == 'try')}" for title, text in said]
    return "\n".join(lines) + "\n"


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return rows of a name, the better direction and a text per run: status if unfinished, parameters and metrics."""
    runs = comparison.runs
    rows: list[tuple[str, ...]] = [("", "better", *(one.label for one in runs))]
    if any(one.run.status != "FINISHED" for one in runs):
        rows.append(("status", "", *(one.run.status for one in runs)))
    for name in comparison.parameters:
        rows.append((name, "", *(one.parameters.get(name, "-") for one in runs)))
    for name in comparison.metrics:
        cells = (f"{cell.value} ({cell.ratio})" if cell.ratio else cell.value for cell in comparison.cells(name))
        rows.append((name, direction(name), *cells))
    return rows


def about(one: Compared) -> list[tuple[str, str]]:
    """Return a run's note, its verdict and the change that the verdict proposes, as (title, text)."""
    top, share, change = (one.run.tags.get(f"verdict.{name}", "") for name in ("top", "share", "try"))
    between = "; the largest cost takes " if top == "healthy" else ", "
    said = [("note", one.run.note.strip()), ("verdict", between.join(filter(None, (top, share)))), ("try", change)]
    return [(title, text) for title, text in said if text and (top or title == "note")]


def _about_lines(one: Compared, width: int) -> list[str]:
    lines = []
    for title, text in about(one):
        for paragraph in text.splitlines():
            indent = f"  {title:9}"
            lines += textwrap.wrap(_printable(paragraph), width, initial_indent=indent, subsequent_indent=" " * 11)
            title = ""
    return [_printable(one.label), *lines] if lines else []


def _printable(text: str) -> str:
    """Remove characters that move the cursor or change colours, and return the text."""
    return "".join(character if character.isprintable() else " " for character in text)


def _inert(text: str, *, code: bool = False) -> str:
    """Return text written by users as one line, escaped for Markdown and HTML."""
    if code and "`" not in text and "\n" not in text:
        return f"`{text}`"
    return re.sub(r"([\\`*_{}\[\]<>|#~&])", r"\\\1", " ".join(text.split()))


def page(comparison: Comparison) -> str:
    """Return the HTML page, with the runs' histories, samples and timelines read from MLflow.

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
    environment.filters["breakable"] = lambda name: Markup(re.sub(r"([._/])", r"\1<wbr>", str(escape(name))))
    program = (FOLDER / "compare_page.js").read_text(encoding="utf-8")
    return environment.get_template("compare_page.html").render(
        comparison=comparison,
        rows=[(name, direction(name), comparison.cells(name)) for name in comparison.metrics],
        about=[about(one) for one in comparison.runs],
        pictured=[
            (title, [_pictures(one.run, paths(one.run)) for one in comparison.runs], what)
            for title, paths, what in (
                ("Samples", latest_samples, "Latest samples"),
                ("Timelines", timelines, "Timeline, a row for each rank, a box for each instruction, gaps for waits,"),
            )
        ],
        data=(data := _data(comparison)),
        lines=data["runs"],
        style=(FOLDER / "compare_page.css").read_text(encoding="utf-8"),
        program=program,
        program_hash=base64.b64encode(hashlib.sha256(program.encode()).digest()).decode(),
    )


def timelines(run: RecordedRun) -> list[str]:
    """Return the paths of the pictures of traced steps among a run's artifacts."""
    return [path for path in run.artifacts("trace") if path.endswith(".png")][:MOST_PICTURES]


def latest_samples(run: RecordedRun) -> list[str]:
    """Return the path of the last picture sampled during training among a run's artifacts, if there is one."""
    drawn = [found for path in run.artifacts("images") if (found := SAMPLES.search(path))]
    return [found.string for found in sorted(drawn, key=lambda found: (int(found["step"]), int(found["at"])))[-1:]]


def _pictures(run: RecordedRun, paths: Sequence[str]) -> list[tuple[str, str]]:
    """Return the artifacts at ``paths`` that are PNG files of limited size, as (name, data URI)."""
    contents = [(PurePosixPath(path).name, run.read_artifact(path)) for path in paths]
    return [
        (name, f"data:image/png;base64,{base64.b64encode(content).decode()}")
        for name, content in contents
        if content is not None and content.startswith(PNG) and len(content) <= MOST_PICTURE_BYTES
    ]


def fewer(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most ``most`` points, with the lowest and the highest of each interval, so that no peak is lost."""
    if len(points) <= most:
        return list(points)

    def height(point: Point) -> float:
        return point.value if math.isfinite(point.value) else -math.inf

    size = math.ceil(len(points) / (most // 2))
    stretches = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [point for stretch in stretches for point in sorted({min(stretch, key=height), max(stretch, key=height)})]


def _data(comparison: Comparison) -> dict[str, Any]:
    """Return the data for the page's script: curves in suitable units, and the order of runs by each metric."""
    names, runs = dict.fromkeys((*LOSSES, *comparison.metrics)), comparison.runs
    most = max(100, min(POINTS // len(runs), POINTS_OF_CURVE))
    histories = {
        name: [fewer(one.run.history(name), most) if name in one.run.metrics else [] for one in runs] for name in names
    }
    histories = {name: curves for name, curves in histories.items() if max(map(len, curves)) > 1}
    ends = [(curve[-1], one) for curves in histories.values() for curve, one in zip(curves, runs, strict=True) if curve]
    longest = max(((point.time_ms - one.run.start_ms) / 1e3 for point, one in ends), default=0.0)
    clock, clock_name = next(((size, word) for size, word in CLOCK if longest >= 2 * size), CLOCK[-1])
    metrics = []
    for name, curves in histories.items():
        finite = [abs(point.value) for curve in curves for point in curve if math.isfinite(point.value)]
        size, word = unit(name, max(finite, default=1.0))
        drawn = [_curve(one, points, size, clock) for one, points in zip(runs, curves, strict=True)]
        metrics.append({"name": name, "unit": word, "better": direction(name), "curves": drawn})
    return {
        "runs": [
            {
                "label": one.label,
                "baseline": len(runs) > 1 and one is comparison.baseline,
                "colour": index % COLOURS,
                "dash": DASHES[index // COLOURS % len(DASHES)],
            }
            for index, one in enumerate(runs)
        ],
        "metrics": metrics,
        "clock": clock_name,
        "orders": {name: _order(comparison, name) for name in comparison.metrics},
    }


def _curve(one: Compared, points: Sequence[Point], size: float, clock: float) -> dict[str, list[float | None] | None]:
    """Return one curve against time and against images; the images are None if the run does not state its batch."""
    batch = one.run.params.get("train.batch_images", "")
    return {
        "images": [point.step * int(batch) for point in points] if batch.isdecimal() else None,
        "time": [float(f"{(point.time_ms - one.run.start_ms) / 1e3 / clock:.6g}") for point in points],
        "values": [float(f"{point.value / size:.6g}") if math.isfinite(point.value) else None for point in points],
    }


def _order(comparison: Comparison, name: str) -> list[int]:
    """Return the positions of the runs sorted by a metric, the best first and those without a value last."""
    sign = -1 if direction(name) == "higher" else 1
    values = [one.values.get(name, math.nan) for one in comparison.runs]
    return sorted(range(len(values)), key=lambda i: sign * values[i] if math.isfinite(values[i]) else math.inf)
