"""Search for layouts, and the decisions that a run leaves to the planner."""

import json
import math
from dataclasses import replace
from typing import Any, Literal

import pytest

from ddpm_ds.cli.plan import report, why
from ddpm_ds.config.ds_config import read_ds_config
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.ground.errors import DsConfigError, LayoutError
from ddpm_ds.ground.units import gib
from ddpm_ds.observe.device_speed import LayerSeconds
from ddpm_ds.pipeline.cuts import neighbouring
from ddpm_ds.planning import memory
from ddpm_ds.planning import predictor as predict
from ddpm_ds.planning.costs import ADAM_BYTES, CLIP_BYTES, EMA_BYTES, analytic_times
from ddpm_ds.planning.decisions import Choice, candidates, choose_layout, ds_config, fitted, layouts, search
from ddpm_ds.planning.inputs import USABLE_MEMORY, Workload, machine, machine_like
from ddpm_ds.planning.memory import activation_bytes, pipeline_memory
from ddpm_ds.planning.predictor import Predictor
from ddpm_ds.schema.layout import Layout
from tests.ds_json import config_of
from tests.launching import REPOSITORY, drafted, tiny_spec
from tests.planning.small import ADAMW, small_job, small_predictor

SLOW_LINKS: dict[str, Any] = {"link_bandwidth": 2e6, "network_bandwidth": 1e6}


def few_layouts() -> Workload:
    return small_job(tiny_spec(train={"accumulation": 8}))


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return small_predictor(4, few_layouts(), kind="cpu", **SLOW_LINKS)


@pytest.fixture
def no_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "communicator_bytes", lambda layout, rank: 0)


def test_the_first_is_the_fastest_of_all_and_the_others_follow_with_a_reason(predictor: Predictor) -> None:
    found, groups = search(predictor, top=4), dict[tuple[int, str, int], float]()
    for layout in candidates(predictor):
        seconds = predictor.predict(layout).step_seconds
        assert predictor.lower_bound(layout) <= seconds * (1 + 1e-9)
        key = (layout.stages, layout.schedule, layout.micro_batch_images)
        groups[key] = min(seconds, groups.get(key, seconds))
    assert found.misfits == 0 and found.fitting == len(candidates(predictor))
    assert [one.step_seconds for one in found.best] == sorted(groups.values())[:4]
    layouts, memories, reason = report(found).split("\n\n")
    assert [line.split()[0] for line in layouts.splitlines()] == ["stages", "1", "2", "3", "4"]
    parts = [
        "weights",
        "gradients",
        "optimizer",
        "ema",
        "activations",
        "buffers",
        "NCCL",
        "total",
        "(host)",
    ]  # no encoders
    assert memories.splitlines()[1].split() == ["rank", *parts]
    assert reason.startswith("1 is the fastest of ") and " longer: " in " ".join(reason.split())


