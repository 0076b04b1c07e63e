"""What a rank holds of the U-Net under a schedule, by phase, and what its activations and messages weigh."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddpm_ds.pipeline.cuts import Schedule, segments, sent_shapes
from ddpm_ds.pipeline.schedule import program
from ddpm_ds.unet.layers import BlockLayer, DownsampleLayer, Layer, UpsampleLayer


@dataclass(frozen=True)
class Segment:
    """A rank's layers of one phase; elements are per image."""

    start: int
    stop: int
    parameters: int
    sent_elements: int
    """In a message to the next rank, and in one of gradients that comes back."""
    received_elements: int
    """The same from the rank before."""


@dataclass(frozen=True)
class Kept:
    """What a phase keeps of one micro-batch between its forward and its backward, and needs while it runs."""

    wide_elements: int
    """Per image, in the arithmetic's dtype."""
    stored_elements: int
    """Per image, in the dtype of the weights."""
    widened_parameters: int
    """Weights of which a CPU's autograd keeps an fp32 copy in fp16."""
    skip_elements: int
    """Per image: the skips that phase 0 of a fold makes, whose gradients wait between the backwards of the phases."""
    recomputed_elements: int
    """Per image, in the arithmetic's dtype: the largest group of layers that is computed again."""
    recomputed_parameters: int
    """The largest group's, as ``widened_parameters``."""
    working_elements: int
    """Per image, in the arithmetic's dtype: inputs and gradients that a layer has at hand beside what is kept."""


def rank_segments(layers: Sequence[Layer], bounds: Sequence[int], schedule: Schedule, rank: int) -> tuple[Segment, ...]:
    """The phases of a rank: one under 1F1B, two in the fold."""
    stages = len(bounds) - 1
    ranks = stages // 2 if schedule == "folded" else stages

    def elements(cut: int, phase: int) -> int:
        turn = schedule == "folded" and cut == bounds[ranks]
        if cut in (0, len(layers)) or turn:
            return 0
        return sum(map(math.prod, sent_shapes(layers, cut, phase=phase, schedule=schedule)))

    return tuple(
        Segment(
            start,
            stop,
            sum(layer.parameters for layer in layers[start:stop]),
            sent_elements=elements(stop, phase),
            received_elements=elements(start, phase),
        )
        for phase, (start, stop) in enumerate(segments(bounds, schedule, rank))
    )


def kept(layers: Sequence[Layer], segment: Segment, schedule: Schedule, phase: int, interval: int) -> Kept:
    """What autograd, checkpoints of ``interval`` layers (0: none) and the fold keep of a segment."""
    own = layers[segment.start : segment.stop]
    holds_skips = schedule == "folded" and phase == 0
    skips = {segment.start + place for place, layer in enumerate(own) if layer.pushes and holds_skips}
    sizes = {segment.start + place: math.prod(layer.output_shape) for place, layer in enumerate(own)}
    if not interval:
        return Kept(
            wide_elements=sum(layer.activation_elements for layer in own),
            stored_elements=sum(sizes[skip] for skip in skips if _copies_its_input(layers[skip + 1])),
            widened_parameters=segment.parameters,
            skip_elements=sum(sizes[skip] for skip in skips),
            recomputed_elements=0,
            recomputed_parameters=0,
            working_elements=_beyond_kept(own),
        )
    first = max(segment.start, 1)  # the first layer, which makes emb, is never computed again
    groups = [(start, min(start + interval, segment.stop)) for start in range(first, segment.stop, interval)]
    tensors = {start - 1 for start, _ in groups if start > first} | skips
    for start, stop in groups:
        tensors |= {skip for skip in _popped(layers, start, stop) if segment.start <= skip < start}
    embed = layers[0].activation_elements if segment.start == 0 else 0
    return Kept(
        wide_elements=embed,
        stored_elements=sum(sizes[tensor] for tensor in tensors),
        widened_parameters=layers[0].parameters if segment.start == 0 else 0,
        skip_elements=sum(sizes[skip] for skip in skips),
        recomputed_elements=max(
            (sum(layer.activation_elements for layer in layers[start:stop]) for start, stop in groups), default=0
        ),
        recomputed_parameters=max(
            (sum(layer.parameters for layer in layers[start:stop]) for start, stop in groups), default=0
        ),
        working_elements=max(_working_elements(layer) for layer in own),
    )


@functools.lru_cache(maxsize=65536)
def moments(schedule: Schedule, micro_batches: int, ranks: int, rank: int) -> tuple[tuple[int, int, int], ...]:
    """The fullest moments of a rank's step, as (micro-batches held by phase 0, by phase 1, between their backwards).

    None of them is below another in all three.
    """
    held = [0, 0]
    between = 0
    seen: set[tuple[int, int, int]] = set()
    for step in program(schedule, micro_batches, ranks, rank):
        if step.instruction == "ForwardPass":
            held[step.phase] += 1
        elif step.instruction == "BackwardPass":
            held[step.phase] -= 1
            if schedule == "folded":
                between += 1 if step.phase else -1
        seen.add((held[0], held[1], between))
    return tuple(
        moment
        for moment in seen
        if not any(moment != other and all(a <= b for a, b in zip(moment, other, strict=True)) for other in seen)
    )


@functools.lru_cache(maxsize=65536)
def _popped(layers: Sequence[Layer], start: int, stop: int) -> frozenset[int]:
    """The layers whose skips are popped between ``start`` and ``stop``."""
    alive: list[int] = []
    popped = set()
    for index, layer in enumerate(layers[:stop]):
        if layer.skip_channels:
            skip = alive.pop()
            if index >= start:
                popped.add(skip)
        if layer.pushes:
            alive.append(index)
    return frozenset(popped)


def _copies_its_input(layer: Layer) -> bool:
    """Whether autograd keeps a padded, enlarged or joined copy of h instead of h."""
    match layer:
        case DownsampleLayer():
            return layer.asymmetric
        case BlockLayer():
            return layer.skip_channels > 0
    return isinstance(layer, UpsampleLayer)


def _beyond_kept(layers: Sequence[Layer]) -> int:
    """What running layers add to the activations of all: a backward frees those of one layer before the next."""
    beyond = after = 0
    for layer in reversed(layers):
        beyond = max(beyond, _working_elements(layer) - after)
        after += layer.activation_elements
    return beyond


def _working_elements(layer: Layer) -> int:
    """A layer's input with its gradient, and its output's gradient with one more like it."""
    width = layer.in_channels + layer.skip_channels
    return 2 * width * layer.in_resolution**2 + 2 * math.prod(layer.output_shape)
