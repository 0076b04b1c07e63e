"""The U-Net as one ordered list of layers, with each layer's input, output and cost; arithmetic without tensors.

Everything walks this list: the reference forward, the partition, the cost table, the names in checkpoints
and the export. Between layers travels the carry ``(h, emb, *skips)``, skips newest last::

    embed, conv_in, down.0 ───────────── skips ─────────────▶ up.0, out       level 0, full size
                       down.1 ────────── skips ──────────▶ up.1               level 1, half
                          down.2 ─────── skips ───────▶ up.2                  level 2, quarter
                                middle.block.0 ... middle.block.1
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from ddpm_ds.unet.spec import Interface, UnetSpec

PASSES_PER_STEP = 3
"""Cost of a training step in forward passes: the backward costs two. Recomputation is not counted as work."""
SIZES = 6
"""Numbers that go with pooled text, in pixels: the original's height and width; the crop's top, left, height, width."""


@dataclass(frozen=True)
class Split:
    """Spread in which each rank of a group has an equal part of one dimension."""

    dimension: int = 0
    blocks: int = 1
    """Number of blocks side by side in the dimension, such as queries, keys and values; a rank has a part of each."""


Spread = Literal["whole", "partial"] | Split
"""How a tensor is spread over a group of ranks: all have all of it, each has a term of a sum, or each has a part.

