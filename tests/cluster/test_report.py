"""The printed report: side by side, marked, red on a terminal only."""

from __future__ import annotations

import re

from ddpm_ds.cluster.checks import BAD, WARNING, Cell, network_row
from ddpm_ds.cluster.network import Network, Route, pairs
from ddpm_ds.cluster.report import findings, report

HOSTS = ["a", "b", "c"]
ROWS = {
    "ssh": {"a": Cell("yes"), "b": Cell("yes"), "c": Cell("no", BAD, "refused", "start it")},
    "devices": {"a": Cell("2 x H200"), "b": Cell("4 x A100 80 GiB", WARNING, "other", "use equal ones")},
}


def network(**speeds: float) -> Network:
    """Routes of 1 GB/s between three hosts, others where told: ``ab=1e6``."""
    routes = [(one, other) for one in HOSTS for other in HOSTS if one != other]
    return Network(
        HOSTS,
        "gloo",
        all_reduce_seconds=dict.fromkeys(HOSTS, 0.001),
        routes=[Route(one, other, 1e-4, speeds.get(one + other, 1e9)) for one, other in routes],
    )


def test_hosts_stand_side_by_side_and_marks_read_in_a_log() -> None:
    text = report(HOSTS, ROWS, None, findings(ROWS, None), [], colour=False)
    assert text.splitlines() == [
        "           a           b                  c",
        "ssh        yes         yes              ! no",
        "devices    2 x H200  ? 4 x A100 80 GiB    -",
        "",
        "! c, ssh: refused; start it",
        "? b, devices: other; use equal ones",
        "",
        "3 hosts: 1 to fix, 1 to check",
    ]
    coloured = report(HOSTS, ROWS, None, findings(ROWS, None), [], colour=True)
    assert "\033[31m! no\033[0m" in coloured and "\033[33m? 4 x A100 80 GiB\033[0m    -" in coloured
    assert re.sub("\033\\[[0-9]+m", "", coloured) == text, "nothing else is coloured"


def test_many_hosts_are_shown_in_several_tables() -> None:
    hosts = [f"h{index}" for index in range(20)]
    text = report(hosts, {"ssh": {host: Cell("yes") for host in hosts}}, None, [], [], colour=False)
    assert text.count("ssh") == 3 and max(map(len, text.splitlines())) < 80


def test_pairs_show_both_ways_and_a_slow_way_is_told() -> None:
    slow = network(bc=1e8)
    text = report(HOSTS, {"all-reduce": network_row(slow)}, slow, findings({}, slow), [], colour=False)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "b - c 0.100 ms 100.0 MB/s 1.00 GB/s" in lines and "a - b 0.100 ms 1.00 GB/s 1.00 GB/s" in lines
    assert "? b to c, bandwidth: 100.0 MB/s, the median is 1.00 GB/s; look at its cable" in text


def test_a_test_that_fails_is_a_bad_cell_with_a_fix() -> None:
    failed = network()
    failed.all_reduce_seconds.clear()
    failed.errors["b"] = "Connect timeout [remote=[10.0.0.1]:41234]"
    (finding,) = findings({"all-reduce": network_row(failed)}, None)
    assert finding.startswith("! b, all-reduce: gloo: Connect timeout") and "open all TCP ports" in finding


def test_of_many_hosts_only_a_ring_is_measured() -> None:
    assert len(pairs(8)) == 28
    assert pairs(9) == [*((rank, rank + 1) for rank in range(8)), (8, 0)]
