"""The verdict names what was planted, and predicts what the change it names would save."""

import functools
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpm_ds.config.ds_model import changed as with_keys
from ddpm_ds.observe.observer import Pauses
from ddpm_ds.planning.finished_run import FinishedRun, Overflows
from ddpm_ds.planning.memory import peak_bytes
from ddpm_ds.planning.verdict import (
    LEAST_GAIN,
    USEFUL,
    Change,
    Verdict,
    _fastest_layouts,
    changes,
    shares,
    tags,
    text,
    traced_predictor,
    verdict,
)
from tests.launching import drafted
from tests.planning.planted_facts import BATCH, Bench

RUN = Path("runs/a b")
EDITS = {
    "data wait": "--set data.workers=3",
    "imbalance": "--set 'ds.pipeline.partition=[3,9,13]' --set ds.pipeline.schedule=planned",
    "bubble": "--set ds.train_micro_batch_size_per_gpu=1 --set ds.gradient_accumulation_steps=32",
    "communication": "--set 'ds.pipeline.partition=[3,9,13]' --set ds.pipeline.schedule=planned",
    "low utilisation": "--set ds.train_micro_batch_size_per_gpu=16 --set ds.gradient_accumulation_steps=2",
    "recomputation": "--set ds.pipeline.activation_checkpoint_interval=0",
    "optimizer": "--set ds.zero_optimization.stage=1",
    "swaps": "--set ds.train_micro_batch_size_per_gpu=8 --set ds.pipeline.space.size=1",
}
"""By cost, the change to try under 1F1B as it is typed."""
FAULTS = {
    "data wait": Bench(read_seconds=5e-4),
    "imbalance": Bench(cuts=(3,)),
    "bubble": Bench(micro_batches=2),
    "communication": Bench(bytes_per_second=5e6),
    "low utilisation": Bench(start_seconds=3e-4),
    "recomputation": Bench(interval=1),
    "swaps": Bench(ranks=1, space=2, micro_batches=2, swap_seconds=1e-3),
    "optimizer": Bench(update_seconds=1e-6, replicas=2, micro_batches=8),
}
"""By the cost that it causes, one fault each."""
IN_A_FOLD = {
    "imbalance": {"cuts": (2, 8, 15)},
    "bubble": {"micro_batches": 4},
    "communication": {"bytes_per_second": 2e6},
}
FOLDED = {
    name: replace(bench, schedule="folded", **IN_A_FOLD.get(name, {}))  # type: ignore[arg-type]
    for name, bench in FAULTS.items()
    if name not in ("optimizer", "swaps")
}
ORDERED = {name: replace(bench, schedule="planned") for name, bench in FOLDED.items() if name != "bubble"}
ORDERED["communication"] = replace(ORDERED["communication"], micro_batches=4)
PLANTED = [*FAULTS.items(), *FOLDED.items(), *ORDERED.items()]
NAMES = [f"{name}-{bench.schedule}" for name, bench in PLANTED]


judged = functools.cache(lambda bench: verdict(bench.traced()))
"""Verdict on a machine that is as it is planted."""


def edit(found: Verdict) -> str:
    return "" if found.change is None else found.change.edit


@pytest.mark.parametrize(("fault", "bench"), PLANTED, ids=NAMES)
def test_the_fault_is_named_with_an_accepted_change_that_saves_as_predicted(
    fault: str, bench: Bench, tmp_path: Path
) -> None:
    assert bench.images * bench.micro_batches * bench.replicas == BATCH
    before, found = bench.traced(), judged(bench)
    assert found.top == fault and not found.healthy and found.change is not None
    assert sum(found.shares.values()) == pytest.approx(1.0) and min(found.shares.values()) >= 0
    assert bench.schedule != "1f1b" or found.change.edit == EDITS[fault]
    check_accepted(before, found.change, tmp_path)
    saved = 1 - changed(bench, found.change).traced().step_seconds / before.step_seconds
    assert saved > 0.02 and found.change.gain == pytest.approx(saved, abs=0.02)


def check_accepted(facts: FinishedRun, change: Change, folder: Path) -> None:
    options, spec, config = shlex.split(change.edit), folder / "spec.yaml", folder / "ds_config.json"
    spec.write_text(yaml.safe_dump(facts.spec.model_dump(mode="json")))
    config.write_text(json.dumps(facts.job.config.given))
    plan = drafted(spec, options[1::2], config, world_size=facts.layout.world_size, stages=None)
    assert set(options[::2]) == {"--set"} and plan.ds.layout.batch_images == BATCH