A parameter that is "partial" is whole on each rank, which computes a term of its gradient.
"""
ROWS, COLUMNS = Split(0), Split(-1)


@dataclass(frozen=True)
class Rows:
    """Spread of an image's rows over a space group: rows of a layer's input and output by rank, () if all have all."""

    arriving: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    rank: int = 0
    """Rank whose rows a layer counts."""


FEWEST_FOR_HEADS = 4  # of two ranks gathering keys and values sends as much as exchanging heads, and waits once


def exchanges_heads(heads: int, ranks: int) -> bool:
    """Return whether ranks that share the pixels of self-attention exchange rows for heads."""
    return ranks >= FEWEST_FOR_HEADS and heads % ranks == 0


@dataclass(frozen=True)
class Parameter:
    """Parameter of a whole layer, and its spread where the layer is split."""

    name: str
    shape: tuple[int, ...]
    spread: Spread = "whole"
    uses: int = 0
    """Products with it per image; 0 but for weights of convolutions and linear layers, which may be deferred."""

    def own_shape(self, ranks: int) -> tuple[int, ...]:
        """Return the shape of the part that one of so many ranks has."""
        if not isinstance(self.spread, Split):
            return self.shape
        sizes = [*self.shape]
        sizes[self.spread.dimension] //= ranks
        return tuple(sizes)


def _normalisation(name: str, channels: int, spread: Spread = "whole") -> list[Parameter]:
    return [Parameter(f"{name}.{kind}", (channels,), spread) for kind in ("weight", "bias")]


def _product(name: str, shape: tuple[int, ...], uses: int, spread: Spread = "whole") -> list[Parameter]:
    """Return weight (out, ..., in) and bias (out,) of a convolution or linear layer."""
    of_bias = replace(spread, dimension=0) if isinstance(spread, Split) else spread
    return [Parameter(f"{name}.weight", shape, spread, uses), Parameter(f"{name}.bias", shape[:1], of_bias)]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Layer of the list. Its kind is its class; sizes and counts are per image, and of one rank if ranks share it."""

    name: str
    in_channels: int
    """Number of channels of h on arrival, before a popped skip is concatenated."""
    out_channels: int
    in_size: tuple[int, int]
    """Height and width of h on arrival."""
    out_size: tuple[int, int]
    embedding_channels: int
    skip_channels: int = 0
    """Number of channels of the skip that is popped and concatenated to h; 0 pops nothing."""
    pushes: bool = False
    """Whether the new h is also pushed as a skip."""
    opens: bool = False
    """Whether the old h is pushed as a residual, which travels with h until a layer that ``closes`` adds it."""
    closes: bool = False
    """Whether the residual is popped and added to the new h."""
    shards: int = 1
    """Number of ranks among which the weights are split (:mod:`ddpm_ds.unet.shards`); 1 splits nothing."""
    rows: Rows = Rows()
    """Rows of the image by rank of a space group (:mod:`ddpm_ds.unet.space`)."""
    rates: tuple[float, ...] = ()
    """Factor on the learning rate of each parameter in :attr:`listed`, 0 if it is not trained; () trains all alike."""
    reached: bool = True
    """Whether the backward comes to this layer: it, or one before it, has something to train."""

    unit: ClassVar[str] = ""
    """Word for the parts that a tensor group shares: groups of channels, or heads; "" for layers that stay whole."""

    @property
    def units(self) -> int:
        """Number of :attr:`unit` parts; 1 for layers that stay whole."""
        return int(getattr(self, f"{self.unit}s")) if self.unit else 1

    @property
    def width(self) -> int:
        """Number of channels that the layer works on: h and the popped skip."""
        return self.in_channels + self.skip_channels

    @property
    def own_channels(self) -> int:
        """Number of the layer's inner channels that one rank has."""
        return self.out_channels // self.shards

    @cached_property
    def sums(self) -> int:
        """Number of sums in a split layer's forward, and in its backward: one for each product with split columns."""
        return sum(one.spread == COLUMNS for one in self.listed) if self.shards > 1 else 0

    @property
    def summed_elements(self) -> tuple[int, int]:
        """Elements that a tensor group sums for a split layer: its output forwards, its input's gradient backwards."""
        return (self.sums * self.out_channels * self.pixels, self.sums * self.width * self.pixels)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Shape of the new h: (channels, height, width)."""
        return (self.out_channels, *self.out_size)

    @property
    def pixels(self) -> int:
        return math.prod(self.out_size)

    @property
    def all_pixels(self) -> int:
        """Number of pixels of the output on all ranks together."""
        return self.out_size[1] * (sum(self.rows.leaving) or self.out_size[0])

    @property
    def wide_pixels(self) -> int:
        """Number of pixels of the output, and of the rows beside it that a 3x3 convolution reads of other ranks."""
        return self.pixels + 2 * self.out_size[1] * bool(self.rows.leaving)

    def gathered_elements(self, heads: int) -> int:
        """Return the elements that self-attention of ``heads`` heads keeps besides, where ranks share its pixels: keys
        and values of others, or its output for this rank's heads.
        """
        if exchanges_heads(heads, len(self.rows.leaving)):
            return self.in_channels * self.pixels
        return 2 * self.in_channels * (self.all_pixels - self.pixels)

    @property
    def listed(self) -> Sequence[Parameter]:
        """Parameters of the whole layer, in the order of its module."""
        raise NotImplementedError

    @cached_property
    def own_elements(self) -> list[tuple[Parameter, int]]:
        """Parameters, each with the number of its elements that one rank has."""
        return [(one, math.prod(one.own_shape(self.shards))) for one in self.listed]

    @cached_property
    def trained_elements(self) -> list[tuple[Parameter, int]]:
        """The part of :attr:`own_elements` that is trained."""
        return [one for one, rate in zip(self.own_elements, self.rates or itertools.repeat(1.0), strict=False) if rate]

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(elements for _, elements in self.own_elements)

    @cached_property
    def trained(self) -> int:
        """Number of parameters that are trained."""
        return sum(elements for _, elements in self.trained_elements)

    @cached_property
    def weights(self) -> int:
        """Number of trained elements of the weights of convolutions and linear layers, with gradients to defer."""
        return sum(elements for one, elements in self.trained_elements if one.uses)

    @cached_property
    def partial_vectors(self) -> int:
        """Number of trained elements of a split layer's partial parameters."""
        return sum(elements for one, elements in self.trained_elements if one.spread == "partial" and self.shards > 1)

    @cached_property
    def weight_macs(self) -> int:
        """Multiply-accumulates of the forward's products with weights."""
        return sum(one.uses * elements for one, elements in self.own_elements)

    @cached_property
    def trained_macs(self) -> int:
        """Multiply-accumulates of the gradients of weights."""
        return sum(one.uses * elements for one, elements in self.trained_elements)

    @property
    def work(self) -> float:
        """Multiply-accumulates of forward and backward over :data:`PASSES_PER_STEP`: :attr:`macs` if all is trained."""
        backward = (2 * self.macs - self.weight_macs + self.trained_macs) * self.reached
        return (self.macs + backward) / PASSES_PER_STEP

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the forward: convolutions, linear layers and the two attention products."""
        return self.weight_macs

    @property
    def activation_elements(self) -> int:
        """Elements kept for the backward, without checkpointing; an input counts in the layer that reads it."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class EmbedLayer(Layer):
    """Embedding of ``(x_t, t[, label][, level][, vector])``, with the condition in x_t, to a carry whose h is x_t."""

    sinusoid_channels: int
    sine_first: bool
    sinusoid_shift: int
    classes: int | None
    condition_level: bool = False
    """Whether the condition's noise level is embedded too, as the timestep is."""
    numbers: int = 0
    """Size of the vector that is added to the embedding; 0 means none."""
    pooled_channels: int = 0
    """Width of the pooled text that is embedded with the image's sizes; 0 embeds neither."""
    size_channels: int = 0
    """Width of the sinusoid of each size."""

    @property
    def text_numbers(self) -> int:
        """Size of the vector of pooled text and sizes."""
        return self.pooled_channels and self.pooled_channels + SIZES

    @property
    def text_channels(self) -> int:
        """Width of the pooled text and the sinusoids of the sizes together."""
        return self.pooled_channels and self.pooled_channels + SIZES * self.size_channels

    @property
    def embedded(self) -> dict[str, int]:
        """Widths of the inputs that two linear layers each embed, by the name of the layers."""
        level = self.sinusoid_channels * self.condition_level
        widths = {"linear": self.sinusoid_channels, "level": level, "text": self.text_channels}
        return {name: width for name, width in widths.items() if width}

    @property
    def listed(self) -> Sequence[Parameter]:
        embedding, rows = self.embedding_channels, 0 if self.classes is None else self.classes + 1
        first, *others = (
            [*_product(f"{name}1", (embedding, width), 1), *_product(f"{name}2", (embedding, embedding), 1)]
            for name, width in self.embedded.items()
        )
        labels = Parameter("label_embedding.weight", (rows, embedding))
        vector = Parameter("condition_embedding.weight", (embedding, self.numbers))
        return [*first, *[labels] * bool(rows), *[vector] * bool(self.numbers), *itertools.chain(*others)]

    @property
    def macs(self) -> int:
        return self.weight_macs + self.numbers * self.embedding_channels

    @property
    def activation_elements(self) -> int:
        return sum(width + 2 * self.embedding_channels for width in self.embedded.values()) + self.numbers


