"""Configuration of ``UNet2DModel``, the family of U-Nets of diffusers without text, to ours and back."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from ddpm_ds.config.spec import Channels, ImageChannels, Interface, Timesteps, UnetSpec
from ddpm_ds.evaluate.diffusers.scheduler import refused
from ddpm_ds.evaluate.diffusers.shared_config import (
    UnetArguments,
    Widths,
    read_arguments,
    read_shared,
    shared_config,
    size_of,
)


def plain_config(unet: UnetSpec, interface: Interface) -> dict[str, Any]:
    """Return the arguments of the ``UNet2DModel`` that equals the U-Net of a spec.

    Raises:
        ValueError: diffusers has no such U-Net.
    """
    attended = unet.attended_levels(interface.size)
    attends = [level in attended for level in range(len(unet.multipliers))]
    return {
        **shared_config(unet, interface, "UNet2DModel"),
        "down_block_types": tuple("AttnDownBlock2D" if yes else "DownBlock2D" for yes in attends),
        "up_block_types": tuple("AttnUpBlock2D" if yes else "UpBlock2D" for yes in reversed(attends)),
        "add_attention": unet.middle_attention,
        "attention_head_dim": unet.head_channels,
        # Without this, scale_shift would leave out the normalisation before the middle attention.
        "attn_norm_num_groups": unet.norm_groups,
    }


class PlainArguments(UnetArguments):
    """Arguments of ``UNet2DModel`` with its defaults, as far as our U-Net has them."""

    class_names: ClassVar[tuple[str, ...]] = ("UNet2DModel",)

    in_channels: Channels = 3
    out_channels: ImageChannels = 3
    down_block_types: tuple[Literal["DownBlock2D", "AttnDownBlock2D"], ...] = (
        "DownBlock2D",
        *("AttnDownBlock2D",) * 3,
    )
    mid_block_type: Literal["UNetMidBlock2D"] = "UNetMidBlock2D"
    up_block_types: tuple[Literal["UpBlock2D", "AttnUpBlock2D"], ...] = (*("AttnUpBlock2D",) * 3, "UpBlock2D")
    block_out_channels: Widths = (224, 448, 672, 896)
    downsample_type: Literal["conv"] = "conv"
    upsample_type: Literal["conv"] = "conv"
    attention_head_dim: Channels | None = 8
    attn_norm_num_groups: Channels | None = None
    add_attention: bool = True
    num_train_timesteps: Timesteps | None = None
    """Number of timesteps; has no effect on a positional embedding."""


def plain_spec(config: Mapping[str, Any], *, last_label_is_class: bool) -> tuple[UnetSpec, Interface]:
    """Return the U-Net that equals a ``UNet2DModel``, and what it takes and predicts.

    Raises:
        ValueError: our U-Net can't express it; one line with the key, its value and what is possible.
    """
    found, attends = read_arguments(PlainArguments, config)
    _check_attention(found, attends)
    size = size_of(found)
    attended, square = tuple(level for level, yes in enumerate(attends) if yes), size[0] == size[1]
    return read_shared(
        found,
        last_label_is_class=last_label_is_class,
        blocks_per_level=found.layers_per_block,
        attention_resolutions=tuple(size[0] >> level for level in attended) if square else (),
        attention_levels=() if square else attended,
        middle_attention=found.add_attention,
        head_channels=found.attention_head_dim,
    )


def _check_attention(found: PlainArguments, attends: list[bool]) -> None:
    widths, groups, heads = found.block_out_channels, found.norm_num_groups, found.attention_head_dim
    if found.add_attention:
        default = groups if found.resnet_time_scale_shift == "default" else None
        if (found.attn_norm_num_groups or default) != groups:
            why = f"our middle attention is normalised like everything else, in {groups} groups"
            raise refused("attn_norm_num_groups", found.attn_norm_num_groups, why)
    attended = [width for width, yes in zip(widths, attends, strict=True) if yes] + [widths[-1]] * found.add_attention
    for width in attended:
        if heads is not None and width % heads:
            raise refused("attention_head_dim", heads, f"it does not divide the {width} channels that are attended")
