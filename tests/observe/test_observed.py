"""Two real ranks that train a few layouts under all observers at once: timeline, flops profile and kernel profile.

Events are the schedule, counts are the table's, all time is shared out, and training stays as it is.
"""

import gzip
import json
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ddpm_ds.pipeline.schedule import neighbours, program
from ddpm_ds.schema.layout import Schedule
from tests.observe.observed_worker import FLOPS_STEP, LAYERS
from tests.pipeline.ladder_worker import Case, run_cases

pytestmark = pytest.mark.launch

LOADER_SECONDS = 0.01
ROLLED_BACK = [1, 2, 2, 3, 1, 2, 3, 4, 5, 6, 5, 6]
"""Back before the traced steps are over, and after they and the profiled ones are."""
CASES: dict[str, tuple[Case, list[int]]] = {
    "linear": (Case(2, 1, 1, "fp32", 0), [1, 2, 3]),
    "folded": (Case(2, 1, 2, "fp16", 1, schedule="folded", reentrant=True), ROLLED_BACK),
    "replicas": (Case(1, 2, 2, "fp32", 0, micro_batches=1), [1, 2, 3, 4, 5]),
    "shared": (Case(1, 1, 2, "fp32", 0, micro_batches=1, space=2), [1, 2, 3, 4, 5]),
    "broken": (Case(1, 2, 0, "fp32", 0, micro_batches=1), [4, 5]),
}
WAITS = {"LoadMicroBatch": "DataWait", "ForwardPass": "RecvActivation", "BackwardPass": "RecvGrad"}
SHORT = {
    **{"DataWait": "w", "LoadMicroBatch": "l", "ForwardPass": "F", "BackwardPass": "B", "OptimizerStep": "O"},
    **{"RecvActivation": "r", "SendActivation": "s", "RecvGrad": "r", "SendGrad": "s", "ReduceGrads": "G"},
}
OWN_METRICS = {"load_seconds", "reduce_seconds", "optimizer_seconds"}
STAGE_METRICS = {"forward_seconds", "backward_seconds", "wait_seconds", "send_seconds"}
RUN_METRICS = {"traced_step_seconds", "bubble_fraction", "imbalance", "mfu", "data_wait_fraction"}
TRACED = ("linear", "folded", "replicas", "shared")


@dataclass(frozen=True)
class Observed:
    """What two ranks left of each case."""

    folder: Path
    ranks: list[dict[str, dict[str, Any]]]
    """What each rank reports, by the case's name."""


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder = tmp_path_factory.mktemp("observed")
    entries = [
        {"name": name, "case": asdict(case), "course": course, "loader_seconds": LOADER_SECONDS * (name == "folded")}
        for name, (case, course) in CASES.items()
    ]
    worker = Path(__file__).with_name("observed_worker.py")
    reports = run_cases(2, worker, entries, folder, XDG_CACHE_HOME=str(folder))
    return Observed(folder, [dict(zip(CASES, report, strict=True)) for report in reports])


def slices(folder: Path, rank: int, step: int) -> list[dict[str, Any]]:
    """The slices of a rank's step in its trace, by time."""
    records = json.loads((folder / "trace" / "steps-2-3.json").read_text())["traceEvents"]
    named = (record for record in records if record["name"] == "thread_name")
    (row,) = (record["tid"] for record in named if record["args"]["name"].startswith(f"rank {rank}: "))
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
    return [*done, ("sampling", 0)]


def test_events_of_a_step_are_the_instructions_of_the_schedule(observed: Observed) -> None:
    for name, step, rank in product(("linear", "folded"), (2, 3), (0, 1)):
        stages = (rank, 3 - rank) if name == "folded" else (rank,)
        events = [event for event in slices(observed.folder / name, rank, step) if event["cat"] != "WaitForRanks"]
        found = [(event["cat"], stages.index(event["args"]["stage"])) for event in events]
        assert found == executed(CASES[name][0].schedule, rank)

    def grid(rank: int) -> str:
        events = [event for event in slices(observed.folder / "linear", rank, 2) if event["cat"] in SHORT]
        return " ".join(f"{SHORT[event['cat']]}{event['args'].get('micro-batch', '')}" for event in events)

    assert grid(0) == "w0 l0 F0 s0 w1 l1 F1 s1 r0 B0 w2 l2 F2 s2 r1 B1 w3 l3 F3 s3 r2 B2 r3 B3 G O"
    assert grid(1) == "w0 l0 r0 F0 B0 s0 w1 l1 r1 F1 B1 s1 w2 l2 r2 F2 B2 s2 w3 l3 r3 F3 B3 s3 G O"


@pytest.mark.parametrize("name", TRACED)
def test_nothing_overlaps_within_a_rank_and_all_is_within_the_step(observed: Observed, name: str) -> None:
    summary = json.loads((observed.folder / name / "trace" / "summary.json").read_text())
    facts = {"first_step": 2, "last_step": 3, "world_size": 2, "schedule": CASES[name][0].schedule, "device": "cpu"}
    facts |= {"host_processes": 2, "pipeline_ranks": CASES[name][0].stages, "replicas": CASES[name][0].replicas}
    assert facts.items() <= summary.items()
    assert summary["step_seconds"] == pytest.approx(sum(rank["step_seconds"] for rank in summary["ranks"]) / 2)
    for rank in range(2):
        for step in (2, 3):
            events = slices(observed.folder / name, rank, step)
            assert all(first["ts"] + first["dur"] <= second["ts"] + 0.002 for first, second in pairwise(events))
            assert all(event["dur"] >= 0 for event in events)
        own = summary["ranks"][rank]
        parts = [own[f"{part}_seconds"] for part in ("data_wait", "load", "reduce", "optimizer", "agreement_wait")]
        parts.append(own["other_seconds"])
        for phase in own["phases"]:
            parts += [phase[f"{part}_seconds"] for part in ("forward", "backward", "wait", "send")]
        assert sum(parts) == pytest.approx(own["step_seconds"], rel=1e-9) and min(parts) >= -1e-9
        passes = sum(phase[f"{kind}_seconds"] for phase in own["phases"] for kind in ("forward", "backward"))
        assert (0 < own["swap_seconds"] < passes) if name == "shared" else own["swap_seconds"] == 0
        assert own["sampling_seconds"] > 0