@dataclass(frozen=True, kw_only=True)
class ConvolutionLayer(Layer):
    """Layer with one 3x3 convolution."""

    @property
    def listed(self) -> Sequence[Parameter]:
        return _product("conv", (self.out_channels, 3, 3, self.in_channels), self.pixels)

    @property
    def activation_elements(self) -> int:
        return self.in_channels * self.wide_pixels


@dataclass(frozen=True, kw_only=True)
class InputLayer(ConvolutionLayer):
    """First convolution, from image channels to the width of the first level."""


@dataclass(frozen=True, kw_only=True)
class DownsampleLayer(ConvolutionLayer):
    """Convolution of stride 2 that halves the image."""

    asymmetric: bool

    @property
    def activation_elements(self) -> int:
        height, width = self.in_size
        if self.rows.leaving:
            return self.in_channels * (height + 1) * (width + self.asymmetric)
        height = sum(self.rows.arriving) or height  # every rank computes the whole output
        return self.in_channels * (height + self.asymmetric) * (width + self.asymmetric)


@dataclass(frozen=True, kw_only=True)
class UpsampleLayer(ConvolutionLayer):
    """Doubling of the image by repeated pixels, and a convolution."""


@dataclass(frozen=True, kw_only=True)
class OutputLayer(ConvolutionLayer):
    """Normalisation, SiLU and the last convolution: a carry to the prediction."""

    groups: int
    epsilon: float

    @property
    def listed(self) -> Sequence[Parameter]:
        return [*_normalisation("norm", self.in_channels), *super().listed]

    @property
    def activation_elements(self) -> int:
        return (2 if self.rows.arriving else 3) * self.in_channels * self.wide_pixels + 2 * self.groups


