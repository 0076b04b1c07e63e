"""Translation of configurations of U-Nets from diffusers and back: ``UNet2DModel``, with text ``UNet2DConditionModel``.

Settings that only one side has are refused by name.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ddpm_ds.data.spec import DataSpec
from ddpm_ds.evaluate.diffusers.scheduler import Arguments, refused
from ddpm_ds.schema.section import Section
from ddpm_ds.schema.types import (
    MOST_LEVELS,
    Blocks,
    Channels,
    Classes,
    Fraction,
    Heads,
    ImageChannels,
    Pixels,
    Small,
    Timesteps,
    Width,
)
from ddpm_ds.unet.layers import SIZES
from ddpm_ds.unet.spec import CrossAttentionSpec, Interface, UnetSpec, check_extent

PLAIN, WITH_TEXT = "UNet2DModel", "UNet2DConditionModel"
"""Classes of diffusers that equal our U-Net, without text and with text."""
SHARED = {
    "blocks_per_level": "layers_per_block",
    "norm_groups": "norm_num_groups",
    "norm_epsilon": "norm_eps",
    "dropout": "dropout",
    "embedding_channels": "time_embedding_dim",
    "time_conditioning": "resnet_time_scale_shift",
    "sinusoid_order": "flip_sin_to_cos",
    "sinusoid_shift": "freq_shift",
    "downsample_padding": "downsample_padding",
}
"""Arguments of both classes by our keys of `unet`."""
OF_PLAIN = {"middle_attention": "add_attention", "head_channels": "attention_head_dim"}
"""Arguments of the class without text by our keys of `unet`."""
OF_TEXT = {
    "context_channels": "cross_attention_dim",
    "linear_projection": "use_linear_projection",
    "upcast_attention": "upcast_attention",
}
"""Arguments of the class with text by our keys of `unet.text`."""
VALUES: dict[str, dict[str, object]] = {
    "time_conditioning": {"add": "default", "scale_shift": "scale_shift"},
    "sinusoid_order": {"cos_sin": True, "sin_cos": False},
    "downsample_padding": {"symmetric": 1, "asymmetric": 0},
}
"""Values in diffusers by our values, for keys where the two differ."""
AVERAGE = {"decay", "inv_gamma", "min_decay", "optimization_step", "power", "update_after_step", "use_ema_warmup"}
"""Keys that diffusers' EMAModel adds to the configuration of the averaged model that it saves."""
Widths = Annotated[tuple[Channels, ...], Field(min_length=1, max_length=MOST_LEVELS)]
Depths = Annotated[int, Field(ge=1, le=64)]


