"""Memory by part, against sums done by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from ddpm_ds.pipeline.schedule import program
from ddpm_ds.planning import memory as memory_model
from ddpm_ds.planning.decisions import fitted
from ddpm_ds.planning.inputs import Workload, rank_stages
from ddpm_ds.planning.memory import (
    COLLECTIVE_BYTES,
    EDGE_BYTES,
    EIGHT_BIT_INTERMEDIATES,
    SCALAR_BYTES,
    Memory,
    activation_bytes,
    communicator_bytes,
    kept,
    moments,
    pipeline_memory,
)
from ddpm_ds.schema.layout import Layout, TensorSplit
from ddpm_ds.unet.layers import EmbedLayer, parameter_shapes
from tests.launching import tiny_spec, tiny_text_spec
from tests.planning.small import ADAMW, EIGHT_BIT, FUSED, small_job

ONE = Layout(1, 4, "1f1b", 20, 2, 0, 0, False)
"""One stage, four replicas, two micro-batches of twenty images, whose activations outweigh an optimizer step."""


def memory(job: Workload, layout: Layout = ONE) -> Memory:
    return pipeline_memory(job, layout, (0, len(job.layers)))[0]


def whole(job: Workload) -> tuple[int, int]:
    return sum(one.parameters for one in job.layers), sum(one.activation_elements for one in job.layers)


def job_in(precision: str, **config: Any) -> Workload:
    return small_job(**config | ({} if precision == "fp32" else {precision: {"enabled": True}}))


@pytest.mark.parametrize(
    ("precision", "zero", "sizes"),
    [
        ("fp32", 0, (4, 4, 8, 4)),  # no second fp32 copy of the weights
        ("fp32", 1, (4, 4, 3, 1)),  # a quarter of 12 and of 4
        ("fp32", 2, (4, 1, 3, 1)),
        ("fp16", 0, (2, 2, 12, 4)),
        ("fp16", 1, (2.5, 4, 3, 1)),  # the own quarter of the new weights beside them, and sums in fp32
        ("fp16", 2, (2.5, 1, 3, 1)),
        ("bf16", 0, (2.5, 2, 3, 1)),  # DeepSpeed shares the optimizer without ZeRO
    ],
)
def test_bytes_of_a_parameter(precision: str, zero: int, sizes: tuple[float, ...]) -> None:
    job = job_in(precision)
    found = memory(job, replace(ONE, zero_stage=zero))
    expected = [whole(job)[0] * size for size in sizes]  # a quarter of the parameters is rounded up
    assert (found.weights, found.gradients, found.optimizer, found.ema) == pytest.approx(expected, abs=12)


@pytest.mark.parametrize(
    ("precision", "zero", "replicas", "optimizer", "expected", "travelling"),
    [
        ("fp32", 1, 1, ADAMW, 4 + 8, 0),  # Adam steps on the sum
        ("fp32", 1, 2, ADAMW, 4 + 4 / 2, 0),  # the own half is copied, the sum released, and Adam needs as much again
        ("fp16", 2, 1, ADAMW, 4 + 8, 2),  # widened, and the sum released
        ("fp16", 2, 2, ADAMW, (4 + 8) / 2, 2 * 2),
        ("bf16", 0, 1, ADAMW, 2 + 4 + 8, 0),  # the sum is DeepSpeed's and stays
        ("bf16", 2, 1, EIGHT_BIT, 4 + EIGHT_BIT_INTERMEDIATES, 2),  # widens no gradient
        ("bf16", 1, 2, FUSED, 4 + 4 / 2, 2 + 2 * 2),  # the sum is DeepSpeed's and stays, and the own half needs no more
    ],
)
def test_bytes_of_a_step_on_flat_gradients(
    precision: str, zero: int, replicas: int, optimizer: dict[str, Any], expected: float, travelling: int
) -> None:
    """For a parameter, and for an element of a chunk: packed, and in ZeRO-2's or in two first buffers for 16 bits."""
    blocks = {"zero_optimization": {"stage": zero, "reduce_bucket_size": 1}} if zero else {}
    layout = replace(ONE, micro_batch_images=1, checkpoint_interval=1, zero_stage=zero, replicas=replicas)
    job = job_in(precision, optimizer=optimizer, **blocks)
    largest = max(map(math.prod, parameter_shapes(job.layers).values()))
    found = memory(job, layout)
    update = found.gradients + found.activations + found.buffers
    assert update == pytest.approx(whole(job)[0] * expected + largest * travelling, abs=50)


