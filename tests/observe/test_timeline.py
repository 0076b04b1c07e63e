"""Real ranks whose steps are traced: the events are the schedule, and nothing that is trained changes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ddpm_ds.pipeline.cuts import Schedule
from ddpm_ds.pipeline.schedule import instruction_stream
from tests.launching import launch, write_json

LOADER_SECONDS = 0.01
MICRO_BATCHES = 4
CASES = [
    {"stages": 2, "schedule": "1f1b", "zero": 1, "precision": "fp32", "course": [1, 2, 3, 4], "loader_seconds": 0.0},
    {"stages": 2, "schedule": "folded", "zero": 2, "precision": "fp16", "course": [1, 2, 2, 3, 2, 3, 4]},
    {"stages": 1, "schedule": "1f1b", "zero": 2, "precision": "fp32", "course": [1, 2, 3]},
]
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
RUN_METRICS = {
    "perf/traced_step_seconds",
    "perf/bubble_fraction",
    "perf/imbalance",
    "perf/mfu",
    "perf/data_wait_fraction",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    """A folder with the traces, and [rank][case] what was told."""
    folder = tmp_path_factory.mktemp("timeline")
    cases = [{"steps": [2, 3], "loader_seconds": LOADER_SECONDS, **case} for case in CASES]
    file = write_json(folder / "cases.json", cases)
    worker = Path(__file__).with_name("timeline_worker.py")
    done = launch(2, worker, str(file), str(folder), XDG_CACHE_HOME=str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


Reports = tuple[Path, list[list[dict[str, Any]]]]


def slices(folder: Path, case: int, rank: int, step: int) -> list[dict[str, Any]]:
    """The slices of a rank's step in its trace, by time."""
    records = json.loads((folder / str(case) / "steps-2-3.json").read_text())["traceEvents"]
    rows = {
        record["args"]["name"]: record["tid"]
        for record in records
        if record["ph"] == "M" and record["name"] == "thread_name"
    }
    row = next(tid for name, tid in rows.items() if name.startswith(f"rank {rank}: "))
    own = [record for record in records if record["ph"] == "X" and record["tid"] == row]
    return sorted((record for record in own if record["args"]["step"] == step), key=lambda record: record["ts"])


def executed(schedule: Schedule, rank: int) -> list[tuple[str, int]]:
    """What a rank of two does in a step, in order, with phases: the stream, its waits where they take place."""
    received: dict[tuple[str, int], int] = {}
    done = []
    for commands in instruction_stream(schedule, micro_batches=MICRO_BATCHES, ranks=2, rank=rank).steps():
        for command in commands:
            name, phase = command.name, command.kwargs.get("phase", 0)
            if name in ("RecvActivation", "RecvGrad"):
                received[name, phase] = received.get((name, phase), 0) + 1
                continue
            if name in ("ReduceTiedGrads", "CommitP2P"):
                continue
            wait = WAITS.get(name, "")
            if wait == "DataWait" or received.get((wait, phase)):
                done.append((wait, phase))
            done.append((name, phase))
    return [*done, ("EMA", 0), ("inspection", 0)]


@pytest.mark.launch
@pytest.mark.parametrize("case", [0, 1])
def test_events_of_a_step_are_the_instructions_of_the_schedule(reports: Reports, case: int) -> None:
    folder, _ = reports
    schedule: Schedule = "folded" if CASES[case]["schedule"] == "folded" else "1f1b"
    for rank in range(2):
        stages = (rank, 3 - rank) if schedule == "folded" else (rank,)
        for step in (2, 3):
            found = [
                (event["cat"], stages.index(event["args"]["stage"]))
                for event in slices(folder, case, rank, step)
                if event["cat"] != "WaitForRanks"
            ]
            assert found == executed(schedule, rank)


@pytest.mark.launch
def test_a_step_of_1f1b_written_out(reports: Reports) -> None:
    folder, _ = reports

    def grid(rank: int) -> str:
        return " ".join(
            SHORT[event["cat"]] + str(event["args"].get("micro-batch", ""))
            for event in slices(folder, 0, rank, 2)
            if event["cat"] in SHORT
        )

    assert grid(0) == "w0 l0 F0 s0 w1 l1 F1 s1 r0 B0 w2 l2 F2 s2 r1 B1 w3 l3 F3 s3 r2 B2 r3 B3 G O E"
    assert grid(1) == "w0 l0 r0 F0 B0 s0 w1 l1 r1 F1 B1 s1 w2 l2 r2 F2 B2 s2 w3 l3 r3 F3 B3 s3 G O E"


