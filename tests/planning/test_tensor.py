"""Tensor groups in the planner: what their sums take, what a rank holds, and where they are proposed."""

import math
from dataclasses import replace
from typing import Any

import pytest

from ddpm_ds.cli.plan import why
from ddpm_ds.ground.units import gib
from ddpm_ds.observe.device_speed import LayerSeconds
from ddpm_ds.planning import decisions
from ddpm_ds.planning.costs import planned_costs
from ddpm_ds.planning.decisions import choose_layout, ds_config, layouts, search, tensor_splits
from ddpm_ds.planning.inputs import USABLE_MEMORY, Workload
from ddpm_ds.planning.memory import peak_bytes, pipeline_memory
from ddpm_ds.schema.layout import Layout, SpaceSplit, TensorSplit
from ddpm_ds.unet.layers import BlockLayer
from tests.ds_json import laid_out
from tests.launching import tiny_spec
from tests.planning.small import small_job, small_machine, small_predictor

ONE, BY_TWO = Layout(1, 1, "1f1b", 4, 2, 0, 0, False), TensorSplit(2, (0, 1))
SPLIT = replace(ONE, tensor=BY_TWO)


def job_of(channels: int = 32, images: int = 8, **config: Any) -> Workload:
    return small_job(
        tiny_spec(
            unet={"channels": channels, "attention_resolutions": [], "dropout": 0.0},
            train={"batch_images": images},
        ),
        **config,
    )


def all_grouped(job: Workload, devices: int) -> list[Layout]:
    splits = tensor_splits(job, devices)
    return [layout for split in splits for layout in layouts(job, devices, offload=False, split=(split, SpaceSplit()))]


def test_sums_of_a_step_take_their_bytes_on_the_link_and_a_latency_each() -> None:
    job, bandwidth = job_of(on_cpu=True), 1e3
    machine = small_machine(2, kind="cpu", link_bandwidth=bandwidth)
    times, bounds = [LayerSeconds(0.0, 0.0)] * len(job.layers), (0, len(job.layers))
    blocks = [layer for layer in job.of(SPLIT).layers if isinstance(layer, BlockLayer)]
    assert {block.shards for block in blocks} == {2}
    (costs,) = planned_costs(job, machine, SPLIT, bounds, times)
    latency = machine.sum_seconds
    outputs = sum(4 * 4 * block.out_channels * block.pixels for block in blocks)  # 4 images, 4 bytes
    inputs = sum(4 * 4 * block.width * block.pixels for block in blocks) + 4 * 4 * blocks[0].embedding_channels
    (phase,) = costs.phases
    assert phase.forward_seconds == pytest.approx(outputs / bandwidth + len(blocks) * latency)
    assert phase.backward_seconds == pytest.approx(inputs / bandwidth + (len(blocks) + 1) * latency)
    vectors = sum(2 * block.width for block in blocks)
    assert costs.reduce_seconds == pytest.approx(4 * vectors / bandwidth + latency)
    assert planned_costs(job, machine, SPLIT, bounds, times, with_sums=False)[0].pass_seconds == 0


def test_groups_are_in_a_node_and_each_level_that_is_added_splits_something() -> None:
    assert {(one.size, one.levels) for one in tensor_splits(job_of(), 4)} == {
        (size, levels) for size in (2, 4) for levels in ((0,), (0, 1))
    }
    assert not [*tensor_splits(job_of(), 1)]


OPEN = {"pipeline": {"tensor": {"size": "auto"}}}
FAST_LINKS, SLOW_LINKS = ({"link_bandwidth": speed, "flops": 1e11, "layer_seconds": 0.0} for speed in (1e12, 1e6))


