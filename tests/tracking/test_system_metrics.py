"""System metrics of every host in one MLflow run, by MLflow's names, and training that is never held up by them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from ddpm_ds.processes.ranks import NODE_ID
from ddpm_ds.tracking import system_metrics as module
from ddpm_ds.tracking.system_metrics import INTERVAL, SAMPLES, SWITCH, SystemMetrics, system_metrics
from tests.launching import PATIENCE_SECONDS, wait_for


class Tracked:
    """Stands in for the tracker."""

    def __init__(self) -> None:
        self.values: list[tuple[str | None, Mapping[str, float]]] = []

    def system_metrics(self, values: Mapping[str, float], node: str | None = None) -> None:
        self.values.append((node, values))

    @property
    def nodes(self) -> set[str | None]:
        return {node for node, _ in self.values}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    for name in (SWITCH, SAMPLES, NODE_ID):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(INTERVAL, "0.02")


@pytest.fixture
def stores() -> list[dist.TCPStore]:
    """The store of three ranks, that of rank 0 first."""
    options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=PATIENCE_SECONDS)}
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, **options)
    return [first, *(dist.TCPStore("127.0.0.1", first.port, **options) for _ in range(2))]


@pytest.fixture
def on_rank(monkeypatch: pytest.MonkeyPatch, stores: list[dist.TCPStore]) -> Callable[..., ExitStack]:
    """Enters what training is wrapped in on a rank; closing it is the end of training."""

    def enter(rank: int, host: str, tracked: Any = None, log: Any = print, local_rank: int = 0) -> ExitStack:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setattr(module, "host_name", lambda: host)
        training = ExitStack()
        training.enter_context(system_metrics(stores[rank] if stores else None, tracked, log))
        return training

    return enter


def test_all_hosts_are_in_the_run_of_rank_0_as_often_as_its_environment_says(
    on_rank: Callable[..., ExitStack], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked, threads = Tracked(), threading.active_count()
    first = on_rank(0, "a", tracked)
    monkeypatch.setenv(INTERVAL, "1000")  # of another host, which counts for nothing
    others = [on_rank(1, "b"), on_rank(2, "b")]
    nothing = on_rank(1, "b", local_rank=1)
    wait_for(lambda: tracked.nodes in ({None, "b", "b-rank1"}, {None, "b", "b-rank2"}))
    for context in (*others, nothing, first):
        context.close()
    wait_for(lambda: threading.active_count() == threads)
    for _, values in tracked.values:
        assert values["cpu_utilization_percentage"] >= 0 and values["system_memory_usage_megabytes"] > 0
        assert 0 < values["disk_usage_percentage"] <= 100 and values["network_receive_megabytes"] >= 0


def test_names_are_those_of_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Mock(NVMLError=RuntimeError)  # a driver with one GPU
    nvml.nvmlDeviceGetCount.return_value = 1
    nvml.nvmlDeviceGetMemoryInfo.return_value = SimpleNamespace(used=1e9, total=4e9)
    nvml.nvmlDeviceGetUtilizationRates.return_value = SimpleNamespace(gpu=70)
    nvml.nvmlDeviceGetPowerUsage.return_value = 300_000
    nvml.nvmlDeviceGetEnforcedPowerLimit.return_value = 400_000
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor("", tracking_uri="http://localhost")
    monitor.collect_metrics()
    theirs = monitor.aggregate_metrics()
    ours = SystemMetrics(pytest.fail).read()
    assert {name for name in theirs if not name.startswith("gpu_")} == {n for n in ours if not n.startswith("gpu_")}
    assert {name: value for name, value in ours.items() if name.startswith("gpu_")} == {
        "gpu_0_memory_usage_percentage": 25.0,
        "gpu_0_memory_usage_megabytes": 1000.0,
        "gpu_0_utilization_percentage": 70,
        "gpu_0_power_usage_watts": 300.0,
        "gpu_0_power_usage_percentage": 75.0,
    }


@pytest.mark.parametrize(("device", "lines"), [("cuda", 1), ("cpu", 0)])
def test_gpus_that_training_uses_and_nobody_can_read_are_said(
    device: str, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", device)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    said: list[str] = []
    assert SystemMetrics(said.append).read()["cpu_utilization_percentage"] >= 0
    assert len(said) == lines and all(
        "without the GPUs" in line and "pip install nvidia-ml-py" in line for line in said
    )


def test_readings_are_averaged_and_traffic_is_not(
    on_rank: Callable[..., ExitStack], stores: list[dist.TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.clear()  # of a single rank
    readings = iter(range(1, 1000))
    monkeypatch.setenv(SAMPLES, "3")
    monkeypatch.setenv(NODE_ID, "a")

    def read(self: SystemMetrics) -> dict[str, float]:
        number = float(next(readings))
        return {"cpu": number, "network_receive_megabytes": number}

    monkeypatch.setattr(SystemMetrics, "read", read)
    tracked = Tracked()
    alone = on_rank(0, "a", tracked)
    wait_for(lambda: len(tracked.values) >= 2)
    alone.close()
    assert tracked.values[:2] == [
        ("a", {"cpu": 2.0, "network_receive_megabytes": 3.0}),
        ("a", {"cpu": 5.0, "network_receive_megabytes": 6.0}),
    ]


def test_a_reading_that_fails_is_said_once_and_a_store_that_has_gone_is_not(
    on_rank: Callable[..., ExitStack], stores: list[dist.TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    said, tracked, threads = list[str](), Tracked(), threading.active_count()
    first = on_rank(0, "a", tracked, said.append)
    with monkeypatch.context() as broken:
        broken.setattr(SystemMetrics, "read", lambda self: 1 / 0)
        second = on_rank(1, "b", log=said.append)
        wait_for(lambda: any("of b" in line for line in said))
    assert "system metrics of b are no longer read (division by zero); training continues" in said
    third, before = on_rank(2, "c", log=said.append), len(said)
    wait_for(lambda: "c" in tracked.nodes)
    first.close()
    del stores[0], first  # the server ends with it
    wait_for(lambda: threading.active_count() == threads)
    assert len(said) == before
    second.close()
    third.close()


@pytest.mark.parametrize(("name", "value"), [(INTERVAL, "0"), (INTERVAL, "often"), (SAMPLES, "0")])
def test_a_setting_that_is_no_number_in_range_is_named(
    name: str,
    value: str,
    on_rank: Callable[..., ExitStack],
    stores: list[dist.TCPStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores.clear()
    monkeypatch.setenv(name, value)
    said = list[str]()
    with on_rank(0, "a", Tracked(), said.append):
        wait_for(lambda: said)
    assert len(said) == 1 and f"no longer read ({name}: '{value}' is not a " in said[0]


def test_nothing_is_read_where_it_is_switched_off(
    on_rank: Callable[..., ExitStack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "false")
    tracked, threads = Tracked(), threading.active_count()
    first = on_rank(0, "a", tracked)
    monkeypatch.delenv(SWITCH)
    second = on_rank(1, "b")
    wait_for(lambda: threading.active_count() == threads + 1)  # the one that hears other hosts
    second.close()
    first.close()
    assert tracked.values == []