@pytest.mark.launch
@pytest.mark.parametrize("case", range(len(CASES)))
def test_nothing_overlaps_within_a_rank_and_all_is_within_the_step(reports: Reports, case: int) -> None:
    folder, _ = reports
    records = json.loads((folder / str(case) / "steps-2-3.json").read_text())["traceEvents"]
    summary = json.loads((folder / str(case) / "summary.json").read_text())
    assert {"ph", "name", "cat", "pid", "tid", "ts", "dur"} <= {
        key for record in records if record["ph"] == "X" for key in record
    }
    for rank in range(2):
        for step in (2, 3):
            events = slices(folder, case, rank, step)
            assert all(first["ts"] + first["dur"] <= second["ts"] + 0.002 for first, second in pairwise(events))
            assert all(event["dur"] >= 0 for event in events)
        own = summary["ranks"][rank]
        parts = [value for name, value in own.items() if name.endswith("_seconds") and name != "step_seconds"]
        parts += [
            phase[f"{name}_seconds"] for phase in own["phases"] for name in ("forward", "backward", "wait", "send")
        ]
        assert sum(parts) == pytest.approx(own["step_seconds"], abs=1e-4)  # with an inspection that is none
        assert all(part >= 0 for part in parts)


@pytest.mark.launch
@pytest.mark.parametrize("case", range(len(CASES)))
def test_tracing_changes_no_loss_and_leaves_the_engine_as_it_was(reports: Reports, case: int) -> None:
    _, ranks = reports
    for rank in ranks:
        plain, traced = rank[case]["plain"], rank[case]["traced"]
        assert traced["losses"] == plain["losses"]
        assert not any(plain["wrapped"])
        assert not traced["wrapped_afterwards"]
    assert any(any(loss for loss in rank[case]["traced"]["losses"]) for rank in ranks)


@pytest.mark.launch
def test_only_the_chosen_steps_are_traced_and_after_a_rewind_once(reports: Reports) -> None:
    _, ranks = reports
    for rank in ranks:
        assert [one["traced"]["wrapped"] for one in rank] == [
            [False, True, True, False],
            [False, True, True, True, True, True, False],
            [False, True, True],
        ]
    assert [[step for step, _ in case["values"]] for case in ranks[0]] == [[3], [3], [3]]
    assert all(not case["values"] and not case["lines"] for case in ranks[1])


@pytest.mark.launch
def test_what_is_reported(reports: Reports) -> None:
    folder, ((linear, folded, alone), _) = reports
    for told, own, stages in ((linear, 2, 2), (folded, 2, 4), (alone, 1, 1)):
        ((_, values),) = told["values"]
        names = {f"stage{stage}/{name}" for stage in range(stages) for name in STAGE_METRICS}
        assert (
            set(values)
            == names | {f"stage{stage}/{name}" for stage in range(own) for name in OWN_METRICS} | RUN_METRICS
        )
        assert 0 < values["perf/bubble_fraction"] < 1 and values["perf/imbalance"] >= 0 and values["perf/mfu"] > 0
        assert values["stage0/ema_seconds"] >= 0.001
        assert told["artifacts"] == [[name, "trace"] for name in ("steps-2-3.json", "steps-2-3.png", "summary.json")]
        assert "traced steps 2-3" in told["lines"][-1]
    for number in range(len(CASES)):
        with Image.open(folder / str(number) / "steps-2-3.png") as picture:
            colours = picture.convert("RGB").getcolors(2**20)
        assert colours is not None and {(59, 125, 216), (224, 123, 57)} <= {colour for _, colour in colours}
    ((_, values),) = folded["values"]
    waited = MICRO_BATCHES * LOADER_SECONDS
    assert waited <= values["stage0/load_seconds"]
    assert values["perf/data_wait_fraction"] * values["perf/traced_step_seconds"] > 0.9 * waited
    ((_, values),) = linear["values"]
    assert values["perf/data_wait_fraction"] < 0.5