class UnetArguments(Arguments):
    """Arguments of both classes that our U-Net has; others may only be null or false."""

    ignored: ClassVar = AVERAGE

    sample_size: Pixels | tuple[Pixels, Pixels] | None = None
    in_channels: Channels
    out_channels: ImageChannels
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

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images."""
        size, halvings = self.sample_size, len(self.block_out_channels) - 1
        if size is None:
            raise refused("sample_size", size, "our images are of one size, such as 32 or [32, 48]")
        height, width = size if isinstance(size, tuple) else (size, size)
        if height % 2**halvings or width % 2**halvings:
            raise refused("sample_size", size, f"it can't be halved {halvings} times, as {halvings + 1} levels ask")
        return height, width

    @property
    def attends(self) -> list[bool]:
        """Whether each level has attention, finest first."""
        down, up = (["Attn" in name for name in self.by_level(f"{side}_block_types")] for side in ("down", "up"))
        if up != down[::-1]:
            raise refused("up_block_types", self.up_block_types, "our decoder attends where the encoder does, mirrored")
        return down

    def by_level(self, argument: str) -> tuple[Any, ...]:
        """Return an argument's values by level; one value stands for all."""
        value, levels = getattr(self, argument), len(self.block_out_channels)
        values = value if isinstance(value, tuple) else (value,) * levels
        if len(values) != levels:
            raise refused(argument, value, f"it should have {levels} entries, one for each of block_out_channels")
        return values

    def ours(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """Return our values by key, for arguments with one value on all levels."""
        values = {}
        for key, argument in keys.items():
            value, *more = set(self.by_level(argument))
            if more:
                raise refused(argument, getattr(self, argument), "ours is the same on all levels")
            values[key] = {theirs: ours for ours, theirs in VALUES[key].items()}[value] if key in VALUES else value
        return values

    @abstractmethod
    def own_keys(self) -> dict[str, Any]:
        """Return the keys of `unet` that only this class decides."""


class PlainArguments(UnetArguments):
    """Arguments of ``UNet2DModel`` that our U-Net has, with diffusers' defaults."""

    class_names: ClassVar[tuple[str, ...]] = (PLAIN,)

    in_channels: Channels = 3
    out_channels: ImageChannels = 3
    down_block_types: tuple[Literal["DownBlock2D", "AttnDownBlock2D"], ...] = ("DownBlock2D", *("AttnDownBlock2D",) * 3)
    mid_block_type: Literal["UNetMidBlock2D"] = "UNetMidBlock2D"
    up_block_types: tuple[Literal["UpBlock2D", "AttnUpBlock2D"], ...] = (*("AttnUpBlock2D",) * 3, "UpBlock2D")
    block_out_channels: Widths = (224, 448, 672, 896)
    downsample_type: Literal["conv"] = "conv"
    upsample_type: Literal["conv"] = "conv"
    attention_head_dim: Channels | None = 8
    attn_norm_num_groups: Channels | None = None
    add_attention: bool = True
    num_train_timesteps: Timesteps | None = None
    """Number of timesteps; without effect on a positional embedding."""

    def own_keys(self) -> dict[str, Any]:
        widths, groups, heads, size = self.block_out_channels, self.norm_num_groups, self.attention_head_dim, self.size
        default = groups if self.resnet_time_scale_shift == "default" else None
        if self.add_attention and (self.attn_norm_num_groups or default) != groups:
            why = f"our middle attention is normalised like everything else, in {groups} groups"
            raise refused("attn_norm_num_groups", self.attn_norm_num_groups, why)
        attended = tuple(level for level, yes in enumerate(self.attends) if yes)
        for width in [widths[level] for level in attended] + [widths[-1]] * self.add_attention:
            if heads is not None and width % heads:
                raise refused("attention_head_dim", heads, f"it does not divide the {width} channels that are attended")
        sides = {"attention_resolutions": tuple(size[0] >> level for level in attended), "attention_levels": ()}
        levels = {"attention_resolutions": (), "attention_levels": attended}
        return self.ours(OF_PLAIN) | (sides if size[0] == size[1] else levels)


class TextArguments(UnetArguments):
    """Arguments of ``UNet2DConditionModel`` that our U-Net has, with diffusers' defaults."""

    class_names: ClassVar[tuple[str, ...]] = (WITH_TEXT,)

    in_channels: Channels = 4
    out_channels: ImageChannels = 4
    down_block_types: tuple[Literal["DownBlock2D", "CrossAttnDownBlock2D"], ...] = (
        *("CrossAttnDownBlock2D",) * 3,
        "DownBlock2D",
    )
    mid_block_type: Literal["UNetMidBlock2DCrossAttn"] = "UNetMidBlock2DCrossAttn"
    up_block_types: tuple[Literal["UpBlock2D", "CrossAttnUpBlock2D"], ...] = ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3)
    only_cross_attention: Literal[False] | tuple[Literal[False], ...] = False
    block_out_channels: Widths = (320, 640, 1280, 1280)
    layers_per_block: Blocks | tuple[Blocks, ...] = 2  # type: ignore[assignment]
    cross_attention_dim: Width | tuple[Width, ...] = 1280
    transformer_layers_per_block: Depths | tuple[Depths, ...] = 1
    encoder_hid_dim: Width | None = None
    encoder_hid_dim_type: str | None = None
    attention_head_dim: Heads | tuple[Heads, ...] = 8
    """Number of heads, not their width: diffusers keeps this old mistake for the sake of old models."""
    use_linear_projection: bool = False
    addition_embed_type: Literal["text_time"] | None = None
    addition_time_embed_dim: Annotated[int, Field(ge=2, le=4096, multiple_of=2)] | None = None
    projection_class_embeddings_input_dim: Width | None = None
    upcast_attention: bool | None = False
    resnet_out_scale_factor: Literal[1] = 1
    conv_in_kernel: Literal[3] = 3
    conv_out_kernel: Literal[3] = 3
    attention_type: Literal["default"] = "default"
    addition_embed_type_num_heads: int = 64
    """Has no effect on ``text_time``."""

    def own_keys(self) -> dict[str, Any]:
        for key in ("encoder_hid_dim", "encoder_hid_dim_type"):
            if (value := getattr(self, key)) is not None:
                why = "ours reads the text as it is encoded, and this model, as Kolors, projects it"
                raise refused(key, value, why)
        attends = self.attends
        depths, heads = (self.by_level(key) for key in ("transformer_layers_per_block", "attention_head_dim"))
        for width, number, yes in zip(self.block_out_channels, heads, [*attends[:-1], True], strict=True):
            if yes and width % number:
                why = f"{number} heads, as diffusers reads it, do not divide the {width} channels that are attended"
                raise refused("attention_head_dim", self.attention_head_dim, why)
        text = CrossAttentionSpec(
            blocks=tuple(depth * yes for depth, yes in zip(depths, attends, strict=True)),
            middle_blocks=depths[-1],
            heads=heads,
            **self.ours(OF_TEXT) | {"upcast_attention": bool(self.upcast_attention)} | self.widths_beside_text(),
        )
        return {"text": text}

    def widths_beside_text(self) -> dict[str, int]:
        """Return the widths of the pooled text and the sizes; none if the U-Net takes neither."""
        key, both = "projection_class_embeddings_input_dim", self.projection_class_embeddings_input_dim
        width = self.addition_time_embed_dim
        if not self.addition_embed_type:
            return {}
        if width is None:
            raise refused("addition_time_embed_dim", None, "text_time embeds the sizes of images; give their width")
        if both is None or both <= SIZES * width:
            sizes = f"{SIZES} sizes of addition_time_embed_dim = {width} each"
            raise refused(key, both, f"text_time has {sizes}, and a pooled text beside them")
        if divides_by_zero(width, self.freq_shift):
            raise refused("addition_time_embed_dim", width, "with freq_shift = 1 diffusers divides by zero")
        if (both, width, self.cross_attention_dim) == (2560, 256, 1280):
            raise refused(key, both, "SDXL's refiner takes 5 numbers, a score among them, and ours 6 sizes")
        return {"pooled_channels": both - SIZES * width, "size_channels": width}


