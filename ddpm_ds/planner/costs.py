"""What a rank's instructions take, and which bytes they send where."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddpm_ds.observe.layer_times import LayerSeconds, LayerTimes
from ddpm_ds.pipeline.simulate import Link, PhaseCosts, RankCosts
from ddpm_ds.planner.job import Job
from ddpm_ds.planner.layouts import Layout
from ddpm_ds.planner.machine import Machine
from ddpm_ds.planner.stages import Segment
from ddpm_ds.unet.layers import PASSES_PER_STEP, Layer

ADAM_BYTES = 34
"""Read and written for a parameter by Adam: weight, gradient and moments in fp32, the layers' copy."""
EMA_BYTES = 12
"""Read and written for a parameter by the averaged weights."""


def analytic_times(job: Job, machine: Machine) -> LayerTimes:
    """Times from arithmetic, memory traffic and a fixed start for each layer; a backward is two forwards."""
    wide = job.arithmetic_bytes(machine.is_cpu)

    def seconds(layer: Layer, images: int) -> LayerSeconds:
        arithmetic = 2 * layer.macs * images / machine.flops
        moved = 2 * wide * layer.activation_elements * images + job.stored_bytes * layer.parameters
        forward = arithmetic + moved / machine.memory_bandwidth + machine.layer_seconds
        return LayerSeconds(forward, (PASSES_PER_STEP - 1) * forward)

    return lambda images: [seconds(layer, images) for layer in job.layers]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step over all devices."""

    within_nodes: int
    between_nodes: int


@dataclass(frozen=True)
class Replicas:
    """The ranks that share a stage: ranks of a stage are neighbours, as DeepSpeed numbers them."""

    count: int
    fewest_in_a_node: int
    crossings: int
    """Edges of the ring through all of them that leave a node."""

    @staticmethod
    def of(layout: Layout, machine: Machine, stage: int) -> Replicas:
        """The replicas of a rank of the pipeline."""
        size, first, count = machine.devices_per_node, stage * layout.replicas, layout.replicas
        last = first + count - 1
        nodes = last // size - first // size + 1
        in_first, in_last = min(count, size - first % size), min(count, last % size + 1)
        return Replicas(count, min(in_first, in_last), nodes if nodes > 1 else 0)

    def bandwidth(self, machine: Machine) -> float:
        """Bytes per second around the ring; across nodes every device of a node uses its share of the network."""
        if not self.crossings:
            return machine.link_bandwidth
        return min(machine.link_bandwidth, self.fewest_in_a_node * machine.network_bandwidth)

    def edge_bytes(self, size: float, passes: int) -> float:
        """Bytes over each edge of the ring when ``size`` bytes are all-reduced (2 passes) or gathered (1)."""
        return passes * size * (self.count - 1) / self.count

    def seconds(self, size: float, passes: int, machine: Machine) -> float:
        """Time of an all-reduce or a gather."""
        if self.count == 1:
            return 0.0
        latency = passes * math.ceil(math.log2(self.count)) * machine.latency_seconds
        return self.edge_bytes(size, passes) / self.bandwidth(machine) + latency


def rank_costs(
    job: Job,
    machine: Machine,
    layout: Layout,
    rank: int,
    segments: Sequence[Segment],
    times: Sequence[LayerSeconds],
) -> RankCosts:
    """What the simulator is given for a rank; ``times`` are of all layers."""
    replicas = Replicas.of(layout, machine, rank)
    images, stored = layout.micro_batch_images, job.stored_bytes
    phases = []
    for segment in segments:
        own = times[segment.start : segment.stop]
        forward, backward = sum(layer.forward for layer in own), sum(layer.backward for layer in own)
        if layout.checkpoint_interval:
            backward += forward - (times[0].forward if segment.start == 0 else 0.0)
        if layout.zero_stage == 2:
            backward += replicas.seconds(segment.parameters * job.reduced_bytes, _reductions(job, layout), machine)
            if layout.offload:  # added up on the host, through the device
                backward += 2 * segment.parameters / layout.replicas * stored / machine.host_bandwidth
        phases.append(
            PhaseCosts(
                forward,
                backward,
                activation_bytes=segment.sent_elements * images * stored,
                gradient_bytes=segment.received_elements * images * stored,
            )
        )
    parameters = sum(segment.parameters for segment in segments)
    reduce = 0.0
    if layout.zero_stage < 2:
        reduce = replicas.seconds(parameters * _reduced_bytes(job, layout), _reductions(job, layout), machine)
    return RankCosts(tuple(phases), reduce, _optimizer_seconds(job, machine, layout, parameters, replicas))


def link(machine: Machine, layout: Layout) -> Callable[[int, int], Link]:
    """The links of a pipeline; those of its slowest replica where replicas differ."""

    def between(source: int, target: int) -> Link:
        crosses = _crossing_replicas(layout, machine, min(source, target)) > 0
        bandwidth = machine.network_bandwidth if crosses else machine.link_bandwidth
        return Link(bandwidth, machine.latency_seconds)

    return between


def crossing_seconds(job: Job, machine: Machine, layout: Layout) -> float:
    """What an element that crosses a cut, per image, costs a rank on either side, there and back."""
    slowest = min(link(machine, layout)(rank, rank + 1).bytes_per_second for rank in range(max(layout.stages - 1, 1)))
    return 2 * layout.micro_batch_images * job.stored_bytes / slowest


def traffic(job: Job, machine: Machine, layout: Layout, segments: Sequence[Sequence[Segment]]) -> Traffic:
    """Bytes of a step on all wires: messages between stages, gradients and weights among replicas."""
    within = between = 0.0
    per_step = layout.micro_batches * layout.micro_batch_images * job.stored_bytes
    for rank, below in itertools.pairwise(range(layout.stages)):
        down, up = segments[rank][0].sent_elements, sum(part.sent_elements for part in segments[below][1:])
        size = 2 * (down + up) * per_step
        crossing = _crossing_replicas(layout, machine, rank)
        between += size * crossing
        within += size * (layout.replicas - crossing)
    for rank in range(layout.stages):
        replicas = Replicas.of(layout, machine, rank)
        parameters = sum(segment.parameters for segment in segments[rank])
        reduced = parameters * _reduced_bytes(job, layout)
        times = layout.micro_batches if layout.zero_stage == 2 else 1
        edge = times * replicas.edge_bytes(reduced, _reductions(job, layout))
        if _is_partitioned(job, layout):
            edge += replicas.edge_bytes(parameters * job.stored_bytes, 1)
        between += edge * replicas.crossings
        within += edge * (replicas.count - replicas.crossings)
    return Traffic(round(within), round(between))


def _crossing_replicas(layout: Layout, machine: Machine, rank: int) -> int:
    """In how many replicas a rank of the pipeline and the next one are in different nodes."""
    size, replicas, first = machine.devices_per_node, layout.replicas, rank * layout.replicas
    if replicas >= size:
        return replicas
    return sum((first + replica) % size + replicas >= size for replica in range(replicas))


def _is_partitioned(job: Job, layout: Layout) -> bool:
    """Whether each replica steps its share of the weights, which are then gathered; DeepSpeed's BF16_Optimizer does."""
    return layout.zero_stage > 0 or job.precision == "bf16"


def _reduced_bytes(job: Job, layout: Layout) -> int:
    """Bytes of an element of a reduced gradient; without ZeRO those of bf16 are fp32."""
    return 4 if layout.zero_stage == 0 and job.precision == "bf16" else job.reduced_bytes


def _reductions(job: Job, layout: Layout) -> int:
    """How often gradients go around the ring: twice for all to have them, once for their owners."""
    return 2 if layout.zero_stage == 0 or job.reduces_to_all else 1


def _optimizer_seconds(job: Job, machine: Machine, layout: Layout, parameters: int, replicas: Replicas) -> float:
    owned = parameters / layout.replicas if _is_partitioned(job, layout) else parameters
    seconds = (
        owned * (ADAM_BYTES + EMA_BYTES) / (machine.host_bandwidth if layout.offload else machine.memory_bandwidth)
    )
    if layout.offload:
        seconds += owned * (4 + job.stored_bytes) / machine.host_bandwidth
    if _is_partitioned(job, layout):
        seconds += replicas.seconds(parameters * job.stored_bytes, 1, machine)
    return seconds
