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
from ddpm_ds.pipeline.cuts import Schedule
from ddpm_ds.pipeline.schedule import Event, neighbours, program
from tests.observe.conftest import CASES, LOADER_SECONDS, Observed
from tests.observe.told import Told

WAITS = {"LoadMicroBatch": "DataWait", "ForwardPass": "RecvActivation", "BackwardPass": "RecvGrad"}
SHORT = {
    "DataWait": "w",
    "LoadMicroBatch": "l",
    "RecvActivation": "r",
    "ForwardPass": "F",
    "SendActivation": "s",
    "RecvGrad": "r",
    "BackwardPass": "B",
    "SendGrad": "s",
    "ReduceGrads": "G",
    "OptimizerStep": "O",
    "EMA": "E",
}
OWN_METRICS = {"load_seconds", "reduce_seconds", "optimizer_seconds", "ema_seconds"}
STAGE_METRICS = {"forward_seconds", "backward_seconds", "wait_seconds", "send_seconds"}
RUN_METRICS = {"traced_step_seconds", "bubble_fraction", "imbalance", "mfu", "data_wait_fraction"}
TRACED = ("linear", "folded", "replicas")


def slices(folder: Path, rank: int, step: int) -> list[dict[str, Any]]:
    """The slices of a rank's step in its trace, by time."""
    records = json.loads((folder / "trace" / "steps-2-3.json").read_text())["traceEvents"]
    (row,) = (
        record["tid"]
        for record in records
        if record["name"] == "thread_name" and record["args"]["name"].startswith(f"rank {rank}: ")
    )
    own = [record for record in records if record["ph"] == "X" and record["tid"] == row]
    return sorted((record for record in own if record["args"]["step"] == step), key=lambda record: record["ts"])


def executed(schedule: Schedule, rank: int) -> list[tuple[str, int]]:
    """What a rank of two does in a step, in order, with phases: its program, its waits where they take place."""
    done = []
    for name, phase, _ in program(schedule, 4, 2, rank):
        before, after = neighbours(schedule, 2, rank, phase)
        waits = {"LoadMicroBatch": True, "ForwardPass": before is not None, "BackwardPass": after is not None}
        if waits.get(name):
            done.append((WAITS[name], phase))
        done.append((str(name), phase))
    return [*done, ("EMA", 0), ("inspection", 0)]


@pytest.mark.launch
def test_events_of_a_step_are_the_instructions_of_the_schedule(observed: Observed) -> None:
    schedules: tuple[tuple[str, Schedule], ...] = (("linear", "1f1b"), ("folded", "folded"))
    for name, schedule in schedules:
        for rank in range(2):
            stages = (rank, 3 - rank) if schedule == "folded" else (rank,)
            for step in (2, 3):
                events = slices(observed.folder / name, rank, step)
                found = [
                    (event["cat"], stages.index(event["args"]["stage"]))
                    for event in events
                    if event["cat"] != "WaitForRanks"
                ]
                assert found == executed(schedule, rank)

    def grid(rank: int) -> str:
        return " ".join(
            SHORT[event["cat"]] + str(event["args"].get("micro-batch", ""))
            for event in slices(observed.folder / "linear", rank, 2)
            if event["cat"] in SHORT
        )

    assert grid(0) == "w0 l0 F0 s0 w1 l1 F1 s1 r0 B0 w2 l2 F2 s2 r1 B1 w3 l3 F3 s3 r2 B2 r3 B3 G O E"
    assert grid(1) == "w0 l0 r0 F0 B0 s0 w1 l1 r1 F1 B1 s1 w2 l2 r2 F2 B2 s2 w3 l3 r3 F3 B3 s3 G O E"