def test_where_links_are_fast_and_there_is_one_image_at_a_time_groups_are_proposed_and_accepted() -> None:
    job = job_of(channels=256, images=1)
    predictor = small_predictor(2, job, **FAST_LINKS)
    found = search(predictor, 3, grouped=all_grouped(job, 2))
    first = found.best[0]
    assert first.layout.tensor == BY_TWO and first.summing_seconds > 0
    assert "1 has tensor groups of 2: its sums take " in why(found)
    read = laid_out(found.ds_config(), job.spec, world_size=2, stages=None, path="plan")
    assert read.layout == first.layout
    assert "tensor" not in ds_config(job, ONE, (0, len(job.layers)))["pipeline"]


def test_where_links_are_slow_they_are_not_and_the_reason_is_given() -> None:
    job = job_of(channels=256, images=8)
    found = search(small_predictor(2, job, **SLOW_LINKS), 3, grouped=all_grouped(job, 2))
    assert found.best[0].layout.tensor.size == 1 and found.in_groups is not None
    assert "Tensor groups: the best, " in why(found) and "of a step over links of 0.001 GB/s" in why(found)


def test_a_run_that_leaves_groups_open_has_them_where_they_are_fastest_and_its_devices_are_on_one_host() -> None:
    job = job_of(channels=256, images=1, **OPEN)
    fast = small_predictor(2, job, **FAST_LINKS)
    choice = choose_layout(fast, "x.json", "aa", None)
    assert (choice.stages, choice.tensor) == (1, BY_TWO)
    assert choice.line.startswith("stages       on l4 1 stage x 2 tensor ranks x 1 replica, levels 0-1 split, ")
    assert " a step, 2 stages (planned) x 1 replica" in choice.line
    assert choice.line.endswith("; -p or pipeline.tensor chooses otherwise")
    assert choose_layout(fast, "x.json", "aa", 1).line.startswith("groups       on l4 1 stage x 2 tensor ranks")
    assert choose_layout(fast, "x.json", "aa", 2).tensor == TensorSplit()
    assert choose_layout(fast, "x.json", "ab", None).tensor == TensorSplit()
    assert choose_layout(small_predictor(2, job, **SLOW_LINKS), "x.json", "aa", None).tensor == TensorSplit()
    closed = small_predictor(2, job_of(channels=256, images=1), **FAST_LINKS)
    assert choose_layout(closed, "x.json", "aa", None).tensor is None


def test_where_no_groups_fit_the_one_is_named_that_needs_least_though_it_is_among_the_slowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decisions, "MOST_GROUPED", 6)
    job, grouped = job_of(images=1024), all_grouped(job_of(images=1024), 2)
    alone = Layout(1, 2, "1f1b", 8, 64, 4, 2, True)
    needs = [peak_bytes(job, layout, (0, len(job.layers))) for layout in (alone, *grouped)]
    assert needs[0] < min(needs[1:])
    predictor = small_predictor(2, job, memory_bytes=math.ceil(needs[0] / USABLE_MEMORY))
    found = search(predictor, 1, [alone], grouped)
    assert found.in_groups is None
    over = gib(min(needs[1:]) - predictor.machine.usable_bytes)
    assert "With tensor groups nothing fits: the nearest, 1 stage x 2 tensor ranks" in why(found)
    assert f"recomputing activations, is {over} over on rank 0; devices of " in why(found)


def test_a_lower_bound_without_cuts_is_one() -> None:
    predictor = small_predictor(4, job_of(images=8))
    for split in (TensorSplit(), BY_TWO):
        for layout in layouts(predictor.job, 4, offload=False, split=(split, SpaceSplit())):
            if predictor.cut(layout) is not None:
                assert predictor.least_seconds(layout) <= predictor.predict(layout).step_seconds * (1 + 1e-9)


def test_a_rank_of_a_group_holds_its_part_of_the_weights() -> None:
    job, bounds = job_of(), (0, len(job_of().layers))
    (whole,), (part,) = (pipeline_memory(job, layout, bounds) for layout in (ONE, SPLIT))
    layers = zip(job.layers, job.of(SPLIT).layers, strict=True)
    halves = sum(one.weights - other.weights for one, other in layers if other.shards > 1)
    assert whole.weights - part.weights == pytest.approx(4 * halves, rel=0.01)
