"""Configurations of diffusers' two families of U-Nets to ours and back: ``UNet2DModel`` without text, and
``UNet2DConditionModel`` with text.

Settings that only one side can express are refused by name.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

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
    Timesteps,
    UnetSpec,
    check_extent,
)
from ddpm_ds.config.text import CrossAttentionSpec, Heads, Width
from ddpm_ds.evaluate.diffusers.scheduler import Arguments, refused
from ddpm_ds.unet.layers import SIZES

Widths = Annotated[tuple[Channels, ...], Field(min_length=1, max_length=MOST_LEVELS)]
CLASS_NAME = "UNet2DConditionModel"
ZERO = "diffusers divides by zero in its sinusoidal embedding; only 4 and more can be held"
ValueOf = TypeVar("ValueOf")
Depths = Annotated[int, Field(ge=1, le=64)]
AVERAGE = {"decay", "inv_gamma", "min_decay", "optimization_step", "power", "update_after_step", "use_ema_warmup"}
"""Keys that diffusers' EMAModel adds to the configuration of the averaged model that it saves."""


class UnetArguments(Arguments):
    """Arguments that both families take, as far as our U-Net has them."""

    ignored: ClassVar = AVERAGE

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


def text_config(unet: UnetSpec, interface: Interface) -> dict[str, Any]:
    """Return the arguments of the ``UNet2DConditionModel`` that equals the U-Net of a spec, which reads text.

    Raises:
        ValueError: diffusers has no such U-Net.
    """
    text = unet.text
    assert text is not None
    if not unet.middle_attention:
        raise ValueError(f"unet.middle_attention = false: the middle of a {CLASS_NAME} reads text; only true is there")
    if text.blocks[-1] not in (0, text.middle_blocks):
        raise ValueError(
            f"unet.text.middle_blocks = {text.middle_blocks} and {text.blocks[-1]} as the last of unet.text.blocks: "
            f"the middle of a {CLASS_NAME} has as many blocks as its last level"
        )
    if text.pooled_channels and divides_by_zero(text.size_channels, unet.sinusoid_shift):
        raise ValueError(f"unet.text.size_channels = {text.size_channels} with unet.sinusoid_shift = 1: {ZERO}")
    attends = [blocks > 0 for blocks in text.blocks]
    # What stands at a level without attention is not read; the middle has the number of the last level.
    depths = (*(blocks or 1 for blocks in text.blocks[:-1]), text.middle_blocks)
    return {
        **shared_config(unet, interface, CLASS_NAME),
        "down_block_types": tuple("CrossAttnDownBlock2D" if yes else "DownBlock2D" for yes in attends),
        "up_block_types": tuple("CrossAttnUpBlock2D" if yes else "UpBlock2D" for yes in reversed(attends)),
        "cross_attention_dim": text.context_channels,
        "transformer_layers_per_block": _one_if_equal(depths),
        "attention_head_dim": _one_if_equal(text.heads),  # which diffusers reads as the number of heads
        "use_linear_projection": text.linear_projection,
        "upcast_attention": text.upcast_attention,
        **(_text_time(text) if text.pooled_channels else {}),
    }


def _text_time(text: CrossAttentionSpec) -> dict[str, Any]:
    return {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": text.size_channels,
        "projection_class_embeddings_input_dim": (text.pooled_channels or 0) + SIZES * text.size_channels,
    }


def _one_if_equal(values: tuple[int, ...]) -> int | tuple[int, ...]:
    return values[0] if len(set(values)) == 1 else values


