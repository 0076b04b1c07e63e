"""The table, and the same in MLflow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rivals.record import record
from rivals.report import BenchmarkReport, NotRun, RowResult, table

from ddpm_ds.experiments.data_rate import Spread
from ddpm_ds.predict.plan import plan_run
from tests.launching import REPOSITORY

CONFIG = REPOSITORY / "ds_configs" / "zero1_fp32.json"
OURS = RowResult(
    row="1f1b",
    name="ddpm_ds 1F1B, fp32, ZeRO-1",
    note="",
    images_per_second=64.0,
    step_seconds=Spread(0.5, 0.4, 0.6),
    ratio=Spread(1.0, 1.0, 1.0),
    round_step_seconds=[0.4, 0.5, 0.6],
    first_losses=[1.0, 0.9],
    largest_loss_difference=0.0,
    rank_message_bytes=[1_000_000, 3_000_000],
    rank_collective_bytes=[500_000, 0],
    bubble=0.125,
    rank_peak_bytes=None,
)
DDP = replace(
    OURS,
    row="ddp",
    name="PyTorch DDP, fp32",
    note="no activation checkpointing",
    ratio=Spread(1.5, 1.4, 1.6),
    bubble=None,
)
REPORT = BenchmarkReport(
    name="digits",
    command="deepspeed --num_gpus 2 launch/bench.py",
    date="2026-11-21T18:00:00+00:00",
    machine="one",
    load_before=0.1,
    versions={"torch": "2.14.1"},
    spec="digits.yaml",
    overrides=[],
    deepspeed_config="zero1.json",
    parameters=1234,
    layout="2 processes = 2 stages x 1 replicas",
    batch="32 images",
    activation_checkpoint_interval=0,
    rounds=3,
    steps_per_round=1,
    rows=[OURS, DDP],
    not_run=[NotRun("plain", "has one process, and 2 were started")],
)


def test_the_table_has_a_line_for_each_row_and_the_notes_below() -> None:
    lines = table(REPORT).splitlines()
    header, ours, ddp = (line.split() for line in lines[-6:-3])
    assert "peak" not in header and "bubble" in header
    assert ours[:6] == ["1f1b", "500", "(400-600)", "64", "1", "3.00"] and "12.5%" in ours
    assert ddp[4:6] == ["1.500", "(1.400-1.600)"] and "-" in ddp
    assert lines[-2:] == [
        "ddp: no activation checkpointing",
        "plain did not run: has one process, and 2 were started",
    ]


def test_memory_has_a_column_where_it_was_measured() -> None:
    rows = [replace(row, rank_peak_bytes=[7_000_000, 9_000_000]) for row in REPORT.rows]
    lines = table(replace(REPORT, rows=rows)).splitlines()
    assert any("peak MB" in line for line in lines) and sum(" 9  " in line for line in lines) == 2


class FakeTracker:
    """Keeps what it is told."""

    started: ClassVar[list[FakeTracker]] = []

    @classmethod
    def start(cls, experiment: str, run_name: str, **options: Any) -> FakeTracker:
        tracker = cls()
        tracker.run_name, tracker.options, tracker.said = run_name, options, {}
        tracker.series, tracker.texts, tracker.ended = {}, {}, False
        # a child looks for its parent when it starts
        tracker.parent_ended = bool(cls.started) and cls.started[0].ended
        cls.started.append(tracker)
        return tracker

    run_name: str
    options: dict[str, Any]
    said: dict[str, float]
    series: dict[str, list[float]]
    texts: dict[str, str]
    ended: bool
    parent_ended: bool

    def metrics(self, values: dict[str, float], step: int) -> None:
        self.said |= values
        for name, value in values.items():
            assert len(self.series.setdefault(name, [])) == step
            self.series[name].append(value)

    def text(self, text: str, name: str) -> None:
        self.texts[name] = text

    def finish(self, status: str) -> str:
        self.ended = True
        return "link"


def test_mlflow_gets_a_run_with_the_table_and_one_for_each_row_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTracker, "started", [])
    monkeypatch.setattr("rivals.record.Tracker", FakeTracker)
    plan = plan_run(REPOSITORY / "launch" / "specs" / "digits.yaml", [], CONFIG, world_size=2, stages=2)
    assert record(REPORT, plan, tmp_path) == "link"
    parent, *children = FakeTracker.started
    assert parent.said["ddp.time_ratio"] == 1.5 and parent.options["params"]["layout"]["stages"] == 2
    assert parent.texts["table.txt"] == table(REPORT) + "\n" and "rank_message_bytes" in parent.texts["report.json"]
    assert [child.run_name for child in children] == ["1f1b", "ddp"]
    for child in children:
        assert child.parent_ended and child.ended
        assert child.options["parent"] == parent.options["identity"]
        assert child.series["round_step_ms"] == [400, 500, 600] and child.series["first_loss"] == [1.0, 0.9]
    assert children[0].said["bubble"] == 0.125 and "bubble" not in children[1].said
