"""The variables that travel, and the room that a run needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpm_ds.cli.doctor import CHECKPOINT_BYTES, exported, saved_bytes
from ddpm_ds.cli.main import main
from ddpm_ds.cluster.probe import travelling
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


def test_snapshots_are_counted_in_the_room_that_a_run_needs() -> None:
    kept = {"train": {"images": 640, "batch_images": 16}, "checkpoint": {"keep_last": 2}}
    assert saved_bytes(tiny_spec(**kept)) == 3 * CHECKPOINT_BYTES
    ema = {"profiles": [0.05, 0.1], "snapshot_images": 100}
    averages, snapshots = 2 * 4, 7 * 2 * 2  # fp32 in each checkpoint; fp16 in each snapshot, the last at the end
    assert saved_bytes(tiny_spec(**kept, ema=ema)) == 3 * (CHECKPOINT_BYTES + averages) + snapshots
