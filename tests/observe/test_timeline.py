"""The timeline of real ranks, its files, and its limits: events are the schedule, and training stays as it is."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from ddpm_ds.observe import timeline
from ddpm_ds.observe.pictures import draw_median_step, draw_step, write_trace
from ddpm_ds.observe.recording import RankTrace, TracedStep
from ddpm_ds.observe.timeline import Timeline
from ddpm_ds.pipeline.schedule import Event
from tests.observe.told import Told


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
    records = json.loads(path.read_text())["traceEvents"]
    names = {record["tid"]: record["args"]["name"] for record in records if record["name"] == "thread_name"}
    assert names == {1: "steps", 2: "rank 0: stages 0 and 1, replica 0", 3: "rank 1: stages 0 and 1, replica 1"}
    assert {record["ph"] for record in records} == {"M", "X"}
    boxes = [record for record in records if record["ph"] == "X"]
    assert [record["name"] for record in boxes if record["tid"] == 1] == ["step 20", "step 21"]
    assert boxes[2] == {
        "ph": "X",
        "name": "forward 3",
        "cat": "ForwardPass",
        "pid": 1,
        "tid": 2,
        "ts": 0.0,
        "dur": 250_000.0,
        "args": {"step": 20, "stage": 1, "micro-batch": 3},
    }
    assert [record["ts"] for record in boxes if record["tid"] == 3] == [0.0, 250_000.0, 500_000.0, 625_000.0]


def test_picture_is_of_the_median_step_and_waiting_is_grey(tmp_path: Path) -> None:
    path, alone = tmp_path / "steps.png", tmp_path / "alone.png"
    draw_median_step(ranks_of(step(20, 0.0, 0.9), step(21, 0.9, 0.2), step(22, 1.1, 0.5)), "digits", path)
    rows = [[Event("ForwardPass", 1, 3, 0.0, 0.25), Event("RecvGrad", 1, 3, 0.25, 0.5)]] * 2
    draw_step(rows, 0.5, ["0, replica 0", "0, replica 1"], "step 22: digits\n500 ms, bubble 50.0%", alone)
    assert path.read_bytes() == alone.read_bytes()
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGBA"))
    forward, waiting = ((pixels == (*colour, 255)).all(2).sum() for colour in ((143, 188, 240), (228, 228, 228)))
    assert 0.9 < forward / waiting < 1, "half of the rows; a number is written into the forwards"
    assert (pixels[..., 3] == 255).all() and np.median(pixels[..., :3]) == 255, "legible on dark pages too"


def test_letters_of_a_picture_can_be_read_400_pixels_wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *arguments, **options)

    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", keep)
    kinds: list[Any] = ["BackwardPass", "InputGradients", "WeightGradients", "DataWait", "ReduceGrads", "EMA"]
    events = [
        Event(kind, 1 if number == 1 else 0, 3, 0.1 * number, 0.1 * number + 0.1) for number, kind in enumerate(kinds)
    ]
    for ranks in (1, 40):
        names = [str(rank) for rank in range(ranks)]
        draw_step([events] * ranks, 0.9, names, "step 3: " + "words " * 20, tmp_path / "x.png")
        figure = drawn.pop()
        words = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
        inches = float(figure.get_size_inches()[0])
        assert min(float(text.get_fontsize()) / 72 for text in words) / inches * 400 >= 8.8, "pixels"
        said = " ".join(text.get_text() for text in words)
        for phrase in (
            "pipeline rank",
            "seconds since the start of the step",
            "waiting",
            "input gradients, decoder half",
        ):
            assert phrase in said
        boxes = [text.get_window_extent() for text in words]
        assert min(box.x0 for box in boxes) >= 0 and max(box.x1 for box in boxes) <= figure.bbox.width
        sides = sorted((side.y0, side.y1) for side in map(Text.get_window_extent, figure.axes[0].get_yticklabels()))
        assert all(below[1] <= above[0] for below, above in pairwise(sides))


def test_a_trace_has_as_many_steps_as_fit_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = SimpleNamespace(phases=2, micro_batches=10)
    told = Told()
    monkeypatch.setattr(timeline.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(timeline, "MOST_EVENTS", 1000)
    Timeline(engine, range(20, 40), tmp_path, told, "fp32", 1)
    assert told.logged == [
        "--trace-steps 20-39: only steps 20-21 are traced; a trace has at most 1,000 events, "
        "and a step may have 168 on each rank"
    ]
