"""Section `unet` of the run spec, and what a U-Net takes and predicts. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ddpm_ds.schema import types
from ddpm_ds.schema.section import Section, no_switch, only_with, refuse


@dataclass(frozen=True, kw_only=True)
class Interface:
    """What a U-Net takes and predicts, as the data decide it."""

    channels: int  # channels of x_t and of the prediction
    size: tuple[int, int]  # height and width in pixels
    condition_channels: int = 0  # channels that are concatenated to x_t, after it, and never noised
    numbers: int = 0  # size of the vector that is added to the time embedding
    condition_level: bool = False  # whether the U-Net also takes the noise level of its condition

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of x_t and of the prediction."""
        return (self.channels, *self.size)


class CrossAttentionSpec(Section):
    """Text in the U-Net: transformer blocks, in which pixels attend to each other and to the tokens of a caption."""

    context_channels: types.Width
    """Width of the encoded tokens: 768 for SD 1.5, 1024 for SD 2, 2048 for SDXL (diffusers: `cross_attention_dim`)."""
    tokens: Annotated[int, Field(ge=1, le=4096)] = 77
    """Tokens of a caption, padding included."""
    blocks: Annotated[tuple[types.Depth, ...], Field(min_length=1)]
    """Transformer blocks after each residual block, by level (diffusers: `transformer_layers_per_block`)."""
    middle_blocks: Annotated[int, Field(ge=1, le=64)] = 1
    """Transformer blocks between the two middle blocks, if `unet.middle_attention` is true."""
    heads: Annotated[tuple[types.Heads, ...], Field(min_length=1)]
    """Heads of each attention, by level; the middle has the last level's (diffusers: `attention_head_dim`)."""
    linear_projection: bool = False
    """Whether diffusers has linear layers around the blocks, instead of 1x1 convolutions (`use_linear_projection`)."""
    pooled_channels: types.Width | None = None
    """Width of pooled text, which is embedded with the sizes of the image: 1280 for SDXL (diffusers:
    `addition_embed_type: text_time`); null has neither."""
    size_channels: Annotated[int, Field(ge=2, le=4096, multiple_of=2)] = 256
    """Width of the sinusoidal embedding of each of the six sizes (diffusers: `addition_time_embed_dim`)."""
    upcast_attention: bool = False
    """Whether diffusers computes attention in fp32 after an export; training does not change."""


class UnetSpec(Section):
    """U-Net of DDPM/ADM residual blocks: an encoder, a middle and a decoder."""

    channels: types.Channels
    """Base width, which `multipliers` multiply."""
    multipliers: Annotated[tuple[types.Channels, ...], Field(min_length=1, max_length=types.MOST_LEVELS)]
    """Width of each level as a multiple of `channels`; every level after the first halves the image."""
    blocks_per_level: types.Blocks = 2
    """Residual blocks per encoder level; a decoder level has one more."""
    attention_resolutions: Annotated[
        tuple[types.Pixels, ...], Field(max_length=types.MOST_LEVELS), only_with("text=null", types.ONE_SIZE)
    ] = ()
    """Sizes of square images (pixels) at which every residual block is followed by self-attention."""
    attention_levels: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...],
        Field(max_length=types.MOST_LEVELS),
        only_with("text=null", "attention_resolutions=[]"),
    ] = ()
    """Levels with self-attention after every residual block, 0 at full size, for images of any shape."""
    middle_attention: bool = True
    """Attention between the two middle blocks."""
    head_channels: Annotated[types.Channels | None, only_with("text=null")] = None
    """Channels per attention head; null means one head of full width."""
    norm_groups: types.Channels = 32
    """Groups of every group normalisation."""
    norm_epsilon: types.Small = 1e-6
    """Epsilon of every group normalisation."""
    dropout: Annotated[types.Fraction, only_with(types.ONE_SIZE)] = 0.0
    """Dropout before the second convolution of each residual block."""
    embedding_channels: types.Channels | None = None
    """Width of the time embedding; null means 4 x the first level's width."""
    time_conditioning: Literal["add", "scale_shift"] = "add"
    """How a block uses the time embedding: added (DDPM), or as scale and shift of the second normalisation (ADM)."""
    sinusoid_order: Literal["sin_cos", "cos_sin"] = "sin_cos"
    """Order of the halves of the sinusoidal embedding (diffusers: `flip_sin_to_cos` true is cos_sin)."""
    sinusoid_shift: Annotated[Literal[0, 1], BeforeValidator(no_switch)] = 1
    """Subtracted from the half width in the frequency exponent (diffusers: `freq_shift`)."""
    downsample_padding: Literal["symmetric", "asymmetric"] = "asymmetric"
    """Zero padding of the strided convolution: on all sides (diffusers: 1), or right and bottom only as in DDPM (0)."""
    text: Annotated[CrossAttentionSpec | None, only_with("data.text")] = None
    """Cross-attention to a caption; null has none."""
    classes: types.Classes | None = None
    """Number of classes of a class-conditional U-Net; null trains without labels."""

    def attended_levels(self, size: tuple[int, int]) -> tuple[int, ...]:
        """Return the levels with attention, for images of ``size`` (height, width)."""
        if self.text is not None:
            return tuple(level for level, blocks in enumerate(self.text.blocks[: len(self.multipliers)]) if blocks)
        sides = [size[0] >> level if size[0] == size[1] else None for level in range(len(self.multipliers))]
        return tuple(
            level
            for level, side in enumerate(sides)
            if level in self.attention_levels or side in self.attention_resolutions
        )


