"""The printed report: tables side by side and, beneath, the reason and the fix of everything that is not good. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ddpm_ds.cluster.checks import BAD, GOOD, WARNING, CheckRow
from ddpm_ds.cluster.network import Network, pairs, speed
from ddpm_ds.command_line import aligned

HOSTS_ABREAST = 8
SLOW = 0.5
"""Share of the median bandwidth below which a way is noted."""
COLOURS = {BAD: "\033[31m", WARNING: "\033[33m"}
PLAIN = "\033[0m"
MARKED = re.compile(r"(?<=  )[!?] \S+(?: \S+)*")
"""A cell of a table that is marked: columns are two spaces apart."""


@dataclass(frozen=True)
class Finding:
    """One line beneath the tables."""

    mark: str
    who: str
    what: str
    why: str
    fix: str

    def line(self) -> str:
        """The whole line, with its mark."""
        return f"{self.mark} {self.who}, {self.what}: {self.why}; {self.fix}"


def findings(rows: Sequence[CheckRow], network: Network | None) -> list[Finding]:
    """Everything that is not good, bad before warnings; hosts with the same finding share a line."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        for host, cell in row.cells.items():
            if cell.mark != GOOD:
                found.setdefault((cell.mark, row.name, cell.why, cell.fix), []).append(host)
    lines = [Finding(mark, ", ".join(who), what, why, fix) for (mark, what, why, fix), who in found.items()]
    if network is not None and len(network.ways) > 2:
        median = statistics.median(way.bytes_per_second for way in network.ways)
        for way in network.ways:
            if way.bytes_per_second < SLOW * median:
                who = f"{way.sender} to {way.receiver}"
                why = f"{speed(way.bytes_per_second)}, the median is {speed(median)}"
                fix = "look at its cable, link speed (ethtool) and other traffic"
                lines.append(Finding(WARNING, who, "bandwidth", why, fix))
    return sorted(lines, key=lambda one: one.mark != BAD)


def report(
    hosts: Sequence[str],
    rows: Sequence[CheckRow],
    network: Network | None,
    found: Sequence[Finding],
    notes: Sequence[str],
    colour: bool,
) -> str:
    """Everything that is printed: tables, findings, notes, and the verdict in the last line."""

    def painted(text: str) -> str:
        return f"{COLOURS[text[0]]}{text}{PLAIN}" if colour else text

    bad = sum(one.mark == BAD for one in found)
    verdict = [f"{bad} to fix" if bad else "good"]
    verdict += [f"{len(found) - bad} to check"] if len(found) > bad else []
    parts = [
        MARKED.sub(lambda cell: painted(cell[0]), _host_tables(hosts, rows)),
        _pair_table(network) if network and network.ways else "",
        "\n".join(painted(one.line()) for one in found),
        "\n".join(notes),
        f"{len(hosts)} host{'s' if len(hosts) != 1 else ''}: {', '.join(verdict)}",
    ]
    return "\n\n".join(part for part in parts if part)


def _host_tables(hosts: Sequence[str], rows: Sequence[CheckRow]) -> str:
    """A row for each check, a column for each host; many hosts in several tables."""
    tables = []
    for first in range(0, len(hosts), HOSTS_ABREAST):
        abreast = hosts[first : first + HOSTS_ABREAST]
        lines = [["", *(f"  {host}" for host in abreast)]]
        for row in rows:
            cells = [row.cells.get(host) for host in abreast]
            lines.append([row.name, *(f"{cell.mark} {cell.text}" if cell else "  -" for cell in cells)])
        tables.append("\n".join(aligned(lines, left=range(len(abreast) + 1))))
    return "\n\n".join(tables)


def _pair_table(network: Network) -> str:
    """A row for each pair of hosts, with the ways there and back."""
    ways = {(way.sender, way.receiver): way for way in network.ways}
    rows: list[tuple[str, ...]] = [("pair", "latency", "there", "back")]
    for one, other in pairs(len(network.hosts)):
        sender, receiver = network.hosts[one], network.hosts[other]
        both = ways.get((sender, receiver)), ways.get((receiver, sender))
        latency = max((way.latency_seconds for way in both if way), default=None)
        cells = [speed(way.bytes_per_second) if way else "-" for way in both]
        rows.append((f"{sender} - {receiver}", "-" if latency is None else f"{latency * 1e3:.3f} ms", *cells))
    return "\n".join(aligned(rows, left={0}))
