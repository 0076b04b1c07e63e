"""The doctor's tables and, beneath, the reason and the fix of everything that is not good. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddpm_ds.cluster.checks import CheckRow, Level
from ddpm_ds.cluster.network import pairs
from ddpm_ds.cluster.pairs import Network, slow_ways, speed
from ddpm_ds.command_line import aligned

HOSTS_ABREAST = 8
MARKS: dict[Level, str] = {"good": " ", "warning": "?", "bad": "!"}
COLOURS = {"!": "\033[31m", "?": "\033[33m"}
PLAIN = "\033[0m"
MARKED = re.compile(r"(?<=  )[!?] \S+(?: \S+)*")
"""A cell of a table that is marked: columns are two spaces apart."""


@dataclass(frozen=True)
class Finding:
    """One line beneath the tables."""

    level: Level
    who: str
    what: str
    why: str
    fix: str

    def line(self) -> str:
        """The whole line, with its mark."""
        return f"{MARKS[self.level]} {self.who}, {self.what}: {self.why}; {self.fix}"


def findings(rows: Sequence[CheckRow], network: Network | None) -> list[Finding]:
    """What is not good, bad before warnings; hosts with the same in one line."""
    found: dict[tuple[Level, str, str, str], list[str]] = {}
    for row in rows:
        for host, cell in row.cells.items():
            if cell.level != "good":
                found.setdefault((cell.level, row.name, cell.why, cell.fix), []).append(host)
    lines = [Finding(level, ", ".join(who), what, why, fix) for (level, what, why, fix), who in found.items()]
    for way, why in slow_ways(network).items() if network else ():
        who = f"{way.sender} to {way.receiver}"
        lines.append(
            Finding("warning", who, "bandwidth", why, "look at its cable, link speed (ethtool) and other traffic")
        )
    return sorted(lines, key=lambda one: one.level != "bad")


def report(
    hosts: Sequence[str],
    rows: Sequence[CheckRow],
    network: Network | None,
    found: Sequence[Finding],
    notes: Sequence[str],
    colour: bool,
) -> str:
    """Everything that is printed: tables, findings, notes, and the verdict in the last line."""
    parts = [
        _host_tables(hosts, rows, colour),
        _pair_table(network) if network and network.ways else "",
        "\n".join(_painted(one.line(), colour) for one in found),
        "\n".join(notes),
        _verdict(found, len(hosts)),
    ]
    return "\n\n".join(part for part in parts if part)


def _host_tables(hosts: Sequence[str], rows: Sequence[CheckRow], colour: bool) -> str:
    """A row for each check, a column for each host; many hosts in several tables."""
    tables = []
    for first in range(0, len(hosts), HOSTS_ABREAST):
        abreast = hosts[first : first + HOSTS_ABREAST]
        lines = [["", *(f"  {host}" for host in abreast)]]
        for row in rows:
            cells = [row.cells.get(host) for host in abreast]
            lines.append([row.name, *(f"{MARKS[cell.level]} {cell.text}" if cell else "  -" for cell in cells)])
        tables.append("\n".join(aligned(lines, left=range(len(abreast) + 1))))
    text = "\n\n".join(tables)
    return MARKED.sub(lambda cell: _painted(cell[0], colour), text)


def _pair_table(network: Network) -> str:
    """A row for each pair of hosts, with the ways there and back."""
    ways = {(way.sender, way.receiver): way for way in network.ways}
    rows: list[tuple[str, ...]] = [("pair", "latency", "there", "back")]
    for one, other in pairs(len(network.hosts)):
        sender, receiver = network.hosts[one], network.hosts[other]
        there, back = ways.get((sender, receiver)), ways.get((receiver, sender))
        latency = max((way.latency_seconds for way in (there, back) if way), default=None)
        rows.append(
            (
                f"{sender} - {receiver}",
                "-" if latency is None else f"{latency * 1e3:.3f} ms",
                *(speed(way.bytes_per_second) if way else "-" for way in (there, back)),
            )
        )
    return "\n".join(aligned(rows, left={0}))


def _verdict(found: Sequence[Finding], hosts: int) -> str:
    bad = sum(one.level == "bad" for one in found)
    warnings = len(found) - bad
    said = [f"{bad} to mend"] if bad else ["good"]
    said += [f"{warnings} to know"] if warnings else []
    return f"{hosts} host{'s' if hosts != 1 else ''}: {', '.join(said)}"


def _painted(text: str, colour: bool) -> str:
    return f"{COLOURS[text[0]]}{text}{PLAIN}" if colour else text
