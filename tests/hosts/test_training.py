"""Training across hosts gives what training on one host gives, whichever launcher starts it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hosts.hosts import UNMETERED, Hosts
from tests.launching import REPOSITORY, write_json
from tests.train.ranks import Ranks, arguments, checkpoints, end_of, mlflow_run, points, the_same

pytestmark = pytest.mark.launch

CHANGES = ("train.images=160", "train.batch_images=16", "train.accumulation=4", "logging.log_every_images=16")
CONFIG = REPOSITORY / "ds_configs" / "zero2_fp16.json"
TRAIN_SECONDS = 240.0


def run_dir_with_store(folder: Path, store: Path) -> Path:
    """A run folder to be, beside a store for its MLflow run."""
    shutil.copy(store, folder / "mlflow.db")
    return folder / "run"


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """A run of two stages x two replicas on one host."""
    run_dir = run_dir_with_store(tmp_path_factory.mktemp("one_host"), empty_store)
    with Ranks(run_dir, *CHANGES, options=["-p", "2"], count=4, MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING="false") as ranks:
        assert ranks.codes(TRAIN_SECONDS) == [0] * 4, ranks.said[-4000:]
    return run_dir


def train(hosts: Hosts, run_dir: Path, launchers: Sequence[Sequence[str]], config: Path = CONFIG) -> str:
    """Train two stages with a launcher on each of the first hosts; returns what all said.

    Nothing of it is left on any host.
    """
    command = ["launch/train.py", *arguments(run_dir, CHANGES, str(config), ["-p", "2"])]
    outputs = [run_dir.with_name(f"said-{index}") for index in range(len(launchers))]
    started = [
        hosts[index].start([*launcher, *command], UNMETERED, output)
        for index, (launcher, output) in enumerate(zip(launchers, outputs, strict=True))
    ]
    codes = [program.wait(TRAIN_SECONDS) for program in started]
    said = "".join(output.read_text() for output in outputs)
    assert codes == [0] * len(launchers), said[-6000:]
    assert [host.processes(r"train\.py|launcher|torch\.distributed") for host in hosts] == [[]] * len(hosts)
    return said


def losses(run_dir: Path) -> list[float]:
    return [point["train/loss"] for point in points(run_dir)]


def held_out_losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "evaluations.jsonl").read_text().splitlines()
    return [json.loads(line)["eval/loss"] for line in lines]


def pictures(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run_dir / "samples").iterdir())}


def test_two_hosts_started_over_ssh_train_as_one_does_in_one_mlflow_run(
    hosts: Hosts, one_host: Path, tmp_path: Path, empty_store: Path
) -> None:
    run_dir = run_dir_with_store(tmp_path, empty_store)
    before = hosts.bytes_between()
    hostfile = hosts.hostfile(tmp_path / "hostfile")
    said = train(hosts, run_dir, [["deepspeed", "--hostfile", str(hostfile)]])
    assert losses(run_dir) == losses(one_host) and len(losses(run_dir)) == 10, "bit for bit"
    assert held_out_losses(run_dir) == held_out_losses(one_host) and len(held_out_losses(run_dir)) == 2
    assert pictures(run_dir) == pictures(one_host) and len(pictures(run_dir)) == 2
    assert checkpoints(run_dir) == ["images-000000160"] and the_same(end_of(run_dir), end_of(one_host))
    assert "2 stages x 2 replicas" in said
    assert all(hosts.bytes_between()[host.name].sent > before[host.name].sent for host in hosts)
    client, run = mlflow_run(run_dir)
    assert run.info.status == "FINISHED" and run.data.tags["host"] == "worker-1"
    assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 10


def test_torchrun_on_each_host_trains_the_folded_schedule_as_one_host_does(
    hosts: Hosts, one_host: Path, tmp_path: Path, empty_store: Path
) -> None:
    config = json.loads(CONFIG.read_text())
    config["pipeline"]["schedule"] = "folded"
    run_dir = run_dir_with_store(tmp_path, empty_store)
    torchrun = ["torchrun", "--nnodes", "2", "--nproc_per_node", "2", "--master_addr", hosts[0].address, "--node_rank"]
    said = train(hosts, run_dir, [[*torchrun, "0"], [*torchrun, "1"]], write_json(tmp_path / "folded.json", config))
    assert "2 stages x 2 replicas, schedule folded" in said
    assert losses(run_dir) == pytest.approx(losses(one_host), rel=1e-6)
    assert held_out_losses(run_dir) == pytest.approx(held_out_losses(one_host), rel=1e-5)