@dataclass(frozen=True, kw_only=True)
class BlockLayer(Layer):
    """Residual block of DDPM or ADM; in the decoder it pops a skip."""

    unit = "group"

    groups: int
    epsilon: float
    dropout: float
    scale_shift: bool

    @property
    def has_shortcut(self) -> bool:
        """Whether a 1x1 convolution replaces the identity around the block."""
        return self.width != self.out_channels

    @property
    def time_channels(self) -> int:
        """Number of channels that the embedding is projected to."""
        return 2 * self.out_channels if self.scale_shift else self.out_channels

    @property
    def listed(self) -> Sequence[Parameter]:
        width, channels, pixels = self.width, self.out_channels, self.pixels
        time = (self.time_channels, self.embedding_channels)
        shortcut = _product("shortcut", (channels, 1, 1, width), pixels, ROWS)
        return [
            *_normalisation("norm1", width, "partial"),
            *_product("conv1", (channels, 3, 3, width), pixels, ROWS),
            *_product("time_projection", time, 1, Split(blocks=2 if self.scale_shift else 1)),
            *_normalisation("norm2", channels, ROWS),
            *_product("conv2", (channels, 3, 3, channels), pixels, COLUMNS),
            *(shortcut if self.has_shortcut else ()),
        ]

    @property
    def activation_elements(self) -> int:
        # norm, SiLU and convolution each keep their input, twice; modulation keeps its input and its scale.
        # Where ranks share rows, norm and SiLU together keep one input, and modulation nothing.
        per_pixel = 3 * self.width + (3 + self.scale_shift) * self.own_channels
        if self.rows.arriving:
            per_pixel = 2 * (self.width + self.own_channels)
        groups = 2 * self.groups + 2 * self.groups // self.shards
        vectors = self.embedding_channels + self.scale_shift * self.own_channels + groups
        mask = self.own_channels * self.wide_pixels // 4 if self.dropout else 0  # one byte each, against 4 of fp32
        return per_pixel * self.wide_pixels + vectors + mask


@dataclass(frozen=True, kw_only=True)
class AttentionLayer(Layer):
    """Self-attention over pixels, added to h."""

    unit = "head"

    groups: int
    epsilon: float
    heads: int

    @property
    def listed(self) -> Sequence[Parameter]:
        width = self.in_channels
        return [
            *_normalisation("norm", width, "partial"),
            *_product("qkv", (3 * width, width), self.pixels, Split(blocks=3)),
            *_product("projection", (width, width), self.pixels, COLUMNS),
        ]

    @property
    def macs(self) -> int:
        return self.weight_macs + 2 * self.in_channels * self.pixels * self.all_pixels // self.shards

    @property
    def activation_elements(self) -> int:
        # h and its normalisation; q, k, v and the heads' output; a logarithm per query and head
        own = (4 * self.in_channels + self.heads) // self.shards
        others = self.gathered_elements(self.heads)
        return (2 * self.in_channels + own) * self.pixels + others + 2 * self.groups


@dataclass(frozen=True, kw_only=True)
class TransformerInputLayer(Layer):
    """Entry to transformer blocks: normalisation and projection; the old h waits as a residual for their exit."""

    groups: int

    @property
    def listed(self) -> Sequence[Parameter]:
        width = self.in_channels
        return [*_normalisation("norm", width), *_product("projection", (width, width), self.pixels)]

    @property
    def activation_elements(self) -> int:
        return 2 * self.in_channels * self.pixels + 2 * self.groups


