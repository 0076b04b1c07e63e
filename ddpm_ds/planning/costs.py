"""Model of time: seconds of each rank's instructions, and the bytes that they send.

The machine's rates come from a data sheet, or from a traced step (:mod:`ddpm_ds.planning.verdict`).
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ddpm_ds.config.ds_config import ResolvedDsConfig
from ddpm_ds.observe.device_speed import LayerSeconds, LayerTimes
from ddpm_ds.pipeline.cuts import Stage
from ddpm_ds.pipeline.messages import BLOCKS_IN_HOST
from ddpm_ds.pipeline.placement import Grid, Sharing, Traffic, run_exchange, sharing, traffic
from ddpm_ds.pipeline.schedule import Program, weight_passes
from ddpm_ds.planning.inputs import KINDS, PCIE_BANDWIDTH, Machine, Workload, rank_stages
from ddpm_ds.planning.simulate import Link, Links, PhaseCosts, RankCosts
from ddpm_ds.schema.layout import BUCKET_ELEMENTS, AcrossHosts, Layout
from ddpm_ds.unet.layers import (
    PASSES_PER_STEP,
    AttentionLayer,
    BlockLayer,
    DownsampleLayer,
    EmbedLayer,
    Layer,
    OutputLayer,
    TransformerBlockLayer,
    TransformerInputLayer,
    TransformerOutputLayer,
    UpsampleLayer,
)
from ddpm_ds.unet.shards import Sums, Swaps, agreed_elements, sums_of, swaps_of, whole_layers

ADAM_BYTES = 34
"""Bytes per parameter that Adam reads and writes: fp32 weight, gradient and moments, and the layers' copy."""
CLIP_BYTES = 16  # bytes per parameter that the norm of a gradient, its fp32 copy and clipping read and write on a GPU
EIGHT_BIT_BYTES = 226  # the same for Adam in 8 bits, which passes over memory several times
ROUNDING_BYTES = 60  # bytes per parameter that random rounding reads and writes besides
EMA_BYTES = 12  # bytes per parameter that an average of the weights reads and writes

DRAWS, UPDATE, EIGHT_BIT_UPDATE, ROUNDING_UPDATE = 10, 30, 47, 12
"""Kernels launched to draw a micro-batch's noise, timesteps and flips; by the optimizer's step with averages; and by
Adam in 8 bits for each ``BUCKET_ELEMENTS``, without and for random rounding."""

LAUNCHES: dict[type[Layer], tuple[int, int]] = {
    AttentionLayer: (5, 11),
    TransformerBlockLayer: (20, 32),
    TransformerInputLayer: (2, 5),
    TransformerOutputLayer: (2, 5),
    UpsampleLayer: (3, 5),
    DownsampleLayer: (2, 3),
    OutputLayer: (3, 4),
}
"""Kernels launched by a forward and a backward of a layer, where its kind decides them; other kinds launch 1 and 2."""
PRODUCTS = 1.75
"""Speed of a transformer block's matrix products on a GPU in half precision, as a multiple of the convolutions' speed.
It fits measured and published times of SDXL (docs/planner.md)."""
SPLIT_COST = 0.1
"""Extra cost of a separate weight-gradient pass, as a share of the seconds of a micro-batch's weight gradients.
Measured on a CPU (docs/performance.md)."""
GLOO_BANDWIDTH = 1e9
"""Bytes per second that a CPU's core sends or receives through gloo, and computes nothing meanwhile. It fits measured
steps of replicas (docs/planner.md)."""
BLOCK_BANDWIDTH = 2e10
"""Bytes per second that a thread block of NCCL copies to another device; by its own tables 20 GB/s on an A100, 37 on an
H100."""


def weight_share(layer: Layer) -> float:
    """Return the weight gradients' share of a layer's backward: half, if all its products are with trained weights."""
    return 0.5 * layer.trained_macs / layer.macs / (backward_share(layer) or 1.0)


def backward_share(layer: Layer) -> float:
    """Return the share of a layer's backward that is left, since some of its weights are not trained."""
    return (PASSES_PER_STEP * layer.work / layer.macs - 1) / (PASSES_PER_STEP - 1)


