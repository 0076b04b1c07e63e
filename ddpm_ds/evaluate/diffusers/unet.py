"""Conversion between our U-Net and the equal ``UNet2DModel`` of diffusers: configuration and tensors, without importing
diffusers.

Settings that only one of the two can express are refused by name. The tensors hold the same numbers; diffusers has
separate q, k and v, counts decoder levels from the deepest, and stores convolution weights as (out, in, k, k) instead
of (out, k, k, in).
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ddpm_ds.config.spec import (
    MOST_LEVELS,
    Blocks,
    Channels,
    Classes,
    Fraction,
    ImageChannels,
    Interface,
    Pixels,
    Small,
    Timesteps,
    UnetSpec,
    check_extent,
)
from ddpm_ds.evaluate.diffusers.scheduler import Arguments, refused
from ddpm_ds.unet.layers import AttentionLayer, BlockLayer, EmbedLayer, InputLayer, Layer, OutputLayer


def diffusers_config(unet: UnetSpec, interface: Interface) -> dict[str, Any]:
    """Return the arguments of the ``UNet2DModel`` that equals the U-Net of a spec.

    Raises:
        ValueError: diffusers has no such U-Net.
    """
    widths = tuple(unet.channels * multiplier for multiplier in unet.multipliers)
    if _divides_by_zero(widths[0], unet.sinusoid_shift):
        raise ValueError(
            f"unet.sinusoid_shift = 1 with a first width of {widths[0]}: diffusers divides by zero in its sinusoidal "
            f"embedding; only a U-Net of sinusoid_shift 0 or a first width of 4 and more can be held"
        )
    if interface.numbers:
        raise ValueError(
            "data.condition tells the U-Net a vector (data.condition.vector, or the flag of data.condition.drop), and "
            "a UNet2DModel takes none"
        )
    if interface.told_level and unet.classes is not None:
        raise ValueError(
            f"unet.classes = {unet.classes} and data.condition.noise are both told to the U-Net, and a UNet2DModel is "
            "told one of them"
        )
    attended = unet.attended_levels(interface.size)
    attends = [level in attended for level in range(len(widths))]
    height, width = interface.size
    return {
        "sample_size": height if height == width else (height, width),
        "in_channels": interface.channels + interface.condition_channels,
        "out_channels": interface.channels,
        "block_out_channels": widths,
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
        **({"class_embed_type": "timestep"} if interface.told_level else {}),
    }


Widths = Annotated[tuple[Channels, ...], Field(min_length=1, max_length=MOST_LEVELS)]


class _UnetArguments(Arguments):
    """Arguments of ``UNet2DModel`` with its defaults, as far as our U-Net has them."""

    class_names: ClassVar[tuple[str, ...]] = ("UNet2DModel",)

    sample_size: Pixels | tuple[Pixels, Pixels] | None = None
    in_channels: Channels = 3
    out_channels: ImageChannels = 3
    center_input_sample: Literal[False] = False
    time_embedding_type: Literal["positional"] = "positional"
    time_embedding_dim: Channels | None = None
    freq_shift: Literal[0, 1] = 0
    flip_sin_to_cos: bool = True
    down_block_types: tuple[Literal["DownBlock2D", "AttnDownBlock2D"], ...] = (
        "DownBlock2D",
        *("AttnDownBlock2D",) * 3,
    )
    mid_block_type: Literal["UNetMidBlock2D"] = "UNetMidBlock2D"
    up_block_types: tuple[Literal["UpBlock2D", "AttnUpBlock2D"], ...] = (*("AttnUpBlock2D",) * 3, "UpBlock2D")
    block_out_channels: Widths = (224, 448, 672, 896)
    layers_per_block: Blocks = 2
    mid_block_scale_factor: Literal[1] = 1
    downsample_padding: Literal[0, 1] = 1
    downsample_type: Literal["conv"] = "conv"
    upsample_type: Literal["conv"] = "conv"
    dropout: Fraction = 0.0
    act_fn: Literal["silu", "swish"] = "silu"
    attention_head_dim: Channels | None = 8
    norm_num_groups: Channels = 32
    attn_norm_num_groups: Channels | None = None
    norm_eps: Small = 1e-5
    resnet_time_scale_shift: Literal["default", "scale_shift"] = "default"
    add_attention: bool = True
    class_embed_type: Literal["timestep"] | None = None
    num_class_embeds: Classes | None = None
    num_train_timesteps: Timesteps | None = None
    """Number of timesteps; has no effect on a positional embedding."""


AVERAGE = {"decay", "inv_gamma", "min_decay", "optimization_step", "power", "update_after_step", "use_ema_warmup"}
"""Keys that diffusers' EMAModel adds to the configuration of the averaged model that it saves."""


