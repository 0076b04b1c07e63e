"""Model of memory: peak bytes of each rank of a pipeline in a step, by part, with images of the largest bucket.

The planner, the advice of a verdict and ``"activation_checkpoint_interval": "auto"`` all use this one model.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ddpm_ds.checkpoint.writer import STAGING_BYTES
from ddpm_ds.pipeline.cuts import Stage, folds
from ddpm_ds.pipeline.messages import pipeline_edges
from ddpm_ds.pipeline.schedule import BACKWARDS, phases_of
from ddpm_ds.planning.inputs import Workload, encoding_ranks, rank_stages
from ddpm_ds.planning.simulate import typical_programs
from ddpm_ds.schema.layout import BUCKET_ELEMENTS, Layout, Schedule
from ddpm_ds.unet.layers import (
    BlockLayer,
    DownsampleLayer,
    EmbedLayer,
    Layer,
    TransformerBlockLayer,
    UpsampleLayer,
    context_elements,
)

ACTIVATION_SHARE = 0.5  # largest share of a device's memory for activations; beyond it "auto" recomputes them
ADAM_INTERMEDIATES = 8
"""Bytes per parameter that PyTorch's Adam needs during its step in addition to its state, unless it is fused."""
EIGHT_BIT_INTERMEDIATES, ROUNDING_INTERMEDIATES = 17, 16
"""Bytes that Adam in 8 bits needs for each element that it steps at a time, and those to round it at random besides."""
COLLECTIVE_BYTES, EDGE_BYTES, SCALAR_BYTES = 1156 * 2**20, 64 * 2**20, 22 * 2**20
"""Bytes of a communicator for collectives, for the messages of an edge, and for scalars, on an H100 (docs/gpu.md)."""
TEXT_BYTES = 2  # bytes of a stored element of an encoded text
FILLING = 4  # micro-batches per rank beyond which the peak no longer grows
_MANY_PARAMETERS = 10**9


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a device, and bytes on its host."""

    weights: int
    gradients: int
    optimizer: int
    """Bytes of Adam's two moments, in fp32 or 8 bits, and of fp32 master weights if the layers have others."""
    ema: int
    activations: int  # bytes of tensors kept for the backward pass, with received messages that are differentiated
    buffers: int  # bytes of messages in flight, gradients being reduced, and workspace of the running layer
    communicators: int = 0  # bytes of NCCL's own buffers
    encoders: int = 0  # bytes of frozen encoders of text, and of what they compute
    host: int = 0  # bytes in host memory: of offloaded state, averages, and the copy that a checkpoint is written from

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes on the device by part."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "host"}


def pipeline_memory(job: Workload, layout: Layout, bounds: Sequence[int]) -> tuple[Memory, ...]:
    """Return the memory of each rank of a pipeline, in the passes or in the optimizer's step, whichever is larger."""
    found, job = [], job.of(layout)
    encoding = encoding_ranks(job.layers, bounds, layout.schedule) if job.encoder_elements else ()
    for rank, keeps in enumerate(_kept(job, layout, bounds)):
        own = rank_stages(job.largest_layers, bounds, layout.schedule)[rank]
        moments = sum(sum(job.moment_bytes[stage.start : stage.stop]) for stage in own)
        chunk = job.chunk_elements(own, layout.zero_stage)
        trained = sum(layer.trained for stage in own for layer in job.layers[stage.start : stage.stop])
        state = _State(job, layout, trained, moments, chunk, sum(stage.parameters for stage in own) - trained)
        first, last = (
            layout.micro_batch_images * (phase.layers + phase.beside) + phase.copies for phase in (keeps[0], keeps[-1])
        )
        skips = layout.micro_batch_images * keeps[0].skips
        activations = max(down * first + up * last + between * skips for down, up, between in _moments(layout, rank))
        text = context_elements(job.largest_layers, *((stage.start, stage.stop) for stage in own))
        # one message in each channel: received ahead of its use, or sent but not delivered
        messages = sum(2 * (stage.sent_elements + stage.received_elements) for stage in own)
        working = max(layout.micro_batch_images * phase.working + phase.working_copies for phase in keeps)
        ahead = TEXT_BYTES * text  # of the micro-batch that is loaded next
        buffers = state.bucket + layout.micro_batch_images * (messages * job.stored_bytes + ahead) + working
        if state.gradients + activations + buffers < state.update:
            activations, buffers = 0, state.update - state.gradients
        communicators = 0 if job.on_cpu else communicator_bytes(layout, rank)
        encoders = job.encoder_elements * (4 if job.on_cpu else 2) if rank in encoding else 0
        own_state = state.weights, state.gradients, state.optimizer, state.ema
        found.append(Memory(*own_state, activations, buffers, communicators, encoders, state.host))
    return tuple(found)


