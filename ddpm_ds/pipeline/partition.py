"""Where the list of layers is cut into stages.

A partition is written as its bounds ``(0, b1, ..., n)``: stage ``s`` owns layers ``bounds[s]`` to
``bounds[s + 1] - 1``. Under ``1f1b`` rank r holds stage r. Under ``folded`` P ranks hold 2P stages, rank r the stages r
and 2P - 1 - r, cut so that every skip is made and used on one rank (:mod:`ddpm_ds.pipeline.fold`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddpm_ds.errors import LayoutError
from ddpm_ds.pipeline import fold
from ddpm_ds.pipeline.chain import Room, lightest_chain, running_sum
from ddpm_ds.unet.layers import Layer, boundary_shapes

PartitionMethod = Literal["flops", "parameters", "uniform"]
Schedule = Literal["1f1b", "folded"]

CROSSING_MACS = 65
"""What an element that crosses a cut costs a rank on either side, there and back, in multiply-accumulates of a forward.

A processor's core computes so many in the time in which it copies the element. An H100 computes 800 while its NVLink
carries it, but its copy engines do that beside other micro-batches."""


def partition(
    layers: Sequence[Layer], stages: int, method: PartitionMethod | Sequence[int], schedule: Schedule = "1f1b"
) -> tuple[int, ...]:
    """Bounds for a pipeline of ``stages`` ranks.

    ``flops`` minimises the slowest rank's layers and transfers exactly, ``parameters`` and ``uniform`` the most
    parameters and layers of a rank; among such partitions the fewest elements cross. A sequence gives the first layer
    of every stage but the first.

    Raises:
        LayoutError: the list can't be cut into so many, or given cuts are not increasing positions inside the list or
            not mirrored, which the fold needs.
    """
    if not isinstance(method, str):
        return _given(layers, stages, method, schedule)
    weights = {
        "flops": [layer.macs for layer in layers],
        "parameters": [layer.parameters for layer in layers],
        "uniform": [1 for _ in layers],
    }[method]
    return weighted(layers, weights, stages, schedule, crossing=CROSSING_MACS if method == "flops" else 0.0)


def weighted(
    layers: Sequence[Layer],
    weights: Sequence[float],
    stages: int,
    schedule: Schedule,
    *,
    crossing: float = 0.0,
    room: Room | None = None,
) -> tuple[int, ...]:
    """Bounds that minimise the heaviest rank's sum of ``weights``, one for each layer, as :func:`partition` does.

    ``crossing`` is the weight that each element which crosses a cut, per image, adds to the ranks on both sides; ranks
    hold no more than ``room``.

    Raises:
        LayoutError: the list can't be cut into so many, or not so that they hold what they have to.
    """
    if schedule == "folded":
        return fold.balanced(layers, weights, stages, crossing, room)
    if stages > len(layers):
        raise LayoutError(
            f"pipeline.stages = {stages}, but the U-Net has {len(layers)} layers; use at most {len(layers)} stages"
        )
    return balanced(weights, stages, [boundary_elements(layers, cut) for cut in range(1, len(layers))], crossing, room)


def _given(layers: Sequence[Layer], stages: int, cuts: Sequence[int], schedule: Schedule) -> tuple[int, ...]:
    count = 2 * stages if schedule == "folded" else stages
    bounds = (0, *(int(cut) for cut in cuts), len(layers))
    if len(bounds) != count + 1 or any(left >= right for left, right in itertools.pairwise(bounds)):
        raise LayoutError(
            f"pipeline.partition = {list(cuts)} does not cut {len(layers)} layers into {count} stages; "
            f"give {count - 1} increasing positions between 1 and {len(layers) - 1}"
        )
    if schedule == "folded":
        fold.check_mirrored(layers, bounds)
    return bounds


def balanced(
    weights: Sequence[float],
    stages: int,
    elements: Sequence[float],
    crossing: float = 0.0,
    room: Room | None = None,
) -> tuple[int, ...]:
    """Contiguous partition whose heaviest part is lightest, and among those the one with the fewest elements crossing.

    ``elements[i]`` cross a cut before item ``i + 1``, and weigh ``crossing`` each in the parts on both sides. Exact.

    Raises:
        LayoutError: no partition leaves every part in the ``room``.
    """
    import numpy as np  # only now: command lines are read without it

    before, cut = running_sum(weights), np.array([0.0, *elements, 0.0])
    parts = before[None, :] - before[:, None] + crossing * (cut[None, :] + cut[:, None])  # [start, stop]
    parts[np.tril_indices(len(before))] = math.inf
    edges = [parts] * stages
    if room is not None:
        sums = [running_sum(room.layer_bytes(rank, 0)) for rank in range(stages)]
        edges = [np.where(held[None, :] - held[:, None] <= room.limit, parts, math.inf) for held in sums]
    chain = lightest_chain(edges, cut.tolist())
    if chain is None:
        raise LayoutError(f"the layers can't be cut into {stages} stages that hold no more than their memory")
    return tuple(chain)


def boundary_elements(layers: Sequence[Layer], cut: int) -> int:
    """Elements per image that cross before layer ``cut`` under 1f1b, in each direction."""
    return sum(math.prod(shape) for shape in boundary_shapes(layers, cut))


def stages_of(rank: int, ranks: int, schedule: Schedule) -> tuple[int, ...]:
    """The stages that a rank holds, in the order in which a micro-batch meets them."""
    return (rank, 2 * ranks - 1 - rank) if schedule == "folded" else (rank,)


def segments(bounds: Sequence[int], schedule: Schedule, rank: int) -> tuple[tuple[int, int], ...]:
    """The layers [start, stop) that a rank owns: one range, or for the fold those of phase 0 and of phase 1."""
    stages = len(bounds) - 1
    ranks = stages // 2 if schedule == "folded" else stages
    return tuple((bounds[stage], bounds[stage + 1]) for stage in stages_of(rank, ranks, schedule))


@dataclass(frozen=True)
class Stage:
    """What one stage holds and sends; one row of the table that ``--dry-run`` prints."""

    index: int
    rank: int
    """Rank in the pipeline that holds it."""
    first_layer: str
    last_layer: str
    layers: int
    parameters: int
    forward_flops: int
    """Per image; a multiply and an add count as two."""
    activation_elements: int
    """Per image, kept from forward to backward without checkpointing."""
    sent_elements: int
    """Per image, to another rank in forward; its gradient comes back in backward."""


def describe(layers: Sequence[Layer], bounds: Sequence[int], schedule: Schedule = "1f1b") -> tuple[Stage, ...]:
    """The stages of a partition, in the order of the layers."""
    count = len(bounds) - 1
    ranks = count // 2 if schedule == "folded" else count
    stages = []
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        own = layers[start:stop]
        stages.append(
            Stage(
                index=index,
                rank=min(index, count - 1 - index) if schedule == "folded" else index,
                first_layer=own[0].name,
                last_layer=own[-1].name,
                layers=len(own),
                parameters=sum(layer.parameters for layer in own),
                forward_flops=2 * sum(layer.macs for layer in own),
                activation_elements=sum(layer.activation_elements for layer in own),
                sent_elements=sum(map(math.prod, sent_shapes(layers, stop, phase=index // ranks, schedule=schedule)))
                if stop < len(layers) and not (schedule == "folded" and index == ranks - 1)
                else 0,
            )
        )
    return tuple(stages)


def sent_shapes(layers: Sequence[Layer], cut: int, *, phase: int, schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Per-image shapes of the tensors that cross before layer ``cut``, in each direction.

    The fold keeps skips, and for its phase 1 the embedding, on their rank: (h, emb) goes down, h alone comes up.
    """
    return boundary_shapes(layers, cut) if schedule == "1f1b" else fold.sent_shapes(layers, cut, phase)
