"""The tables of both kinds of benchmarks, and the same in MLflow."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from rivals.benchmark import layout_result, one_device_result
from rivals.measure import Spread
from rivals.report import Report, record

from ddpm_ds.planning import plan_run
from tests.launching import REPOSITORY

CONFIG = REPOSITORY / "ds_configs" / "zero1_fp32.json"
ABOUT: dict[str, Any] = {
    "name": "digits",
    "layout": "2 processes = 2 stages x 1 replicas",
    "command": "deepspeed --num_gpus 2 launch/bench.py",
    "machine": "one",
    "versions": {"torch": "2.14.1"},
    "not_run": [{"row": "plain", "reason": "has one process, and 2 were started"}],
}


def row(**values: Any) -> Any:
    """What a row says of itself."""
    return SimpleNamespace(**{"note": "", "is_pipeline": False, "parameters": 35_746_307, "macs": 6.222e9, **values})


def layout_report(peaks: list[int] | None = None) -> Report:
    """A pipeline of two ranks and DDP, which takes 1.5 times as long."""
    seen = [(1_000_000, 500_000, 0.0), (3_000_000, 0, 0.25)]
    seconds, slower = [0.4, 0.5, 0.6], [0.6, 0.75, 0.9]
    ours, ddp = row(name="ddpm_ds 1F1B", is_pipeline=True), row(name="PyTorch DDP", note="no checkpointing")
    rows = [
        layout_result("1f1b", ours, 32, seconds, seconds, seen, [1.0, 0.9], 0.0, peaks),
        layout_result("ddp", ddp, 32, slower, seconds, seen, [1.0, 0.9], 2e-7, peaks),
    ]
    return Report(ABOUT, ["machine      one"], rows)


def one_device_report(peak_bytes: int | None = None) -> Report:
    """Diffusers, an engine that is 1.5 times as fast, and another U-Net."""
    shared = {
        "note": "",
        "parameters": 35_746_307,
        "macs": 6.222e9,
        "host": None,
        "peak_bytes": peak_bytes,
        "reference": "diffusers",
    }
    known: list[dict[str, Any]] = [
        {"row": "diffusers", "name": "UNet2DModel"},
        {"row": "engine", "name": "1F1B", "note": "kernels: reference"},
        {"row": "lucidrains", "name": "theirs", "parameters": 35_719_555, "reference": "lucidrains"},
    ]
    for one, prediction, gradient in zip(known, (0.0, 2e-6, None), (0.0, 3e-7, None), strict=True):
        one |= {"prediction_difference": prediction, "gradient_norm_difference": gradient}
    whole = {"diffusers": [0.9, 1.0, 12.5], "engine": [0.6, 0.5, 12.5], "lucidrains": [0.9, 1.0, 12.5]}
    parts = {"diffusers": [0.7, 0.75, 0.8]}
    rows = [one_device_result({**shared, **one}, whole, parts, 8, 1e12) for one in known]
    return Report({**ABOUT, "layout": "one device"}, ["machine      one"], rows, ["engine over bare: 1.040"])


def test_the_table_has_a_line_for_each_row_and_the_notes_below() -> None:
    head, lines, below = (block.splitlines() for block in layout_report().table().split("\n\n"))
    header, ours, ddp = (line.split() for line in lines)
    assert head == ["machine      one"] and "peak" not in header and "bubble" in header
    assert ours[:6] == ["1f1b", "500", "(450-550)", "64", "1", "3.00"] and "12.5%" in ours
    assert ddp[4:6] == ["1.500", "(1.500-1.500)"] and "-" in ddp and "2.0e-07" in ddp
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)  # a single round
    assert below == ["ddp: no checkpointing", "plain did not run: has one process, and 2 were started"]


def test_the_table_keeps_unets_of_their_own_apart() -> None:
    _, same, other, below = (block.splitlines() for block in one_device_report().table().split("\n\n"))
    header, first, second = (line.split() for line in same)
    assert "peak" not in header and "prediction" in header
    assert first[:4] == ["diffusers", "1000", "(950-6750)", "750"] and "35,746,307" in first and "29.9%" in first
    assert second[:4] == ["engine", "600", "(550-6550)", "-"] and second[5:7] == ["1.500", "(1.250-1.750)"]
    assert "2.0e-06" in second and "3.0e-07" in second and "35,746,307" not in second
    assert "prediction" not in other[0] and "35,719,555" in other[1] and "6.222 G" in other[1]
    assert below[:2] == ["engine: kernels: reference", "engine over bare: 1.040"]


def test_memory_has_a_column_where_it_was_measured() -> None:
    table = layout_report(peaks=[7_000_000, 9_000_000]).table()
    assert "peak MB" in table and table.count(" 9  ") == 2
    assert one_device_report(1_234_000_000).table().count(" 1,234 ") == 3


class FakeTracker:
    """Keeps what it is told."""

    started: ClassVar[list[FakeTracker]] = []

    def __init__(self, experiment: str, run_name: str, **options: Any) -> None:
        self.run_name, self.options, self.ended = run_name, options, False
        self.numbers: dict[str, float] = {}
        self.series: dict[str, list[float]] = {}
        self.texts: dict[str, str] = {}
        # a child looks for its parent when it starts
        self.parent_ended = bool(self.started) and self.started[0].ended
        self.started.append(self)

    def metrics(self, values: dict[str, float], step: int) -> None:
        self.numbers |= values
        for name, value in values.items():
            assert len(self.series.setdefault(name, [])) == step
            self.series[name].append(value)

    def text(self, text: str, name: str) -> None:
        self.texts[name] = text

    def finish(self, status: str) -> str:
        self.ended = True
        return "link"


@pytest.mark.parametrize("report", [layout_report(), one_device_report()], ids=["layout", "one device"])
def test_mlflow_gets_a_run_with_the_table_and_one_for_each_row_under_it(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTracker, "started", [])
    monkeypatch.setattr("rivals.report.Tracker.start", FakeTracker)
    plan = plan_run(REPOSITORY / "launch" / "specs" / "digits.yaml", [], CONFIG, world_size=2, stages=2)
    assert record(report, plan, tmp_path) == "link"
    parent, *children = FakeTracker.started
    assert parent.run_name == f"digits {report.about['layout']}" and parent.options["params"]["layout"]["stages"] == 2
    assert parent.texts["table.txt"] == report.table() + "\n"
    assert [one["row"] for one in json.loads(parent.texts["report.json"])["rows"]] == [one.run_name for one in children]
    for child, result in zip(children, report.rows, strict=True):
        assert child.parent_ended and child.ended and child.options["parent"] == parent.options["identity"]
        assert child.series["round_step_seconds"] == result.numbers["round_step_seconds"]
        assert all(parent.numbers[f"{child.run_name}.{name}"] == value for name, value in result.metrics().items())
        step = result.numbers["step_seconds"]
        assert [child.numbers[f"step_seconds{end}"] for end in ("", "_low", "_high")] == [
            step.median,
            step.low,
            step.high,
        ]
        assert None not in child.numbers.values()
    missing = "bubble" if "bubble" in children[0].numbers else "forward_backward_seconds"
    assert missing in children[0].numbers and missing not in children[1].numbers
