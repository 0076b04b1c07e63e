"""Training across hosts gives what training on one host gives, with any launcher or disaster; and doctor sees both."""

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from tests.hosts.hosts import UNMETERED, Host, Hosts
from tests.launching import PATIENCE_SECONDS, REPOSITORY, place_digits, wait_for, write_json
from tests.training.ranks import Ranks, arguments, checkpoints, points

pytestmark = pytest.mark.launch

CHANGES = ("train.images=160", "train.batch_images=16", "train.accumulation=4", "logging.log_every_images=16")
PLAIN = ("samples.every_images=null", "evaluation.every_images=null")
CONFIG = REPOSITORY / "ds_configs" / "zero2_fp16.json"
TRAIN_SECONDS = 240.0


def run_dir_with_store(folder: Path, store: Path) -> Path:
    place_digits(folder)
    shutil.copy(store, folder / "mlflow.db")
    return folder / "run"


def test_doctor_finds_equal_hosts_good_and_adds_up_over_their_network(hosts: Hosts, tmp_path: Path) -> None:
    hostfile = hosts.hostfile(tmp_path / "hostfile")
    command = ["ddpm-ds", "doctor", "--hostfile", str(hostfile), "--deepspeed_config", "ds_configs/zero2_fp16.json"]
    output = tmp_path / "output"
    code = hosts[0].start(command, {"MLFLOW_TRACKING_TOKEN": "hush"}, output).wait(PATIENCE_SECONDS)
    said = output.read_text()
    assert code == 0 and said.count("gloo") == 2 and "! " not in said and "hush" not in said, said
    assert not hosts[1].processes(r"ddpm_ds\.")


def test_torchrun_on_each_host_trains_the_folded_schedule_as_one_host_does(
    hosts: Hosts, tmp_path: Path, empty_store: Path
) -> None:
    values = json.loads((REPOSITORY / "ds_configs" / "zero2_fp16.json").read_text())
    values["pipeline"]["schedule"] = "folded"
    config, run_dir = write_json(tmp_path / "folded.json", values), run_dir_with_store(tmp_path, empty_store)
    torchrun = ["torchrun", "--nnodes", "2", "--nproc_per_node", "2", "--master_addr", hosts[0].address, "--node_rank"]
    command = ["launch/train.py", *arguments(run_dir, CHANGES, str(config), ["-p", "2"])]
    outputs = [tmp_path / f"output-{node}" for node in range(2)]
    started = [
        host.start([*torchrun, str(node), *command], UNMETERED, outputs[node]) for node, host in enumerate(hosts)
    ]
    codes, output = [program.wait(TRAIN_SECONDS) for program in started], "".join(map(Path.read_text, outputs))
    assert codes == [0, 0] and "2 stages x 2 replicas, schedule folded" in output, output[-6000:]
    assert [host.processes(r"train\.py|torch\.distributed") for host in hosts] == [[], []]
    (tmp_path / "one").mkdir()
    one_host = run_dir_with_store(tmp_path / "one", empty_store)
    with Ranks(one_host, *CHANGES, options=["-p", "2"], count=4, MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING="false") as ranks:
        assert ranks.codes(TRAIN_SECONDS) == [0] * 4, ranks.said[-4000:]
    losses = [[point["train/loss"] for point in points(folder)] for folder in (run_dir, one_host)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and len(losses[0]) == 10
    assert checkpoints(run_dir) == ["images-000000160"]


GONE_SECONDS = 30.0
"""Time within which nothing may be left of a start on any host: --dead-seconds, ssh's alarm, the launcher's leave."""
OF_A_RUN = r"train\.py|deepspeed\.launcher|pdsh|tracking\.sender"
ENVIRONMENT = {
    "PDSH_SSH_ARGS_APPEND": "-o ServerAliveInterval=1 -o ServerAliveCountMax=3",
    "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.1",
}
LOGGED = {"system/cpu_utilization_percentage", "train/loss"}
"""Metrics of a run, as soon as the process beside training has imported MLflow."""


def set_images(spec: Path, images: int) -> None:
    values = yaml.safe_load((REPOSITORY / "launch" / "specs" / "digits.yaml").read_text())
    values["train"]["images"] = images
    spec.write_text(yaml.safe_dump(values))


def logged(run_dir: Path) -> set[str]:
    """The names of the metrics in the run's one MLflow run, if it has begun."""
    client = MlflowClient(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert len(runs) < 2
    return {name for run in runs for name in run.data.metrics}


def test_a_run_outlives_a_dropped_ssh_and_a_host_that_falls_silent_and_dies(
    hosts: Hosts, tmp_path: Path, empty_store: Path
) -> None:
    one, two = hosts
    run_dir, spec, said = run_dir_with_store(tmp_path, empty_store), tmp_path / "spec.yaml", tmp_path / "said"
    set_images(spec, 1_000_000)
    hostfile = hosts.hostfile(tmp_path / "hostfile", slots=1)
    options = ["--spec", str(spec), "-p", "2", "--dead-seconds", "6"]
    script = [
        "launch/train.py",
        *arguments(run_dir, (*PLAIN, "checkpoint.every_images=48"), "zero2_fp16.json", options),
    ]
    run = one.start(["ddpm-ds", "run", "--max-restarts", "2", "--hostfile", str(hostfile), *script], ENVIRONMENT, said)

    until = functools.partial(wait_for, output=lambda: said.read_text()[-6000:])

    def lines(pattern: str) -> list[str]:
        return re.findall(pattern, said.read_text())

    at_start: list[str] = []

    def trains() -> bool:
        """Whether the newest start has written a checkpoint."""
        latest = run_dir / "checkpoints" / "latest"
        return latest.exists() and latest.read_text() not in at_start

    def after(disaster: Callable[[], object], alive: list[Host]) -> None:
        """Let it happen when the run trains; everything of this start ends in time, and the next begins."""
        until(trains)
        old = [process for host in alive for process in host.processes(OF_A_RUN)]
        restarts = len(lines("; restart "))
        disaster()
        until(lambda: not any(process.is_running() for process in old), GONE_SECONDS)
        until(lambda: len(lines("; restart ")) > restarts)
        at_start.append((run_dir / "checkpoints" / "latest").read_text())

    def drop_ssh() -> None:
        (ssh,) = one.processes(r"^ssh .* worker-2 ")
        ssh.kill()

    def lose_host() -> None:
        hosts.hostfile(hostfile, slots=2, names=["worker-1"])
        set_images(spec, int(points(run_dir)[-1]["train/seen_images"]) + 48)
        hosts.stall()

    until(lambda: logged(run_dir) >= LOGGED)
    with hosts.environment_file.open("a") as travels:
        travels.writelines(f"{name}={value}\n" for name, value in UNMETERED.items())  # of later starts
    after(drop_ssh, [two])
    after(lose_host, [two])
    two.kill()
    assert run.wait(PATIENCE_SECONDS) == 0, said.read_text()[-6000:]

    assert lines(r"ddpm-ds run: (.*); restart") == ["exit code 76 (a process was lost or hung)"] * 2
    resumed = lines(r"resuming from \S+/(images-\d+)")
    assert resumed == sorted(set(resumed)) and len(resumed) == 2
    gone = "the launcher of rank 1 (stage 1, host worker-2) is gone: all ranks have saved and stopped"
    assert gone in said.read_text()
    assert "rank 1 (stage 1, host worker-2) has not answered for 6 s" in said.read_text()
    assert one.processes(OF_A_RUN) == []
