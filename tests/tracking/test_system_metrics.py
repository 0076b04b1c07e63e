"""System metrics of rank 0's host by MLflow's names, and training that is never held up by them."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ddpm_ds.tracking.run_folder import EVENTS, records
from ddpm_ds.tracking.sender import read_system_metrics
from ddpm_ds.tracking.tracker import INTERVAL, SWITCH
from tests.launching import PATIENCE_SECONDS, wait_for
from tests.tracking.stored import read_run, start


@pytest.mark.launch
@pytest.mark.parametrize("switch", ["true", "false"])
def test_readings_are_events_of_the_run_unless_the_environment_switches_them_off(
    root: Path, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    monkeypatch.setenv(INTERVAL, "0.02")
    tracker = start(root, system_metrics=True)
    if switch == "true":
        wait_for(lambda: len(list(records(root / "run" / EVENTS))) > 4)
    tracker.finish("FINISHED", PATIENCE_SECONDS)
    assert "finish" in list(records(root / "run" / EVENTS))[-1][0], "a run that has ended takes no readings"
    found = read_run(root).data.metrics
    assert (switch == "false") == (found == {})
    if switch == "true":
        assert found["system/system_memory_usage_megabytes"] > 0 and set(found) >= {
            *("system/cpu_utilization_percentage", "system/system_memory_usage_percentage"),
            *("system/disk_usage_percentage", "system/disk_usage_megabytes", "system/disk_available_megabytes"),
            *("system/network_receive_megabytes", "system/network_transmit_megabytes"),
        }


@pytest.mark.parametrize(
    ("interval", "line"),
    [
        ("0.02", "system metrics are no longer read (division by zero); training continues"),
        ("0", f"no system metrics are read ({INTERVAL}: '0' is not a "),
        ("often", f"no system metrics are read ({INTERVAL}: 'often' is not a "),
    ],
)
def test_what_fails_is_one_line(interval: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[Any] = [{"cpu": 1}, {"cpu": 2}]
    monitor = Mock(aggregate_metrics=lambda: readings.pop(0) if readings else 1 / 0)
    for kind in ("CPU", "Disk", "Network", "GPU"):
        stand_in = {"CPU": lambda: monitor, "GPU": Mock(side_effect=OSError)}.get(
            kind, lambda: Mock(aggregate_metrics=dict)
        )
        monkeypatch.setattr(f"mlflow.system_metrics.metrics.{kind.lower()}_monitor.{kind}Monitor", stand_in)
    said, replies = list[str](), list[Any]()
    read_system_metrics(interval, replies.append, lambda _, line: said.append(line))
    assert len(said) == 1 and said[0].startswith(line)
    assert replies == [{"metrics": {"system/cpu": value}} for value in (1, 2)] * (interval == "0.02")