def test_of_layouts_that_are_nearly_as_fast_the_one_with_most_memory_to_spare_is_first(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpm_ds.planning.decisions.NEARLY", 0.5)
    predictions = [predictor.predict(layout) for layout in candidates(predictor)]
    fastest = min(predictions, key=lambda one: one.step_seconds)
    near = [one for one in predictions if one.step_seconds <= 1.5 * fastest.step_seconds]
    for top in (1, 4):
        found = search(predictor, top)
        assert found.best[0].peak.total == min(one.peak.total for one in near) < fastest.peak.total
    found = replace(found, best=(found.best[0], predictor.predict(fastest.layout)))
    words = " ".join(why(found).split())
    assert words.startswith("1 needs least memory within 2% of the fastest of ") and " less, and needs " in words


def test_a_layout_that_nearly_fills_the_memory_is_marked(predictor: Predictor) -> None:
    (first,) = search(predictor, 1).best
    for spare, marked in ((0.96, True), (0.94, False)):
        machine = replace(predictor.machine, memory_bytes=math.ceil(first.peak.total / spare))
        printed = report(replace(search(predictor, 1), predictor=replace(predictor, machine=machine)))
        assert ("\n! leaves less than 5% of the " in printed) == (" ! " in printed.splitlines()[1]) == marked


def test_the_tables_of_a_plan_are_no_wider_than_a_terminal() -> None:
    memory = {"memory_bytes": 2**32, "link_bandwidth": 1e7, "network_bandwidth": 1e6}
    found = search(small_predictor(32, small_job(tiny_spec()), kind="l4", nodes=4, **memory), 10)
    lines = report(found).splitlines()
    assert len(found.best) > 5 and max(map(len, lines)) <= 100 and len(lines) <= 36  # beside the four lines above them


@pytest.mark.long
def test_many_micro_batches_are_extrapolated_to_what_their_simulation_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """From four times as many as a rank holds on, one more adds the same; an order made for another number of them is
    not quite the same order."""
    monkeypatch.setattr(predict, "SIMULATED", 1)
    predictor = small_predictor(4, small_job(tiny_spec(train={"batch_images": 64})), **SLOW_LINKS)
    many = [one for one in candidates(predictor) if one.stages > 1 and one.micro_batches > 4 * one.most_kept]
    assert {(one.schedule, one.in_flight) for one in many} == {(name, "auto") for name in ("1f1b", "planned")} | {
        ("planned", stages) for stages in (2, 4)
    }
    for layout in {(one.schedule, one.in_flight, one.stages): one for one in many}.values():
        exact, tolerance = predictor.simulate(layout), 0.02 if layout.schedule == "1f1b" else 0.05
        assert predictor.predict(layout).step_seconds == pytest.approx(exact.step_seconds, rel=tolerance)
        assert predictor.predict(layout).bubble == pytest.approx(exact.bubble, abs=tolerance)


def test_the_memory_of_the_fullest_host_is_that_of_all_its_ranks() -> None:
    predictor = small_predictor(4, nodes=2)
    (first,) = search(predictor, 1, [Layout(2, 2, "1f1b", 2, 4, 0, 1, False, across_hosts="stages")]).best
    hosts = [2 * rank.host for rank in first.memory]  # two replicas of a stage
    assert first.host_bytes(predictor.machine) == max(hosts) > min(hosts)
    assert "(host)" in report(search(predictor, 1, [first.layout]))
    assert "GiB/host" in report(search(small_predictor(4), 1)) and "GiB/host" not in report(
        search(small_predictor(4, kind="cpu"), 1)
    )


def test_a_little_less_memory_than_the_first_needs_makes_another_the_first(predictor: Predictor) -> None:
    winner = search(predictor, top=1).best[0]
    less = {"memory_bytes": winner.peak.total - 1, **SLOW_LINKS}
    tight = small_predictor(4, few_layouts(), kind="cpu", **less)
    found = search(tight, top=3)
    assert found.best[0].layout != winner.layout
    assert all(one.peak.total < winner.peak.total for one in found.best)
    assert (misfit := found.fastest_misfit) is not None and f"{misfit.layout.words()} would take" in why(found)
    assert misfit.step_seconds < found.best[0].step_seconds and misfit.peak.total > tight.machine.usable_bytes


def test_where_nothing_fits_the_nearest_is_named_and_what_it_needs(no_communicators: None) -> None:
    with pytest.raises(LayoutError, match=r"nothing fits 2 devices of 0.2 MiB \(0.2 MiB of it usable\)") as raised:
        search(small_predictor(2, memory_bytes=2**18), top=1)
    needed = int(str(raised.value).rsplit("devices of ", 1)[1].split("MiB")[0])
    assert search(small_predictor(2, memory_bytes=needed * 2**20), top=1).best


def test_a_job_without_a_layout_is_refused_with_the_reason() -> None:
    def refused(devices: int, message: str, accumulation: int | Literal["auto"] = "auto", **config: Any) -> None:
        job = small_job(tiny_spec(train={"accumulation": accumulation}), **config)
        with pytest.raises((DsConfigError, LayoutError), match=message):
            search(small_predictor(devices, job), top=1)

    refused(512, r"train.batch_images = 16 .*--set train.batch_images=512")
    refused(32, r"train.accumulation = 16 .* leave no layout on 32 devices", accumulation=16)
    refused(2, r"plan: optimizer.params.lr = 5 contradicts", optimizer={**ADAMW, "params": {"lr": 5}})


def test_both_axes_are_simulated_and_the_better_one_is_named() -> None:
    """On a slow network, ZeRO-2 keeps replicas in a node and a large batch of one reduction whole pipelines."""
    rates = {"nodes": 2, "link_bandwidth": 1e9, "network_bandwidth": 1e6}
    for zero_stage, batch, kept in ((2, 16, "stages"), (0, 2048, "replicas")):
        job = small_job(tiny_spec(train={"batch_images": batch}))
        apart, asked = small_predictor(4, job, **rates), (2, zero_stage, "1f1b")
        possible = layouts(job, 4, offload=False, nodes=2)
        found = search(apart, 1, [one for one in possible if (one.stages, one.zero_stage, one.schedule) == asked])
        first, turned = found.best[0], found.other_axis
        assert turned is not None and turned.layout == replace(first.layout, across_hosts=turned.layout.across_hosts)
        assert first.layout.across_hosts == first.layout.axis_over_nodes == kept != turned.layout.across_hosts
        assert first.step_seconds < turned.step_seconds and first.traffic.busiest < turned.traffic.busiest
        other = f"with its {turned.layout.across_hosts} across them"
        assert f"1 has its {kept} across nodes: " in why(found) and other in why(found)
        assert ds_config(job, first.layout, apart.bounds(first.layout))["pipeline"]["across_hosts"] == kept


@pytest.mark.parametrize("schedule", ["1f1b", "planned"])
def test_a_layout_that_does_not_fit_is_cut_for_its_memory_before_it_is_given_up(
    schedule: str, no_communicators: None
) -> None:
    job = small_job(tiny_spec(unet={"multipliers": [1, 4], "blocks_per_level": 2}))
    free = small_predictor(4, job)
    layout = next(one for one in candidates(free) if (one.stages, one.schedule, one.micro_batches) == (4, schedule, 8))
    needs = free.predict(layout).peak.total
    tight = small_predictor(4, job, memory_bytes=int(0.95 * needs / USABLE_MEMORY))
    assert tight.fits(layout) and tight.bounds(layout) != free.bounds(layout)
    assert tight.predict(layout).peak.total <= tight.machine.usable_bytes
    assert tight.lower_bound(layout) > free.lower_bound(layout)  # the busiest rank has more to do
    assert not small_predictor(4, job, memory_bytes=needs // 3).fits(layout)


def test_cuts_are_moved_as_long_as_a_step_gets_shorter_and_fits(no_communicators: None) -> None:
    layout, free = Layout(2, 2, "planned", 2, 4, 0, 2, False, in_flight=2), small_predictor(4, **SLOW_LINKS)
    found, peak = free.bounds(layout), free.predict(layout).peak.total
    free.improve(layout)
    moved, others = free.predict(layout), neighbouring(free.job.layers, free.bounds(layout), "planned")
    around = min(free.simulate(layout, cuts).step_seconds for cuts in others)
    assert moved.step_seconds * (1 - predict.LEAST_GAIN) <= around
    assert moved.step_seconds < free.simulate(layout, found).step_seconds and moved.peak.total > peak
    tight = small_predictor(4, memory_bytes=int(peak / USABLE_MEMORY) + 1, **SLOW_LINKS)
    tight.improve(layout)
    assert tight.predict(layout).peak.total <= tight.machine.usable_bytes
    assert tight.predict(layout).step_seconds <= free.simulate(layout, found).step_seconds


DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
ZERO_0, ZERO_1 = (REPOSITORY / "ds_configs" / f"zero{stage}_fp32.json" for stage in (0, 1))
LARGE = {"channels": 512, "multipliers": [1, 1], "blocks_per_level": 2}


def chosen(spec: RunSpec, mib: int, hosts: str = "aaaa", stages: int | None = None, **pipeline: Any) -> Choice:
    """The planner's choice on processor cores of these hosts with so many MiB each."""
    config = json.loads(ZERO_0.read_text())
    config["pipeline"] |= pipeline
    devices = machine_like("cpu", mib * 2**20, half=False, devices=len(hosts), nodes=len(set(hosts)))
    return choose_layout(Predictor(Workload(spec, config_of(**config), on_cpu=True), devices), ZERO_0, hosts, stages)


def test_what_fits_one_device_is_trained_by_replicas_and_what_does_not_is_cut() -> None:
    large = tiny_spec(unet=LARGE)
    assert chosen(tiny_spec(), 8192)[0] == chosen(large, 8192)[0] == 1
    assert chosen(tiny_spec(), 8192, schedule="folded")[0] in (2, 4)  # a fold has two ranks or more
    assert chosen(large, 1536)[0] > 1


def test_what_can_not_be_laid_out_is_one_line() -> None:
    with pytest.raises(LayoutError, match=r"^[^\n]*nothing fits 4 devices[^\n]*$"):
        chosen(tiny_spec(unet=LARGE), 64, schedule="1f1b")
    with pytest.raises(LayoutError, match=r"^[^\n]*train.batch_images[^\n]*$"):
        chosen(tiny_spec(train={"batch_images": 3}), 8192, "aa", schedule="folded")


def test_the_hosts_are_part_of_the_choice() -> None:
    stages, *_, why = chosen(tiny_spec(unet=LARGE), 1536, "aabb")
    assert stages > 1 and ("across nodes" in why) == (stages == 2)


def test_where_memory_is_short_fewer_micro_batches_are_in_flight_before_any_activation_is_computed_again() -> None:
    plan = drafted(DIGITS, [], ZERO_1, world_size=2, stages=2)
    job, usual = Workload(plan.spec, plan.ds.config, on_cpu=True), replace(plan.ds.layout, checkpoint_interval=0)
    enough = max(rank.total for rank in pipeline_memory(job, usual, plan.bounds))
    fewest = 2 * activation_bytes(job, replace(usual, in_flight=2), plan.bounds)
    assert fewest < enough

    def found(memory: int, in_flight: int | Literal["auto"] = "auto") -> tuple[int | str, int | str]:
        layout = fitted(job, replace(plan.ds.layout, in_flight=in_flight), plan.bounds, memory)
        return layout.in_flight, layout.checkpoint_interval

    assert found(enough) == (4, 0) and found(enough - 1) == found(fewest) == (2, 0)
    assert found(fewest - 2)[1] == 1
    assert found(enough - 1, in_flight=4)[0] == 4 and found(enough, in_flight=1)[0] == 1


SDXL, ZERO_2_BF16 = REPOSITORY / "launch/specs/sdxl.yaml", REPOSITORY / "ds_configs/zero2_bf16.json"


def sdxl(devices: int) -> Predictor:
    spec = load_spec(SDXL, ["data.path=pictures", "train.batch_images=64"])
    config = config_of(**read_ds_config(ZERO_2_BF16, []))
    cards = machine("rtx4090", half=True, devices=devices, nodes=1)
    return Predictor(Workload(spec, config, on_cpu=False), cards)


def test_sdxl_fits_four_cards_of_24_gb_with_fp32_adam_and_averages() -> None:
    predictor = sdxl(4)
    (best,) = search(predictor, 1, [Layout(4, 1, "1f1b", 1, 64, 0, 0, False)]).best
    parameters = sum(layer.parameters for layer in predictor.job.layers)
    assert sum(rank.optimizer + rank.ema for rank in best.memory) == (12 + 4) * parameters


def test_sdxl_whole_is_trained_on_one_card_of_24_gb_by_4_bytes_a_parameter() -> None:
    """The arithmetic of docs/planner.md: weights, moments and gradients, with averages on the host."""
    spec = load_spec(SDXL, ["data.path=pictures", "train.batch_images=1", "ema.on_host=true"])
    rounded = ["ds.optimizer.type=AdamW8bit", "ds.optimizer.params.stochastic_rounding=true"]
    config = config_of(**read_ds_config(ZERO_2_BF16, rounded))
    job, card = Workload(spec, config, on_cpu=False), machine("rtx4090", half=True, devices=1, nodes=1)
    best = search(Predictor(job, card), 1).best[0]
    ((rank,), parameters) = best.memory, 2_567_463_684
    assert (rank.weights, rank.gradients, rank.ema) == (2 * parameters, 2 * parameters, 0)
    assert 2.03 * parameters < rank.optimizer < 2.04 * parameters
    shown = [gib(size) for size in (rank.weights, rank.optimizer, rank.activations, rank.total, card.usable_bytes)]
    assert shown == ["4.78 GiB", "4.87 GiB", "6.41 GiB", "20.92 GiB", "22.56 GiB"]
    recomputed, bounds = replace(best.layout, checkpoint_interval=1), (0, len(job.layers))
    assert gib(memory.peak_bytes(job, recomputed, bounds)) == "15.06 GiB"
    masters = replace(job, config=config_of(**read_ds_config(ZERO_2_BF16, rounded[:1])))
    assert memory.peak_bytes(masters, recomputed, bounds) > card.usable_bytes


def test_parts_of_sdxl_take_memory_and_time_for_what_is_trained() -> None:
    spec = load_spec(SDXL, ["data.path=pictures", "train.batch_images=1"])
    config = config_of(**read_ds_config(ZERO_2_BF16, []))
    found = []
    for train in ([], ["attn"], ["conv_out"]):
        optimizer = spec.optimizer.model_copy(update={"train": tuple(train)})
        job = Workload(spec.model_copy(update={"optimizer": optimizer}), config, on_cpu=False)
        layout, bounds = Layout(1, 1, "1f1b", 1, 1, 0, 1, False), (0, len(job.layers))
        predictor = Predictor(job, machine("h100", half=True, devices=1, nodes=1))
        (rank,), trained = memory.pipeline_memory(job, layout, bounds), sum(layer.trained for layer in job.layers)
        assert rank.weights == 2 * 2_567_463_684
        assert (rank.gradients, rank.optimizer, rank.ema) == (2 * trained, 12 * trained, 4 * trained)
        found.append((predictor.predict(layout).step_seconds, activation_bytes(job, layout, bounds)))
    (whole, kept), (attention, less), (last, least) = found
    assert whole > attention > 3 * last and kept > less > 100 * least, "there is a backward of one layer"


def test_sdxl_on_two_cards_of_24_gb_says_what_it_lacks_without_offload() -> None:
    predictor, held = sdxl(2), Layout(2, 1, "1f1b", 1, 64, 1, 1, False)
    found = search(predictor, 1, [held, replace(held, offload=True)])
    assert [one.layout.offload for one in found.best] == [True]
    over = memory.peak_bytes(predictor.job, held, predictor.tightest(held)) - predictor.machine.usable_bytes
    assert f"Without offload nothing fits: the nearest, {held.words()}, is {gib(over)} over on rank " in why(found)


@pytest.mark.parametrize(("micro_batches", "zero_stage"), [(1, 0), (4, 1)])
def test_gradients_of_several_micro_batches_are_added_up_in_fp32_where_that_fits(
    micro_batches: int, zero_stage: int
) -> None:
    """ZeRO-0 would add them up in bf16, with less memory, and ZeRO-2 would average each."""
    job = small_job(tiny_spec(train={"accumulation": micro_batches}), bf16={"enabled": True})
    predictor = small_predictor(2, job)
    among = [Layout(1, 2, "1f1b", 8 // micro_batches, micro_batches, 0, zero, False) for zero in (0, 1, 2)]
    (best,) = search(predictor, 1, among).best
    assert best.layout.zero_stage == zero_stage


def test_eight_replicas_of_sdxl_reach_nine_tenths_of_their_passes_alone() -> None:
    """Two images on each H100, whose passes take 130 ms: the arithmetic of docs/planner.md."""
    job, gpus, passes = sdxl(8).job, machine("h100", half=True, devices=8, nodes=1), 0.130
    parameters = sum(layer.parameters for layer in job.layers)
    computed = analytic_times(job, gpus, 0.0)(job.layers, 2)
    faster = passes / sum(one.forward + one.backward for one in computed)
    copied = [4 * layer.parameters / gpus.memory_bandwidth for layer in job.layers]  # gradients, into their sum
    both = zip(computed, copied, strict=True)
    times = [LayerSeconds(faster * one.forward, faster * one.backward + copying) for one, copying in both]
    layout = Layout(1, 8, "1f1b", 2, 1, 0, 1, False)
    step = Predictor(job, gpus, lambda layers, images: times).predict(layout).step_seconds

    stepping = (CLIP_BYTES + ADAM_BYTES + EMA_BYTES) * parameters / 8 / gpus.memory_bandwidth + sum(copied)
    wire = 7 / 8 * 2 * parameters / gpus.link_bandwidth
    first, last = (chunk * 7 / 8 * 2 / gpus.link_bandwidth + 3 * gpus.latency_seconds for chunk in (0, 9_562_880))
    assert (stepping, wire) == pytest.approx((11.3e-3, 14.3e-3), rel=0.01)
    assert first < step - passes - stepping < 4 * last, "all but a few chunks are hidden"
    assert passes / step == pytest.approx(0.917, abs=0.002)
