"""A network that stalls under a run of two hosts: nothing is refused or closed, yet every rank ends and says why."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ddpm_ds.errors import EXIT_PEER_LOST
from tests.hosts.hosts import Hosts
from tests.train.ranks import arguments

pytestmark = pytest.mark.launch

DEAD_SECONDS = 4
END_SECONDS = 25.0
"""More than the watch needs: 30 s is what the launcher gives to ranks that don't end."""
START_SECONDS = 240.0
LOGGED = {"system/cpu_utilization_percentage", "system/worker-2/cpu_utilization_percentage", "train/loss"}
"""A host's are logged as soon as a process beside training has imported MLflow; a short run is over by then."""


def logged(run_dir: Path) -> set[str]:
    """The names of the metrics in the run's one MLflow run, if it has begun."""
    client = MlflowClient(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert len(runs) < 2
    return {name for run in runs for name in run.data.metrics}


def test_every_rank_ends_by_itself_and_names_the_rank_stage_and_host_it_lost(
    hosts: Hosts, tmp_path: Path, empty_store: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    common = ["deepspeed", "--hostfile", str(hosts.hostfile(tmp_path / "hostfile", slots=1))]
    common += ["--master_addr", hosts[0].address, "--no_ssh", "--node_rank"]
    train = ["launch/train.py", *arguments(run_dir, ["train.images=1000000"], "zero2_fp16.json", ["-p", "2"])]
    train += ["--dead-seconds", str(DEAD_SECONDS)]
    outputs = [tmp_path / "said-0", tmp_path / "said-1"]
    pace = {"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.1"}
    launchers = [hosts[node].start([*common, str(node), *train], pace, outputs[node]) for node in (0, 1)]
    deadline = time.monotonic() + START_SECONDS
    while not logged(run_dir) >= LOGGED:
        assert all(launcher.poll() is None for launcher in launchers), outputs[0].read_text()[-4000:]
        assert time.monotonic() < deadline, outputs[0].read_text()[-4000:]
        time.sleep(0.2)
    hosts.stall()
    begin = time.monotonic()
    codes = [launcher.wait(END_SECONDS) for launcher in launchers]
    took = time.monotonic() - begin
    said = [output.read_text() for output in outputs]
    hosts.heal()
    assert codes == [EXIT_PEER_LOST] * 2, "".join(said)[-4000:]
    assert took >= DEAD_SECONDS
    other = [r"rank 1 \(stage 1, host worker-2\)", r"rank 0 \(stage 0, host worker-1\)"]
    for text, lost, own in zip(said, other, reversed(other), strict=True):
        assert re.search(f"{lost} has not answered for {DEAD_SECONDS} s: ending {own}; the run can be resumed", text), (
            text
        )
    assert [host.processes(r"train\.py|launcher") for host in hosts] == [[], []]
