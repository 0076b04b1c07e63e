"""Where the list of layers is cut into stages.

A partition is written as its bounds ``(0, b1, ..., n)``: stage ``s`` owns layers ``bounds[s]`` to
``bounds[s + 1] - 1``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddpm_ds.errors import LayoutError
from ddpm_ds.unet.layers import Layer, boundary_shapes

PartitionMethod = Literal["flops", "parameters", "uniform"]


def boundary_elements(layers: Sequence[Layer], cut: int) -> int:
    """Elements per image that cross before layer ``cut``, in each direction."""
    return sum(math.prod(shape) for shape in boundary_shapes(layers, cut))


def partition(layers: Sequence[Layer], stages: int, method: PartitionMethod | Sequence[int]) -> tuple[int, ...]:
    """Bounds of ``stages`` stages.

    ``flops`` and ``parameters`` minimise the heaviest stage exactly, and among such partitions the elements that
    cross; ``uniform`` balances the number of layers; a sequence gives the first layer of every stage but the first.

    Raises:
        LayoutError: more stages than layers, or cuts that are not increasing positions inside the list.
    """
    if stages > len(layers):
        raise LayoutError(
            f"pipeline.stages = {stages}, but the U-Net has {len(layers)} layers; use at most {len(layers)} stages"
        )
    if not isinstance(method, str):
        bounds = (0, *(int(cut) for cut in method), len(layers))
        if len(bounds) != stages + 1 or any(left >= right for left, right in itertools.pairwise(bounds)):
            raise LayoutError(
                f"pipeline.partition = {list(method)} does not cut {len(layers)} layers into {stages} stages; "
                f"give {stages - 1} increasing positions between 1 and {len(layers) - 1}"
            )
        return bounds
    weights = {
        "flops": [layer.macs for layer in layers],
        "parameters": [layer.parameters for layer in layers],
        "uniform": [1 for _ in layers],
    }[method]
    return balanced(weights, stages, [boundary_elements(layers, cut) for cut in range(1, len(layers))])


def balanced(weights: Sequence[int], stages: int, crossing: Sequence[int]) -> tuple[int, ...]:
    """Contiguous partition whose heaviest part is lightest, and among those the one with the least crossing.

    ``crossing[i]`` is the price of a cut before item ``i + 1``. Exact dynamic programming, O(stages * n^2).
    """
    n = len(weights)
    before = [0]
    for weight in weights:
        before.append(before[-1] + weight)

    lightest: list[float] = [0.0] + [math.inf] * n  # heaviest part of the best split of the first `stop` items
    for _ in range(stages):
        lightest = [math.inf] + [
            min(max(lightest[start], before[stop] - before[start]) for start in range(stop)) for stop in range(1, n + 1)
        ]
    limit = lightest[n]

    price: list[float] = [0.0] + [math.inf] * n
    choices: list[list[int]] = []
    for _ in range(stages):
        row, choice = [math.inf], [0]
        for stop in range(1, n + 1):
            options = (
                (price[start] + (crossing[start - 1] if start else 0), start)
                for start in range(stop)
                if before[stop] - before[start] <= limit
            )
            best, start = min(options, default=(math.inf, 0))
            row.append(best)
            choice.append(start)
        price = row
        choices.append(choice)

    bounds = [n]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return tuple(reversed(bounds))


@dataclass(frozen=True)
class Stage:
    """What one stage holds and sends; one row of the table that ``--dry-run`` prints."""

    index: int
    first_layer: str
    last_layer: str
    layers: int
    parameters: int
    forward_flops: int
    """Per image; a multiply and an add count as two."""
    activation_elements: int
    """Per image, kept from forward to backward without checkpointing."""
    sent_elements: int
    """Per image, to the next stage in forward; its gradient comes back in backward."""


def describe(layers: Sequence[Layer], bounds: Sequence[int]) -> tuple[Stage, ...]:
    """The stages of a partition."""
    stages = []
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        own = layers[start:stop]
        stages.append(
            Stage(
                index=index,
                first_layer=own[0].name,
                last_layer=own[-1].name,
                layers=len(own),
                parameters=sum(layer.parameters for layer in own),
                forward_flops=2 * sum(layer.macs for layer in own),
                activation_elements=sum(layer.activation_elements for layer in own),
                sent_elements=boundary_elements(layers, stop) if stop < len(layers) else 0,
            )
        )
    return tuple(stages)
