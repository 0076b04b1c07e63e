"""The printed report: tables of the hosts and, below them, reason and fix of everything that is not good. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpm_ds.cluster.checks import BAD, GOOD, WARNING, Rows
from ddpm_ds.command_line import aligned

HOSTS_ABREAST = 8
COLOURS = {BAD: "\033[31m", WARNING: "\033[33m"}
PLAIN = "\033[0m"
MARKED = re.compile(r"(?<=  )[!?] \S+(?: \S+)*|^[!?] .*$", re.MULTILINE)
"""A marked cell of a table, whose columns are two spaces apart, or a whole marked line."""


def findings(rows: Rows) -> list[str]:
    """Return a line for each finding that is not good, beginning with its mark, bad ones first.

    Hosts with the same finding share a line.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for name, cells in rows.items():
        for host, cell in cells.items():
            if cell.mark != GOOD:
                found.setdefault((cell.mark, f"{name}: {cell.why}; {cell.fix}"), []).append(host)
    lines = [f"{mark} {', '.join(who)}, {what}" for (mark, what), who in found.items()]
    return sorted(lines, key=lambda line: not line.startswith(BAD))


def report(hosts: Sequence[str], rows: Rows, found: Sequence[str], notes: Sequence[str], colour: bool) -> str:
    """Return the printed text: tables, findings, notes, and the verdict in the last line."""
    bad = sum(line.startswith(BAD) for line in found)
    verdict = [f"{bad} to fix" if bad else "good"]
    verdict += [f"{len(found) - bad} to check"] if len(found) > bad else []
    parts = [
        *_host_tables(hosts, rows),
        "\n".join(found),
        "\n".join(notes),
        f"{len(hosts)} host{'s' if len(hosts) != 1 else ''}: {', '.join(verdict)}",
    ]
    text = "\n\n".join(part for part in parts if part)
    return MARKED.sub(lambda marked: f"{COLOURS[marked[0][0]]}{marked[0]}{PLAIN}", text) if colour else text


def _host_tables(hosts: Sequence[str], rows: Rows) -> list[str]:
    """Return tables with a row for each check and a column for each host, several tables for many hosts."""
    tables = []
    for first in range(0, len(hosts), HOSTS_ABREAST):
        abreast = hosts[first : first + HOSTS_ABREAST]
        lines = [["", *(f"  {host}" for host in abreast)]]
        for name, cells in rows.items():
            texts = {host: f"{cell.mark} {cell.text}" for host, cell in cells.items()}
            lines.append([name, *(texts.get(host, "  -") for host in abreast)])
        tables.append("\n".join(aligned(lines, left=range(len(abreast) + 1))))
    return tables
