"""The printed report: side by side, marked, red on a terminal only."""

from __future__ import annotations

import re

from ddpm_ds.cluster.checks import BAD, WARNING, Cell, network_row
from ddpm_ds.cluster.network import Network
from ddpm_ds.cluster.report import findings, report

HOSTS = ["a", "b", "c"]
ROWS = {
    "ssh": {"a": Cell("yes"), "b": Cell("yes"), "c": Cell("no", BAD, "refused", "start it")},
    "devices": {"a": Cell("2 x H200"), "b": Cell("4 x A100 80 GiB", WARNING, "other", "use equal ones")},
}


def test_hosts_stand_side_by_side_and_marks_read_in_a_log() -> None:
    text = report(HOSTS, ROWS, findings(ROWS), [], colour=False)
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
    coloured = report(HOSTS, ROWS, findings(ROWS), [], colour=True)
    assert "\033[31m! no\033[0m" in coloured and "\033[33m? 4 x A100 80 GiB\033[0m    -" in coloured
    assert re.sub("\033\\[[0-9]+m", "", coloured) == text, "nothing else is coloured"


def test_many_hosts_are_shown_in_several_tables() -> None:
    hosts = [f"h{index}" for index in range(20)]
    text = report(hosts, {"ssh": {host: Cell("yes") for host in hosts}}, [], [], colour=False)
    assert text.count("ssh") == 3 and max(map(len, text.splitlines())) < 80


def test_a_test_that_fails_is_a_bad_cell_with_a_fix() -> None:
    failed = Network(HOSTS, "gloo", errors={"b": "Connect timeout [remote=[10.0.0.1]:41234]"})
    (finding,) = findings({"all-reduce": network_row(failed)})
    assert finding.startswith("! b, all-reduce: gloo: Connect timeout") and "open all TCP ports" in finding