def update_bytes(job: Workload, layout: Layout) -> int:
    """Return the bytes per parameter that the optimizer's step and averages (not the host's) read and write."""
    beside = job.spec.ema.on_host and not layout.offload
    stepped = ADAM_BYTES + CLIP_BYTES * (not layout.offload)
    rounded = ROUNDING_BYTES * job.config.rounds
    return (EIGHT_BIT_BYTES if job.config.is_8bit else stepped) + rounded + (0 if beside else EMA_BYTES)


def planned_costs(
    job: Workload,
    machine: Machine,
    layout: Layout,
    bounds: Sequence[int],
    times: Sequence[LayerSeconds],
    *,
    with_sums: bool = True,
) -> list[RankCosts]:
    """Return the costs of each rank's instructions on a machine, for the simulator.

    ``times`` are the seconds of every layer, split as in the layout, for one micro-batch, without recomputation;
    ``with_sums`` adds those of tensor groups, and the swaps of space groups.
    """
    job = job.of(layout)
    sends, costs = sharing(job.config, layout), list[RankCosts]()
    # If weights are gathered, each replica steps its share of them.
    factor = beside_a_message(machine, layout)
    pairs = zip(times, job.layers, strict=True)
    times = [LayerSeconds(one.forward * factor, one.backward * factor * layer.reached) for one, layer in pairs]
    owned_share = 1 / layout.data_ranks if sends.weight_bytes else 1.0
    for rank, stages in enumerate(rank_stages(job.layers, bounds, layout.schedule)):
        phases = [_phase_costs(job, machine, layout, stage, times, with_sums=with_sums) for stage in stages]
        chunk = job.chunk_elements(stages, layout.zero_stage)
        pieces = [_pieces(job, layout, stage, times, chunk) for stage in stages]
        stalls, reduction, gathering = _replica_seconds(machine, layout, rank, sends, pieces)
        for number, (phase, stall) in enumerate(zip(phases, stalls, strict=True)):
            longer = phase.backward_seconds + stall
            phases[number] = replace(phase, backward_seconds=longer, weight_pass_seconds=stall)
        if layout.tensor.size > 1:  # sums of partial gradients, and on GPUs copies of others
            layers = tuple(layer for stage in stages for layer in job.layers[stage.start : stage.stop])
            agreed = agreed_elements(layers, given=not job.on_cpu) * owned_share * sends.gradient_bytes
            reduction += _group_seconds(machine, layout, 1, agreed)
        before = rank * sum(phase.forward_seconds for phase in phases)  # of the stages before it
        trained = sum(layer.trained for stage in stages for layer in job.layers[stage.start : stage.stop])
        updating = update_seconds(job, machine, layout, owned_share * trained)
        costs.append(RankCosts(tuple(phases), reduction, updating + max(gathering - before, 0.0)))
    return costs


def _phase_costs(
    job: Workload, machine: Machine, layout: Layout, stage: Stage, times: Sequence[LayerSeconds], *, with_sums: bool
) -> PhaseCosts:
    """Return the costs of a phase without its replicas."""
    own, layers = times[stage.start : stage.stop], job.layers[stage.start : stage.stop]
    forward, backward = sum(layer.forward for layer in own), sum(layer.backward for layer in own)
    if layout.checkpoint_interval:
        again = [*zip(own, layers, strict=True)][stage.start == 0 :]  # the first is never repeated
        backward += sum(one.forward for one, layer in again if layer.reached)
    weights = sum(one.backward * weight_share(layer) for one, layer in zip(own, layers, strict=True))
    sent, received = (
        round(elements * layout.micro_batch_images * job.stored_bytes * job.mean_pixels)
        for elements in (stage.sent_elements, stage.received_elements)
    )
    if with_sums and layout.tensor.size > 1:
        down, up = (sum_seconds(job, machine, layout, sums) for sums in sums_of(layers, layout.interval))
        forward, backward = forward + down, backward + up
    if with_sums and layout.space.size > 1:
        down, up = (swap_seconds(job, machine, layout, swaps) for swaps in swaps_of(layers, layout.interval))
        forward, backward = forward + down, backward + up
    return PhaseCosts(forward, backward, sent, received, weights, split_seconds=SPLIT_COST * weights)


