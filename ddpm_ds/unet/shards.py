"""Layers whose weights are split among the ranks of a tensor group, and a rank's part of a weight.

A residual block is split by channels, attention by heads, a transformer block by heads and by the width of its gated
network. Each rank computes its part from the whole input, and the parts are summed to the whole output, so that all
ranks of the group have the same carry between layers. Does not import torch.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ddpm_ds.ground.errors import DsConfigError
from ddpm_ds.ground.units import counted
from ddpm_ds.schema.layout import Layout, TensorSplit, divisors
from ddpm_ds.schema.section import shown
from ddpm_ds.unet.layers import BlockLayer, EmbedLayer, Layer, Parameter, Split


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
    """Return the layers unsplit, so that they count the whole U-Net."""
    return tuple(replace(layer, shards=1) for layer in layers)


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

    A backward sums each layer's gradient, and the embedding's once for each walk with split residual blocks. It repeats
    the forward's sums in the layers that it recomputes, a group of ``interval`` (0: none) at a time. Unless checkpoints
    are ``reentrant``, recomputing stops before the last sum of a group, which the backward does not need.
    """
    forward = Sums(sum(layer.sums for layer in layers), sum(layer.summed_elements[0] for layer in layers))
    walks = [layers]
    if interval:
        rest = layers[isinstance(layers[0], EmbedLayer) :]
        walks = [rest[start : start + interval] for start in range(0, len(rest), interval)]
    number, elements = forward.number, sum(layer.summed_elements[1] for layer in layers)
    for walk in walks:
        if split := [layer for layer in walk if isinstance(layer, BlockLayer) and layer.shards > 1]:
            number, elements = number + 1, elements + split[0].embedding_channels
        if interval:
            number += sum(layer.sums for layer in walk)
            elements += sum(layer.summed_elements[0] for layer in walk)
            if not reentrant and (last := walk[-1]).sums:
                number, elements = number - 1, elements - last.summed_elements[0] // last.sums
    return forward, Sums(number, elements)


def agreed_elements(layers: Sequence[Layer], *, given: bool) -> int:
    """Return the elements of gradients that a ring carries: partial ones in two passes, whole ones if ``given``."""
    alike = sum(layer.parameters for layer in layers if layer.shards == 1) if given else 0
    return 2 * sum(layer.partial_vectors for layer in layers) + alike
