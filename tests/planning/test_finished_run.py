"""A run's folder is read, and one that can't be read is refused in one line."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddpm_ds.ground.errors import OutputError
from ddpm_ds.observe.device_speed import startup_times
from ddpm_ds.observe.observer import PauseClock, Pauses, read_pauses
from ddpm_ds.planning.costs import planned_costs
from ddpm_ds.planning.finished_run import Overflows, facts_of
from ddpm_ds.planning.verdict import conclude, shares
from tests.planning.planted_facts import Bench, write_run

BENCHES = [
    Bench(micro_batches=4, zero_stage=1, replicas=2, cuts=(5,)),
    Bench(schedule="folded", micro_batches=8, interval=1),
    Bench(schedule="planned", in_flight=2),
]


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.schedule)
def test_facts_are_what_the_folder_says(bench: Bench, tmp_path: Path) -> None:
    facts = bench.traced()
    run_dir = write_run(tmp_path / "run", facts)
    found = facts_of(run_dir)
    assert replace(found, ranks=(), job=facts.job) == replace(facts, ranks=())
    assert (found.job.config, found.spec.unet) == (facts.job.config, facts.spec.unet)
    for read, written in zip(found.ranks, facts.ranks, strict=True):
        assert replace(read, wait_seconds=0.0) == replace(written, wait_seconds=0.0)
        assert read.wait_seconds == pytest.approx(written.wait_seconds)
    file = run_dir / "trace" / "summary.json"
    summary = json.loads(file.read_text())
    for number, own in enumerate(summary["ranks"]):  # the replicas of a rank are averaged
        own["optimizer_seconds"] = 1.0 + number
    file.write_text(json.dumps(summary))
    assert facts_of(run_dir).ranks[0].optimizer_seconds == (1.5 if facts.layout.replicas == 2 else 1.0)


def test_the_loss_curve_and_the_pauses_are_read(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", Bench().traced(), precision="fp16")
    config = json.loads((run_dir / "ds_config.json").read_text())
    config["fp16"] = {"enabled": True, "initial_scale_power": 12}
    (run_dir / "ds_config.json").write_text(json.dumps(config))
    points = [{"step": step, "train/skipped_steps": 4.0, "train/loss_scale": 2560.0 / step} for step in (10, 20)]
    (run_dir / "metrics.jsonl").write_text("\n".join([*map(json.dumps, points), '{"step": 3']))
    (run_dir / "evaluations.jsonl").write_text('{"step": 20, "usage/evaluation_seconds": 1.5}\n' * 3)
    pauses = {"seconds": 50.0, "checkpoint_seconds": 2.0, "sampling_seconds": 4.0}
    (run_dir / "trace" / "pauses.json").write_text(json.dumps(pauses))
    facts = facts_of(run_dir)
    assert facts.job.precision == "fp16" and facts.job.stored_bytes == 2
    assert facts.overflows == Overflows(4, 20, 4096.0, 128.0)
    assert facts.pauses == Pauses(50.0, 2.0, 4.0)
    assert facts.evaluation_seconds == 3.0  # the last one is of the run's end


def test_a_run_whose_steps_are_graphs_has_their_seconds_and_no_start_up(tmp_path: Path) -> None:
    eager = Bench(ranks=1, replicas=2, micro_batches=1, zero_stage=1, read_seconds=1e-4, start_seconds=1e-3).traced()
    loading = eager.ranks[0].data_wait_seconds + eager.ranks[0].load_seconds
    own = (eager.step_seconds - loading) / 4 + loading  # what is not loading takes a quarter of the time
    run_dir = write_run(tmp_path / "run", eager, graphs=True)
    seconds = [eager.step_seconds, own, own, eager.step_seconds, own, own]  # with steps that are watched
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": 1, "usage/step_seconds": {one}}}\n' for one in seconds))
    facts = facts_of(run_dir)
    assert facts.replayed and facts.step_seconds == own
    (found,), (traced,) = facts.ranks, eager.ranks
    assert found.pass_seconds == pytest.approx(traced.pass_seconds / 4)
    assert found.data_wait_seconds == traced.data_wait_seconds
    assert shares(facts)["low utilisation"] == 0 < shares(eager)["low utilisation"]
    assert shares(facts)["data wait"] > 2 * shares(eager)["data wait"]


def test_a_message_beside_the_passes_of_a_gpu_is_counted_once() -> None:
    """A trace has it in its times, and the planner adds it to those of layers."""
    facts = Bench().traced()
    facts = replace(facts, machine=replace(facts.machine, kind="h100", startup={}))
    times = facts.layer_times(facts.own_layers, facts.layout.micro_batch_images)
    ranks = planned_costs(facts.job, facts.machine, facts.layout, facts.bounds, times)
    for planned, traced in zip(ranks, facts.ranks, strict=True):
        assert planned.pass_seconds == pytest.approx(sum(phase.pass_seconds for phase in traced.phases))


def test_a_trace_of_another_layout_is_not_judged(tmp_path: Path) -> None:
    changes = {"micro_batches": 1, "micro_batch_images": 1, "schedule": "folded", "zero_stage": 2, "precision": "bf16"}
    for key, value in changes.items():
        run_dir = write_run(tmp_path / key, Bench().traced(), **{key: value})
        with pytest.raises(OutputError, match="was traced before it was resumed on another layout"):
            facts_of(run_dir)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", Bench().traced())
    for name in ("trace/summary.json", "stages.txt", "ds_config.json", "machine.json"):
        whole = (run_dir / name).read_text()
        for content in ("", '{"a": 1}'):
            (run_dir / name).write_text(content)
            with pytest.raises(OutputError, match=r"^[^\n]*its files are damaged[^\n]*$"):
                facts_of(run_dir)
        (run_dir / name).write_text(whole)


def test_a_run_is_concluded_with_its_device_and_its_verdict(tmp_path: Path) -> None:
    # A step of hours, beside which the start-up that is measured here is nothing, however busy the machine is.
    run_dir = write_run(tmp_path / "run", Bench(cuts=(3,), macs_per_second=1e4).traced())
    facts = facts_of(run_dir)
    startup = startup_times(facts.job.layers, torch.device("cpu"), "fp32")
    found = conclude(run_dir, startup)
    assert found.top == "imbalance"
    assert "largest cost: imbalance" in (run_dir / "verdict.txt").read_text()
    assert facts_of(run_dir) == replace(facts, machine=replace(facts.machine, startup=startup))
    assert startup["BlockLayer"].forward > 0
    assert set(startup) == {type(layer).__name__ for layer in facts.job.layers}


def test_pauses_are_those_between_steps_and_neither_before_nor_after(tmp_path: Path) -> None:
    now = 0.0
    clock = PauseClock(tmp_path, lambda: now)
    with clock.span("sampling"):
        now += 100  # the samples of the initial weights
    for step, pause in ((1, "another"), (2, "checkpoint"), (3, "sampling"), (4, "checkpoint")):
        clock.begin_step(step)
        now += 10
        with contextlib.suppress(RuntimeError), clock.span(pause):
            now += step
            raise RuntimeError("a pause may end so")
    PauseClock(None).finish()  # other ranks write nothing
    assert read_pauses(tmp_path) == Pauses()
    clock.finish()
    assert read_pauses(tmp_path) == Pauses(seconds=46.0, checkpoint_seconds=2.0, sampling_seconds=3.0)