@pytest.mark.parametrize(
    "bench",
    [
        Bench(micro_batches=8, accumulation=8, warmup_images=320, replicas=2),
        Bench(schedule="folded", micro_batches=8, cuts=(2, 8, 15)),
        Bench(schedule="planned", micro_batches=8, in_flight=3),
        Bench(ranks=1, micro_batches=8, in_flight=4, replicas=2),
    ],
)
def test_training_accepts_every_change_that_is_proposed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpm_ds.planning.verdict.MOST_LAYOUTS", 1000)
    monkeypatch.setattr("ddpm_ds.planning.verdict.MUCH_MORE", -1000.0)
    facts = bench.traced(pauses=Pauses(100.0, 20.0, 20.0), evaluation_seconds=10.0)
    facts = replace(facts, ranks=tuple(replace(rank, data_wait_seconds=0.01) for rank in facts.ranks))
    found = changes(facts, traced_predictor(facts), shares(facts))
    stages = {change.settings.get("ds.pipeline.stages", bench.ranks) for change in found}
    assert stages == {count for count in (1, 2, 4) if bench.ranks * bench.replicas % count == 0}
    assert len(found) > 10 and any("data.workers" in change.settings for change in found)
    for change in found:
        check_accepted(facts, change, tmp_path)


def changed(bench: Bench, change: Change) -> Bench:
    fields = {
        "data.workers": "workers",
        "ds.gradient_accumulation_steps": "micro_batches",
        "ds.pipeline.activation_checkpoint_interval": "interval",
        "ds.pipeline.partition": "cuts",
        "ds.pipeline.schedule": "schedule",
        "ds.zero_optimization.stage": "zero_stage",
        "ds.pipeline.space.size": "space",
    }
    values: dict[str, Any] = {fields[name]: value for name, value in change.settings.items() if name in fields}
    assert len(values) >= len(change.settings) - 1  # the micro-batch's images follow from their number
    if "cuts" in values:
        values["cuts"] = tuple(values["cuts"])
    values["replicas"] = bench.replicas * bench.space // values.get("space", bench.space)
    return replace(bench, **values)


def test_other_stages_are_named_where_they_save_far_more() -> None:
    change = judged(Bench(ranks=8, micro_batches=32)).change
    assert change is not None and change.settings["ds.pipeline.stages"] == 1 and change.gain > 0.2


def test_a_run_in_which_little_is_lost_is_healthy() -> None:
    found = verdict(Bench(schedule="folded", micro_batches=32).traced())
    assert found.healthy and found.shares[USEFUL] > 0.9
    assert "\nhealthy: no cost takes 5% of the time; largest cost: imbalance, " in text(found, RUN)
    assert tags(found)["verdict.top"] == "healthy"


def test_the_text_is_a_table_and_sentences_with_numbers_and_the_tags_are_short() -> None:
    found = judged(FAULTS["data wait"])
    printed, words = text(found, RUN), " ".join(text(found, RUN).split())
    assert printed.startswith("where the time went\n\n  useful work ") and " data wait 23.1% ######### " in words
    assert "\nlargest cost: data wait, 23.1%: rank 0 waits 16 ms of a 73.7 ms step" in printed
    files = "--spec 'runs/a b/spec.yaml' --deepspeed_config 'runs/a b/ds_config.json'"
    command = f"try next: ddpm-ds train {files} --processes 2 --set data.workers=3"
    assert command in printed.splitlines()
    assert "23% less time per image, 1.30 times the images per second" in words
    assert all(len(line) <= 100 or line == command for line in printed.splitlines())
    assert min(found.shares.values()) == 0.0 and " 0.0%" not in printed and len(printed.splitlines()) < 40
    assert tags(found) == {"verdict.top": "data wait", "verdict.share": "23.1%", "verdict.try": "--set data.workers=3"}
    starting = text(judged(FAULTS["low utilisation"]), RUN)  # which has another name than the tag
    assert "\nlargest cost: operator start-up, " in starting


def test_as_many_threads_as_keep_up() -> None:
    """An image is computed in 2 ms and waited for 5 ms more, so two threads read it in 7: seven keep up."""
    facts = Bench(read_seconds=5e-3).traced()
    found = verdict(facts)
    assert found.top == "data wait" and edit(found) == "--set data.workers=7"
    assert "with data.workers = 2, from data.store_root = " in found.evidence
    spec = facts.spec.model_copy(update={"data": facts.spec.data.model_copy(update={"workers": 3})})
    assert edit(verdict(replace(facts, job=replace(facts.job, spec=spec)))) == "--set data.workers=11"


def with_memory(facts: FinishedRun, more: int) -> FinishedRun:
    """A run on a machine with the memory that its layout needs to keep all activations, and a few bytes more."""
    needed = peak_bytes(facts.job, replace(facts.layout, checkpoint_interval=0), facts.bounds)
    return replace(facts, machine=replace(facts.machine, memory_bytes=needed + more))


def test_activations_that_are_kept_fit_by_the_planners_memory() -> None:
    scarce, enough = (verdict(with_memory(FAULTS["recomputation"].traced(), more)) for more in (-1, 0))
    assert scarce.top == "recomputation" and "activation_checkpoint_interval" not in edit(scarce)
    assert "activation_checkpoint_interval" in edit(enough)