def check_extent(unet: UnetSpec) -> None:
    """Check the number of layers and the widths of a U-Net against the limits; raises ValueError with one line."""
    levels, blocks = len(unet.multipliers), unet.blocks_per_level
    attending = min(len({*unet.attention_resolutions, *unet.attention_levels}), levels)
    attention, middle = [1] * attending, 1
    if unet.text is not None:
        attention, middle = [depth + 2 for depth in unet.text.blocks[:levels] if depth], unet.text.middle_blocks + 2
    layers = (2 * blocks + 1) * (levels + sum(attention)) + 2 * levels + 3 + middle * unet.middle_attention
    widest = max(unet.multipliers)
    width = unet.channels * widest
    refuse(
        {
            f"unet.blocks_per_level = {blocks} makes {layers:,} layers on {levels} levels, and {types.MOST_LAYERS} are "
            "the most; use fewer blocks": layers > types.MOST_LAYERS,
            f"unet.channels = {unet.channels} times {widest} of unet.multipliers is {width:,}, and "
            f"{types.MOST_CHANNELS:,} channels are the most; use fewer": width > types.MOST_CHANNELS,
        }
    )


def check_levels(unet: UnetSpec, size: tuple[int, int]) -> None:
    """Check that images of ``size`` (height, width) can be halved at each level; raises ValueError with one line."""
    levels = len(unet.multipliers)
    step = 2 ** (levels - 1)
    below = (max(step, size[0] // step * step), max(step, size[1] // step * step))
    above = (-(-size[0] // step) * step, -(-size[1] // step) * step)
    near = " or ".join(map(types.written, dict.fromkeys((below, above))))
    refuse(
        {
            f"data.image_size = {types.written(size)} can't be halved {levels - 1} times, as the {levels} levels of "
            f"unet.multipliers ask; use a multiple of {step}, such as {near}, or fewer levels": any(
                side % step for side in size
            ),
            f"unet.attention_resolutions = {list(unet.attention_resolutions)} are sides of squares, and "
            f"data.image_size is {types.written(size)}; use unet.attention_levels, 0 to {levels - 1}": (
                unet.attention_resolutions and size[0] != size[1]
            ),
        }
    )
    sizes = [size[0] >> level for level in range(levels)]
    for key, found in (("attention_resolutions", sizes), ("attention_levels", [*range(levels)])):
        if others := [one for one in getattr(unet, key) if one not in found]:
            raise ValueError(f"unet.{key} has {others[0]}, but the levels are {found}; use some of those")


def check_widths(unet: UnetSpec, size: tuple[int, int]) -> None:
    """Check that groups and heads divide the levels' widths; raises ValueError with one line."""
    check_extent(unet)
    widths, groups, head = [unet.channels * each for each in unet.multipliers], unet.norm_groups, unet.head_channels
    attended = [widths[level] for level in unet.attended_levels(size)] + widths[-1:] * unet.middle_attention
    faults: dict[str, object] = {
        f"unet.channels = {unet.channels} makes a first level of {widths[0]} channels (diffusers: the first of "
        "block_out_channels), which is odd; the sinusoidal embedding needs an even width": widths[0] % 2
    }
    for width in widths:
        faults[f"unet.norm_groups = {groups} does not divide {width} channels; use a divisor"] = width % groups
    for width in attended:
        fault = f"unet.head_channels = {head} does not divide the {width} channels that are attended; use a divisor"
        faults[fault] = head and width % head
    refuse(faults)


def check_cross_attention(unet: UnetSpec, numbers: int) -> None:
    """Check the blocks and heads by level, and that pooled text is the only vector; raises ValueError with one line."""
    if unet.text is None:
        return
    text, levels = unet.text, len(unet.multipliers)
    for key, found in (("blocks", text.blocks), ("heads", text.heads)):
        if len(found) != levels:
            raise ValueError(
                f"unet.text.{key} = {list(found)} has {len(found)} numbers, and unet.multipliers has {levels} levels; "
                "give one for each level"
            )
    widths = [unet.channels * multiplier for multiplier in unet.multipliers]
    depths = [*text.blocks[:-1], text.blocks[-1] or unet.middle_attention]
    faults: dict[str, object] = {
        f"unet.text.blocks = {list(text.blocks)} reads no text; give a level some blocks": not any(depths),
        f"unet.text.pooled_channels = {text.pooled_channels} and numbers of data.condition are two vectors beside the "
        "time embedding; use one": text.pooled_channels and numbers,
    }
    for width, heads, depth in zip(widths, text.heads, depths, strict=True):
        fault = f"unet.text.heads has {heads}, which does not divide the {width} channels of its level; use a divisor"
        faults[fault] = depth and width % heads
    refuse(faults)