class _Piece(NamedTuple):
    """Layers whose parameters travel between replicas together: those of a chunk, or one layer of several chunks."""

    chunks: float
    elements: int
    forward: float  # seconds of the layers for a micro-batch
    backward: float
    weights: float  # seconds of the backward for gradients of weights


def _pieces(job: Workload, layout: Layout, stage: Stage, times: Sequence[LayerSeconds], chunk: int) -> list[_Piece]:
    """Return the pieces of a stage, in the order in which their gradients are complete."""
    found, elements, forward, backward, weights = list[_Piece](), 0, 0.0, 0.0, 0.0
    for number in reversed(range(stage.start, stage.stop)):
        layer, one = job.layers[number], times[number]
        elements, forward = elements + layer.trained, forward + one.forward
        backward += one.backward + one.forward * (layout.interval > 0 and number > 0 and layer.reached)
        weights += one.backward * weight_share(layer)
        if elements >= chunk or number == stage.start:
            found.append(_Piece(elements / chunk, elements, forward, backward, weights))
            elements, forward, backward, weights = 0, 0.0, 0.0, 0.0
    return found


def _replica_seconds(
    machine: Machine, layout: Layout, rank: int, sends: Sharing, phases: Sequence[Sequence[_Piece]]
) -> tuple[list[float], float, float]:
    """Return the seconds that a rank waits for its replicas: in a backward of each phase, before the optimizer's step
    for the last gradients, and before the next forwards for new weights.
    """

    def rings(pieces: Iterable[_Piece], width: int) -> list[float]:
        return [ring_seconds(machine, layout, rank, one.elements * width, sends.passes, one.chunks) for one in pieces]

    def exchanged(
        pieces: Sequence[_Piece], computing: Iterable[float], width: int, buffers: int = 0
    ) -> tuple[float, float]:
        """Return the seconds by which a computation in pieces grows, and those from its end until all has arrived."""
        rate = GLOO_BANDWIDTH if machine.is_cpu else math.inf  # of the rank's own core, which sends and receives
        own = [2 * (1 - 1 / layout.data_ranks) * one.elements * width / rate for one in pieces]
        computing = [seconds + more for seconds, more in zip(computing, own, strict=True)]
        stall, left = waits(computing, rings(pieces, width), buffers)
        return sum(own) + stall, left

    stalls, pieces = [0.0] * len(phases), [*itertools.chain.from_iterable(reversed(phases))]
    if not sends.weight_bytes:  # one after the other, at the end of the step
        return stalls, sum(rings(pieces, sends.gradient_bytes)), 0.0
    # Read backwards, weights that come before their layers run are gradients that leave after them.
    gathering = sum(exchanged(pieces, (one.forward for one in pieces), sends.weight_bytes))
    if layout.zero_stage < 2:
        return stalls, sum(exchanged(pieces, (one.backward for one in pieces), sends.gradient_bytes)), gathering
    each = list[tuple[float, float]]()
    for phase in phases:
        passes = [one.weights if layout.schedule == "planned" else one.backward for one in phase]
        longer, left = exchanged(phase, passes, sends.gradient_bytes, buffers=2)
        beside = min(left, sum(one.forward for one in phase))  # the next micro-batch's, or none at the end
        each.append((longer + left - beside, beside))
    return [stall for stall, _ in each], each[0][1], gathering


def waits(computing: Iterable[float], travelling: Iterable[float], buffers: int = 0) -> tuple[float, float]:
    """Return the seconds that a computation in pieces waits for one of some ``buffers``, and those from its end until
    the last piece arrives. A piece travels once it is computed, one at a time, in a buffer, if their number is given.
    """
    computed = now = 0.0
    arrivals = list[float]()
    for seconds, travel in zip(computing, travelling, strict=True):
        computed, now = computed + seconds, now + seconds
        if 0 < buffers <= len(arrivals):
            now = max(now, arrivals[-buffers])
        arrivals.append(max([now, *arrivals[-1:]]) + travel)
    return now - computed, max(arrivals[-1] - now, 0.0)


