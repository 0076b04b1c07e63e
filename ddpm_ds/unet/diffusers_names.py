"""Our names and tensors beside those of diffusers' ``UNet2DModel``, and its constructor arguments for a spec.

The two hold the same numbers; diffusers keeps q, k and v apart and counts decoder levels from the deepest.
diffusers itself is not needed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddpm_ds.spec import UnetSpec
from ddpm_ds.unet.layers import AttentionLayer, BlockLayer, EmbedLayer, InputLayer, Layer, OutputLayer

_BLOCK = {"norm1": "norm1", "conv1": "conv1", "time_projection": "time_emb_proj", "norm2": "norm2", "conv2": "conv2"}


def to_diffusers(state: Mapping[str, Tensor], layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Tensors by diffusers' names from tensors by ours (``4.conv1.weight``); split tensors are views."""
    return {
        name: tensor
        for ours, theirs in tensor_names(layers)
        for name, tensor in zip(theirs, state[ours].chunk(len(theirs)), strict=True)
    }


def from_diffusers(state: Mapping[str, Tensor], layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Tensors by our names from tensors by diffusers' names.

    Raises ValueError where the names are not those of a `UNet2DModel` of these layers.
    """
    table = list(tensor_names(layers))
    wrong = state.keys() ^ {name for _, theirs in table for name in theirs}
    if wrong:
        raise ValueError(f"{len(wrong)} tensor names don't match the U-Net, the first is {min(wrong)}")
    return {ours: torch.cat([state[name] for name in theirs]) for ours, theirs in table}


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


def diffusers_config(unet: UnetSpec, *, image_channels: int, image_size: int) -> dict[str, Any]:
    """Arguments of the ``UNet2DModel`` that equals the U-Net of a spec."""
    attends = [image_size >> level in unet.attention_resolutions for level in range(len(unet.multipliers))]
    return {
        "sample_size": image_size,
        "in_channels": image_channels,
        "out_channels": image_channels,
        "block_out_channels": tuple(unet.channels * multiplier for multiplier in unet.multipliers),
        "layers_per_block": unet.blocks_per_level,
        "down_block_types": tuple("AttnDownBlock2D" if yes else "DownBlock2D" for yes in attends),
        "up_block_types": tuple("AttnUpBlock2D" if yes else "UpBlock2D" for yes in reversed(attends)),
        "add_attention": unet.middle_attention,
        "attention_head_dim": unet.head_channels,
        "norm_num_groups": unet.norm_groups,
        # Without this, scale_shift would leave out the normalisation before the middle attention.
        "attn_norm_num_groups": unet.norm_groups,
        "norm_eps": unet.norm_epsilon,
        "dropout": unet.dropout,
        "time_embedding_dim": unet.embedding_channels,
        "resnet_time_scale_shift": "default" if unet.time_conditioning == "add" else "scale_shift",
        "flip_sin_to_cos": unet.sinusoid_order == "cos_sin",
        "freq_shift": unet.sinusoid_shift,
        "downsample_padding": 1 if unet.downsample_padding == "symmetric" else 0,
        # The row after the last class is "no label".
        "num_class_embeds": None if unet.classes is None else unet.classes + 1,
    }