@dataclass(frozen=True, kw_only=True)
class TransformerBlockLayer(Layer):
    """Self-attention over pixels, cross-attention to the context, and a gated network, each added to h."""

    unit = "head"

    heads: int
    tokens: int
    context_channels: int

    @property
    def listed(self) -> Sequence[Parameter]:
        width, pixels = self.in_channels, self.pixels
        qkv, _ = _product("qkv", (3 * width, width), pixels, Split(blocks=3))
        q, _ = _product("q", (width, width), pixels, ROWS)
        kv, _ = _product("kv", (2 * width, self.context_channels), self.tokens, Split(blocks=2))
        norms = [_normalisation(f"norm{number}", width, "partial") for number in (1, 2, 3)]
        projections = [_product(f"projection{number}", (width, width), pixels, COLUMNS) for number in (1, 2)]
        gated = _product("gated", (8 * width, width), pixels, Split(blocks=2))
        last = _product("projection3", (width, 4 * width), pixels, COLUMNS)
        return [*norms[0], qkv, *projections[0], *norms[1], q, kv, *projections[1], *norms[2], *gated, *last]

    @property
    def macs(self) -> int:
        return self.weight_macs + 2 * (self.all_pixels + self.tokens) * self.own_channels * self.pixels

    @property
    def activation_elements(self) -> int:
        # three normalisations and their inputs; of the own heads q, k, v and output twice, 8 + 4 + 4 of the gate and a
        # logarithm per query and head, twice. The context is one tensor for all layers of a rank, and is counted there.
        per_pixel = 6 * self.in_channels + 22 * self.own_channels + 2 * self.heads // self.shards + 6
        others = self.gathered_elements(self.heads)
        return per_pixel * self.pixels + others + 2 * self.own_channels * self.tokens


@dataclass(frozen=True, kw_only=True)
class TransformerOutputLayer(Layer):
    """Exit of transformer blocks: a projection, to which the residual is added."""

    @property
    def listed(self) -> Sequence[Parameter]:
        return _product("projection", (self.in_channels, self.in_channels), self.pixels)

    @property
    def activation_elements(self) -> int:
        return self.in_channels * self.pixels


_Described = tuple[type[Layer], str, dict[str, Any]]


def unet_layers(unet: UnetSpec, interface: Interface) -> tuple[Layer, ...]:
    """Return the U-Net of a spec as its ordered list of layers."""
    embedding = unet.embedding_channels or 4 * unet.channels * unet.multipliers[0]
    channels, size = interface.channels + interface.condition_channels, interface.size
    layers, skips = list[Layer](), list[int]()
    for kind, name, options in layer_options(unet, interface):
        if options.pop("pops", False):
            options["skip_channels"] = skips.pop()
        changed = {"out_channels": channels, "out_size": size, **options}
        layer = kind(name=name, in_channels=channels, in_size=size, embedding_channels=embedding, **changed)
        layers.append(layer)
        channels, size = layer.out_channels, layer.out_size
        if layer.pushes:
            skips.append(channels)
    return tuple(layers)