def unet_spec_from_diffusers(
    config: Mapping[str, Any], *, last_label_is_class: bool = False
) -> tuple[UnetSpec, Interface]:
    """Return the U-Net that equals a ``UNet2DModel``, and what it takes and predicts: input channels beyond those of
    the output are a condition, and a timestep as its class is the noise level of that. Missing keys take its defaults.

    The last row of ``num_class_embeds`` is read as "no label", as :func:`diffusers_config` writes it, unless
    ``last_label_is_class``.

    Raises:
        ValueError: our U-Net can't express it; one line with the key, its value and what is possible.
    """
    found = _UnetArguments.read(config)
    for key, value in (found.model_extra or {}).items():
        if value is not None and value is not False and key not in AVERAGE:
            raise refused(key, value, "no such argument of UNet2DModel is known here; only null can be read")
    size = _size(found)
    attends = _attention(found)
    _check_widths(found, attends)
    told_level = found.class_embed_type is not None
    classes = None if told_level else found.num_class_embeds  # which has no effect beside it
    if classes is not None and not last_label_is_class:
        if classes == 1:
            raise refused("num_class_embeds", 1, "ours has a class at least, and a last row for no label")
        classes -= 1
    channels = math.gcd(*found.block_out_channels)
    attended, square = tuple(level for level, yes in enumerate(attends) if yes), size[0] == size[1]
    spec = UnetSpec(
        channels=channels,
        multipliers=tuple(width // channels for width in found.block_out_channels),
        blocks_per_level=found.layers_per_block,
        attention_resolutions=tuple(size[0] >> level for level in attended) if square else (),
        attention_levels=() if square else attended,
        middle_attention=found.add_attention,
        head_channels=found.attention_head_dim,
        norm_groups=found.norm_num_groups,
        norm_epsilon=found.norm_eps,
        dropout=found.dropout,
        embedding_channels=found.time_embedding_dim,
        time_conditioning="add" if found.resnet_time_scale_shift == "default" else "scale_shift",
        sinusoid_order="cos_sin" if found.flip_sin_to_cos else "sin_cos",
        sinusoid_shift=found.freq_shift,
        downsample_padding="symmetric" if found.downsample_padding else "asymmetric",
        classes=classes,
    )
    try:
        check_extent(spec)
    except ValueError as error:
        raise refused("layers_per_block", found.layers_per_block, str(error)) from None
    conditions = found.in_channels - found.out_channels
    if told_level and not conditions:
        raise refused("class_embed_type", "timestep", "ours is the noise level of a condition, and this model has none")
    return spec, Interface(channels=found.out_channels, size=size, condition_channels=conditions, told_level=told_level)


def _size(found: _UnetArguments) -> tuple[int, int]:
    size, levels = found.sample_size, len(found.block_out_channels)
    if size is None:
        raise refused("sample_size", size, "our images are of one size, such as 32 or [32, 48]")
    height, width = size if isinstance(size, tuple) else (size, size)
    if height % 2 ** (levels - 1) or width % 2 ** (levels - 1):
        raise refused("sample_size", size, f"it can't be halved {levels - 1} times, as {levels} levels ask")
    return height, width


def _attention(found: _UnetArguments) -> list[bool]:
    """Return whether each level has attention, finest first."""
    down, up = ([name.startswith("Attn") for name in names] for names in (found.down_block_types, found.up_block_types))
    levels = len(found.block_out_channels)
    for key, types in (("down_block_types", found.down_block_types), ("up_block_types", found.up_block_types)):
        if len(types) != levels:
            raise refused(key, types, f"it should have {levels} entries, one for each of block_out_channels")
    if up != down[::-1]:
        raise refused("up_block_types", found.up_block_types, "our decoder attends where the encoder does, mirrored")
    return down


def _check_widths(found: _UnetArguments, attends: list[bool]) -> None:
    widths, groups, heads = found.block_out_channels, found.norm_num_groups, found.attention_head_dim
    if found.out_channels > found.in_channels:
        why = f"ours predicts {found.in_channels} channels at most; variances that are learned can't be expressed"
        raise refused("out_channels", found.out_channels, why)
    for width in widths:
        if width % groups:
            raise refused("norm_num_groups", groups, f"it does not divide the {width} of block_out_channels")
    if found.add_attention:
        default = groups if found.resnet_time_scale_shift == "default" else None
        if (found.attn_norm_num_groups or default) != groups:
            why = f"our middle attention is normalised like everything else, in {groups} groups"
            raise refused("attn_norm_num_groups", found.attn_norm_num_groups, why)
    attended = [width for width, yes in zip(widths, attends, strict=True) if yes] + [widths[-1]] * found.add_attention
    for width in attended:
        if heads is not None and width % heads:
            raise refused("attention_head_dim", heads, f"it does not divide the {width} channels that are attended")
    if _divides_by_zero(widths[0], found.freq_shift):
        raise refused("freq_shift", 1, f"with {widths[0]} as the first of block_out_channels diffusers divides by zero")


def _divides_by_zero(first_width: int, shift: int) -> bool:
    """Return whether diffusers' sinusoidal embedding would divide by zero, having no frequencies to space."""
    return shift == 1 and first_width // 2 == 1


CLASS_EMBEDDING = "class_embedding.weight"
"""diffusers' name of the embedding of classes, a row for each."""
_OLD_ATTENTION = re.compile(r"(.*\.attentions\.\d+)\.(query|key|value|proj_attn)\.(weight|bias)")
_NEW_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_BLOCK = {"norm1": "norm1", "conv1": "conv1", "time_projection": "time_emb_proj", "norm2": "norm2", "conv2": "conv2"}


def to_diffusers(state: Mapping[str, Tensor], layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Return tensors by diffusers' names from tensors by ours (``4.conv1.weight``), as views."""
    return {
        name: tensor.permute(0, 3, 1, 2) if tensor.ndim == 4 else tensor
        for ours, theirs in tensor_names(layers)
        for name, tensor in zip(theirs, state[ours].chunk(len(theirs)), strict=True)
    }


def from_diffusers(state: Mapping[str, Tensor], layers: Sequence[Layer]) -> dict[str, Tensor]:
    """Return tensors by our names from tensors by diffusers' names, present or old.

    Raises ValueError if the names are not those of a `UNet2DModel` with these layers.
    """
    stored = stored_names(state, layers)
    whole = {ours: torch.cat([state[stored[name]] for name in theirs]) for ours, theirs in tensor_names(layers)}
    return {
        name: tensor.permute(0, 2, 3, 1).contiguous() if tensor.ndim == 4 else tensor for name, tensor in whole.items()
    }


def stored_names(names: Iterable[str], layers: Sequence[Layer]) -> dict[str, str]:
    """Return the names in a file (``names``), which may be old, by diffusers' present names.

    Raises ValueError unless they are exactly the names of a `UNet2DModel` with these layers.
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
    """Return the present name of a diffusers tensor; attention once had `query`, `key`, `value` and `proj_attn`."""
    old = _OLD_ATTENTION.fullmatch(name)
    return f"{old[1]}.{_NEW_ATTENTION[old[2]]}.{old[3]}" if old else name


def tensor_names(layers: Sequence[Layer]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each of our tensors, with the names of the diffusers tensors that are fused in it."""
    levels = 1 + max(int(layer.name.split(".")[1]) for layer in layers if layer.name.startswith("down."))
    for index, layer in enumerate(layers):
        for ours, theirs in _module_names(layer, levels):
            for kind in ("weight", "bias"):
                yield f"{index}.{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs)
        if isinstance(layer, EmbedLayer) and layer.classes is not None:
            yield f"{index}.label_embedding.weight", (CLASS_EMBEDDING,)


def _module_names(layer: Layer, levels: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    match layer:
        case EmbedLayer():
            yield "linear1", ("time_embedding.linear_1",)
            yield "linear2", ("time_embedding.linear_2",)
            if layer.told_level:
                yield "level1", ("class_embedding.linear_1",)
                yield "level2", ("class_embedding.linear_2",)
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
    """Return diffusers' module for a layer, such as ``up_blocks.0.resnets.2`` for ``up.3.block.2`` of 4 levels."""
    side, *place = name.split(".")
    blocks = "mid_block"
    if side != "middle":
        level = int(place.pop(0))
        blocks = f"down_blocks.{level}" if side == "down" else f"up_blocks.{levels - 1 - level}"
    kind, number = place[0], place[1] if len(place) > 1 else "0"
    modules = {"block": "resnets", "attention": "attentions", "downsample": "downsamplers", "upsample": "upsamplers"}
    return f"{blocks}.{modules[kind]}.{number}"
