"""The variables that travel, the file that takes them, and the room that a run needs."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from ddpm_ds.cli.doctor import CHECKPOINT_BYTES, _write, chosen_by_hosts, exported, merge_into, saved_bytes, secrets
from ddpm_ds.cli.main import main
from ddpm_ds.cluster.probe import travelling
from ddpm_ds.cluster.survey import Survey
from ddpm_ds.errors import OutputError
from ddpm_ds.processes.hosts import read_environment
from tests.cluster.test_checks import RUN
from tests.launching import tiny_spec

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
    assert secrets(HERE) == [
        "AWS_SECRET_ACCESS_KEY",
        "MLFLOW_REGISTRY_URI",
        "MLFLOW_TRACKING_AUTH",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_URI",
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


def test_hosts_choose_what_they_agree_on() -> None:
    assert chosen_by_hosts(False, ["eth0", "eth0"]) == {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "eth0"}
    assert chosen_by_hosts(True, ["eth0", "ens3"]) == {}
    assert chosen_by_hosts(True, [""]) == {}


def test_writing_keeps_what_was_there(tmp_path: Path) -> None:
    path, backup = tmp_path / ".deepspeed_env", tmp_path / ".deepspeed_env.bak"
    before = "# mine\n\nUCX_TLS=tcp\nexport OMP_NUM_THREADS=1\n"
    path.write_text(before)
    lines = merge_into(path, travelling(HERE), {"DS_ACCELERATOR": "cuda", "GLOO_SOCKET_IFNAME": "lo"})
    assert read_environment(path) == {**travelling(HERE), "UCX_TLS": "tcp"}
    assert set(lines[0].removeprefix(f"{path}: ").split(", ")) == set(read_environment(path))
    assert lines[1:] == ["  OMP_NUM_THREADS was 1", f"  the file as it was: {backup}"] and backup.read_text() == before
    assert {stat.S_IMODE(file.stat().st_mode) for file in (path, backup)} == {0o600}
    assert all("=" in line for line in path.read_text().splitlines())  # all that DeepSpeed's reader can stand
    assert len(merge_into(path, travelling(HERE), {})) == 1, "nothing changes"
    path.write_text("MLFLOW_TRACKING_TOKEN=hush\n")
    assert "hush" not in "".join(merge_into(path, {"MLFLOW_TRACKING_TOKEN": "other"}, {}))
    path.write_text("NCCL_DEBUG=WARN\n")
    lines = merge_into(path, {}, {"NCCL_DEBUG": "INFO", "DS_ACCELERATOR": "cpu"})
    assert read_environment(path)["NCCL_DEBUG"] == "WARN", "a default changes nothing"
    assert lines[1:] == [f"  the file as it was: {backup}"]


def test_without_ssh_hosts_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hostfile").write_text("a slots=1\nb slots=1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["doctor", "--hostfile", str(tmp_path / "hostfile")]) == 2
    assert "ssh, with which other hosts are asked, is not on this machine" in capsys.readouterr().err


def test_a_file_of_variables_that_can_not_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, values: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("ddpm_ds.cli.doctor.write_environment", full)
    with pytest.raises(OutputError, match=r"^--write-env .*env can't be written \(No space left on device\)"):
        _write(tmp_path / "env", Survey(RUN, {}, "", ""))


def test_snapshots_are_counted_in_the_room_that_a_run_needs() -> None:
    kept = {"train": {"images": 640, "batch_images": 16}, "checkpoint": {"keep_last": 2}}
    assert saved_bytes(tiny_spec(**kept)) == 3 * CHECKPOINT_BYTES
    ema = {"profiles": [0.05, 0.1], "snapshot_images": 100}
    averages, snapshots = 2 * 4, 7 * 2 * 2  # fp32 in each checkpoint; fp16 in each snapshot, the last at the end
    assert saved_bytes(tiny_spec(**kept, ema=ema)) == 3 * (CHECKPOINT_BYTES + averages) + snapshots
