"""A comparison as text: a table for the terminal and one in Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from ddpm_ds.experiments.compare import Compared, Comparison
from ddpm_ds.experiments.compare_measures import direction, is_pace, number, times

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
        rows.append((name, direction(name), *(_cell(one, name) for one in runs)))
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


def _cell(one: Compared, name: str) -> str:
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
