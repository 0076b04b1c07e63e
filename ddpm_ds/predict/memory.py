"""Whether activations fit, which decides if recomputing them is worth its time.

What a rank holds in its fullest moment, by part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ddpm_ds.pipeline.cuts import Schedule, Stage, stages_of
from ddpm_ds.pipeline.order import pipeline_edges
from ddpm_ds.pipeline.schedule import held_micro_batches
from ddpm_ds.predict.layouts import Candidate
from ddpm_ds.predict.stages import Kept, Segment, moments
from ddpm_ds.predict.workload import Workload

ACTIVATION_SHARE = 0.5
"""Share of a device's memory that activations may take; beyond it they are recomputed."""


def activation_bytes(
    stages: Sequence[Stage], schedule: Schedule, micro_batch_images: int, micro_batches: int, element_bytes: int
) -> int:
    """Bytes of activations on the fullest rank without checkpointing, at the fullest moment of its schedule."""
    ranks = 1 + max(stage.rank for stage in stages)
    most = 0
    for rank in range(ranks):
        elements = [stages[index].activation_elements for index in stages_of(rank, ranks, schedule)]
        moments = held_micro_batches(schedule, micro_batches=micro_batches, ranks=ranks, rank=rank)
        most = max(most, *(sum(count * size for count, size in zip(held, elements, strict=True)) for held in moments))
    return most * micro_batch_images * element_bytes


def checkpoint_interval(
    stages: Sequence[Stage],
    schedule: Schedule,
    *,
    micro_batch_images: int,
    micro_batches: int,
    element_bytes: int,
    device_bytes: int,
) -> int:
    """What ``"activation_checkpoint_interval": "auto"`` means: 0 where activations fit, else 1."""
    needed = activation_bytes(stages, schedule, micro_batch_images, micro_batches, element_bytes)
    return 0 if needed <= ACTIVATION_SHARE * device_bytes else 1


STOCK_BUCKET_ELEMENTS = 500_000_000
"""Gradients that DeepSpeed reduces at a time without ZeRO."""

ADAM_INTERMEDIATES = 8
"""Bytes for a parameter that PyTorch's Adam needs beside its state while it steps."""
_MANY_PARAMETERS = 10**9
COLLECTIVE_BYTES, EDGE_BYTES = 1156 * 2**20, 64 * 2**20
"""Bytes of a communicator for collectives, and of one for the messages of an edge, on an H100 (docs/gpu.md)."""
FILLING = 4
"""Micro-batches per rank after which more of them add no fuller moment."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, and beside it on its host."""

    weights: int
    gradients: int
    optimizer: int
    """fp32 weights, where they are beside the layers' own, and Adam's two moments."""
    ema: int
    activations: int
    """Kept for backward, with what was received and is differentiated."""
    buffers: int
    """Messages on their way, gradients being reduced, what the running layer has at hand."""
    communicators: int = 0
    """NCCL's own buffers."""
    host: int = 0
    """On the host, with offload."""

    @property
    def total(self) -> int:
        """Of the device."""
        return sum(getattr(self, part.name) for part in fields(self) if part.name != "host")


def rank_memory(
    job: Workload, layout: Candidate, rank: int, segments: Sequence[Segment], keeps: Sequence[Kept], *, on_cpu: bool
) -> Memory:
    """The fuller of two moments: in the passes, with activations; and in the optimizer's step, without."""
    parameters = sum(segment.parameters for segment in segments)
    state = _State(job, layout, parameters, on_cpu)
    activations = _activation_bytes(job, layout, rank, segments, keeps, on_cpu)
    buffers = state.bucket + _message_bytes(job, layout, segments) + _working_bytes(job, layout, keeps, on_cpu)
    if state.gradients + activations + buffers < state.update:
        activations, buffers = 0, state.update - state.gradients
    nccl = 0 if on_cpu else communicator_bytes(layout, rank)
    return Memory(state.weights, state.gradients, state.optimizer, state.ema, activations, buffers, nccl, state.host)


def communicator_bytes(layout: Candidate, rank: int) -> int:
    """Bytes that NCCL takes on a GPU: for the whole job, a stage's replicas, a pipeline's ranks, and each edge."""
    groups = (layout.stages * layout.replicas, layout.replicas, layout.stages)
    edges = pipeline_edges(layout.stages, 2 if layout.schedule == "folded" else 1)
    own = sum(rank in (edge.source, edge.target) for edge in edges)
    return COLLECTIVE_BYTES * sum(members > 1 for members in groups) + EDGE_BYTES * own