def peak_bytes(job: Workload, layout: Layout, bounds: Sequence[int]) -> int:
    """Return the bytes of the fullest rank."""
    return max(memory.total for memory in pipeline_memory(job, layout, bounds))


def activation_bytes(job: Workload, layout: Layout, bounds: Sequence[int]) -> int:
    """Return the peak bytes of activations on the fullest rank, without messages and copies of skips and weights."""
    images = layout.micro_batch_images
    return images * max(
        down * keeps[0].layers + up * keeps[-1].layers
        for rank, keeps in enumerate(_kept(job, layout, bounds))
        for down, up, _ in _moments(layout, rank)
    )


def communicator_bytes(layout: Layout, rank: int) -> int:
    """Return the bytes of NCCL's communicators on a GPU: of replicas, a tensor group, a whole pipeline, and edges."""
    tensor = layout.tensor.size
    collectives = (layout.data_ranks > 1) + (tensor > 1) + (layout.space.size > 1)
    scalars = layout.stages * tensor > 1
    edges = pipeline_edges(layout.stages, phases_of(layout.schedule))
    own = sum(rank in (edge.source, edge.target) for edge in edges)
    return COLLECTIVE_BYTES * collectives + SCALAR_BYTES * scalars + EDGE_BYTES * own


def layer_bytes(job: Workload, layout: Layout, rank: int, phase: int) -> list[float]:
    """Return about the bytes of each layer on a rank in a phase: its weights' state, and the most activations."""
    job = job.of(layout)
    of_moments = sum(job.moment_bytes) / sum(layer.trained for layer in job.layers)
    state = _State(job, layout, _MANY_PARAMETERS, int(of_moments * _MANY_PARAMETERS), BUCKET_ELEMENTS)
    per_parameter = (state.weights + state.gradients + state.optimizer + state.ema) / _MANY_PARAMETERS
    images = layout.micro_batch_images * max(_moments(layout, rank), key=lambda moment: moment[0] + moment[1])[phase]

    def kept(layer: Layer) -> float:
        if layout.interval:
            return job.stored_bytes * math.prod(layer.output_shape) / layout.interval
        return job.arithmetic_bytes * layer.activation_elements

    frozen = (job.stored_bytes * (layer.parameters - layer.trained) for layer in job.largest_layers)
    return [
        per_parameter * layer.trained + own + images * kept(layer) * layer.reached
        for layer, own in zip(job.largest_layers, frozen, strict=True)
    ]