def beside_a_message(machine: Machine, layout: Layout) -> float:
    """Return the factor on a rank's passes by which one waiting message, which holds multiprocessors, slows them.

    About one waits at any time (docs/pipeline.md). Across hosts NCCL takes two blocks for each network card, no more
    than inside a host.
    """
    most = KINDS[machine.kind].multiprocessors
    return most / (most - BLOCKS_IN_HOST) if most and layout.stages > 1 else 1.0


def update_seconds(job: Workload, machine: Machine, layout: Layout, owned: float) -> float:
    """Return the seconds of the optimizer's step and the averages for the ``owned`` parameters of a rank."""
    bandwidth = machine.host_bandwidth if layout.offload else machine.memory_bandwidth
    each = (EIGHT_BIT_UPDATE + ROUNDING_UPDATE * job.config.rounds) * job.config.is_8bit
    count = UPDATE + each * math.ceil(owned / BUCKET_ELEMENTS)
    seconds = max(owned * update_bytes(job, layout) / bandwidth, count * launch_seconds(job, machine, layout))
    if layout.offload:
        seconds += owned * (4 + job.stored_bytes) / min(machine.host_bandwidth, PCIE_BANDWIDTH)
    return seconds


def launches(layer: Layer) -> tuple[int, int]:
    """Return about how many kernels the host launches in a layer's forward and backward; draws count for the first one.

    They are the operators that are neither views nor allocations, within a tenth (tests/planning/test_launches.py). A
    convolution's three gradients count as three, as in weight-gradient passes. A split layer also launches its sums,
    the padding of its parts, and copies of gradients.
    """
    match layer:
        case BlockLayer():
            pops, shortcut, dropout = layer.skip_channels > 0, layer.has_shortcut, 2 * (layer.dropout > 0)
            forward = 8 + pops + shortcut + dropout + layer.sums * (6 + shortcut)
            return forward, 10 + 3 * shortcut + dropout + 13 * layer.sums
        case EmbedLayer():
            text = layer.pooled_channels > 0
            # with the masks of all blocks and their projections of the embedding
            return 14 + 18 * text + DRAWS + 5, 7 + 7 * text + 8
    forward, backward = LAUNCHES.get(type(layer), (1, 2))
    return forward + 2 * layer.sums, backward + 3 * layer.sums


def launch_seconds(job: Workload, machine: Machine, layout: Layout) -> float:
    """Return the host's seconds for each kernel; 0 if a CUDA graph launches them all."""
    return 0.0 if job.is_replayed(layout) else machine.launch_seconds


def analytic_times(job: Workload, machine: Machine, launch: float) -> LayerTimes:
    """Return a function that estimates layers' times: the longer of arithmetic with memory traffic, and launches."""

    def seconds(layer: Layer, images: int) -> LayerSeconds:
        products = isinstance(layer, TransformerBlockLayer) and job.precision != "fp32" and not machine.is_cpu
        arithmetic = 2 * layer.macs * images / machine.flops / (PRODUCTS if products else 1.0)
        (whole,) = whole_layers([layer]) if layer.rows.arriving else [layer]  # a rank keeps less, and moves its share
        elements = whole.activation_elements * layer.pixels / layer.all_pixels
        moved = 2 * job.arithmetic_bytes * elements * images + job.stored_bytes * layer.parameters
        computing = arithmetic + moved / machine.memory_bandwidth + machine.layer_seconds
        copied = 2 * job.stored_bytes * layer.trained / machine.memory_bandwidth  # gradients, to their sum
        forward, backward = (count * launch for count in launches(layer))
        differentiating = (PASSES_PER_STEP - 1) * computing * backward_share(layer) + copied
        return LayerSeconds(max(computing, forward), max(differentiating, backward))

    return lambda layers, images: [seconds(layer, images) for layer in layers]


