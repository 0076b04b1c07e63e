"""The timeline's clock and metrics, its files, and its limits, of traces written by hand."""

import json
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from ddpm_ds.observe.observer import Barrier, Clock, RankTrace, TracedStep, aligned, clock_offset
from ddpm_ds.observe.timeline import LOOKS, draw_median_step, draw_step, rank_seconds, timeline_metrics, trace_json
from ddpm_ds.pipeline.schedule import Event


def step(number: int, start: float, seconds: float) -> TracedStep:
    """A forward of micro-batch 3 that takes the first half."""
    forward = Event("ForwardPass", 1, 3, start, start + seconds / 2)
    wait = Event("RecvGrad", 1, 3, start + seconds / 2, start + seconds)
    return TracedStep(number, start, start + seconds, (forward, wait))


def ranks_of(*steps: TracedStep) -> list[RankTrace]:
    return [RankTrace(rank, 0, rank, (0, 1), ((8, 0), (8, 0)), (), steps) for rank in range(2)]


def test_a_trace_names_steps_and_ranks_for_perfetto() -> None:
    records = json.loads(trace_json(ranks_of(step(20, 0.0, 0.5), step(21, 0.5, 0.25)), "digits"))["traceEvents"]
    names = {record["tid"]: record["args"]["name"] for record in records if record["name"] == "thread_name"}
    assert names == {1: "steps", 2: "rank 0: stages 0 and 1, replica 0", 3: "rank 1: stages 0 and 1, replica 1"}
    boxes = [record for record in records if record["ph"] == "X"]
    assert [record["name"] for record in boxes if record["tid"] == 1] == ["step 20", "step 21"]
    forward = {"name": "forward 3", "cat": "ForwardPass", "pid": 1, "tid": 2, "ts": 0.0, "dur": 250_000.0}
    assert boxes[2] == {"ph": "X", **forward, "args": {"step": 20, "stage": 1, "micro-batch": 3}}


def test_picture_is_of_the_median_step_and_waiting_is_grey() -> None:
    ranks, alone = ranks_of(step(20, 0.0, 0.9), step(21, 0.9, 0.2), step(22, 1.1, 0.5)), BytesIO()
    rows = [[Event("ForwardPass", 1, 3, 0.0, 0.25), Event("RecvGrad", 1, 3, 0.25, 0.5)]] * 2
    draw_step(rows, 0.5, ["0, replica 0", "0, replica 1"], "step 22: digits\n500 ms, bubble 50.0%", alone)
    assert draw_median_step(ranks, "digits") == alone.getvalue()
    with Image.open(alone) as picture:
        pixels = np.asarray(picture.convert("RGBA"))
    forward, waiting = ((pixels == (*colour, 255)).all(2).sum() for colour in ((143, 188, 240), (228, 228, 228)))
    assert 0.9 < forward / waiting < 1, "half of the rows; a number is written into the forwards"
    assert (pixels[..., 3] == 255).all() and np.median(pixels[..., :3]) == 255, "legible on dark pages too"