def layer_bytes(job: Workload, layout: Candidate, rank: int, phase: int, on_cpu: bool) -> list[float]:
    """About what each layer would take on a rank in a phase: its weights with all that goes with them, and activations.

    Of the rank's moments that counts in which it holds the most micro-batches.
    """
    state = _State(job, layout, _MANY_PARAMETERS, on_cpu)
    per_parameter = (state.weights + state.gradients + state.optimizer + state.ema) / _MANY_PARAMETERS
    held = max(_moments(layout, rank), key=lambda moment: moment[0] + moment[1])[phase]
    wide = layout.micro_batch_images * job.arithmetic_bytes(on_cpu)
    stored = layout.micro_batch_images * job.stored_bytes
    return [
        per_parameter * layer.parameters
        + held
        * (
            stored * math.prod(layer.output_shape) / layout.checkpoint_interval
            if layout.checkpoint_interval
            else wide * layer.activation_elements
        )
        for layer in job.layers
    ]


class _State:
    """Weights, gradients and optimizer of a rank, which do not depend on images.

    ``update`` is what gradients and their reduction or Adam's step take when no activations are there.
    """

    def __init__(self, job: Workload, layout: Candidate, parameters: int, on_cpu: bool) -> None:
        stored, zero = job.stored_bytes, layout.zero_stage
        partitioned = zero > 0 or job.precision == "bf16"
        owned = -(-parameters // layout.replicas) if partitioned else parameters
        masters = 0 if zero == 0 and job.precision == "fp32" else 4
        optimizer, ema = (masters + 8) * owned, 4 * owned
        bucket = job.bucket_elements * stored if zero else 0
        if on_cpu:  # where memory that is not touched is not there
            bucket = min(bucket, parameters * stored)
        self.weights = parameters * stored
        self.host = 0
        self.bucket = bucket
        again = 0  # in ZeRO-2 a micro-batch's gradients, which are added to those before when activations are gone
        if zero == 2:
            self.gradients = owned * job.accumulated_bytes
            again = owned * stored if layout.micro_batches > 1 else 0
        elif zero == 1:
            self.gradients = parameters * job.accumulated_bytes
        else:
            # BF16_Optimizer adds up in fp32 what the backward leaves in bf16
            self.gradients = parameters * (stored + 4 if job.precision == "bf16" else stored)
        if layout.offload:
            self.host = optimizer + ema + owned * (4 + 2 * stored)
            optimizer = ema = 0
            self.gradients = 0 if zero == 2 else self.gradients
            self.update = self.gradients + bucket + owned * stored
        elif zero:
            reducing = self.gradients + bucket + max(again, owned * stored if zero == 1 else 0)
            self.update = max(reducing, (4 + ADAM_INTERMEDIATES) * owned)  # the gradients have become fp32 ones
        else:
            flat = min(parameters, STOCK_BUCKET_ELEMENTS) * stored if layout.replicas > 1 else 0
            wide = 4 * parameters if job.precision == "fp16" else 0
            intermediates = 0 if on_cpu else ADAM_INTERMEDIATES * owned  # a CPU steps one tensor after the other
            self.update = self.gradients + max(flat, wide + intermediates)
        self.optimizer, self.ema = optimizer, ema


def _activation_bytes(
    job: Workload, layout: Candidate, rank: int, segments: Sequence[Segment], keeps: Sequence[Kept], on_cpu: bool
) -> int:
    images, stored, wide = layout.micro_batch_images, job.stored_bytes, job.arithmetic_bytes(on_cpu)
    widens = wide > stored
    sizes = [0, 0]
    for phase, (segment, own) in enumerate(zip(segments, keeps, strict=True)):
        skips = own.skip_elements if widens and not layout.checkpoint_interval else 0
        narrow = max(own.stored_elements, skips) + segment.received_elements
        sizes[phase] = images * (wide * own.wide_elements + stored * narrow)
        sizes[phase] += 4 * own.widened_parameters if widens else 0
    waiting = images * stored * keeps[0].skip_elements
    return max(down * sizes[0] + up * sizes[1] + between * waiting for down, up, between in _moments(layout, rank))


def _moments(layout: Candidate, rank: int) -> Sequence[tuple[int, int, int]]:
    return moments(layout.schedule, min(layout.micro_batches, FILLING * layout.stages), layout.stages, rank)


def _working_bytes(job: Workload, layout: Candidate, keeps: Sequence[Kept], on_cpu: bool) -> int:
    wide = job.arithmetic_bytes(on_cpu)
    widens = wide > job.stored_bytes
    return max(
        layout.micro_batch_images * wide * (own.working_elements + own.recomputed_elements)
        + (4 * own.recomputed_parameters if widens else 0)
        for own in keeps
    )


def _message_bytes(job: Workload, layout: Candidate, segments: Sequence[Segment]) -> int:
    """In each channel one message: received ahead of its use, or sent and not delivered."""
    elements = sum(2 * (segment.sent_elements + segment.received_elements) for segment in segments)
    return elements * layout.micro_batch_images * job.stored_bytes
