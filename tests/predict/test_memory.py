"""Memory by part, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpm_ds.pipeline.schedule import held_micro_batches
from ddpm_ds.predict.layouts import Candidate
from ddpm_ds.predict.memory import COLLECTIVE_BYTES, EDGE_BYTES, Memory, rank_memory
from ddpm_ds.predict.stages import Segment, kept, moments, rank_segments
from ddpm_ds.predict.workload import Workload
from tests.predict.small import small_job

ONE = Candidate(1, 4, "1f1b", 20, 2, 0, 0, False)
"""One stage, four replicas, two micro-batches of twenty images, whose activations outweigh an optimizer step."""


def memory(
    task: Workload, layout: Candidate, bounds: tuple[int, ...], rank: int = 0, *, on_cpu: bool = False
) -> Memory:
    segments = rank_segments(task.layers, bounds, layout.schedule, rank)
    keeps = [
        kept(task.layers, segment, layout.schedule, phase, layout.checkpoint_interval)
        for phase, segment in enumerate(segments)
    ]
    return rank_memory(task, layout, rank, segments, keeps, on_cpu=on_cpu)


def whole(task: Workload) -> tuple[int, int, int]:
    """Parameters, kept elements of an image, and the number of layers."""
    layers = task.layers
    return sum(one.parameters for one in layers), sum(one.activation_elements for one in layers), len(layers)


@pytest.mark.parametrize(
    ("precision", "zero", "weights", "gradients", "optimizer", "ema"),
    [
        ("fp32", 0, 4, 4, 8, 4),  # no second fp32 copy of the weights
        ("fp32", 1, 4, 4, 3, 1),  # a quarter of 12 and of 4
        ("fp32", 2, 4, 1, 3, 1),
        ("fp16", 0, 2, 2, 12, 4),
        ("fp16", 1, 2, 2, 3, 1),
        ("fp16", 2, 2, 0.5, 3, 1),
        ("bf16", 0, 2, 6, 3, 1),  # bf16 and what DeepSpeed adds up in fp32; it shares the optimizer without ZeRO
    ],
)
def test_bytes_of_a_parameter(
    precision: str, zero: int, weights: float, gradients: float, optimizer: float, ema: float
) -> None:
    config: dict[str, Any] = {} if precision == "fp32" else {precision: {"enabled": True}}
    task = small_job(**config)
    parameters, _, layers = whole(task)
    found = memory(task, replace(ONE, zero_stage=zero), (0, layers))
    sizes = found.weights, found.gradients, found.optimizer, found.ema
    expected = [parameters * size for size in (weights, gradients, optimizer, ema)]
    assert sizes == pytest.approx(expected, abs=12)  # a quarter of the parameters is rounded up


def test_communicators_of_a_gpu() -> None:
    """The job's, a stage's replicas', a pipeline's, and one for each kind of message to and from each neighbour."""
    task, layout = small_job(), Candidate(3, 2, "1f1b", 1, 6, 0, 2, False)
    _, _, layers = whole(task)
    middle = memory(task, layout, (0, 4, 8, layers), rank=1)
    assert middle.communicators == 3 * COLLECTIVE_BYTES + 4 * EDGE_BYTES
    assert memory(task, layout, (0, 4, 8, layers), rank=0).communicators == 3 * COLLECTIVE_BYTES + 3 * EDGE_BYTES
    assert memory(task, replace(layout, stages=1), (0, layers)).communicators == 2 * COLLECTIVE_BYTES
    assert memory(task, layout, (0, 4, 8, layers), rank=1, on_cpu=True).communicators == 0


def test_offload_moves_the_optimizer_and_the_average_to_the_host() -> None:
    task = small_job(fp16={"enabled": True})
    parameters, _, layers = whole(task)
    found = memory(task, replace(ONE, zero_stage=2, offload=True), (0, layers))
    assert (found.optimizer, found.ema, found.gradients) == (0, 0, 0)
    # 12 for weights and moments, 4 for the average, 4 + 2 + 2 for gradients and the weights on their way
    assert found.host == pytest.approx(parameters / 4 * 24, abs=24)


def test_activations_of_one_stage_are_those_of_one_micro_batch() -> None:
    task = small_job()
    _, elements, layers = whole(task)
    assert memory(task, ONE, (0, layers)).activations == 20 * elements * 4
    assert memory(task, replace(ONE, micro_batch_images=60), (0, layers)).activations == 60 * elements * 4


def test_without_activations_to_speak_of_the_optimizer_step_is_the_fullest_moment() -> None:
    task = small_job(zero_optimization={"stage": 1, "reduce_bucket_size": 1})
    parameters, _, layers = whole(task)
    found = memory(task, replace(ONE, micro_batch_images=1, zero_stage=1, replicas=1), (0, layers))
    assert found.activations == 0
    # weights; fp32 weights and moments; average; gradients and as much again twice while Adam steps
    assert found.total == parameters * (4 + 12 + 4 + 12)


def test_fp16_on_a_cpu_keeps_fp32_activations_and_widened_weights() -> None:
    task = small_job(fp16={"enabled": True})
    parameters, elements, layers = whole(task)
    assert memory(task, ONE, (0, layers), on_cpu=True).activations == 20 * elements * 4 + 4 * parameters
    assert memory(task, ONE, (0, layers)).activations == 20 * elements * 2


def test_the_first_of_two_stages_holds_two_micro_batches_and_the_second_what_it_received() -> None:
    task = small_job()
    layout, cut = Candidate(2, 1, "1f1b", 3, 8, 0, 0, False), 5
    bounds = (0, cut, len(task.layers))
    first, second = (sum(one.activation_elements for one in part) for part in (task.layers[:cut], task.layers[cut:]))
    (segment,) = rank_segments(task.layers, bounds, "1f1b", 1)
    assert memory(task, layout, bounds, 0).activations == 2 * 3 * first * 4
    assert memory(task, layout, bounds, 1).activations == 3 * (second + segment.received_elements) * 4


def test_checkpointing_keeps_what_layers_begin_with_and_skips_once() -> None:
    """The tiny U-Net: the h that each layer after the first takes; its skips are among them."""
    task = small_job()
    layers = task.layers
    segment = Segment(0, len(layers), 0, 0, 0)
    one = kept(layers, segment, "1f1b", 0, 1)
    sizes = [layer.out_channels * layer.out_resolution**2 for layer in layers]
    assert one.stored_elements == sum(sizes[1:-1])  # the image that layer 1 takes is not made by a layer with gradient
    assert one.recomputed_elements == max(layer.activation_elements for layer in layers[1:])
    two = kept(layers, segment, "1f1b", 0, 2)
    begins = {start - 1 for start in range(3, len(layers), 2)}
    pushed = {place for place, layer in enumerate(layers) if layer.pushes}
    assert two.stored_elements == sum(sizes[place] for place in begins | pushed)
    assert one.wide_elements == layers[0].activation_elements


def test_checkpointing_in_a_fold_keeps_the_skips_for_the_other_phase() -> None:
    layers = small_job().layers
    stop = 7
    found = kept(layers, Segment(0, stop, 0, 0, 0), "folded", 0, 4)
    sizes = [layer.out_channels * layer.out_resolution**2 for layer in layers]
    pushed = {place for place, layer in enumerate(layers[:stop]) if layer.pushes}
    assert len(pushed) > 2 and found.skip_elements == sum(sizes[place] for place in pushed)
    assert found.stored_elements == sum(sizes[place] for place in pushed | {4})  # groups begin at layers 1 and 5
    assert kept(layers, Segment(0, stop, 0, 0, 0), "1f1b", 0, 4).skip_elements == 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_fold_is_fullest_at_one_moment_not_the_sum_of_two(ranks: int) -> None:
    for rank in range(ranks):
        held = held_micro_batches("folded", micro_batches=4 * ranks, ranks=ranks, rank=rank)
        found = moments("folded", 4 * ranks, ranks, rank)
        for weights in ((1, 1), (5, 1), (1, 5)):
            most = max(weights[0] * down + weights[1] * up for down, up in held)
            assert max(weights[0] * down + weights[1] * up for down, up, _ in found) == most


@pytest.mark.parametrize("schedule", ["1f1b", "folded"])
def test_more_micro_batches_than_four_a_rank_fill_no_more(schedule: Any) -> None:
    for ranks in (2, 3, 5):
        for rank in range(ranks):
            assert set(moments(schedule, 4 * ranks, ranks, rank)) == set(moments(schedule, 7 * ranks, ranks, rank))
