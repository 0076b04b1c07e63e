"""Configuration of ``UNet2DConditionModel``, the family of U-Nets of diffusers that read text, to ours and back."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from ddpm_ds.config.spec import Blocks, Channels, ImageChannels, Interface, UnetSpec
from ddpm_ds.config.text import CrossAttentionSpec, Heads, Width
from ddpm_ds.evaluate.diffusers.scheduler import refused
from ddpm_ds.evaluate.diffusers.shared_config import (
    UnetArguments,
    Widths,
    divides_by_zero,
    read_arguments,
    read_shared,
    shared_config,
)
from ddpm_ds.unet.layers import SIZES

CLASS_NAME = "UNet2DConditionModel"
ZERO = "diffusers divides by zero in its sinusoidal embedding; only 4 and more can be held"
ValueOf = TypeVar("ValueOf")
Depths = Annotated[int, Field(ge=1, le=64)]


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
