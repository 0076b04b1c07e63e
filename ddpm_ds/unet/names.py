"""diffusers' names of our parameters, and the parameters that patterns of these names choose to train.

Does not import torch.
"""

import difflib
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from ddpm_ds.schema.section import shown
from ddpm_ds.unet import layers as kinds
from ddpm_ds.unet.layers import Layer

_EMBEDDINGS = {"linear": "time_embedding", "level": "class_embedding", "text": "add_embedding"}
_MODULES: dict[type[Layer], dict[str, str]] = {
    kinds.EmbedLayer: {f"{ours}{n}": f"{theirs}.linear_{n}" for ours, theirs in _EMBEDDINGS.items() for n in (1, 2)}
    | {"label_embedding": "class_embedding"},
    kinds.InputLayer: {"conv": "conv_in"},
    kinds.OutputLayer: {"norm": "conv_norm_out", "conv": "conv_out"},
    kinds.BlockLayer: {name: name for name in ("norm1", "conv1", "norm2", "conv2")}
    | {"time_projection": "time_emb_proj", "shortcut": "conv_shortcut"},
    kinds.AttentionLayer: {"norm": "group_norm", "qkv": "to_q to_k to_v", "projection": "to_out.0"},
    kinds.TransformerInputLayer: {"norm": "norm", "projection": "proj_in"},
    kinds.TransformerBlockLayer: {
        **{"norm1": "norm1", "qkv": "attn1.to_q attn1.to_k attn1.to_v", "projection1": "attn1.to_out.0"},
        **{"norm2": "norm2", "q": "attn2.to_q", "kv": "attn2.to_k attn2.to_v", "projection2": "attn2.to_out.0"},
        **{"norm3": "norm3", "gated": "ff.net.0.proj", "projection3": "ff.net.2"},
    },
    kinds.TransformerOutputLayer: {"projection": "proj_out"},
}
"""Modules of diffusers by modules of our layers, in which several may be fused; every other layer has a `conv`."""


def tensor_names(layers: Sequence[Layer]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each of our tensors, with the names of diffusers' tensors that it joins."""
    levels = 1 + max(int(layer.name.split(".")[1]) for layer in layers if layer.name.startswith("down."))
    for index, layer in enumerate(layers):
        modules = _MODULES.get(type(layer), {"conv": "conv"})
        outside = isinstance(layer, kinds.EmbedLayer | kinds.InputLayer | kinds.OutputLayer)
        place = "" if outside else f"{_place(layer.name, levels)}."
        if isinstance(layer, kinds.TransformerBlockLayer):
            place += f"transformer_blocks.{layer.name.rpartition('.')[2]}."
        for ours in layer.listed:
            module, _, kind = ours.name.rpartition(".")
            yield f"{index}.{ours.name}", tuple(f"{place}{name}.{kind}" for name in modules.get(module, module).split())


def _place(name: str, levels: int) -> str:
    """Return diffusers' module for a layer, such as ``up_blocks.0.resnets.2`` for ``up.3.block.2`` of 4 levels, and
    ``up_blocks.0.attentions.2`` for all of ``up.3.attention.2``.
    """
    side, *place = name.split(".")
    blocks = "mid_block"
    if side != "middle":
        level = int(place.pop(0))
        blocks = f"down_blocks.{level}" if side == "down" else f"up_blocks.{levels - 1 - level}"
    kind, number = place[0], place[1] if len(place) > 1 and (side, place[0]) != ("middle", "attention") else "0"
    modules = {"block": "resnets", "attention": "attentions", "downsample": "downsamplers", "upsample": "upsamplers"}
    return f"{blocks}.{modules[kind]}.{number}"


def trained_layers(layers: Sequence[Layer], train: Sequence[str], rates: Mapping[str, float]) -> tuple[Layer, ...]:
    """Return the layers with a factor on the learning rate of each parameter; 0 of parameters that are not trained.

    Patterns are regular expressions, found anywhere in a name. ``train`` chooses parameters, () all; the factors of all
    patterns of ``rates`` that a name has are multiplied. Raises ValueError, in one line, if a pattern is in no name, or
    in some of the names that one of our tensors joins.
    """
    if not train and not rates:
        return tuple(layers)
    names, found = dict(tensor_names(layers)), dict[str, float]()
    everything = [name for theirs in names.values() for name in theirs]
    for key, patterns in {"train": train, "rates": rates}.items():
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in everything):
                pieces = sorted({piece for name in everything for piece in name.split(".")})
                near = ", ".join(difflib.get_close_matches(pattern, pieces, cutoff=0.0))
                what = f"no parameter of the U-Net has {shown(pattern)} in its name in diffusers"
                raise ValueError(f"optimizer.{key}: {what}; use a part of a name, such as {near}")
    for ours, theirs in names.items():
        each = {
            math.prod(
                (factor for pattern, factor in rates.items() if re.search(pattern, name)),
                start=float(not train or any(re.search(pattern, name) for pattern in train)),
            )
            for name in theirs
        }
        if len(each) > 1:
            joined = " and ".join(theirs)
            raise ValueError(f"optimizer.train and rates: {joined} are one tensor here; give them the same patterns")
        found[ours] = each.pop()
    factors = [tuple(found[f"{index}.{one.name}"] for one in layer.listed) for index, layer in enumerate(layers)]
    reached = accumulate((any(own) for own in factors), operator.or_)
    return tuple(replace(one, rates=own, reached=ends) for one, own, ends in zip(layers, factors, reached, strict=True))