ARGUMENTS: dict[str, type[UnetArguments]] = {PLAIN: PlainArguments, WITH_TEXT: TextArguments}


def use_of(unet: UnetSpec, data: DataSpec | None) -> Literal["inpaint", "edit", "depth"] | None:
    """Return the use of latents' conditions that diffusers has pipelines for: images are inpainted, edited as by
    InstructPix2Pix, or looked through as by Marigold, which has no pooled text. None is any other U-Net.
    """
    if data is None or data.autoencoder is None or data.condition is None or unet.text is None:
        return None
    if data.condition.kind == "cut_out":
        return "inpaint"
    if data.condition.kind != "stored":
        return None
    return "depth" if data.condition.scaled and unet.text.pooled_channels is None else "edit"


def input_order(unet: UnetSpec, data: DataSpec | None) -> list[int]:
    """Return our numbers of input channels in diffusers' order, [] if it is ours: inpainting has the mask before the
    cut image, and Marigold the image before x_t.
    """
    use = use_of(unet, data)
    if data is None or use in (None, "edit"):
        return []
    x_t, image = [*range(data.channels)], [*range(data.channels, 2 * data.channels)]
    return [*x_t, 2 * data.channels, *image] if use == "inpaint" else [*image, *x_t]


def class_of(unet: UnetSpec) -> str:
    """Return the name of diffusers' class for the U-Net of a spec."""
    return PLAIN if unet.text is None else WITH_TEXT


def diffusers_config(unet: UnetSpec, interface: Interface) -> dict[str, object]:
    """Return the arguments with which diffusers' :func:`class_of` equals the U-Net of a spec.

    Raises ValueError: diffusers has no such U-Net.
    """
    widths = tuple(unet.channels * multiplier for multiplier in unet.multipliers)
    if (fault := _fault(unet, interface, widths[0])) is not None:
        raise ValueError(fault)
    (height, width), text = interface.size, unet.text
    kind, attended = "Attn" if text is None else "CrossAttn", unet.attended_levels(interface.size)
    before = [kind if level in attended else "" for level in range(len(widths))]
    found = {
        "sample_size": height if height == width else (height, width),
        "in_channels": interface.channels + interface.condition_channels,
        "out_channels": interface.channels,
        "block_out_channels": widths,
        **_theirs(unet, SHARED),
        # The row after the last class is "no label".
        "num_class_embeds": None if unet.classes is None else unet.classes + 1,
        **({"class_embed_type": "timestep"} if interface.condition_level else {}),
        "down_block_types": tuple(f"{name}DownBlock2D" for name in before),
        "up_block_types": tuple(f"{name}UpBlock2D" for name in reversed(before)),
    }
    if text is None:
        # Without the last, scale_shift would leave out the normalisation before the middle attention.
        return found | _theirs(unet, OF_PLAIN) | {"attn_norm_num_groups": unet.norm_groups}
    # diffusers ignores the number at a level without attention; its middle has the number of the last level.
    blocks = (*(blocks or 1 for blocks in text.blocks[:-1]), text.middle_blocks)
    # diffusers reads the second as the number of heads.
    for key, values in (("transformer_layers_per_block", blocks), ("attention_head_dim", text.heads)):
        found[key] = values[0] if len(set(values)) == 1 else values
    found |= _theirs(text, OF_TEXT)
    if text.pooled_channels:
        found["addition_embed_type"] = "text_time"
        found["addition_time_embed_dim"] = text.size_channels
        found["projection_class_embeddings_input_dim"] = text.pooled_channels + SIZES * text.size_channels
    return found


