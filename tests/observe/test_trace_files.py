"""A trace's files: what Perfetto wants, what is too large, what a picture shows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from ddpm_ds.observe import timeline
from ddpm_ds.observe.pictures import draw_median_step, draw_step, write_trace
from ddpm_ds.observe.recording import RankTrace, TracedStep
from ddpm_ds.observe.timeline import Timeline
from ddpm_ds.pipeline.schedule import Event


def step(number: int, start: float, seconds: float) -> TracedStep:
    """A forward of micro-batch 3 that takes the first half."""
    forward = Event("ForwardPass", 1, 3, start, start + seconds / 2)
    wait = Event("RecvGrad", 1, 3, start + seconds / 2, start + seconds)
    return TracedStep(number, start, start + seconds, (forward, wait))


def ranks_of(*steps: TracedStep) -> list[RankTrace]:
    return [RankTrace(rank, 0, rank, (0, 1), ((8, 0), (8, 0)), (), steps) for rank in range(2)]


def test_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(ranks_of(step(20, 0.0, 0.5), step(21, 0.5, 0.25)), "digits", path)
    written = json.loads(path.read_text())
    records = written["traceEvents"]
    names = {record["tid"]: record["args"]["name"] for record in records if record["name"] == "thread_name"}
    assert names == {1: "steps", 2: "rank 0: stages 0 and 1, replica 0", 3: "rank 1: stages 0 and 1, replica 1"}
    assert {record["ph"] for record in records} == {"M", "X"}
    slices = [record for record in records if record["ph"] == "X"]
    assert [record["name"] for record in slices if record["tid"] == 1] == ["step 20", "step 21"]
    assert slices[2] == {
        "ph": "X",
        "name": "forward 3",
        "cat": "ForwardPass",
        "pid": 1,
        "tid": 2,
        "ts": 0.0,
        "dur": 250_000.0,
        "args": {"step": 20, "stage": 1, "micro-batch": 3},
    }
    assert [record["ts"] for record in slices if record["tid"] == 3] == [0.0, 250_000.0, 500_000.0, 625_000.0]
    assert all(type(record["ts"]) is float and record["dur"] >= 0 for record in slices)


def test_picture_is_of_the_median_step_and_leaves_waiting_empty(tmp_path: Path) -> None:
    path, alone = tmp_path / "steps.png", tmp_path / "alone.png"
    draw_median_step(ranks_of(step(20, 0.0, 0.9), step(21, 0.9, 0.2), step(22, 1.1, 0.5)), "digits", path)
    rows = [[Event("ForwardPass", 1, 3, 0.0, 0.25), Event("RecvGrad", 1, 3, 0.25, 0.5)]] * 2
    names = [f"rank {rank}: stages 0 and 1, replica {rank}" for rank in range(2)]
    draw_step(rows, 0.5, names, "step 22: digits\n500 ms, bubble 50.0%", alone)
    assert path.read_bytes() == alone.read_bytes()
    with Image.open(path) as picture:
        pixels = picture.convert("RGB")
        colours = pixels.getcolors(2**20)
        assert colours is not None
        painted = sum(count for count, colour in colours if colour == (143, 188, 240))
        assert 0.12 < painted / (pixels.width * pixels.height) < 0.2  # half of the rows


class Told:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def make(steps: range, told: Told, folder: Path) -> Any:
    engine: Any = SimpleNamespace(phases=2, micro_batches=10)
    report: Any = told
    return Timeline(engine, steps, folder, report, precision="fp32", macs_per_image=1)


def test_a_trace_too_large_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(timeline, "MOST_EVENTS", 1000)
    told = Told()
    observer = make(range(20, 40), told, tmp_path)
    assert told.lines == [
        "--trace-steps 20-39: only steps 20-21 are traced; a trace has at most 1,000 events, "
        "and a step may have 168 on each rank"
    ]
    told.lines.clear()
    assert observer._cut(ranks_of(step(20, 0.0, 1.0))[0]).steps[0].events == step(20, 0.0, 1.0).events
    monkeypatch.setattr(timeline, "MOST_EVENTS", 2)
    observer = make(range(20, 21), told, tmp_path)
    assert len(observer._cut(ranks_of(step(20, 0.0, 1.0))[1]).steps[0].events) == 1
    assert told.lines == ["step 20: 1 of 2 events of rank 1 are left out of the trace, which has at most 2"]
