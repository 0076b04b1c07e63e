"""Layers whose weights are split among the ranks of a tensor group, and where a rank's part of a weight is.

A residual block is split by channels, attention by heads, a transformer block by heads and by the width of its gated
network. Each rank computes its part from the whole input, and the parts are summed to the whole output, so that all
ranks of the group have the same carry between layers. Does not import torch.
"""

import fnmatch
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ddpm_ds.config.ds_config import TensorSplit
from ddpm_ds.unet.layers import Layer


class Shard(NamedTuple):
    """Part of a flattened parameter that one rank of a tensor group has: of every ``ranks`` runs of ``run`` elements,
    the run of number ``rank``.
    """

    rank: int
    ranks: int
    run: int


def level_of(layer: Layer, levels: int) -> int:
    """Return the level of a layer in a U-Net with so many ``levels``, 0 at full size; the middle belongs to the last,
    and the first and last layers to level 0.
    """
    side, *rest = layer.name.split(".")
    if side in ("down", "up"):
        return int(rest[0])
    return levels - 1 if side == "middle" else 0


def split_layers(layers: Sequence[Layer], tensor: TensorSplit) -> tuple[Layer, ...]:
    """Return the layers with those that ``tensor`` asks for split; a layer whose groups or heads don't divide stays
    whole, as does one of a kind that is never split.
    """
    return tuple(
        replace(layer, shards=tensor.size)
        if is_asked(layer, layers, tensor) and can_split(layer, tensor.size)
        else layer
        for layer in layers
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
    return tensor.levels == "auto" or level_of(layer, levels) in tensor.levels
