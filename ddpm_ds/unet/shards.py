"""Layers whose weights are split among the ranks of a tensor group, and a rank's part of a weight.

A residual block is split by channels, attention by heads, a transformer block by heads and by the width of its gated
network. Each rank computes its part from the whole input, and the parts are summed to the whole output, so that all
ranks of the group have the same carry between layers.

The ranks of a space group have whole weights, and share the rows of the carry instead (:mod:`ddpm_ds.unet.space`). The
lowest level that they share is divided as evenly as possible, and finer levels have twice its rows, so that rows of a
level are above the rows of the next::

    6 rows of level 2       rank 0  0         rank 1  1 2         rank 2  3         rank 3  4 5
    12 rows of level 1              0 1               2 3 4 5             6 7               8 9 10 11

Does not import torch.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ddpm_ds.ground.errors import DsConfigError
from ddpm_ds.ground.units import counted
from ddpm_ds.schema.layout import Layout, SpaceSplit, TensorSplit, divisors
from ddpm_ds.schema.section import shown
from ddpm_ds.unet.layers import (
    AttentionLayer,
    BlockLayer,
    DownsampleLayer,
    EmbedLayer,
    InputLayer,
    Layer,
    OutputLayer,
    Parameter,
    Rows,
    Split,
    TransformerBlockLayer,
    TransformerInputLayer,
    UpsampleLayer,
    exchanges_heads,
)


class Shard(NamedTuple):
    """A rank's part of a flattened parameter: run number ``rank`` in every ``ranks`` runs of ``run`` elements."""

    rank: int
    ranks: int
    run: int

    @classmethod
    def of(cls, parameter: Parameter, rank: int, ranks: int) -> Shard | None:
        """Return a rank's part of a parameter of a split layer; None if each rank has all of it."""
        spread = parameter.spread
        if not isinstance(spread, Split):
            return None
        return cls(rank, ranks, math.prod(parameter.shape[spread.dimension :]) // spread.blocks // ranks)


class Sums(NamedTuple):
    """Number of sums over a tensor group, and their elements per image."""

    number: int
    elements: int


def level_of(layer: Layer, levels: int) -> int:
    """Return a layer's level in a U-Net of so many ``levels``, 0 at full size; the middle belongs to the last."""
    side, *rest = layer.name.split(".")
    if side in ("down", "up"):
        return int(rest[0])
    return levels - 1 if side == "middle" else 0


def split_layers(layers: Sequence[Layer], tensor: TensorSplit) -> tuple[Layer, ...]:
    """Return the layers; layers that ``tensor`` asks for are split if their groups or heads divide."""
    split = [is_asked(layer, layers, tensor) and can_split(layer, tensor.size) for layer in layers]
    return tuple(replace(one, shards=tensor.size) if asked else one for one, asked in zip(layers, split, strict=True))


def whole_layers(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return the layers unsplit, with all rows of the image, so that they count the whole U-Net."""
    return tuple(replace(_with_rows(layer, Rows()), shards=1) for layer in layers)


EVEN_SHARE, MOST_SHARE = 1.1, 1.5
"""Largest part of the rows that one rank may have, in equal shares: on levels that are shared unasked; at all."""


def rows_by_rank(height: int, ranks: int) -> tuple[int, ...]:
    """Return the rows of each rank, as evenly as possible."""
    return tuple((rank + 1) * height // ranks - rank * height // ranks for rank in range(ranks))


def busiest_share(height: int, ranks: int) -> float:
    """Return the rows of the busiest rank in equal shares; infinite if some rank has none."""
    return -(-height // ranks) * ranks / height if height >= ranks else math.inf


def lowest_shared(height: int, levels: int, space: SpaceSplit) -> int:
    """Return the lowest of so many ``levels`` whose rows a space group shares, for images of a ``height``."""
    if space.levels != "auto":
        return max(space.levels)
    even = [level for level in range(levels) if busiest_share(height >> level, space.size) <= EVEN_SHARE]
    return max(even, default=0)


def row_layers(layers: Sequence[Layer], space: SpaceSplit) -> tuple[Layer, ...]:
    """Return whole layers as the busiest rank of a space group has them: with most rows, then with two neighbours."""
    if space.size == 1:
        return tuple(layers)
    levels, height = 1 + max(level_of(layer, 0) for layer in layers), layers[0].in_size[0]
    lowest = lowest_shared(height, levels, space)
    own = rows_by_rank(height >> lowest, space.size)
    shared = {height >> level: tuple(rows << lowest - level for rows in own) for level in range(lowest + 1)}
    busiest = max(range(space.size), key=lambda rank: (own[rank], 0 < rank < space.size - 1))
    return tuple(
        _with_rows(one, Rows(shared.get(one.in_size[0], ()), shared.get(one.out_size[0], ()), busiest))
        for one in layers
    )


def layers_of_rank(layers: Sequence[Layer], rank: int) -> tuple[Layer, ...]:
    """Return the layers as another rank of their space group has them."""
    return tuple(_with_rows(layer, replace(layer.rows, rank=rank)) for layer in layers)


def _with_rows(layer: Layer, rows: Rows) -> Layer:
    """Return a layer with the sizes that it has on the rank of some ``rows``; without rows, of the whole image."""

    def size(size: tuple[int, int], before: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, int]:
        return (now[rows.rank] if now else sum(before) or size[0]), size[1]

    arriving = size(layer.in_size, layer.rows.arriving, rows.arriving)
    leaving = size(layer.out_size, layer.rows.leaving, rows.leaving)
    return replace(layer, rows=rows, in_size=arriving, out_size=leaving)


class Swaps(NamedTuple):
    """Swaps of a rank with its space group, and what it sends in them for an image."""

    number: int = 0
    elements: int = 0
    """Elements of activations, or of their gradients."""
    statistics: int = 0
    """Numbers of 4 bytes, for every other rank."""
    rows: int = 0
    """Part of the elements that goes to neighbours only."""

    def size(self, width: int) -> int:
        """Return the bytes, with ``width`` for an element."""
        return self.elements * width + self.statistics * 4

    def __add__(self, other: Swaps) -> Swaps:  # type: ignore[override]
        return Swaps(*(one + two for one, two in zip(self, other, strict=True)))


def swaps_of(layers: Sequence[Layer], interval: int) -> tuple[Swaps, Swaps]:
    """Return the swaps of the forward and of the backward of a stage with these ``layers``.

    A backward repeats the forward's swaps, if groups of ``interval`` layers (0: none) are recomputed. The image needs
    no gradient, so a stage with the first layer gives none back.
    """
    forward = backward = Swaps()
    for layer, before in zip(layers, (None, *layers), strict=False):
        for there, back in layer_swaps(layer):
            forward += there
            if not isinstance(before, EmbedLayer) and layer.reached:
                backward += back
            if interval and layer.reached:
                backward += there
    return forward, backward


def layer_swaps(layer: Layer) -> Iterator[tuple[Swaps, Swaps]]:
    """Yield the swaps of a layer's forward, each with that of its gradient."""
    rows, width = layer.rows, layer.in_size[1]
    ranks = len(rows.arriving)
    if not ranks:  # each rank has the whole input
        return
    down, up = rows.rank < ranks - 1, rows.rank > 0
    own = layer.in_size[0] * width
    others = sum(rows.arriving) * width - own
    groups = getattr(layer, "groups", 0)

    def beside(rows: int, statistics: int = 0) -> Swaps:
        return Swaps(1, rows, statistics, rows)

    def normalised(channels: int) -> Swaps:
        return beside(channels * width * (up + down), 2 * groups * (ranks - 1))

    match layer:
        case InputLayer() | UpsampleLayer():
            yield (beside(layer.in_channels * width * (up + down)),) * 2
        case DownsampleLayer() if rows.leaving:
            first, last = (up, down) if layer.asymmetric else (down, up)
            yield beside(layer.in_channels * width * first), beside(layer.in_channels * width * last)
        case DownsampleLayer():
            yield Swaps(1, layer.in_channels * own * (ranks - 1)), Swaps(1, layer.in_channels * others)
        case BlockLayer():
            yield (normalised(layer.width),) * 2
            yield (normalised(layer.out_channels),) * 2
        case OutputLayer():
            yield (normalised(layer.in_channels),) * 2
        case AttentionLayer() | TransformerInputLayer():
            yield (normalised(0),) * 2
    if isinstance(layer, AttentionLayer | TransformerBlockLayer):
        if exchanges_heads(layer.heads, ranks):
            each = layer.in_channels // ranks
            yield Swaps(1, 3 * each * own * (ranks - 1)), Swaps(1, 3 * each * others)
            yield Swaps(1, each * others), Swaps(1, each * own * (ranks - 1))
        else:
            yield Swaps(1, 2 * layer.in_channels * own * (ranks - 1)), Swaps(1, 2 * layer.in_channels * others)


def rows_fault(layers: Sequence[Layer], space: SpaceSplit, sizes: Sequence[int]) -> tuple[str, list[int]] | None:
    """Return why a space group can't share the rows of layers, and which of some ``sizes`` can; None if it can."""
    height, levels = layers[0].in_size[0], 1 + max(level_of(layer, 0) for layer in layers)
    lowest = lowest_shared(height, levels, space)
    rows = height >> lowest
    if space.size == 1 or (share := busiest_share(rows, space.size)) <= MOST_SHARE:
        return None
    able = [size for size in sizes if busiest_share(rows, size) <= MOST_SHARE]
    why = f"has {counted(rows, 'row')}" if math.isinf(share) else f"gives one rank {share:.2f} shares of {rows} rows"
    which = ", ".join(map(str, able))
    return f"level {lowest} of an image of height {height} {why}; sizes that work are {which}", able


def check_rows(layers: Sequence[Layer], layout: Layout, path: Path | str) -> None:
    """Check that space groups, of the JSON at ``path``, can share the rows of these layers; raises DsConfigError."""
    space, key = layout.space, "pipeline.space"
    if (found := rows_fault(layers, space, divisors(layout.world_size // layout.stages, space.size))) is None:
        return
    (fault, sizes), height = found, layers[0].in_size[0]
    levels = range(lowest_shared(height, 1 + max(level_of(layer, 0) for layer in layers), space))
    able = [level for level in levels if busiest_share(height >> level, space.size) <= MOST_SHARE]
    fixes = [f"ds.{key}.size={sizes[-1]}", *(f"ds.{key}.levels={shown([*range(one + 1)])}" for one in able[-1:])]
    advice = " or ".join(f"--set {shlex.quote(fix)}" for fix in fixes)
    raise DsConfigError(f"{path}: {key} = {shown(space.block)}: {fault}; use {advice}")


def check_split(layers: Sequence[Layer], layout: Layout, path: Path | str) -> None:
    """Check that a layout that splits layers, of the JSON at ``path``, splits some of these; raises DsConfigError."""
    tensor = layout.tensor
    if tensor.size == 1:
        return
    names = [layer.name for layer in layers]
    for pattern in tensor.layers:
        if not fnmatch.filter(names, pattern):
            able = [layer.name for layer in layers if can_split(layer, tensor.size)]
            near = difflib.get_close_matches(pattern, able or names, n=1, cutoff=0.0)[0]
            right = [near if one == pattern else one for one in tensor.layers]
            raise DsConfigError(
                f"{path}: pipeline.tensor.layers = {shown(tensor.layers)}: no layer of the U-Net is named {pattern}; "
                f"use --set {shlex.quote(f'ds.pipeline.tensor.layers={shown(right)}')}"
            )
    asked = [layer for layer in layers if is_asked(layer, layers, tensor)]
    if any(can_split(layer, tensor.size) for layer in asked):
        return
    parts = ", ".join(sorted({counted(layer.units, layer.unit) for layer in asked if layer.unit}))
    why = f"{parts} can't be shared by {tensor.size} ranks" if parts else "it names no residual block and no attention"
    sizes = divisors(layout.world_size // layout.stages, tensor.size)
    fitting = [size for size in sizes if size == 1 or any(can_split(layer, size) for layer in asked)]
    raise DsConfigError(
        f"{path}: pipeline.tensor = {shown(tensor.block)} splits no layer: {why}; use --set "
        f"ds.pipeline.tensor.size={fitting[-1]}"
    )


def can_split(layer: Layer, count: int) -> bool:
    """Return whether a layer can be split into ``count`` parts."""
    return layer.units >= count and layer.units % count == 0


def is_asked(layer: Layer, layers: Sequence[Layer], tensor: TensorSplit) -> bool:
    """Return whether ``tensor`` asks for a layer of these ``layers`` to be split."""
    if tensor.size == 1:
        return False
    if tensor.layers:
        return any(fnmatch.fnmatchcase(layer.name, pattern) for pattern in tensor.layers)
    levels = 1 + max(level_of(one, 0) for one in layers)
    return tensor.levels == "all" or level_of(layer, levels) in tensor.levels


def sums_of(layers: Sequence[Layer], interval: int, *, reentrant: bool = False) -> tuple[Sums, Sums]:
    """Return the sums of the forward and of the backward of a stage with these ``layers``.

    A backward sums the gradient of each layer that it comes to, and the embedding's once for each walk with split
    residual blocks. It repeats the forward's sums in the layers that it recomputes, a group of ``interval`` (0: none)
    at a time. Unless checkpoints are ``reentrant``, recomputing stops before the last sum of a group, which the
    backward does not need.
    """
    forward = Sums(sum(layer.sums for layer in layers), sum(layer.summed_elements[0] for layer in layers))
    embeds = layers[0].reached  # else a backward does not come to the embedding
    if not (layers := [layer for layer in layers if layer.reached]):
        return forward, Sums(0, 0)
    walks = [layers]
    if interval:
        rest = layers[isinstance(layers[0], EmbedLayer) :]
        walks = [rest[start : start + interval] for start in range(0, len(rest), interval)]
    number, elements = sum(layer.sums for layer in layers), sum(layer.summed_elements[1] for layer in layers)
    for walk in walks:
        if embeds and (split := [layer for layer in walk if isinstance(layer, BlockLayer) and layer.shards > 1]):
            number, elements = number + 1, elements + split[0].embedding_channels
        if interval:
            number += sum(layer.sums for layer in walk)
            elements += sum(layer.summed_elements[0] for layer in walk)
            if not reentrant and (last := walk[-1]).sums:
                number, elements = number - 1, elements - last.summed_elements[0] // last.sums
    return forward, Sums(number, elements)


def agreed_elements(layers: Sequence[Layer], *, given: bool) -> int:
    """Return the elements of gradients that a ring carries: partial ones in two passes, whole ones if ``given``."""
    alike = sum(layer.trained for layer in layers if layer.shards == 1) if given else 0
    return 2 * sum(layer.partial_vectors for layer in layers) + alike