def test_where_one_level_does_not_fit_tensor_groups_are_to_keep_it_if_their_devices_are_on_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def groups(facts: FinishedRun) -> list[Change]:
        return [one for one in changes(facts, traced_predictor(facts), shares(facts)) if "tensor" in one.edit]

    bench = Bench(ranks=1, replicas=2, micro_batches=1, interval=1, macs_per_second=1e7)
    together = replace(with_memory(bench.traced(), -1), host_devices=2)
    (change,) = groups(together)
    assert 0.01 < change.gain < LEAST_GAIN and change.settings["ds.pipeline.tensor.size"] == 2
    assert "keeps all activations in " in change.words and verdict(together).change is None
    monkeypatch.setattr("ddpm_ds.planning.verdict.LEAST_GAIN", 0.01)
    assert verdict(together).change == change
    assert groups(replace(together, host_devices=1)) == groups(bench.traced(host_devices=2)) == []
    quick = replace(bench, macs_per_second=4.5e8).traced(machine=together.machine, host_devices=2)
    (slow,) = groups(quick)
    assert slow.gain < 0.01, "on links without a limit it would be 1.3 %"
    check_accepted(together, change, tmp_path)


def test_skipped_steps_are_a_cost_with_a_loss_scale_to_begin_with() -> None:
    found = verdict(Bench().traced(overflows=Overflows(8, 32, 2.0**16, 2.0**8)))
    assert found.top == "overflow steps" and found.shares["overflow steps"] == pytest.approx(0.25)
    assert found.change is not None and found.change.gain == pytest.approx(0.25)
    assert found.change.edit == "--set ds.fp16.initial_scale_power=8"
    found = verdict(Bench().traced(overflows=Overflows(8, 32, 2.0**16, 2.0**16)))  # the scale comes back
    assert edit(found) == "--set ds.fp16.enabled=false --set ds.bf16.enabled=true"


@pytest.mark.parametrize(
    ("pauses", "evaluation_seconds", "top", "typed"),
    [
        (Pauses(100.0, 20.0, 0.0), 0.0, "checkpoint pauses", "--set checkpoint.every_minutes=400"),
        (Pauses(100.0, 0.0, 20.0), 2.0, "sampling pauses", "--set samples.every_images=900000"),
        (Pauses(100.0, 0.0, 20.0), 18.0, "sampling pauses", "--set evaluation.every_images=1800000"),
    ],
)
def test_pauses_are_a_share_of_the_run(pauses: Pauses, evaluation_seconds: float, top: str, typed: str) -> None:
    found = verdict(Bench().traced(pauses=pauses, evaluation_seconds=evaluation_seconds))
    assert found.top == top and found.shares[top] == pytest.approx(0.2)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.change is not None and found.change.edit == typed
    assert found.change.gain == pytest.approx(0.2, abs=0.04)


def test_without_a_better_setting_nothing_is_named() -> None:
    facts = Bench(ranks=1, micro_batches=1).traced()
    (rank,) = facts.ranks
    busy = replace(facts, ranks=(replace(rank, load_seconds=facts.step_seconds),), step_seconds=2 * facts.step_seconds)
    found = verdict(busy)
    assert (found.top, found.change) == ("transfers", None)
    assert "try next: nothing" in text(found, RUN)


def test_waiting_is_never_explained_twice() -> None:
    """A trace in which ranks waited less than a simulation says is shared out as it was."""
    facts = Bench(micro_batches=2).traced()
    ranks = tuple(replace(rank, wait_seconds=rank.wait_seconds / 2) for rank in facts.ranks)
    found = shares(replace(facts, ranks=ranks))
    waited, busy = sum(rank.wait_seconds for rank in ranks), sum(2 * rank.pass_seconds for rank in ranks)
    assert found["bubble"] + found["imbalance"] == pytest.approx(waited / (waited + busy), rel=0.01)
    assert found["communication"] == 0


def test_no_change_gives_graphs_up() -> None:
    """Launches, which other layouts would have, are not in the seconds of layers that graphs replay."""
    eager = Bench(ranks=1, replicas=2, micro_batches=8, zero_stage=1).traced()
    fused = {"type": "AdamW", "params": {"torch_adam": True, "fused": True}}
    job = replace(eager.job, on_cpu=False, config=with_keys(eager.job.config, {"optimizer": fused}))
    for replayed in (False, True):
        facts = replace(eager, job=job, replayed=replayed)
        others = _fastest_layouts(facts, traced_predictor(facts), 1.0, same_stages=False)
        assert bool(others) != replayed


def test_waits_for_swaps_are_no_work_and_the_planner_knows_how_long_they_take() -> None:
    facts = FAULTS["swaps"].traced()
    found, (rank,) = shares(facts), facts.ranks
    working = 2 * rank.pass_seconds - rank.swap_seconds
    assert found["swaps"] == pytest.approx(rank.swap_seconds / facts.step_seconds)
    assert found["useful work"] + found["low utilisation"] == pytest.approx(working / facts.step_seconds)
    predicted = traced_predictor(facts).simulate(facts.layout, facts.bounds)
    assert predicted.step_seconds == pytest.approx(facts.step_seconds, rel=0.01)
    said = verdict(facts).evidence
    assert said.endswith("step are waits for the ranks of a space group, 55 in a micro-batch of images of 8x8")