def layer_options(unet: UnetSpec, interface: Interface) -> Iterator[_Described]:
    """Yield kind, name and options of each layer, as in DDPM (Ho et al. 2020, appendix B); widths left out stay."""
    widths = [unet.channels * multiplier for multiplier in unet.multipliers]
    sizes = [(interface.size[0] >> level, interface.size[1] >> level) for level in range(len(widths))]
    attended, text = unet.attended_levels(interface.size), unet.text
    depths = text.blocks if text else (0,) * len(widths)
    norm = {"groups": unet.norm_groups, "epsilon": unet.norm_epsilon}
    residual = {"dropout": unet.dropout, "scale_shift": unet.time_conditioning == "scale_shift", **norm}

    def attention(name: str, level: int, blocks: int, **carry: bool) -> Iterator[_Described]:
        if text is None:
            heads = widths[level] // (unet.head_channels or widths[level])
            yield AttentionLayer, name, {"heads": heads, **carry, **norm}
            return
        context = {"heads": text.heads[level], "tokens": text.tokens, "context_channels": text.context_channels}
        yield TransformerInputLayer, f"{name}.in", {"opens": True, "groups": unet.norm_groups}
        for number in range(blocks):
            yield TransformerBlockLayer, f"{name}.{number}", {**context}
        yield TransformerOutputLayer, f"{name}.out", {"closes": True, **carry}

    embed = {
        "sinusoid_channels": widths[0],
        "sine_first": unet.sinusoid_order == "sin_cos",
        "sinusoid_shift": unet.sinusoid_shift,
        "classes": unet.classes,
        "condition_level": interface.condition_level,
        "numbers": interface.numbers,
    }
    pooled = {"pooled_channels": text.pooled_channels or 0, "size_channels": text.size_channels} if text else {}
    yield EmbedLayer, "embed", {**embed, **pooled}
    yield InputLayer, "conv_in", {"out_channels": widths[0], "pushes": True}
    for level, width in enumerate(widths):
        for number in range(unet.blocks_per_level):
            pushes = level not in attended
            yield BlockLayer, f"down.{level}.block.{number}", {"out_channels": width, "pushes": pushes, **residual}
            if level in attended:
                yield from attention(f"down.{level}.attention.{number}", level, depths[level], pushes=True)
        if level < len(widths) - 1:
            padding = {"asymmetric": unet.downsample_padding == "asymmetric"}
            yield DownsampleLayer, f"down.{level}.downsample", {"out_size": sizes[level + 1], "pushes": True, **padding}
    yield BlockLayer, "middle.block.0", {**residual}
    if unet.middle_attention:
        yield from attention("middle.attention", -1, text.middle_blocks if text else 0)
    yield BlockLayer, "middle.block.1", {**residual}
    for level, width in reversed([*enumerate(widths)]):
        for number in range(unet.blocks_per_level + 1):
            yield BlockLayer, f"up.{level}.block.{number}", {"out_channels": width, "pops": True, **residual}
            if level in attended:
                yield from attention(f"up.{level}.attention.{number}", level, depths[level])
        if level:
            yield UpsampleLayer, f"up.{level}.upsample", {"out_size": sizes[level - 1]}
    yield OutputLayer, "out", {"out_channels": interface.channels, **norm}


def parameter_shapes(layers: Sequence[Layer]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the whole U-Net by its global name, in the order of the layers."""
    return {f"{index}.{one.name}": one.shape for index, layer in enumerate(layers) for one in layer.listed}


def first_cut(layers: Sequence[Layer]) -> int:
    """Return the first layer before which the list may be cut: 1, or 2 with a condition, which is never sent."""
    return 2 if layers[0].out_channels > layers[-1].out_channels else 1


def has_residual(layers: Sequence[Layer], cut: int) -> bool:
    """Return whether a residual crosses before layer `cut`, which is between transformer blocks or at their ends."""
    return sum(layer.opens - layer.closes for layer in layers[:cut]) > 0


def context_elements(layers: Sequence[Layer], *segments: tuple[int, int]) -> int:
    """Return the elements per image of the encoded text that layers [start, stop) of ``segments`` read, or 0."""
    own = (layer for start, stop in segments for layer in layers[start:stop])
    return next((one.tokens * one.context_channels for one in own if isinstance(one, TransformerBlockLayer)), 0)


def boundary_shapes(layers: Sequence[Layer], cut: int) -> tuple[tuple[int, ...], ...]:
    """Return the per-image shapes of the tensors that cross before layer `cut` (1 to len - 1), each tensor once.

    Order: h, emb, skips oldest first, a residual last. A newest skip that is h is not listed again.
    """
    last = layers[cut - 1]
    skips: list[tuple[int, ...]] = []
    for layer in layers[:cut]:
        if layer.skip_channels or layer.closes:
            skips.pop()
        if layer.opens:
            skips.append((layer.in_channels, *layer.in_size))
        if layer.pushes:
            skips.append(layer.output_shape)
    if last.pushes:
        skips.pop()  # it is h
    return (last.output_shape, (last.embedding_channels,), *skips)
