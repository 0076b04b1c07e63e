"""System metrics of every host in one MLflow run, by MLflow's names, and training that is never held up by them."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ddpm_ds.processes.ranks import NODE_ID
from ddpm_ds.tracking import sender as module
from ddpm_ds.tracking.run_folder import EVENTS, SYSTEM_METRICS, read
from ddpm_ds.tracking.sender import collect, system_metrics
from ddpm_ds.tracking.tracker import INTERVAL, SWITCH
from tests.launching import PATIENCE_SECONDS, wait_for
from tests.tracking.stored import read_run, start


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SWITCH, NODE_ID):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(INTERVAL, "0.02")


def test_all_hosts_are_in_the_run_of_rank_0_as_often_as_its_environment_says(root: Path) -> None:
    tracker, folder = start(root, system_metrics=True), root / "run" / SYSTEM_METRICS
    with ExitStack() as training, pytest.MonkeyPatch.context() as environment:
        for rank in (0, 1, 2):  # two hosts are called b
            environment.setenv("RANK", str(rank))
            environment.setenv("LOCAL_RANK", "0")
            training.enter_context(system_metrics(root / "run"))
            environment.setenv(NODE_ID, "b")
            environment.setenv(INTERVAL, "1000")  # which counts for nothing
        wait_for(lambda: sum(bool(file.stat().st_size) for file in folder.glob("*.jsonl")) == 3)
    sizes = {file: file.stat().st_size for file in folder.glob("b*.jsonl")}
    tracker.finish("FINISHED", PATIENCE_SECONDS)
    found = read_run(root).data.metrics
    names = {name.removeprefix("system/") for name in found if name.count("/") == 1}
    assert names >= {
        *("cpu_utilization_percentage", "system_memory_usage_megabytes", "system_memory_usage_percentage"),
        *("disk_usage_percentage", "disk_usage_megabytes", "disk_available_megabytes"),
        *("network_receive_megabytes", "network_transmit_megabytes"),
    }
    (second,) = {name.split("/")[1] for name in found if name.count("/") == 2} - {"b"}
    assert second in ("b-rank1", "b-rank2")
    for host in ("", "b/", f"{second}/"):
        assert set(found) >= {f"system/{host}{name}" for name in names}
        assert found[f"system/{host}system_memory_usage_megabytes"] > 0
    assert {file: file.stat().st_size for file in folder.glob("b*.jsonl")} == sizes, "read while it trains"


def test_only_the_first_rank_of_another_host_starts_a_child_and_a_switch_of_rank_0_counts_for_all(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Mock()
    with monkeypatch.context() as patch:
        patch.setattr(module, "start_child", started)
        for rank, local_rank in (("0", "0"), ("1", "1"), ("2", "0")):
            patch.setenv("RANK", rank)
            patch.setenv("LOCAL_RANK", local_rank)
            with system_metrics(root):
                pass
    assert [call.args for call in started.call_args_list] == [(root, "2")]
    monkeypatch.setenv(SWITCH, "false")
    tracker = start(root, system_metrics=True)
    (record, _) = read(root / "run" / EVENTS, 0, 1)[0]
    assert record["start"]["system_metrics"] is None
    tracker.finish("FINISHED", PATIENCE_SECONDS)


class Counter:
    """Stands for a class of MLflow's, whose readings are 1, 2, ..."""

    read = 0

    def collect_metrics(self) -> None:
        self.read += 1

    def aggregate_metrics(self) -> dict[str, int]:
        return {"cpu": self.read}

    def clear_metrics(self) -> None:
        pass


@pytest.mark.parametrize(
    ("interval", "monitor", "points", "line"),
    [
        ("0.02", Counter, [{"system/rack_1_b/cpu": 1}, {"system/rack_1_b/cpu": 2}], ""),
        ("0.02", lambda: Mock(collect_metrics=lambda: 1 / 0), [], "(division by zero); training continues"),
        ("0", Counter, [], f"system metrics of rack_1_b are read ({INTERVAL}: '0' is not a "),
        ("often", Counter, [], f"system metrics of rack_1_b are read ({INTERVAL}: 'often' is not a "),
    ],
)
def test_readings_are_written_and_what_fails_is_one_line(
    interval: str,
    monitor: Any,
    points: list[dict[str, float]],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(NODE_ID, "rack 1/b")
    for kind in ("CPU", "Disk", "Network", "GPU"):
        stand_in = {"CPU": monitor, "GPU": Mock(side_effect=OSError)}.get(kind, lambda: Mock(aggregate_metrics=dict))
        monkeypatch.setattr(f"mlflow.system_metrics.metrics.{kind.lower()}_monitor.{kind}Monitor", stand_in)
    said, ending = list[str](), threading.Event()
    thread = threading.Thread(target=collect, args=(tmp_path, 1, interval, ending, lambda _, line: said.append(line)))
    thread.start()
    file = tmp_path / SYSTEM_METRICS / "rack_1_b.jsonl"
    wait_for(lambda: said or len(read(file, 0, 2)) == 2 or not thread.is_alive())
    ending.set()
    thread.join()
    assert [record["metrics"] for record, _ in read(file, 0, 2)] == points
    assert len(said) == bool(line) and line in "".join(said)