def _fault(unet: UnetSpec, interface: Interface, width: int) -> str | None:
    """Return why diffusers has no such U-Net, with ``width`` channels on its first level; None if it has one."""
    kind, text = class_of(unet), unet.text
    zero = "diffusers divides by zero in its sinusoidal embedding; use sinusoid_shift 0 or 4 channels and more"
    if divides_by_zero(width, unet.sinusoid_shift):
        return f"unet.sinusoid_shift = 1 with a first width of {width}: {zero}"
    if interface.numbers:
        vector = "a vector (data.condition.vector, or the flag of data.condition.drop)"
        return f"data.condition gives the U-Net {vector}, and a {kind} takes none"
    if interface.condition_level and unet.classes is not None:
        return f"unet.classes = {unet.classes} and data.condition.noise are both given to the U-Net; a {kind} takes one"
    if text is None:
        return None
    if not unet.middle_attention:
        return f"unet.middle_attention = false: the middle of a {kind} reads text; only true is there"
    if text.blocks[-1] not in (0, text.middle_blocks):
        both = f"unet.text.middle_blocks = {text.middle_blocks} and {text.blocks[-1]} as the last of unet.text.blocks"
        return f"{both}: the middle of a {kind} has as many blocks as its last level"
    if text.pooled_channels and divides_by_zero(text.size_channels, unet.sinusoid_shift):
        return f"unet.text.size_channels = {text.size_channels} with unet.sinusoid_shift = 1: {zero}"
    return None


def divides_by_zero(width: int, shift: int) -> bool:
    """Return whether diffusers' sinusoidal embedding would divide by zero, for lack of frequencies."""
    return shift == 1 and width // 2 == 1


def unet_spec_from_diffusers(
    config: Mapping[str, object], *, last_label_is_class: bool = False
) -> tuple[UnetSpec, Interface]:
    """Return the U-Net that equals one of diffusers, and its interface. Input channels beyond the outputs' number are a
    condition; a timestep as class is the condition's noise level. Missing keys take diffusers' defaults, and a missing
    class is ``UNet2DModel``. The last row of ``num_class_embeds`` means "no label" unless ``last_label_is_class``.

    Raises ValueError, a line with the key, its value and the fix: our U-Net can't express it.
    """
    name = config.get("_class_name", PLAIN)
    if not isinstance(name, str) or name not in ARGUMENTS:
        raise refused("_class_name", name, f"only {' or '.join(ARGUMENTS)} can be read")
    found = ARGUMENTS[name].read(config)
    size, widths, groups = found.size, found.block_out_channels, found.norm_num_groups
    if found.out_channels > found.in_channels:
        why = f"ours predicts {found.in_channels} channels at most; variances that are learned can't be expressed"
        raise refused("out_channels", found.out_channels, why)
    if (bad := next((width for width in widths if width % groups), None)) is not None:
        raise refused("norm_num_groups", groups, f"it does not divide the {bad} of block_out_channels")
    if divides_by_zero(widths[0], found.freq_shift):
        raise refused("freq_shift", 1, f"with {widths[0]} as the first of block_out_channels diffusers divides by zero")
    own = found.own_keys()
    level, conditions = found.class_embed_type is not None, found.in_channels - found.out_channels
    classes = None if level else found.num_class_embeds  # classes have no effect beside a level
    if classes is not None and not last_label_is_class:
        if classes == 1:
            raise refused("num_class_embeds", 1, "ours has a class at least, and a last row for no label")
        classes -= 1
    channels = math.gcd(*widths)
    multipliers = tuple(width // channels for width in widths)
    spec = UnetSpec(channels=channels, multipliers=multipliers, classes=classes, **found.ours(SHARED), **own)
    try:
        check_extent(spec)
    except ValueError as error:
        raise refused("layers_per_block", found.layers_per_block, str(error)) from None
    if level and not conditions:
        raise refused("class_embed_type", "timestep", "ours is the noise level of a condition, and this model has none")
    return spec, Interface(channels=found.out_channels, size=size, condition_channels=conditions, condition_level=level)


def _theirs(section: Section, keys: Mapping[str, str]) -> dict[str, object]:
    """Return the arguments for the ``keys`` of a section."""
    values = {key: getattr(section, key) for key in keys}
    return {keys[key]: VALUES[key][value] if key in VALUES else value for key, value in values.items()}