def test_observers_change_no_loss_and_leave_the_engine_as_it_was(observed: Observed) -> None:
    for rank in observed.ranks:
        plain, folded = rank["folded"]["expected"], rank["folded"]
        assert folded["losses"] == plain["losses"] and not any(plain["wrapped"])
        # The flops profile wraps step 1, the timeline 2 and 3, the kernel profile 5 and 6, with 4 to warm up.
        free = [4, 10, 11]  # step 1 again, 5 and 6 again
        assert [place for place, wrapped in enumerate(folded["wrapped"]) if not wrapped] == free
        assert rank["linear"]["wrapped"] == [True, True, True]
        assert all(rank[name]["restored"] for name in TRACED)
    assert any(any(rank["folded"]["losses"]) for rank in observed.ranks)


def test_metrics_files_and_the_wait_for_the_loader_are_reported(observed: Observed) -> None:
    for name, own, stages in (("linear", 2, 2), ("folded", 2, 4), ("replicas", 1, 1)):
        told = observed.ranks[0][name]
        ((step, values),) = [(step, values) for step, values in told["metrics"] if "perf/mfu" in values]
        names = {f"stage{stage}/{metric}" for stage in range(stages) for metric in STAGE_METRICS}
        names |= {f"stage{stage}/{metric}" for stage in range(own) for metric in OWN_METRICS}
        names |= {f"perf/{metric}" for metric in RUN_METRICS}
        assert step == 3 and set(values) == names
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
    quiet = observed.ranks[1]["folded"]
    assert quiet["logged"] == quiet["metrics"] == quiet["artifacts"] == []


@pytest.mark.parametrize("name", TRACED[:3])
def test_every_layout_is_profiled_with_recomputation_and_in_half_precision(observed: Observed, name: str) -> None:
    folder, told, (case, _) = observed.folder / name / "flops", observed.ranks[0][name], CASES[name]
    profile, fold = json.loads((folder / "flops.json").read_text()), case.schedule == "folded"
    owners = [0, 1, 1, 0] if fold else list(range(case.stages))
    texts = [f"flops.stage{stage}.txt" for stage in range(len(owners))]
    files = [f"flops/{text}" for text in (*texts, "table.txt", "flops.json")]
    assert [file for file in told["artifacts"] if file.startswith("flops")] == files
    step, metrics = told["metrics"][0]
    assert step == FLOPS_STEP == profile["step"] and min(metrics.values()) > 0
    units = [f"flops/stage{stage}_{unit}" for stage in range(len(owners)) for unit in ("gflops", "latency_ms")]
    assert metrics.keys() == {"flops/forward_gflops", *units}
    assert metrics["flops/forward_gflops"] == pytest.approx(sum(metrics[unit] for unit in units[::2]), rel=1e-12)

    images = profile["micro_batch_images"]
    assert images == 16 // case.replicas // case.micro_batches
    counted = [(layer["name"], layer["total"]["macs"]) for layer in profile["layers"]]
    assert counted == [(layer.name, layer.macs * images) for layer in LAYERS]
    assert [(stage["stage"], stage["rank"]) for stage in profile["stages"]] == list(enumerate(owners))
    for stage, text in enumerate((folder / text).read_text() for text in texts):
        assert text.startswith(f"stage {stage} of {len(owners)}, on rank {owners[stage]}: layers ")
        # What checkpointing computes again is in no count: DeepSpeed's multiply-accumulates are the table's.
        macs = profile["stages"][stage]["total"]["macs"]
        assert f"{macs / 1e6:.2f} MMACs" in text or f"{macs / 1e3:.2f} KMACs" in text
        assert "DeepSpeed Flops Profiler" in text and "UnetStage(" in text


@pytest.mark.parametrize(("name", "steps", "last"), [("folded", 2, 6), ("replicas", 1, 5), ("linear", 0, 3)])
def test_steps_are_profiled_once_on_all_ranks(name: str, steps: int, last: int, observed: Observed) -> None:
    told, folder = observed.ranks[0][name], observed.folder / name / "kernels"
    (said,) = (line for line in told["logged"] if "kernels" in line)
    if not steps:
        assert said.startswith("--profile-kernels 5-6: none of these steps was taken since the run was started")
        assert not folder.exists()
        return
    assert said == f"kernels of steps {last - steps + 1}-{last}: {folder}, a table for each rank"
    files = [f"rank{rank}{end}" for rank in range(2) for end in (".txt", ".trace.json.gz")]
    assert [file for file in told["artifacts"] if file.startswith("kernels")] == [f"kernels/{file}" for file in files]
    for rank in range(2):
        table = (folder / f"rank{rank}.txt").read_text()
        for column in ("Self CPU", "CPU total", "Self CPU Mem", "# of Calls", "instruction BackwardPass"):
            assert column in table, column
        events = json.loads(gzip.decompress((folder / f"rank{rank}.trace.json.gz").read_bytes()))["traceEvents"]
        seen = {one["name"] for one in events}
        numbers = range(last - steps + 1, last + 1)
        assert {one for one in seen if one.startswith("ProfilerStep")} == {f"ProfilerStep#{one}" for one in numbers}
        assert {"instruction ForwardPass", "instruction BackwardPass", "between steps: sampling"} <= seen
