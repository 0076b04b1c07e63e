"""``ddpm-ds run`` across hosts: what becomes of a run whose ssh drops, whose launcher is killed, whose host dies."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from tests.hosts.hosts import UNMETERED, Host, Hosts
from tests.launching import REPOSITORY
from tests.train.ranks import arguments, points

pytestmark = pytest.mark.launch

PATIENCE_SECONDS = 180.0
GONE_SECONDS = 30.0
"""Within which nothing may be left of a start, on any host: --dead-seconds, ssh's alarm, and the launcher's leave."""
OF_A_RUN = r"train\.py|deepspeed\.launcher|pdsh|tracking\.worker"
CHANGES = ("checkpoint.every_images=48", "samples.every_images=null", "evaluation.every_images=null")
ENVIRONMENT = {
    "PDSH_SSH_ARGS_APPEND": "-o ServerAliveInterval=1 -o ServerAliveCountMax=3",
    **UNMETERED,
}


def until(happened: Callable[[], object], said: Path, seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, said.read_text()[-6000:]
        time.sleep(0.05)


def kill(processes: list[psutil.Process]) -> None:
    """Kill the only one."""
    (process,) = processes
    process.kill()


def set_images(spec: Path, images: int) -> None:
    """Write the spec of a run of so many images."""
    values = yaml.safe_load((REPOSITORY / "launch" / "specs" / "digits.yaml").read_text())
    values["train"]["images"] = images
    spec.write_text(yaml.safe_dump(values))


def test_a_run_outlives_a_dropped_ssh_a_killed_launcher_and_a_dead_host(
    hosts: Hosts, tmp_path: Path, empty_store: Path
) -> None:
    one, two = hosts
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    run_dir, spec, said = tmp_path / "run", tmp_path / "spec.yaml", tmp_path / "said"
    set_images(spec, 1_000_000)
    hostfile = hosts.hostfile(tmp_path / "hostfile", slots=1)
    options = ["--spec", str(spec), "-p", "2", "--dead-seconds", "6"]
    script = ["launch/train.py", *arguments(run_dir, CHANGES, "zero2_fp16.json", options)]
    run = one.start(
        ["ddpm-ds", "run", "--max-restarts", "2", "--", "--hostfile", str(hostfile), *script], ENVIRONMENT, said
    )

    def lines(pattern: str) -> list[str]:
        return re.findall(pattern, said.read_text())

    def trains() -> bool:
        """Whether the newest start has written a checkpoint."""
        latest = run_dir / "checkpoints" / "latest"
        return latest.exists() and latest.read_text() not in at_start

    def after(disaster: Callable[[], object], alive: list[Host]) -> None:
        """Let it happen when the run trains; everything of this start ends in time, and the next begins."""
        until(trains, said)
        old = [process for host in alive for process in host.processes(OF_A_RUN)]
        restarts = len(lines("; restart "))
        disaster()
        until(lambda: not any(process.is_running() for process in old), said, GONE_SECONDS)
        until(lambda: len(lines("; restart ")) > restarts, said)
        at_start.append((run_dir / "checkpoints" / "latest").read_text())

    at_start: list[str] = []
    after(lambda: kill(one.processes(r"^ssh .* worker-2 ")), [two])

    def kill_launcher() -> None:
        hosts.hostfile(hostfile, slots=2)
        kill(two.processes(r"deepspeed\.launcher\.launch "))

    after(kill_launcher, [two])

    def lose_host() -> None:
        hosts.hostfile(hostfile, names=["worker-1"])
        set_images(spec, int(points(run_dir)[-1]["progress/images"]) + 48)
        two.kill()

    after(lose_host, [])
    assert run.wait(PATIENCE_SECONDS) == 0, said.read_text()[-6000:]

    assert lines(r"ddpm-ds run: (.*); restart") == ["exit code 76 (a process was lost or hung)"] * 3
    assert lines(r"layout +(\d) processes: 2 stages x (\d)") == [("2", "1"), ("2", "1"), ("4", "2"), ("2", "1")]
    resumed = lines(r"resuming from \S+/(images-\d+)")
    assert resumed == sorted(set(resumed)) and len(resumed) == 3
    gone = "what started rank 1 (stage 1, host worker-2) is gone: all ranks have saved and stopped"
    dead = "rank 2 (stage 1, host worker-2), rank 3 (stage 1, host worker-2) have not answered for 6 s"
    assert gone in said.read_text() and dead in said.read_text()
    assert one.processes(OF_A_RUN) == []