@pytest.mark.parametrize(("ranks", "phases"), [(2, 1), (2, 2), (40, 1)])
def test_the_legend_is_no_taller_than_the_plot(ranks: int, phases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of boxes, each of them seen."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **options: drawn.append(figure))
    names = [name for name, (_, *colours) in LOOKS.items() if colours] * phases
    events = [Event(name, number % phases, 1, number / 100, (number + 1) / 100) for number, name in enumerate(names)]
    draw_step([events] * ranks, 0.5, ["0"] * ranks, "step 22: digits\n500 ms, bubble 50.0%", BytesIO())
    (figure,) = drawn
    figure.canvas.draw()
    plot, legend = figure.axes[0].get_window_extent(), figure.legends[0].get_window_extent()
    assert legend.height <= 1.05 * plot.height and legend.width <= figure.bbox.width and legend.y1 < plot.y0


def summarise(traces: Sequence[RankTrace], peak: float) -> dict[str, Any]:
    """A summary of steps that two ranks recorded, with micro-batches of 8 images."""
    job = {"micro_batches": 1, "micro_batch_images": 8, "pipeline_ranks": 2, "replicas": 1, "step_seconds": 10.0}
    return {**job, "peak_flops_per_second": peak, "ranks": [rank_seconds(trace) for trace in traces]}


def trace(rank: int, events: Sequence[Event], barriers: Any = ((0, 1),), ahead: float = 0.0) -> RankTrace:
    """One step of ten seconds on a rank whose clock is ``ahead``."""
    step, bounds = (
        TracedStep(20, 0.0, 10.0, tuple(events)),
        [Barrier(came + ahead, left + ahead) for came, left in barriers],
    )
    return RankTrace(rank, rank, 0, (rank,), (((64, 0), (0, 64))[rank],), tuple(bounds), (step.moved(-ahead),))


FIRST = [
    Event("DataWait", 0, 0, 0.0, 1.0),
    Event("LoadMicroBatch", 0, 0, 1.0, 1.5),
    Event("ForwardPass", 0, 0, 1.5, 3.5),
    Event("SendActivation", 0, 0, 3.5, 3.75),
    Event("RecvGrad", 0, 0, 3.75, 6.0),
    Event("BackwardPass", 0, 0, 6.0, 8.0),
    Event("OptimizerStep", 0, -1, 8.0, 9.5),
]
SECOND = [
    Event("RecvActivation", 0, 0, 0.0, 4.0),
    Event("ForwardPass", 0, 0, 4.0, 5.0),
    Event("BackwardPass", 0, 0, 5.0, 6.0),
    Event("OptimizerStep", 0, -1, 6.0, 9.25),
]


def test_seconds_bubble_and_utilisation_of_a_step() -> None:
    ranks, error = aligned([trace(1, SECOND), trace(0, FIRST)])
    assert error == 1.0
    assert [event.instruction for event in ranks[1].steps[0].events][3:5] == ["WaitForRanks", "OptimizerStep"]
    summary = summarise(ranks, 1000.0)
    values = timeline_metrics(summary, macs_per_image=125)
    kinds = ("forward", "backward", "wait", "send", "load", "reduce", "optimizer")
    first = dict(zip(kinds, (2.0, 2.0, 2.25, 0.25, 1.5, 0.0, 1.5), strict=True))
    # The second one waits 4 s for activations, and 2 until rank 0 has come to the optimizer's step.
    second = dict(zip(kinds, (1.0, 1.0, 6.0, 0.0, 0.0, 0.0, 1.25), strict=True))
    stages = {f"stage0/{kind}_seconds": first[kind] for kind in kinds}
    stages |= {f"stage1/{kind}_seconds": second[kind] for kind in kinds}
    whole = {"traced_step_seconds": 10.0, "bubble_fraction": (2.25 + 6.0) / 20, "imbalance": 4 / 3 - 1}
    whole |= {"mfu": 8 * 125 * 2 * 3 / 10 / 2000, "data_wait_fraction": 0.1}
    assert values == pytest.approx(stages | {f"perf/{name}": value for name, value in whole.items()})
    assert summary["ranks"][0]["other_seconds"] == pytest.approx(0.5)
    assert summary["ranks"][1]["phases"][0]["gradient_bytes"] == 64


def test_pauses_are_no_part_of_the_step() -> None:
    ranks, _ = aligned([trace(0, [*FIRST, Event("checkpoint", 0, -1, 9.5, 10.0)]), trace(1, SECOND)])
    first = summarise(ranks, 1.0)["ranks"][0]
    assert (first["step_seconds"], first["checkpoint_seconds"], first["sampling_seconds"]) == (9.5, 0.5, 0.0)


def test_ranks_wait_for_each_other_where_gradients_are_added_and_where_they_agree() -> None:
    early = [event if event.instruction != "OptimizerStep" else event._replace(end=7.0) for event in SECOND]
    ranks, _ = aligned([trace(0, FIRST), trace(1, early)])  # who ends before the last begins has not waited
    assert all(event.instruction != "WaitForRanks" for event in ranks[1].steps[0].events)
    both = [trace(rank, [Event("ReduceGrads", 0, -1, begin, 8.0)]) for rank, begin in enumerate((7.0, 5.0))]
    ranks, _ = aligned(both)
    assert ranks[1].steps[0].events == both[1].steps[0].events  # another stage
    ranks, _ = aligned([both[0], replace(both[1], pipeline_rank=0, replica=1)])
    assert ranks[1].steps[0].events == (Event("WaitForRanks", 0, -1, 5.0, 7.0), Event("ReduceGrads", 0, -1, 7.0, 8.0))


def test_clocks_of_two_hosts_become_one() -> None:
    barriers = [Barrier(0.0, 1.02), Barrier(2.0, 2.01), Barrier(3.0, 3.5)]
    later = [Barrier(0.99, 1.01), Barrier(1.99, 2.015), Barrier(3.2, 3.5)]
    ranks, error = aligned([trace(0, FIRST, barriers), trace(1, SECOND, later, ahead=5000.0)])
    moved = ranks[1].steps[0]
    assert error < 0.02
    assert moved.start == pytest.approx(0.0, abs=error)
    assert moved.events[-1].end == pytest.approx(9.25, abs=error)
    assert clock_offset(later, barriers)[0] == 0.0  # nothing says that these two are not one clock


def test_time_on_a_device_is_what_its_events_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events have times in milliseconds, which the device says when it has come to them."""
    synchronize, at = Mock(), iter((100.0, 100.0, 350.0))

    def event(enable_timing: bool) -> Mock:
        now = next(at)
        return Mock(at=now, elapsed_time=lambda end: end.at - now)

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr("ddpm_ds.observe.observer.time.perf_counter", lambda: 7.0)
    clock = Clock(torch.device("cuda"))
    synchronize.reset_mock()
    marks = [clock.mark(), clock.mark()]
    assert not synchronize.called
    assert clock.seconds(marks) == pytest.approx([7.0, 7.25]) and synchronize.call_count == 1
