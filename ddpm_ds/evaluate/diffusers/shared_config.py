"""What the configurations of diffusers' two families of U-Nets have in common: arguments, their reading and writing.

Settings that only one side can express are refused by name.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

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
    UnetSpec,
    check_extent,
)
from ddpm_ds.evaluate.diffusers.scheduler import Arguments, refused

Widths = Annotated[tuple[Channels, ...], Field(min_length=1, max_length=MOST_LEVELS)]


class UnetArguments(Arguments):
    """Arguments that both families take, as far as our U-Net has them."""

    sample_size: Pixels | tuple[Pixels, Pixels] | None = None
    in_channels: Channels
    out_channels: ImageChannels
    center_input_sample: Literal[False] = False
    time_embedding_type: Literal["positional"] = "positional"
    time_embedding_dim: Channels | None = None
    freq_shift: Literal[0, 1] = 0
    flip_sin_to_cos: bool = True
    down_block_types: tuple[str, ...]
    up_block_types: tuple[str, ...]
    block_out_channels: Widths
    layers_per_block: Blocks = 2
    mid_block_scale_factor: Literal[1] = 1
    downsample_padding: Literal[0, 1] = 1
    dropout: Fraction = 0.0
    act_fn: Literal["silu", "swish"] = "silu"
    norm_num_groups: Channels = 32
    norm_eps: Small = 1e-5
    resnet_time_scale_shift: Literal["default", "scale_shift"] = "default"
    class_embed_type: Literal["timestep"] | None = None
    num_class_embeds: Classes | None = None


ArgumentsOf = TypeVar("ArgumentsOf", bound=UnetArguments)

AVERAGE = {"decay", "inv_gamma", "min_decay", "optimization_step", "power", "update_after_step", "use_ema_warmup"}
"""Keys that diffusers' EMAModel adds to the configuration of the averaged model that it saves."""


def shared_config(unet: UnetSpec, interface: Interface, class_name: str) -> dict[str, Any]:
    """Return the arguments that both families take, of the U-Net of a spec.

    Raises:
        ValueError: diffusers has no such U-Net.
    """
    widths = tuple(unet.channels * multiplier for multiplier in unet.multipliers)
    if divides_by_zero(widths[0], unet.sinusoid_shift):
        raise ValueError(
            f"unet.sinusoid_shift = 1 with a first width of {widths[0]}: diffusers divides by zero in its sinusoidal "
            f"embedding; only a U-Net of sinusoid_shift 0 or a first width of 4 and more can be held"
        )
    if interface.numbers:
        raise ValueError(
            "data.condition tells the U-Net a vector (data.condition.vector, or the flag of data.condition.drop), and "
            f"a {class_name} takes none"
        )
    if interface.told_level and unet.classes is not None:
        raise ValueError(
            f"unet.classes = {unet.classes} and data.condition.noise are both told to the U-Net, and a {class_name} is "
            "told one of them"
        )
    height, width = interface.size
    return {
        "sample_size": height if height == width else (height, width),
        "in_channels": interface.channels + interface.condition_channels,
        "out_channels": interface.channels,
        "block_out_channels": widths,
        "layers_per_block": unet.blocks_per_level,
        "norm_num_groups": unet.norm_groups,
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


def read_arguments(kind: type[ArgumentsOf], config: Mapping[str, Any]) -> tuple[ArgumentsOf, list[bool]]:
    """Return the checked arguments in a configuration, and whether each level has attention, finest first.

    Raises:
        ValueError: one line with the key, its value and what is possible.
    """
    found = kind.read(config)
    for key, value in (found.model_extra or {}).items():
        if value is not None and value is not False and key not in AVERAGE:
            name = kind.class_names[0]
            raise refused(key, value, f"no such argument of {name} is known here; only null can be read")
    size_of(found)
    attends = _attention(found)
    _check_widths(found)
    return found, attends


def read_shared(found: UnetArguments, *, last_label_is_class: bool, **own: Any) -> tuple[UnetSpec, Interface]:
    """Return the U-Net, and what it takes and predicts, of arguments and the fields that are a family's ``own``.

    Raises:
        ValueError: our U-Net can't express it; one line with the key, its value and what is possible.
    """
    told_level = found.class_embed_type is not None
    classes = None if told_level else found.num_class_embeds  # which has no effect beside it
    if classes is not None and not last_label_is_class:
        if classes == 1:
            raise refused("num_class_embeds", 1, "ours has a class at least, and a last row for no label")
        classes -= 1
    channels = math.gcd(*found.block_out_channels)
    spec = UnetSpec(
        channels=channels,
        multipliers=tuple(width // channels for width in found.block_out_channels),
        norm_groups=found.norm_num_groups,
        norm_epsilon=found.norm_eps,
        dropout=found.dropout,
        embedding_channels=found.time_embedding_dim,
        time_conditioning="add" if found.resnet_time_scale_shift == "default" else "scale_shift",
        sinusoid_order="cos_sin" if found.flip_sin_to_cos else "sin_cos",
        sinusoid_shift=found.freq_shift,
        downsample_padding="symmetric" if found.downsample_padding else "asymmetric",
        classes=classes,
        **own,
    )
    try:
        check_extent(spec)
    except ValueError as error:
        raise refused("layers_per_block", found.layers_per_block, str(error)) from None
    conditions = found.in_channels - found.out_channels
    if told_level and not conditions:
        raise refused("class_embed_type", "timestep", "ours is the noise level of a condition, and this model has none")
    size = size_of(found)
    return spec, Interface(channels=found.out_channels, size=size, condition_channels=conditions, told_level=told_level)


def size_of(found: UnetArguments) -> tuple[int, int]:
    """Return height and width of the images; raises ValueError if there are none, or they can't be halved."""
    size, levels = found.sample_size, len(found.block_out_channels)
    if size is None:
        raise refused("sample_size", size, "our images are of one size, such as 32 or [32, 48]")
    height, width = size if isinstance(size, tuple) else (size, size)
    if height % 2 ** (levels - 1) or width % 2 ** (levels - 1):
        raise refused("sample_size", size, f"it can't be halved {levels - 1} times, as {levels} levels ask")
    return height, width


def _attention(found: UnetArguments) -> list[bool]:
    """Return whether each level has attention, finest first."""
    down, up = (["Attn" in name for name in names] for names in (found.down_block_types, found.up_block_types))
    levels = len(found.block_out_channels)
    for key, types in (("down_block_types", found.down_block_types), ("up_block_types", found.up_block_types)):
        if len(types) != levels:
            raise refused(key, types, f"it should have {levels} entries, one for each of block_out_channels")
    if up != down[::-1]:
        raise refused("up_block_types", found.up_block_types, "our decoder attends where the encoder does, mirrored")
    return down


def _check_widths(found: UnetArguments) -> None:
    widths, groups = found.block_out_channels, found.norm_num_groups
    if found.out_channels > found.in_channels:
        why = f"ours predicts {found.in_channels} channels at most; variances that are learned can't be expressed"
        raise refused("out_channels", found.out_channels, why)
    for width in widths:
        if width % groups:
            raise refused("norm_num_groups", groups, f"it does not divide the {width} of block_out_channels")
    if divides_by_zero(widths[0], found.freq_shift):
        raise refused("freq_shift", 1, f"with {widths[0]} as the first of block_out_channels diffusers divides by zero")


def divides_by_zero(width: int, shift: int) -> bool:
    """Return whether diffusers' sinusoidal embedding would divide by zero, having no frequencies to space."""
    return shift == 1 and width // 2 == 1
