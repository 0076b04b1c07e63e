"""A comparison as text: a table for the terminal and one in Markdown.

A comparison as one HTML page that needs nothing else: no network, no other file.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ddpm_ds.experiments.compare import FAILURES, Compared, Comparison, curve, direction, is_pace, judged, number, times
from ddpm_ds.tracking.runs import RecordedRun

if TYPE_CHECKING:
    from ddpm_ds.experiments.compare import Comparison

WIDEST_NAME, WIDEST_RUN = 56, 28  # characters; what is longer takes several lines
GAP = "  "

Row = tuple[str, ...]


def terminal(comparison: Comparison, width: int = 120) -> str:
    """The table in lines of at most ``width`` characters, as many runs side by side as fit; then notes and verdicts."""
    rows = [tuple(_printable(cell) for cell in row) for row in table_rows(comparison)]
    widths = [
        min(min(WIDEST_NAME, width // 2) if column == 0 else WIDEST_RUN, max(map(len, cells)))
        for column, cells in enumerate(zip(*rows, strict=True))
    ]
    parts = [textwrap.fill(_printable(f"{comparison.title}. {explained(comparison)}"), width)]
    for runs in _side_by_side(widths, width):
        columns = [0, 1, *runs]
        parts.append("\n".join(line for row in rows for line in _lines(row, columns, widths)))
    if said := [line for one in comparison.runs for line in _said(one, width)]:
        parts.append("\n".join(said))
    return "\n\n".join(parts)


def markdown(comparison: Comparison) -> str:
    """The same as a Markdown document."""
    header, *rows = table_rows(comparison)
    lines = [f"# {_inert(comparison.title)}", "", _inert(explained(comparison)), ""]
    lines += [_piped(header), _piped(["---", "---", *["---:" for _ in comparison.runs]], plain=True)]
    lines += map(_piped, rows)
    for one in comparison.runs:
        if about := about_run(one):
            lines += [
                "",
                f"**{_inert(one.label)}**",
                "",
                *(f"- {title}: {_said_inert(title, text)}" for title, text in about),
            ]
    return "\n".join(lines) + "\n"


def table_rows(comparison: Comparison) -> list[Row]:
    """Name, better direction and a cell for each run: how runs ended where one did not finish, parameters, metrics."""
    runs = comparison.runs
    rows: list[Row] = [("", "better", *(one.label for one in runs))]
    if any(one.run.status != "FINISHED" for one in runs):
        rows.append(("status", "", *(one.run.status for one in runs)))
    for name in comparison.parameters:
        rows.append((name, "", *(one.parameters.get(name, "-") for one in runs)))
    for name in comparison.measures:
        rows.append((name, direction(name), *(_text_cell(one, name) for one in runs)))
    return rows


def explained(comparison: Comparison) -> str:
    """What the numbers of the table are, in a sentence or two."""
    sentences = []
    if len(comparison.runs) > 1:
        same = "" if comparison.parameters else "; no parameter differs"
        sentences.append(f"Ratios are to {comparison.baseline.label}{same}.")
    if any(map(is_pace, comparison.measures)):
        sentences.append("Times and rates are medians over log points without the first, all else is the last value.")
    return " ".join(sentences)


def about_run(one: Compared) -> list[tuple[str, str]]:
    """What is said of a run, as (title, text): its note, its verdict and the change that the verdict proposes."""
    said = [("note", one.run.note.strip())]
    if one.verdict is not None:
        said += [("verdict", one.verdict.words), ("try", one.verdict.change)]
    return [(title, text) for title, text in said if text]


def _text_cell(one: Compared, name: str) -> str:
    value = number(name, one.values.get(name))
    return f"{value} ({times(one.ratios[name])})" if name in one.ratios else value


def _side_by_side(widths: Sequence[int], width: int) -> list[list[int]]:
    """The runs' columns in groups that fit beside the first two columns, at least one in each."""
    groups: list[list[int]] = []
    free = -1
    for column in range(2, len(widths)):
        free -= widths[column] + len(GAP)
        if free < 0:
            groups.append([])
            free = width - sum(widths[:2]) - len(GAP) - widths[column] - len(GAP)
        groups[-1].append(column)
    return groups


def _lines(row: Row, columns: Sequence[int], widths: Sequence[int]) -> list[str]:
    """A row as aligned lines: names to the left, runs to the right."""
    cells = [textwrap.wrap(row[column], widths[column], break_on_hyphens=False) for column in columns]
    lines = []
    for texts in zip_longest(*cells, fillvalue=""):
        aligned = [
            text.ljust(widths[column]) if column < 2 else text.rjust(widths[column])
            for column, text in zip(columns, texts, strict=True)
        ]
        lines.append(GAP.join(aligned).rstrip())
    return lines


def _said(one: Compared, width: int) -> list[str]:
    about = about_run(one)
    if not about:
        return []
    lines = [_printable(one.label)]
    for title, text in about:
        for paragraph in text.splitlines():
            indent = f"  {title:9}"
            lines += textwrap.wrap(_printable(paragraph), width, initial_indent=indent, subsequent_indent=" " * 11)
            title = ""
    return lines


def _printable(text: str) -> str:
    """Without what moves the cursor or changes colours."""
    return "".join(character if character.isprintable() else " " for character in text)


def _piped(cells: Sequence[str], *, plain: bool = False) -> str:
    return f"| {' | '.join(cells if plain else map(_inert, cells))} |"


def _said_inert(title: str, text: str) -> str:
    return f"`{text}`" if title == "try" and "`" not in text and "\n" not in text else _inert(text)


def _inert(text: str) -> str:
    """Text of users in one line, without a meaning in Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&])", r"\\\1", " ".join(text.split()))


ARTIFACT_FOLDER = "comparison"
"""Folder of the parent run's artifacts that holds the comparison of its children."""
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
class TableCell:
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


def _cells(comparison: Comparison, name: str) -> list[TableCell]:
    better = direction(name)
    finite = [
        one.values[name]
        for one in comparison.runs
        if one.run.status not in FAILURES and math.isfinite(one.values.get(name, math.nan))
    ]
    written = {number(name, value) for value in finite}
    best = number(name, {"lower": min, "higher": max}[better](finite)) if better and len(written) > 1 else None
    return [_cell(one, name, best) for one in comparison.runs]


def _cell(one: Compared, name: str, best: str | None) -> TableCell:
    value, to_baseline = number(name, one.values.get(name)), one.ratios.get(name)
    return TableCell(
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
