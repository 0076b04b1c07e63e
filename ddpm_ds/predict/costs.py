"""What a rank's instructions take, and which bytes they send where."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddpm_ds.observe.device_speed import LayerSeconds, LayerTimes
from ddpm_ds.pipeline.placement import AcrossHosts, Grid, Sharing, Traffic, exchange, sharing, traffic
from ddpm_ds.pipeline.schedule import PhaseCosts, RankCosts
from ddpm_ds.predict.layouts import Candidate
from ddpm_ds.predict.machine import Machine
from ddpm_ds.predict.simulate import Link
from ddpm_ds.predict.stages import Segment
from ddpm_ds.predict.workload import Workload
from ddpm_ds.unet.layers import PASSES_PER_STEP, Layer

ADAM_BYTES = 34
"""Read and written for a parameter by Adam: weight, gradient and moments in fp32, the layers' copy."""
EMA_BYTES = 12
"""Read and written for a parameter by the averaged weights."""


def analytic_times(job: Workload, machine: Machine) -> LayerTimes:
    """Times from arithmetic, memory traffic and a fixed start for each layer; a backward is two forwards."""
    wide = job.arithmetic_bytes(machine.is_cpu)

    def seconds(layer: Layer, images: int) -> LayerSeconds:
        arithmetic = 2 * layer.macs * images / machine.flops
        moved = 2 * wide * layer.activation_elements * images + job.stored_bytes * layer.parameters
        forward = arithmetic + moved / machine.memory_bandwidth + machine.layer_seconds
        return LayerSeconds(forward, (PASSES_PER_STEP - 1) * forward)

    return lambda images: [seconds(layer, images) for layer in job.layers]


@functools.lru_cache(maxsize=256)
def _grid(stages: int, replicas: int, across: AcrossHosts, devices_per_node: int) -> Grid:
    return Grid(stages, replicas, across, tuple(rank // devices_per_node for rank in range(stages * replicas)))


def grid(machine: Machine, layout: Candidate) -> Grid:
    """Which device is which rank of which replica, and in which node."""
    across = "stages" if layout.across == "auto" else layout.across
    return _grid(layout.stages, layout.replicas, across, machine.devices_per_node)


def shared(job: Workload, layout: Candidate) -> Sharing:
    """What the replicas of a layout send each other."""
    return sharing(
        job.config, precision=job.precision, zero_stage=layout.zero_stage, micro_batches=layout.micro_batches
    )


def step_traffic(job: Workload, machine: Machine, layout: Candidate, bounds: Sequence[int]) -> Traffic:
    """Bytes of a step on all wires: messages between stages, gradients and weights among replicas."""
    sent = exchange(
        job.layers,
        bounds,
        layout.schedule,
        replicas=layout.replicas,
        images=layout.micro_batches * layout.micro_batch_images,
        precision=job.precision,
        shared=shared(job, layout),
    )
    return traffic(grid(machine, layout), sent)


@dataclass(frozen=True)
class Ring:
    """The replicas of a rank of the pipeline, and what they send each other."""

    count: int
    fewest_in_a_node: int
    crosses: bool

    @staticmethod
    def of(layout: Candidate, machine: Machine, stage: int) -> Ring:
        """Through the replicas of a rank of the pipeline."""
        where = grid(machine, layout)
        return _ring(where.stages, where.replicas, where.across, machine.devices_per_node, stage)

    def bandwidth(self, machine: Machine) -> float:
        """Bytes per second around the ring; across nodes every device of a node uses its share of the network."""
        if not self.crosses:
            return machine.link_bandwidth
        return min(machine.link_bandwidth, self.fewest_in_a_node * machine.network_bandwidth)

    def seconds(self, size: float, passes: int, machine: Machine) -> float:
        """Time in which ``size`` bytes are all-reduced (2 passes) or gathered (1)."""
        if self.count == 1:
            return 0.0
        latency = passes * math.ceil(math.log2(self.count)) * machine.latency_seconds
        return passes * size * (self.count - 1) / self.count / self.bandwidth(machine) + latency


@functools.lru_cache(maxsize=65536)
def _ring(stages: int, replicas: int, across: AcrossHosts, devices_per_node: int, stage: int) -> Ring:
    where = _grid(stages, replicas, across, devices_per_node)
    return Ring(replicas, min(Counter(where.hosts_of(stage)).values()), where.rings[stage].crossing > 0)


def rank_costs(
    job: Workload,
    machine: Machine,
    layout: Candidate,
    rank: int,
    segments: Sequence[Segment],
    times: Sequence[LayerSeconds],
) -> RankCosts:
    """What the simulator is given for a rank; ``times`` are of all layers."""
    ring, sends = Ring.of(layout, machine, rank), shared(job, layout)
    images, stored = layout.micro_batch_images, job.stored_bytes
    phases = []
    for segment in segments:
        own = times[segment.start : segment.stop]
        forward, backward = sum(layer.forward for layer in own), sum(layer.backward for layer in own)
        if layout.checkpoint_interval:
            backward += forward - (times[0].forward if segment.start == 0 else 0.0)
        if layout.zero_stage == 2:
            backward += ring.seconds(segment.parameters * sends.gradient_bytes, sends.passes, machine)
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
        reduce = ring.seconds(parameters * sends.gradient_bytes, sends.passes, machine)
    return RankCosts(tuple(phases), reduce, _optimizer_seconds(job, machine, layout, parameters, ring))


def link(machine: Machine, layout: Candidate) -> Callable[[int, int], Link]:
    """The links of a pipeline; those of its slowest replica where replicas differ."""
    boundaries = grid(machine, layout).boundaries

    def between(source: int, target: int) -> Link:
        crosses = boundaries[min(source, target)].crossing > 0
        bandwidth = machine.network_bandwidth if crosses else machine.link_bandwidth
        return Link(bandwidth, machine.latency_seconds)

    return between


def crossing_seconds(job: Workload, machine: Machine, layout: Candidate) -> float:
    """What an element that crosses a cut, per image, costs a rank on either side, there and back."""
    links = [link(machine, layout)(rank, rank + 1).bytes_per_second for rank in range(layout.stages - 1)]
    return 2 * layout.micro_batch_images * job.stored_bytes / min(links, default=machine.link_bandwidth)


def _optimizer_seconds(job: Workload, machine: Machine, layout: Candidate, parameters: int, ring: Ring) -> float:
    gathered = shared(job, layout).weight_bytes  # where each replica steps its share of the weights
    owned = parameters / layout.replicas if gathered else parameters
    seconds = (
        owned * (ADAM_BYTES + EMA_BYTES) / (machine.host_bandwidth if layout.offload else machine.memory_bandwidth)
    )
    if layout.offload:
        seconds += owned * (4 + job.stored_bytes) / machine.host_bandwidth
    if gathered:
        seconds += ring.seconds(parameters * gathered, 1, machine)
    return seconds