@pytest.mark.parametrize(
    ("precision", "zero", "replicas"), [("fp32", 0, 1), ("bf16", 0, 2), ("bf16", 2, 1), ("fp16", 1, 4)]
)
def test_moments_of_8_bits(precision: str, zero: int, replicas: int) -> None:
    """Two codes an element and two scales a block of weights, each in blocks of its own; 8 bytes of norms, biases."""
    job = job_in(precision, optimizer=EIGHT_BIT)
    shapes = parameter_shapes(job.layers).values()
    weights = sum(2 * (256 + 4) * -(-math.prod(shape) // 256) for shape in shapes if len(shape) > 1)
    others = sum(8 * math.prod(shape) for shape in shapes if len(shape) == 1)
    masters, shared = (0, 1) if precision == "fp32" and not zero else (4 * whole(job)[0], replicas)
    found = memory(job, replace(ONE, zero_stage=zero, replicas=replicas))
    assert found.optimizer == pytest.approx((weights + others + masters) / shared, abs=8)


def test_communicators_of_a_gpu() -> None:
    """A stage's replicas', a pipeline's for scalars, and one for each kind of message to and from each neighbour."""
    layout, cuts = Layout(3, 2, "1f1b", 1, 6, 0, 2, False), (0, 4, 8, len(small_job().layers))
    sizes = [rank.communicators for rank in pipeline_memory(small_job(), layout, cuts)]
    assert sizes == [COLLECTIVE_BYTES + SCALAR_BYTES + edges * EDGE_BYTES for edges in (3, 4, 3)]
    assert {rank.communicators for rank in pipeline_memory(small_job(on_cpu=True), layout, cuts)} == {0}
    split = Layout(1, 1, "1f1b", 1, 6, 0, 2, False, tensor=TensorSplit(2))
    assert communicator_bytes(split, 0) == COLLECTIVE_BYTES + SCALAR_BYTES


def test_averages_on_the_host_take_nothing_of_the_device_and_a_copy_of_the_weights_there() -> None:
    layout, on_host = replace(ONE, zero_stage=2), small_job(tiny_spec(ema={"on_host": True}))
    usual, found = memory(small_job(), layout), memory(on_host, layout)
    assert (found.ema, found.total, found.host - usual.host) == (0, usual.total - usual.ema, 2 * usual.ema)
    offloaded = replace(layout, offload=True)
    assert memory(on_host, offloaded) == memory(small_job(), offloaded), "there they are in any case"


def test_offload_moves_the_optimizer_and_the_average_to_the_host() -> None:
    job = small_job(fp16={"enabled": True})
    found = memory(job, replace(ONE, zero_stage=2, offload=True))
    assert (found.optimizer, found.ema) == (0, 0) and found.gradients == pytest.approx(whole(job)[0], abs=4)
    # 12 for weights and moments, 4 for the average, 4 + 2 + 2 for gradients and the weights on their way, 16 to save
    assert found.host == pytest.approx(whole(job)[0] / 4 * 40, abs=40)


@pytest.mark.parametrize(("optimizer", "bytes_saved"), [(ADAMW, 16), (EIGHT_BIT, 8 + 2 * (1 + 4 / 256))])
def test_a_checkpoint_is_copied_to_the_host_through_two_locked_buffers(
    optimizer: dict[str, Any], bytes_saved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 masters, moments and averages of the own quarter of the parameters; small ones keep fp32 moments."""
    layout = replace(ONE, zero_stage=1)
    job, on_cpu = (small_job(optimizer=optimizer, on_cpu=there) for there in (False, True))
    saved = memory(on_cpu, layout).host
    assert saved == pytest.approx(whole(job)[0] / 4 * bytes_saved, rel=0.1 if optimizer is EIGHT_BIT else 1e-3)
    assert memory(job, layout).host == 3 * saved
    monkeypatch.setattr(memory_model, "STAGING_BYTES", 2**10)
    assert memory(job, layout).host == saved + 2 * 2**10


def test_auto_recomputes_where_activations_take_more_than_half_of_the_memory() -> None:
    job = small_job()
    bounds, needed = (0, len(job.layers)), 20 * whole(job)[1] * 4
    assert activation_bytes(job, ONE, bounds) == needed == memory(job).activations
    open_layout = replace(ONE, checkpoint_interval="auto")
    assert [fitted(job, open_layout, bounds, size).interval for size in (2 * needed, 2 * needed - 2)] == [0, 1]


def test_fp16_on_a_cpu_keeps_fp32_activations_and_widened_weights() -> None:
    on_gpu, on_cpu = (small_job(fp16={"enabled": True}, on_cpu=is_cpu) for is_cpu in (False, True))
    (parameters, elements), first = whole(on_gpu), on_gpu.layers[0]
    assert isinstance(first, EmbedLayer)
    of_inputs = first.embedding_channels * first.sinusoid_channels
    assert memory(on_cpu).activations == 20 * elements * 4 + 4 * (parameters - of_inputs)
    assert memory(on_gpu).activations == 20 * elements * 2


def test_checkpointing_keeps_what_layers_begin_with_and_skips_once() -> None:
    layers = small_job().layers
    stage = rank_stages(layers, (0, len(layers)), "1f1b")[0][0]
    one, two = (kept(layers, stage, interval, 0, 1, holds_skips=False) for interval in (1, 2))
    sizes = [math.prod(layer.output_shape) for layer in layers]
    assert one.beside == sum(sizes[1:-1])  # the image that layer 1 takes is not made by a layer with gradient
    wide = kept(layers, stage, 1, 1, 0, holds_skips=False)
    assert wide.layers == layers[0].activation_elements
    assert wide.working_copies == 4 * max(layer.parameters for layer in layers[1:])
    begins = {start - 1 for start in range(3, len(layers), 2)}
    pushed = {place for place, layer in enumerate(layers) if layer.pushes}
    assert two.beside == sum(sizes[place] for place in begins | pushed)


def test_encoders_are_held_where_text_is_read() -> None:
    job, layout = small_job(tiny_text_spec()), Layout(3, 1, "1f1b", 3, 8, 0, 0, False)
    bounds = (0, 1, len(job.layers) - 1, len(job.layers))
    plain, encoding = (pipeline_memory(each, layout, bounds) for each in (job, replace(job, encoder_elements=1000)))
    assert [more.total - less.total for more, less in zip(encoding, plain, strict=True)] == [2000, 2000, 0]
    on_cpu = replace(job, encoder_elements=1000, on_cpu=True)
    assert [memory.encoders for memory in pipeline_memory(on_cpu, layout, bounds)] == [4000, 4000, 0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_fold_is_fullest_at_one_moment_not_the_sum_of_two(ranks: int) -> None:
    """Under 1F1B a rank holds a micro-batch for itself and for each rank after it."""
    assert [moments("1f1b", 8, 4, rank) for rank in range(4)] == [((4 - rank, 0, 0),) for rank in range(4)]
    for rank in range(ranks):
        held, seen = [0, 0], []
        for step in program("folded", 4 * ranks, ranks, rank):
            held[step.phase] += (step.name == "ForwardPass") - (step.name == "BackwardPass")
            seen.append(tuple(held))
        found = moments("folded", 4 * ranks, ranks, rank)
        for weights in ((1, 1), (5, 1), (1, 5)):
            most = max(weights[0] * down + weights[1] * up for down, up in seen)
            assert max(weights[0] * down + weights[1] * up for down, up, _ in found) == most


@pytest.mark.parametrize("schedule", ["1f1b", "folded"])
def test_more_micro_batches_than_four_a_rank_fill_no_more(schedule: Any) -> None:
    for ranks, rank in ((2, 0), (2, 1), (3, 1), (5, 0), (5, 3)):
        assert set(moments(schedule, 4 * ranks, ranks, rank)) == set(moments(schedule, 7 * ranks, ranks, rank))


def test_a_stage_keeps_what_it_received_and_in_a_fold_the_skips_for_the_other_phase() -> None:
    layers, bounds = small_job().layers, (0, 7, len(small_job().layers))
    sizes = [math.prod(layer.output_shape) for layer in layers]
    (second,), (first,) = rank_stages(layers, bounds, "1f1b")[1], rank_stages(layers, bounds, "1f1b")[0]
    assert kept(layers, second, 0, 0, 1, holds_skips=False).beside == second.received_elements > 0
    pushed = {place for place, layer in enumerate(layers[:7]) if layer.pushes}
    found = kept(layers, first, 4, 0, 1, holds_skips=True)
    assert found.skips == sum(sizes[place] for place in pushed)
    assert found.beside == sum(sizes[place] for place in pushed | {4})  # groups begin at layers 1 and 5


def test_checkpoints_keep_residuals_between_groups_and_ranks_the_text_of_each_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, layout = small_job(tiny_text_spec()), Layout(3, 1, "1f1b", 3, 8, 0, 0, False)
    layers, sizes = job.layers, [math.prod(layer.output_shape) for layer in job.layers]
    begins = {start - 1 for start in range(4, len(layers), 3)}
    kept_places = begins | {place - layer.opens for place, layer in enumerate(layers) if layer.pushes or layer.opens}
    stage = rank_stages(layers, (0, len(layers)), "1f1b")[0][0]
    assert kept(layers, stage, 3, 0, 1, holds_skips=False).beside == sum(sizes[place] for place in kept_places)
    bounds, found = (0, 3, 14, len(layers)), []  # the first rank has no transformer block
    for context in (memory_model.context_elements, lambda layers, *segments: 0):
        monkeypatch.setattr(memory_model, "context_elements", context)
        memory_model._kept_by_rank.cache_clear()
        found.append(pipeline_memory(job, layout, bounds))
    image = 5 * 6  # tokens x channels; in the arithmetic's precision for each in flight, in 16 bits for the next
    more = [(a.activations - b.activations, a.buffers - b.buffers) for a, b in zip(*found, strict=True)]
    assert more == [(0, 0), (2 * 3 * 4 * image, 3 * 2 * image), (3 * 4 * image, 3 * 2 * image)]
    memory_model._kept_by_rank.cache_clear()
