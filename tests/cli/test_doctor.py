"""Preflight check of hosts as a verb, on this machine alone, and its report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpm_ds.cli.doctor import exported, findings, report
from ddpm_ds.cli.main import main
from ddpm_ds.cluster.checks import BAD, WARNING, Cell, network_row
from ddpm_ds.cluster.probe import travelling
from ddpm_ds.cluster.survey import Network

HERE = {
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "eth0",
    "HOME": "/root",
    "MLFLOW_RUN_ID": "abc",
    "MLFLOW_EXPERIMENT_NAME": "my digits",
    "MLFLOW_TRACKING_PASSWORD": "hush",
    "MLFLOW_TRACKING_TOKEN": "hush",
    "MLFLOW_TRACKING_AUTH": "hush",
    "MLFLOW_REGISTRY_URI": "postgresql+psycopg2://bob:hush@db/ml",
    "MLFLOW_TRACKING_URI": "https://me:hush@server/",
    "AWS_SECRET_ACCESS_KEY": "hush",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "4",
    "PYTHONPATH": "/more",
    "PYTHONDEVMODE": "1",
}


def test_what_matters_travels_and_secrets_do_not() -> None:
    assert sorted(travelling(HERE)) == [
        "DS_ACCELERATOR",
        "GLOO_SOCKET_IFNAME",
        "MLFLOW_EXPERIMENT_NAME",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
    ]


def test_hosts_are_asked_in_the_environment_that_deepspeed_gives_them() -> None:
    assert exported(HERE, {"OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "ens3"}, "/project") == {
        "GLOO_SOCKET_IFNAME": "ens3",
        "MLFLOW_EXPERIMENT_NAME": "my digits",
        "MLFLOW_RUN_ID": "abc",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "PYTHONDEVMODE": "1",
        "PYTHONPATH": "/project:/more",
    }


def test_without_ssh_hosts_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hostfile").write_text("a slots=1\nb slots=1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["doctor", "--hostfile", str(tmp_path / "hostfile")]) == 2
    assert "ssh, with which other hosts are asked, is not on this machine" in capsys.readouterr().err


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
