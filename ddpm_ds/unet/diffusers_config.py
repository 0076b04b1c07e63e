"""The configuration of the ``UNet2DModel`` that equals a U-Net of ours, and back. diffusers itself is not needed here.

What the two can't both hold is refused by name: a configuration that is read has no meaning that is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from ddpm_ds.diffusion.diffusers_arguments import Arguments, refused
from ddpm_ds.spec import Fraction, PositiveFloat, PositiveInt, UnetSpec


def diffusers_config(unet: UnetSpec, *, image_channels: int, image_size: int) -> dict[str, Any]:
    """Arguments of the ``UNet2DModel`` that equals the U-Net of a spec.

    Raises:
        ValueError: diffusers has no such U-Net.
    """
    widths = tuple(unet.channels * multiplier for multiplier in unet.multipliers)
    if _divides_by_zero(widths[0], unet.sinusoid_shift):
        raise ValueError(
            f"unet.sinusoid_shift = 1 with a first width of {widths[0]}: diffusers divides by zero in its sinusoidal "
            f"embedding; only a U-Net of sinusoid_shift 0 or a first width of 4 and more can be held"
        )
    attends = [image_size >> level in unet.attention_resolutions for level in range(len(widths))]
    return {
        "sample_size": image_size,
        "in_channels": image_channels,
        "out_channels": image_channels,
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
    }


class _UnetArguments(Arguments):
    """``UNet2DModel``'s arguments with its defaults, as far as our U-Net has them."""

    class_names: ClassVar[tuple[str, ...]] = ("UNet2DModel",)

    sample_size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = None
    in_channels: Literal[1, 3] = 3
    out_channels: PositiveInt = 3
    center_input_sample: Literal[False] = False
    time_embedding_type: Literal["positional"] = "positional"
    time_embedding_dim: PositiveInt | None = None
    freq_shift: Literal[0, 1] = 0
    flip_sin_to_cos: bool = True
    down_block_types: tuple[Literal["DownBlock2D", "AttnDownBlock2D"], ...] = (
        "DownBlock2D",
        *("AttnDownBlock2D",) * 3,
    )
    mid_block_type: Literal["UNetMidBlock2D"] = "UNetMidBlock2D"
    up_block_types: tuple[Literal["UpBlock2D", "AttnUpBlock2D"], ...] = (*("AttnUpBlock2D",) * 3, "UpBlock2D")
    block_out_channels: tuple[PositiveInt, ...] = (224, 448, 672, 896)
    layers_per_block: PositiveInt = 2
    mid_block_scale_factor: Literal[1] = 1
    downsample_padding: Literal[0, 1] = 1
    downsample_type: Literal["conv"] = "conv"
    upsample_type: Literal["conv"] = "conv"
    dropout: Fraction = 0.0
    act_fn: Literal["silu", "swish"] = "silu"
    attention_head_dim: PositiveInt | None = 8
    norm_num_groups: PositiveInt = 32
    attn_norm_num_groups: PositiveInt | None = None
    norm_eps: PositiveFloat = 1e-5
    resnet_time_scale_shift: Literal["default", "scale_shift"] = "default"
    add_attention: bool = True
    class_embed_type: None = None
    num_class_embeds: PositiveInt | None = None
    num_train_timesteps: PositiveInt | None = None
    """Has no effect on a positional embedding."""


def unet_spec_from_diffusers(config: Mapping[str, Any]) -> tuple[UnetSpec, int, int]:
    """The U-Net that equals a ``UNet2DModel``, its image channels and its image size. Missing keys take its defaults.

    Of ``num_class_embeds`` the last is read as "no label", as :func:`diffusers_config` writes it.

    Raises:
        ValueError: our U-Net can't express it; the key, its value and what we can, in one line.
    """
    found = _UnetArguments.read(config)
    for key, value in (found.model_extra or {}).items():
        if value is not None and value is not False:
            raise refused(key, value, "no such argument of UNet2DModel is known here; only null can be read")
    size = _image_size(found)
    attends = _attention(found)
    _check_widths(found, attends)
    channels = math.gcd(*found.block_out_channels)
    spec = UnetSpec(
        channels=channels,
        multipliers=tuple(width // channels for width in found.block_out_channels),
        blocks_per_level=found.layers_per_block,
        attention_resolutions=tuple(size >> level for level, yes in enumerate(attends) if yes),
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
        classes=None if found.num_class_embeds is None else found.num_class_embeds - 1,
    )
    return spec, found.in_channels, size


def _image_size(found: _UnetArguments) -> int:
    size, levels = found.sample_size, len(found.block_out_channels)
    if isinstance(size, tuple) and size[0] == size[1]:
        size = size[0]
    if not isinstance(size, int):
        raise refused("sample_size", size, "our images are square and of one size, such as 32")
    if not levels or size % 2 ** (levels - 1):
        raise refused("sample_size", size, f"it can't be halved {levels - 1} times, as {levels} levels ask")
    return size


def _attention(found: _UnetArguments) -> list[bool]:
    """Whether each level attends, from the finest."""
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
    if found.out_channels != found.in_channels:
        why = f"ours has the {found.in_channels} channels of the image; variances that are learned can't be expressed"
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
    if found.num_class_embeds == 1:
        raise refused("num_class_embeds", 1, "ours has a class at least, and a last row for no label")


def _divides_by_zero(first_width: int, shift: int) -> bool:
    """Whether diffusers' sinusoidal embedding has no frequencies to spread."""
    return shift == 1 and first_width // 2 == 1