class TextArguments(UnetArguments):
    """Arguments of ``UNet2DConditionModel`` with its defaults, as far as our U-Net has them."""

    class_names: ClassVar[tuple[str, ...]] = (CLASS_NAME,)

    in_channels: Channels = 4
    out_channels: ImageChannels = 4
    down_block_types: tuple[Literal["DownBlock2D", "CrossAttnDownBlock2D"], ...] = (
        *("CrossAttnDownBlock2D",) * 3,
        "DownBlock2D",
    )
    mid_block_type: Literal["UNetMidBlock2DCrossAttn"] = "UNetMidBlock2DCrossAttn"
    up_block_types: tuple[Literal["UpBlock2D", "CrossAttnUpBlock2D"], ...] = (
        "UpBlock2D",
        *("CrossAttnUpBlock2D",) * 3,
    )
    only_cross_attention: Literal[False] | tuple[Literal[False], ...] = False
    mid_block_only_cross_attention: Literal[False] | None = None
    block_out_channels: Widths = (320, 640, 1280, 1280)
    layers_per_block: Blocks | tuple[Blocks, ...] = 2  # type: ignore[assignment]
    cross_attention_dim: Width | tuple[Width, ...] = 1280
    transformer_layers_per_block: Depths | tuple[Depths, ...] = 1
    reverse_transformer_layers_per_block: None = None
    encoder_hid_dim: Width | None = None
    encoder_hid_dim_type: str | None = None
    attention_head_dim: Heads | tuple[Heads, ...] = 8
    """Number of heads, not their width: diffusers keeps an old error so that old models can be read."""
    num_attention_heads: None = None
    dual_cross_attention: Literal[False] = False
    use_linear_projection: bool = False
    addition_embed_type: Literal["text_time"] | None = None
    addition_time_embed_dim: Annotated[int, Field(ge=2, le=4096, multiple_of=2)] | None = None
    projection_class_embeddings_input_dim: Width | None = None
    upcast_attention: bool | None = False
    resnet_skip_time_act: Literal[False] = False
    resnet_out_scale_factor: Literal[1] = 1
    time_embedding_act_fn: None = None
    timestep_post_act: None = None
    time_cond_proj_dim: None = None
    conv_in_kernel: Literal[3] = 3
    conv_out_kernel: Literal[3] = 3
    attention_type: Literal["default"] = "default"
    class_embeddings_concat: Literal[False] = False
    cross_attention_norm: None = None
    addition_embed_type_num_heads: int = 64
    """Has no effect on ``text_time``."""


def text_spec(config: Mapping[str, Any], *, last_label_is_class: bool) -> tuple[UnetSpec, Interface]:
    """Return the U-Net that equals a ``UNet2DConditionModel``, and what it takes and predicts.

    Raises:
        ValueError: our U-Net can't express it; one line with the key, its value and what is possible.
    """
    found, attends = read_arguments(TextArguments, config)
    for key in ("encoder_hid_dim", "encoder_hid_dim_type"):
        if (value := getattr(found, key)) is not None:
            raise refused(key, value, "ours reads the text as it is encoded, and this model, as Kolors, projects it")
    depths = _by_level(found, "transformer_layers_per_block", found.transformer_layers_per_block)
    heads = _by_level(found, "attention_head_dim", found.attention_head_dim)
    for width, number, yes in zip(found.block_out_channels, heads, [*attends[:-1], True], strict=True):
        if yes and width % number:
            why = f"{number} heads, as diffusers reads it, do not divide the {width} channels that are attended"
            raise refused("attention_head_dim", found.attention_head_dim, why)
    text = CrossAttentionSpec(
        context_channels=_alike(found, "cross_attention_dim", found.cross_attention_dim),
        blocks=tuple(depth * yes for depth, yes in zip(depths, attends, strict=True)),
        middle_blocks=depths[-1],
        heads=heads,
        linear_projection=found.use_linear_projection,
        upcast_attention=bool(found.upcast_attention),
        **_told_beside_text(found),
    )
    blocks = _alike(found, "layers_per_block", found.layers_per_block)
    return read_shared(found, last_label_is_class=last_label_is_class, blocks_per_level=blocks, text=text)


def _told_beside_text(found: TextArguments) -> dict[str, int]:
    """Return the widths of the pooled text and of the sizes; none if the U-Net is told neither."""
    key, both = "projection_class_embeddings_input_dim", found.projection_class_embeddings_input_dim
    width = found.addition_time_embed_dim
    if not found.addition_embed_type:
        return {}
    if width is None:
        raise refused("addition_time_embed_dim", None, "text_time embeds the sizes of images; give their width")
    if both is None or both <= SIZES * width:
        why = f"text_time has {SIZES} sizes of addition_time_embed_dim = {width} each, and a pooled text beside them"
        raise refused(key, both, why)
    if divides_by_zero(width, found.freq_shift):
        raise refused("addition_time_embed_dim", width, f"with freq_shift = 1 {ZERO}")
    if (both, width, found.cross_attention_dim) == (2560, 256, 1280):
        raise refused(key, both, "SDXL's refiner is told 5 numbers, a score among them, and ours 6 sizes")
    return {"pooled_channels": both - SIZES * width, "size_channels": width}


def _by_level(found: UnetArguments, key: str, value: ValueOf | tuple[ValueOf, ...]) -> tuple[ValueOf, ...]:
    """Return a value for each level, of one or of so many."""
    levels = len(found.block_out_channels)
    values = value if isinstance(value, tuple) else (value,) * levels
    if len(values) != levels:
        raise refused(key, value, f"it should have {levels} entries, one for each of block_out_channels")
    return values


def _alike(found: UnetArguments, key: str, value: ValueOf | tuple[ValueOf, ...]) -> ValueOf:
    """Return the value that all levels share."""
    values = _by_level(found, key, value)
    if len(set(values)) > 1:
        raise refused(key, value, "ours is the same on all levels")
    return values[0]
