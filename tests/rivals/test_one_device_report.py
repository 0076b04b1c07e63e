"""The table of ``--one-device``, and the same in MLflow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rivals.one_device_report import OneDeviceReport, OneDeviceResult, one_device_table
from rivals.record import record_one_device
from rivals.report import NotRun

from ddpm_ds.experiments.data_rate import Spread
from ddpm_ds.predict.plan import plan_run
from tests.launching import REPOSITORY
from tests.rivals.test_report import CONFIG, FakeTracker

DIFFUSERS = OneDeviceResult(
    row="diffusers",
    name="diffusers UNet2DModel, fp32, AdamW",
    note="",
    reference="diffusers",
    parameters=35_746_307,
    macs=6_222_000_000,
    images_per_second=8.0,
    step_seconds=Spread(1.0, 0.9, 12.5),
    forward_backward_seconds=Spread(0.75, 0.7, 0.8),
    speed=Spread(1.0, 1.0, 1.0),
    mfu=0.4,
    peak_bytes=None,
    loss=1.0,
    gradient_norm=2.0,
    prediction_difference=0.0,
    gradient_norm_difference=0.0,
    round_step_seconds=[0.9, 1.0, 12.5],
    round_forward_backward_seconds=[0.7, 0.75, 0.8],
)
ENGINE = replace(
    DIFFUSERS,
    row="engine",
    name="ddpm_ds 1F1B",
    note="kernels: reference",
    forward_backward_seconds=None,
    speed=Spread(1.5, 1.25, 1.75),
    prediction_difference=2e-6,
    gradient_norm_difference=3e-7,
    round_forward_backward_seconds=[],
)
OTHER = replace(
    DIFFUSERS,
    row="lucidrains",
    reference="lucidrains",
    parameters=35_719_555,
    prediction_difference=None,
    gradient_norm_difference=None,
)
REPORT = OneDeviceReport(
    name="cifar10",
    command="deepspeed --num_gpus 1 launch/bench.py --one-device",
    date="2026-11-22T04:00:00+00:00",
    machine="one",
    load_before=0.1,
    versions={"torch": "2.14.1"},
    spec="cifar10.yaml",
    overrides=[],
    deepspeed_config="zero1.json",
    precision="fp32",
    images=8,
    dropout=0.1,
    activation_checkpoint_interval=0,
    peak_flops=92e9,
    arithmetic="float32",
    tolerance=1e-4,
    rounds=3,
    steps_per_round=1,
    rows=[DIFFUSERS, ENGINE, OTHER],
    not_run=[NotRun("fused-kernels", "no GPU")],
    engine_over_bare=Spread(1.04, 1.03, 1.05),
)


def test_the_table_keeps_unets_of_their_own_apart_and_says_what_did_not_run() -> None:
    blocks = [block.splitlines() for block in one_device_table(REPORT).split("\n\n")]
    head, same, other, below = blocks
    assert any("0.092 TFLOP/s" in line for line in head)
    header, first, second = (line.split() for line in same)
    assert "peak" not in header and "prediction" in header
    assert first[:4] == ["diffusers", "1000", "(900-12500)", "750"] and "35,746,307" in first
    assert second[:7] == ["engine", "1000", "(900-12500)", "-", "8", "1.500", "(1.250-1.750)"]
    assert "2.0e-06" in second and "3.0e-07" in second and "35,746,307" not in second
    assert "prediction" not in other[0] and "35,719,555" in other[1] and "6.222 G" in other[1]
    assert below == [
        "engine: kernels: reference",
        "engine over bare: 1.040 (1.030-1.050) of its step time",
        "fused-kernels did not run: no GPU",
    ]


def test_memory_has_a_column_where_it_was_measured() -> None:
    rows = [replace(row, peak_bytes=1_234_000_000) for row in REPORT.rows]
    assert one_device_table(replace(REPORT, rows=rows)).count(" 1,234 ") == 3


def test_mlflow_gets_the_table_and_a_run_for_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTracker, "started", [])
    monkeypatch.setattr("rivals.record.Tracker", FakeTracker)
    plan = plan_run(REPOSITORY / "launch" / "specs" / "digits.yaml", [], CONFIG, world_size=1, stages=1)
    assert record_one_device(REPORT, plan, tmp_path) == "link"
    parent, *children = FakeTracker.started
    assert parent.run_name == "cifar10 one device"
    assert parent.said["engine.speed"] == 1.5 and parent.said["diffusers.mfu"] == 0.4
    assert parent.texts["table.txt"] == one_device_table(REPORT) + "\n" and "peak_flops" in parent.texts["report.json"]
    assert [child.run_name for child in children] == ["diffusers", "engine", "lucidrains"]
    assert children[0].series["round_forward_backward_ms"] == [700, 750, 800]
    assert children[0].said["forward_backward_ms"] == 750 and "forward_backward_ms" not in children[1].said
    assert children[1].said["prediction_difference"] == 2e-6 and "prediction_difference" not in children[2].said
