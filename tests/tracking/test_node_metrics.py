"""System metrics of every host in one MLflow run, and nothing left of them when training ends or dies."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from mlflow import MlflowClient
from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from ddpm_ds.tracking import node_metrics as module
from ddpm_ds.tracking.node_metrics import READER, Collector, MetricsReader, node_metrics
from ddpm_ds.tracking.system_metrics import PACE, SWITCH, samples
from tests.launching import REPOSITORY, free_port

PATIENCE_SECONDS = 60.0
CPU = "cpu_utilization_percentage"

RANK = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from ddpm_ds.tracking.node_metrics import node_metrics
from ddpm_ds.tracking.tracker import Tracker

root, port, rank = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=60))
run = {"output_root": root, "run_dir": root / "run", "params": {}, "tags": {}}
tracker = Tracker.start("experiment", "name", **run) if rank == 0 else None
with node_metrics(store, tracker):
    while not (root / f"end{rank}").exists():
        time.sleep(0.05)
    begin = time.monotonic()
print(f"left after {time.monotonic() - begin} s", flush=True)
assert "mlflow" not in sys.modules
if tracker is not None:
    tracker.finish("FINISHED")
"""


def wait_for(happened: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (result := happened()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)
    return result


def readers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The children of a rank that read system metrics."""
    return [child for child in psutil.Process(process.pid).children() if READER in child.cmdline()]


def start_rank(root: Path, port: int, rank: int, **environment: str) -> subprocess.Popen[str]:
    """A rank that is the only one of its host."""
    variables = {**os.environ, "RANK": str(rank), "LOCAL_RANK": "0", **environment}
    command = [sys.executable, "-c", RANK, str(root), str(port)]
    return subprocess.Popen(
        command, env=variables, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_two_hosts_are_in_one_run_and_a_reader_ends_with_its_rank(
    tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_TRACKING_URI", SWITCH, *PACE):
        monkeypatch.delenv(name, raising=False)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    (tmp_path / "run").mkdir()
    port, client = free_port(), MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    first = start_rank(tmp_path, port, 0, **{PACE[0]: "0.2"})  # the other one hears of it
    second = start_rank(tmp_path, port, 1)
    names = [f"system/{CPU}", f"system/{platform.node()}/{CPU}"]

    def points() -> list[int]:
        """How many there are of CPU utilisation, of each host."""
        experiment = client.get_experiment_by_name("experiment")
        found = client.search_runs([experiment.experiment_id]) if experiment else []
        return [len(client.get_metric_history(run.info.run_id, name)) for run in found for name in names]

    try:
        wait_for(lambda: min(points(), default=0) > 2)
        (reader,) = readers(second)
        assert readers(first) == []
        second.kill()
        wait_for(lambda: not reader.is_running())
        before = points()[0]
        wait_for(lambda: points()[0] > before)
        (tmp_path / "end0").touch()
        said, _ = first.communicate(timeout=PATIENCE_SECONDS)
        assert first.returncode == 0 and said.count("\n") == 1 and float(said.split()[2]) < 1.5, said
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert run.info.status == "FINISHED"
    steps = [point.step for point in client.get_metric_history(run.info.run_id, names[1])]
    assert steps == sorted(steps) and steps[-1] <= PATIENCE_SECONDS, "seconds since the run began"


class Tracked:
    """Stands in for the tracker."""

    def __init__(self) -> None:
        self.values: list[tuple[str, dict[str, float]]] = []

    def system_metrics(self, values: Mapping[str, float], node: str) -> None:
        self.values.append((node, dict(values)))


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dist.TCPStore]]:
    """Of three ranks, that of rank 0 first."""
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    monkeypatch.delenv(SWITCH, raising=False)
    options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=PATIENCE_SECONDS)}
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, **options)]
    stores += [dist.TCPStore("127.0.0.1", stores[0].port, **options) for _ in range(2)]
    yield stores


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[subprocess.Popen[bytes]]]:
    """Has a program of one line run in place of the reader; returns the processes that are started."""

    def replace(program: str) -> list[subprocess.Popen[bytes]]:
        started: list[subprocess.Popen[bytes]] = []

        def start(name: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            started.append(subprocess.Popen([sys.executable, "-c", program], **pipes))  # type: ignore[call-overload]
            return started[-1]

        monkeypatch.setattr(module, "start_side_process", start)
        return started

    return replace


def test_a_reader_that_dies_is_said_once(
    stores: list[dist.TCPStore], instead: Callable[[str], list[subprocess.Popen[bytes]]]
) -> None:
    started = instead("""print('{"say": "no GPUs"}\\n{"metrics": {"a": 1.5}}', flush=True); raise SystemExit(3)""")
    tracked, said = Tracked(), list[str]()
    collector = Collector(stores[0], tracked)  # type: ignore[arg-type]
    reader = MetricsReader(1, stores[1], said.append)
    wait_for(lambda: tracked.values and len(said) == 2)
    reader.end()
    collector.end()
    host = platform.node()
    assert tracked.values == [(host, {"a": 1.5})] and len(started) == 1
    assert said == [
        f"{host}: no GPUs",
        f"system metrics of {host} are no longer read (exit code 3); training goes on",
    ]


BUSY = """while True: print('{"metrics": {"a": 1.5}}', flush=True); import time; time.sleep(0.05)"""


def test_hosts_of_one_name_are_told_apart_and_readers_end_with_training(
    stores: list[dist.TCPStore], instead: Callable[[str], list[subprocess.Popen[bytes]]]
) -> None:
    started, tracked, said = instead(BUSY), Tracked(), list[str]()
    collector = Collector(stores[0], tracked)  # type: ignore[arg-type]
    all_readers = [MetricsReader(rank, stores[rank], said.append) for rank in (1, 2)]
    wait_for(lambda: len({node for node, _ in tracked.values}) == 2)
    for reader in all_readers:
        reader.end()
    collector.end()
    host = platform.node()
    assert {node for node, _ in tracked.values} in ({host, f"{host}-rank1"}, {host, f"{host}-rank2"})
    assert [process.returncode for process in started] == [-9, -9] and said == []


def test_a_store_that_has_gone_ends_the_reader_without_a_word(
    stores: list[dist.TCPStore], instead: Callable[[str], list[subprocess.Popen[bytes]]]
) -> None:
    started, tracked, said = instead(BUSY), Tracked(), list[str]()
    collector = Collector(stores[0], tracked)  # type: ignore[arg-type]
    MetricsReader(1, stores[1], said.append)
    wait_for(lambda: tracked.values)
    collector.end()
    del collector
    stores.pop(0)  # the server ends with it
    assert wait_for(lambda: started[0].poll()) == -9 and said == []


@pytest.mark.parametrize("world", ["switched off", "of one rank", "of one host"])
def test_nothing_is_started_where_there_is_nothing_to_read(
    world: str,
    stores: list[dist.TCPStore],
    instead: Callable[[str], list[subprocess.Popen[bytes]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = instead("import time; time.sleep(60)")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    if world == "switched off":
        monkeypatch.setenv(SWITCH, "false")
    threads = threading.active_count()
    with node_metrics(None if world == "of one rank" else stores[0], Tracked()):  # type: ignore[arg-type]
        time.sleep(0.2)
        monkeypatch.delenv(SWITCH, raising=False)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("LOCAL_RANK", "1" if world == "of one host" else "0")
        with node_metrics(None if world == "of one rank" else stores[1], None):
            time.sleep(0.3)
    assert started == [] and threading.active_count() == threads


class Gpu(BaseMetricsMonitor):
    """A GPU that is always busy."""

    def collect_metrics(self) -> None:
        self._metrics["gpu_0_power_usage_watts"].append(300.0)

    def aggregate_metrics(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self._metrics.items()}


@pytest.mark.parametrize(("device", "gpu", "lines"), [("cuda", None, 1), ("cpu", None, 0), ("cuda", Gpu(), 0)])
def test_gpus_that_training_uses_and_mlflow_can_not_read_are_said(
    device: str, gpu: Gpu | None, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", device)
    monkeypatch.setenv(PACE[0], "0.01")
    monkeypatch.setattr(SystemMetricsMonitor, "_initialize_gpu_monitor", lambda self: gpu)
    said: list[str] = []
    values = next(samples(threading.Event(), said.append))
    assert values[CPU] >= 0 and values.get("gpu_0_power_usage_watts") == (300.0 if gpu else None)
    assert len(said) == lines and all("without the GPUs" in line for line in said)