@functools.lru_cache(maxsize=256)
def _grid(stages: int, replicas: int, across: AcrossHosts, devices_per_node: int, tensor: int, space: int) -> Grid:
    nodes = (rank // devices_per_node for rank in range(stages * replicas * tensor))
    return Grid(stages, replicas, across, tuple(nodes), tensor, space)


def grid(machine: Machine, layout: Layout) -> Grid:
    """Return the grid of a layout: the rank and replica of each device, and its node."""
    sizes = machine.devices_per_node, layout.tensor.size, layout.space.size
    return _grid(layout.stages, layout.data_ranks, layout.axis_over_nodes, *sizes)


def links(machine: Machine, layout: Layout) -> Links:
    """Return the links of a pipeline, of the slowest replica if replicas differ."""
    blocks = math.inf if machine.is_cpu else BLOCKS_IN_HOST * BLOCK_BANDWIDTH
    bandwidths = min(machine.link_bandwidth, blocks), machine.network_bandwidth
    boundaries = grid(machine, layout).boundaries
    return tuple(Link(bandwidths[edges.crossing > 0], machine.latency_seconds) for edges in boundaries)


def crossing_seconds(job: Workload, machine: Machine, layout: Layout) -> float:
    """Return a rank's seconds for each element of an image that crosses one of its cuts, and for the gradient."""
    slowest = min((link.bytes_per_second for link in links(machine, layout)), default=machine.link_bandwidth)
    return 2 * layout.micro_batch_images * job.stored_bytes / slowest


def ring_bandwidth(machine: Machine, layout: Layout, rank: int) -> float:
    """Return the bytes per second around the ring of a rank's replicas; across nodes each device has its share."""
    where = grid(machine, layout)
    if not where.rings[rank].crossing:
        return machine.link_bandwidth
    fewest = min(Counter(where.hosts_of(rank)).values())
    return min(machine.link_bandwidth, fewest * machine.network_bandwidth)


def ring_seconds(machine: Machine, layout: Layout, rank: int, size: float, passes: int, chunks: float = 1) -> float:
    """Return the seconds in which a rank's replicas all-reduce ``size`` bytes (two passes), or scatter or gather them
    (one), in so many chunks with a latency each.
    """
    count = layout.data_ranks
    if count == 1 or not size:
        return 0.0
    latency = chunks * passes * math.ceil(math.log2(count)) * machine.latency_seconds
    return passes * size * (count - 1) / count / ring_bandwidth(machine, layout, rank) + latency


def sum_seconds(job: Workload, machine: Machine, layout: Layout, sums: Sums) -> float:
    """Return the seconds of a micro-batch's sums over a tensor group."""
    images = layout.micro_batch_images * job.mean_pixels
    return _group_seconds(machine, layout, sums.number, 2 * images * sums.elements * job.arithmetic_bytes)


def swap_seconds(job: Workload, machine: Machine, layout: Layout, swaps: Swaps) -> float:
    """Return the seconds of a micro-batch's swaps with a space group: a wait and bytes for each."""
    size = layout.micro_batch_images * swaps.size(job.arithmetic_bytes)
    wait, bandwidth = machine.swap_speed
    if grid(machine, layout).split_groups:
        bandwidth = min(bandwidth, machine.network_bandwidth)
    return swaps.number * wait + size / bandwidth


def _group_seconds(machine: Machine, layout: Layout, count: int, size: float) -> float:
    """Return the seconds of ``count`` collectives of a tensor group, with so many bytes in all passes around a ring."""
    ranks = layout.tensor.size
    crosses = machine.devices_per_node % ranks > 0
    bandwidth = machine.network_bandwidth if crosses else machine.link_bandwidth
    return count * math.ceil(math.log2(ranks)) * machine.sum_seconds + size * (ranks - 1) / ranks / bandwidth


def step_traffic(
    job: Workload, machine: Machine, layout: Layout, bounds: Sequence[int], programs: Sequence[Program] | None = None
) -> Traffic:
    """Return the bytes of a step: messages between stages, gradients and weights of replicas, what groups exchange."""
    reductions = None
    if programs is not None:  # they may have fewer micro-batches than the layout
        many = max(number for own in programs for one in own for number in one.micro_batches) + 1
        counts = weight_passes(programs, layout.schedule)
        reductions = [[count * layout.micro_batches / many for count in own] for own in counts]
    sent = run_exchange(
        ResolvedDsConfig(layout, job.config),
        job.of(layout).layers,
        bounds,
        reductions,
        images=round(layout.micro_batches * layout.micro_batch_images * job.mean_pixels),
        arithmetic_bytes=job.arithmetic_bytes,
        gives_gradients=not job.on_cpu,
    )
    return traffic(grid(machine, layout), sent)