class _State:
    """Bytes of a rank's weights, gradients and optimizer.

    ``moments`` are Adam's for the ``parameters`` that it trains, ``chunk`` the elements that travel between replicas at
    once, and ``frozen`` other parameters.
    """

    def __init__(
        self, job: Workload, layout: Layout, parameters: int, moments: int, chunk: int, frozen: int = 0
    ) -> None:
        stored, zero = job.stored_bytes, layout.zero_stage
        partitioned = zero > 0 or job.precision == "bf16"
        owned, moments = (-(-each // layout.data_ranks) if partitioned else each for each in (parameters, moments))
        rounds = job.config.rounds
        masters = 0 if (zero == 0 and job.precision == "fp32") or rounds else 4
        stepped = stored if rounds else 4
        self.weights, self.optimizer = (parameters + frozen) * stored, masters * owned + moments
        self.ema = 4 * owned
        kept = -(-frozen // (layout.data_ranks if partitioned else 1))
        saved = stepped * owned + moments + self.ema + (4 + stepped) * kept
        self.host = saved + (0 if job.on_cpu or layout.offload else 2 * min(STAGING_BYTES, saved))
        self.host += 4 * kept if stored < stepped else 0  # frozen weights in fp32
        if job.spec.ema.on_host and not layout.offload:  # beside the weights that were copied last
            self.ema, self.host = 0, self.host + self.ema + stepped * owned
        wide = job.config.adds_in_fp32(zero, layout.micro_batches)
        summed = 4 if wide else stored  # bytes of an element while it is added up
        self.gradients = (owned if zero == 2 else parameters) * summed
        self._intermediates = 0 if job.is_fused else ADAM_INTERMEDIATES * owned
        if job.config.is_8bit:
            each = EIGHT_BIT_INTERMEDIATES + ROUNDING_INTERMEDIATES * rounds
            self._intermediates = each * min(BUCKET_ELEMENTS, owned)
        # self.bucket: bytes of gradients on their way to the sum
        # self.update: bytes of gradients and their reduction or Adam's step, without activations
        elements = min(chunk if partitioned else BUCKET_ELEMENTS, parameters)
        if not partitioned:
            self.bucket = 0
            averaged = elements * stored if layout.data_ranks > 1 else 0
            masters = 4 * parameters if job.precision == "fp16" and not job.config.is_8bit else 0
            # a CPU steps one tensor after the other
            intermediates = 0 if job.on_cpu and not job.config.is_8bit else self._intermediates
            self.update = self.gradients + max(averaged, masters + intermediates)
        else:
            several = layout.data_ranks > 1
            packed = elements * stored if summed != stored and (zero < 2 or not several) else 0
            # two chunks on their way, if they have memory of their own; gloo receives others beside each
            scratch = packed + 2 * elements * stored * (several and (zero == 2 or summed != stored))
            received = 2 * elements * stored * (several and job.on_cpu)
            self.bucket = elements * stored + scratch + received
            if zero < 2 and received:  # all that are under way at the end of the passes
                received = parameters * stored
            own = owned * summed if several and zero < 2 else 0  # average of the own part, beside the sum
            if several and (stored != 4 or layout.offload):
                self.weights += owned * stored  # that the others gather
            widened = 0 if summed == 4 or job.config.is_8bit else 4 * owned
            stays = job.precision == "bf16" and (zero == 0 or (zero == 1 and wide))  # the sum of BF16_Optimizer
            left = self.gradients if stays and (own or widened) else 0
            widening = (left if own else 0) + (own or self.gradients) + widened
            stepping = left + (widened or own or self.gradients) + self._intermediates
            if layout.offload:  # the gradient in 16 bits, in fp32 a bucket at a time, and the stepped weights
                self.host += self.optimizer + self.ema + owned * (4 + 2 * stored)
                self.optimizer = self.ema = 0
                widening = stepping = (own or self.gradients) + 4 * min(elements, owned)
            self.update = max(self.gradients + own + received, widening, stepping) + scratch


@dataclass(frozen=True)
class Kept:
    """Bytes that a phase keeps for a micro-batch from its forward to its backward, and needs while it runs.

    All are per image, except fp32 copies of half-precision weights that autograd keeps on a CPU.
    """

    layers: int  # bytes of activations that layers keep
    beside: int
    """Bytes of the received message, of checkpointed tensors, of skips that are kept in addition to copies, and in
    phase 0 of the encoded text that the rank reads."""
    copies: int
    skips: int  # bytes of skips that phase 0 of a fold makes, whose gradients are kept between the phases' backwards
    working: int  # additional bytes of inputs and gradients while a layer, or a recomputed group, runs
    working_copies: int


def _kept(job: Workload, layout: Layout, bounds: Sequence[int]) -> tuple[tuple[Kept, ...], ...]:
    sizes, job = (job.arithmetic_bytes, job.stored_bytes), job.of(layout)
    return _kept_by_rank(job.largest_layers, bounds, layout.schedule, layout.interval, *sizes)


@functools.lru_cache(maxsize=4096)
def _kept_by_rank(
    layers: Sequence[Layer], bounds: Sequence[int], schedule: Schedule, interval: int, wide: int, stored: int
) -> tuple[tuple[Kept, ...], ...]:
    found = []
    for own in rank_stages(layers, bounds, schedule):
        first, *rest = (
            kept(layers, stage, interval, wide, stored, holds_skips=folds(schedule) and phase == 0)
            for phase, stage in enumerate(own)
        )
        text = wide * context_elements(layers, *((stage.start, stage.stop) for stage in own))
        found.append((replace(first, beside=first.beside + text), *rest))
    return tuple(found)


def kept(layers: Sequence[Layer], stage: Stage, interval: int, wide: int, stored: int, *, holds_skips: bool) -> Kept:
    """Return the bytes of a stage that autograd, checkpoints of ``interval`` layers (0: none) and the fold keep.

    ``wide`` and ``stored`` are the bytes of an element in arithmetic and of a weight; ``holds_skips`` says whether
    skips stay on the rank, as in phase 0 of a fold.
    """
    places = range(stage.start, stage.stop)
    sizes = {place: math.prod(layers[place].output_shape) for place in places}
    skips = {place for place in places if layers[place].pushes and holds_skips}
    skip_elements = sum(sizes[skip] for skip in skips)
    begin = next((place for place in places if layers[place].reached), stage.stop)  # before, no backward comes
    copied = 4 if wide > stored else 0  # bytes of a weight's copy
    if not interval:
        whole, weights = layers[begin : stage.stop], 0
        tensors = {skip for skip in skips if copied or _copies_its_input(layers[skip + 1])}
        working = wide * _beyond_kept(whole)
    else:
        first = max(begin, 1)  # the first layer, which makes emb, is never computed again
        groups = [range(start, min(start + interval, stage.stop)) for start in range(first, stage.stop, interval)]
        tensors = {group[0] - 1 for group in groups[1:]} | skips
        for group in groups:
            tensors |= {skip for skip in _popped(layers, group.start, group.stop) if stage.start <= skip < group.start}
        whole, working, weights = layers[: begin == 0], 0 if groups else wide * _working_elements(layers[0]), 0
        for group in groups:
            own = layers[group.start : group.stop]
            running = sum(layer.activation_elements for layer in own) + max(map(_working_elements, own))
            freed = sum(sizes[tensor] for tensor in tensors if tensor >= group.start)  # the backward has been there
            working = max(working, wide * running - stored * freed)
            weights = max(weights, sum(layer.parameters for layer in own))
    # weights that read inputs need no copy, since inputs need no gradient
    reading = sum(one.embedding_channels * sum(one.embedded.values()) for one in whole if isinstance(one, EmbedLayer))
    return Kept(
        layers=wide * sum(layer.activation_elements for layer in whole),
        beside=stored * (sum(sizes[tensor] for tensor in tensors) + stage.received_elements),
        copies=copied * (sum(layer.parameters for layer in whole) - reading),
        skips=stored * skip_elements,
        working=working,
        working_copies=copied * weights,
    )


@functools.lru_cache(maxsize=65536)
def moments(
    schedule: Schedule, micro_batches: int, ranks: int, rank: int, most_kept: int = 0
) -> tuple[tuple[int, int, int], ...]:
    """Return the candidate peaks of a rank's step, as (micro-batches of phase 0, of phase 1, between their backwards).

    No entry is dominated by another. ``most_kept`` is as in :class:`Layout`.
    """
    kept, between = [0, 0], 0
    seen: set[tuple[int, int, int]] = set()
    for name, phase, numbers in typical_programs(schedule, micro_batches, ranks, most_kept)[rank]:
        if name == "ForwardPass":
            kept[phase] += 1
        elif name in ("BackwardPass", "WeightGradients"):  # until then input and output gradient of a layer are kept
            kept[phase] -= len(numbers)
        if name in BACKWARDS and folds(schedule):
            between += 1 if phase else -1
        seen.add((kept[0], kept[1], between))
    return tuple(
        moment
        for moment in seen
        if not any(moment != other and all(a <= b for a, b in zip(moment, other, strict=True)) for other in seen)
    )


def _moments(layout: Layout, rank: int) -> Sequence[tuple[int, int, int]]:
    count = min(layout.micro_batches, FILLING * layout.stages)
    return moments(layout.schedule, count, layout.stages, rank, layout.most_kept)


@functools.lru_cache(maxsize=65536)
def _popped(layers: Sequence[Layer], start: int, stop: int) -> frozenset[int]:
    """Return the layers whose outputs are popped between ``start`` and ``stop``, as skips or residuals."""
    alive: list[int] = []
    popped = set()
    for index, layer in enumerate(layers[:stop]):
        if layer.skip_channels or layer.closes:
            skip = alive.pop()
            if index >= start:
                popped.add(skip)
        if layer.opens:
            alive.append(index - 1)
        if layer.pushes:
            alive.append(index)
    return frozenset(popped)


def _copies_its_input(layer: Layer) -> bool:
    padded = isinstance(layer, DownsampleLayer) and layer.asymmetric
    return padded or (isinstance(layer, BlockLayer) and layer.skip_channels > 0) or isinstance(layer, UpsampleLayer)


def _beyond_kept(layers: Sequence[Layer]) -> int:
    """Return the most elements that a running layer needs beyond all activations, which a backward frees in turn."""
    beyond = after = 0
    for layer in reversed(layers):
        beyond = max(beyond, _working_elements(layer) - after)
        after += layer.activation_elements
    return beyond


def _working_elements(layer: Layer) -> int:
    """Return the elements of a layer's input, output and gradients; a transformer block's gated network has eight times
    as many. A tensor group sums a copy of the input's gradient.
    """
    width = layer.in_channels + layer.skip_channels
    summed = width * math.prod(layer.in_size) if layer.sums else 0
    if isinstance(layer, TransformerBlockLayer):
        return (4 + 8 // layer.shards) * width * layer.pixels + summed
    return 2 * width * math.prod(layer.in_size) + 2 * math.prod(layer.output_shape) + summed