@pytest.mark.launch
@pytest.mark.parametrize("name", TRACED)
def test_nothing_overlaps_within_a_rank_and_all_is_within_the_step(observed: Observed, name: str) -> None:
    summary = json.loads((observed.folder / name / "trace" / "summary.json").read_text())
    facts = {"first_step": 2, "last_step": 3, "world_size": 2, "schedule": CASES[name][0].schedule, "device": "cpu"}
    facts |= {"pipeline_ranks": CASES[name][0].stages, "replicas": CASES[name][0].replicas}
    assert facts.items() <= summary.items()
    assert summary["step_seconds"] == pytest.approx(sum(rank["step_seconds"] for rank in summary["ranks"]) / 2)
    for rank in range(2):
        for step in (2, 3):
            events = slices(observed.folder / name, rank, step)
            assert all(first["ts"] + first["dur"] <= second["ts"] + 0.002 for first, second in pairwise(events))
            assert all(event["dur"] >= 0 for event in events)
        own = summary["ranks"][rank]
        parts = [own[f"{part}_seconds"] for part in ("data_wait", "load", "reduce", "optimizer", "agreement_wait")]
        parts += [own["ema_seconds"], own["other_seconds"]]
        for phase in own["phases"]:
            parts += [phase[f"{part}_seconds"] for part in ("forward", "backward", "wait", "send")]
        assert sum(parts) == pytest.approx(own["step_seconds"], rel=1e-9) and min(parts) >= -1e-9
        assert own["inspection_seconds"] > 0


@pytest.mark.launch
def test_observers_change_no_loss_and_leave_the_engine_as_it_was(observed: Observed) -> None:
    for rank in observed.ranks:
        for name in ("linear", "folded"):
            assert rank[name]["losses"] == rank[name]["expected"]["losses"], name
            assert not any(rank[name]["expected"]["wrapped"])
        # The flops profile wraps step 1, the timeline 2 and 3, the kernel profile 5 and 6, with 4 to warm up.
        assert rank["linear"]["wrapped"] == [True, True, True, True, True]
        folded = dict.fromkeys(range(12), True) | dict.fromkeys([4, 10, 11], False)  # step 1 again, 5 and 6 again
        assert rank["folded"]["wrapped"] == list(folded.values())
        assert all(rank[name]["restored"] for name in TRACED)
    assert any(any(rank["linear"]["losses"]) for rank in observed.ranks)


@pytest.mark.launch
def test_metrics_files_and_the_wait_for_the_loader_are_reported(observed: Observed) -> None:
    for name, own, stages in (("linear", 2, 2), ("folded", 2, 4), ("replicas", 1, 1)):
        told = observed.ranks[0][name]
        ((step, values),) = [(step, values) for step, values in told["metrics"] if "perf/mfu" in values]
        names = {f"stage{stage}/{metric}" for stage in range(stages) for metric in STAGE_METRICS}
        names |= {f"stage{stage}/{metric}" for stage in range(own) for metric in OWN_METRICS}
        assert step == 3 and set(values) - {"perf/inspection_fraction"} == names | {
            f"perf/{metric}" for metric in RUN_METRICS
        }
        assert 0 < values["perf/bubble_fraction"] < 1 and values["perf/imbalance"] >= 0 and values["perf/mfu"] > 0
        drawn = ["trace/steps-2-3.png"] if name != "replicas" else []  # one stage waits for no other
        files = ["trace/steps-2-3.json", *drawn, "trace/summary.json"]
        assert [file for file in told["artifacts"] if file.startswith("trace")] == files
        assert (observed.folder / name / "trace" / "steps-2-3.png").exists() == bool(drawn)
        (line,) = (line for line in told["logged"] if "traced steps 2-3" in line)
        assert line.endswith("steps-2-3.png and .json" if drawn else "steps-2-3.json")
        for file in drawn:
            with Image.open(observed.folder / name / file) as picture:
                colours = picture.convert("RGB").getcolors(2**20)
            assert colours is not None and {(59, 125, 216), (224, 123, 57)} <= {colour for _, colour in colours}
        if name == "folded":
            assert values["stage0/load_seconds"] >= 4 * LOADER_SECONDS
            assert values["perf/data_wait_fraction"] * values["perf/traced_step_seconds"] > 0.9 * 4 * LOADER_SECONDS
    assert all(not observed.ranks[1][name][told] for name in CASES for told in ("logged", "metrics", "artifacts"))


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
