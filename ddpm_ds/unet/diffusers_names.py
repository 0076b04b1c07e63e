"""Our names and tensors beside those of diffusers' ``UNet2DModel``.

The two hold the same numbers; diffusers keeps q, k and v apart, counts decoder levels from the deepest, and has
convolutions' weights as (out, in, k, k), which are (out, k, k, in) here.
diffusers itself is not needed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ddpm_ds.unet.layers import AttentionLayer, BlockLayer, EmbedLayer, InputLayer, Layer, OutputLayer

_OLD_ATTENTION = re.compile(r"(.*\.attentions\.\d+)\.(query|key|value|proj_attn)\.(weight|bias)")
_NEW_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_BLOCK = {"norm1": "norm1", "conv1": "conv1", "time_projection": "time_emb_proj", "norm2": "norm2", "conv2": "conv2"}


def to_diffusers(state: Mapping[str, Tensor], layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Tensors by diffusers' names from tensors by ours (``4.conv1.weight``); views of them."""
    return {
        name: to_published(tensor)
        for ours, theirs in tensor_names(layers)
        for name, tensor in zip(theirs, state[ours].chunk(len(theirs)), strict=True)
    }


def from_diffusers(state: Mapping[str, Tensor], layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Tensors by our names from tensors by diffusers' names, present or old.

    Raises ValueError where the names are not those of a `UNet2DModel` of these layers.
    """
    stored = stored_names(state, layers)
    return {
        ours: from_published(torch.cat([state[stored[name]] for name in theirs]))
        for ours, theirs in tensor_names(layers)
    }


def to_published(tensor: Tensor) -> Tensor:
    """A parameter of ours in the shape that PyTorch's layers have: a view."""
    return tensor.permute(0, 3, 1, 2) if tensor.ndim == 4 else tensor


def from_published(tensor: Tensor) -> Tensor:
    """A parameter of PyTorch's layers in our shape, contiguous."""
    return tensor.permute(0, 2, 3, 1).contiguous() if tensor.ndim == 4 else tensor


def published_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that PyTorch's layers have for a parameter of one of our shapes."""
    return (shape[0], shape[3], *shape[1:3]) if len(shape) == 4 else shape


def stored_names(names: Iterable[str], layers: Sequence[Layer]) -> dict[str, str]:
    """Which of the ``names`` in a file is each tensor of diffusers: its present name, or its older one.

    Raises ValueError where they are not those of a `UNet2DModel` of these layers, each once.
    """
    names = list(names)
    stored = {_present_name(name): name for name in names}
    wrong = stored.keys() ^ {name for _, theirs in tensor_names(layers) for name in theirs}
    if wrong:
        raise ValueError(f"{len(wrong)} tensor names don't match the U-Net, the first is {min(wrong)}")
    if len(stored) < len(names):
        twice = min(set(names) - set(stored.values()))
        raise ValueError(f"{twice} is there under its present and its old name")
    return stored


def _present_name(name: str) -> str:
    """diffusers' name of today for a tensor: attention was once `query`, `key`, `value` and `proj_attn`."""
    old = _OLD_ATTENTION.fullmatch(name)
    return f"{old[1]}.{_NEW_ATTENTION[old[2]]}.{old[3]}" if old else name


def tensor_names(layers: Sequence[Layer]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each of our tensors' names with that of diffusers' tensor, or of the several that are fused in ours."""
    levels = 1 + max(int(layer.name.split(".")[1]) for layer in layers if layer.name.startswith("down."))
    for index, layer in enumerate(layers):
        for ours, theirs in _module_names(layer, levels):
            for kind in ("weight", "bias"):
                yield f"{index}.{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs)
        if isinstance(layer, EmbedLayer) and layer.classes is not None:
            yield f"{index}.label_embedding.weight", ("class_embedding.weight",)


def _module_names(layer: Layer, levels: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    match layer:
        case EmbedLayer():
            yield "linear1", ("time_embedding.linear_1",)
            yield "linear2", ("time_embedding.linear_2",)
        case InputLayer():
            yield "conv", ("conv_in",)
        case OutputLayer():
            yield "norm", ("conv_norm_out",)
            yield "conv", ("conv_out",)
        case BlockLayer():
            place = _place(layer.name, levels)
            yield from ((ours, (f"{place}.{theirs}",)) for ours, theirs in _BLOCK.items())
            if layer.has_shortcut:
                yield "shortcut", (f"{place}.conv_shortcut",)
        case AttentionLayer():
            place = _place(layer.name, levels)
            yield "norm", (f"{place}.group_norm",)
            yield "qkv", tuple(f"{place}.to_{part}" for part in "qkv")
            yield "projection", (f"{place}.to_out.0",)
        case _:
            yield "conv", (f"{_place(layer.name, levels)}.conv",)


def _place(name: str, levels: int) -> str:
    """diffusers' module for a layer's name, such as ``up_blocks.0.resnets.2`` for ``up.3.block.2`` of 4 levels."""
    side, *place = name.split(".")
    blocks = "mid_block"
    if side != "middle":
        level = int(place.pop(0))
        blocks = f"down_blocks.{level}" if side == "down" else f"up_blocks.{levels - 1 - level}"
    kind, number = place[0], place[1] if len(place) > 1 else "0"
    modules = {"block": "resnets", "attention": "attentions", "downsample": "downsamplers", "upsample": "upsamplers"}
    return f"{blocks}.{modules[kind]}.{number}"
