"""Modules of the layers, each a function from carry to carry.

:class:`CarryLayer` is the only place that knows the carry and the data types; a layer computes an h from an h, and a
residual block also from its projection of emb and a mask, which :func:`walk` makes for many blocks at once.
:func:`pack` and :func:`unpack` turn a carry into what crosses a boundary between stages, and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ddpm_ds.unet import layers as kinds
from ddpm_ds.unet import operations as ops
from ddpm_ds.unet.space import Band, SpaceGroup
from ddpm_ds.unet.tensor_group import ALONE, TensorGroup
from ddpm_ds.unet.weight_gradients import WaitingGradients, Weighted, weighted_parts

Carry = tuple[Tensor, ...]
"""``(h, emb, *skips)``: h (N, C, H, W), emb (N, E), skips newest last, and after them a residual that is open."""


def pack(carry: Carry, last: kinds.Layer) -> Carry:
    """Return the tensors to send after layer ``last``, in the order of :func:`ddpm_ds.unet.layers.boundary_shapes`.

    The output of a layer that pushes is h and the newest skip, which is left out: it and its gradient are sent once.
    """
    return carry[:-1] if last.pushes else carry


def unpack(tensors: Carry, last: kinds.Layer) -> Carry:
    """Restore the carry from received tensors; the inverse of :func:`pack`."""
    return (*tensors, tensors[0]) if last.pushes else tensors


class CarryLayer(nn.Module):
    """Layer of the list: pops a skip if needed, computes the new h, and pushes it if needed.

    A layer that opens a residual pushes its h, and one that closes it pops it, for its :meth:`compute` to add. Each
    subclass is the module of one ``kind`` of layers.
    """

    of_kind: ClassVar[dict[type[kinds.Layer], Callable[..., CarryLayer]]] = {}
    pieces: Mapping[str, tuple[str, ...]] = {"compute": ()}
    """Methods that ``torch.compile`` may compile, each with its convolutions and linear layers; () means all."""
    summed_pieces: Mapping[str, tuple[str, ...]]
    """The methods of a split layer, whose ranks sum the output of each one."""
    convolved: Mapping[str, str] = {}
    """Names of convolutions by the name of the normalisation before them."""

    def __init_subclass__(cls, kind: type[kinds.Layer]) -> None:
        cls.of_kind[kind] = cls

    def __init__(self, layer: kinds.Layer) -> None:
        super().__init__()
        self.layer = layer
        self.tensor = ALONE
        """Ranks among which the layer is split."""
        self.arriving: Band | None = None
        """Rows of the input that ranks share, and this rank's; None if it has all."""
        self.leaving: Band | None = None
        """The same of the output."""

    def split(self, tensor: TensorGroup) -> None:
        """Keep this rank's part of the layer, which a tensor group computes together from now on."""
        self.tensor, self.pieces = tensor, self.summed_pieces
        for listed in self.layer.listed:
            module, _, kind = listed.name.rpartition(".")
            tensor.keep(self.get_submodule(module), kind, listed)
        for piece in self.pieces:
            beside = WaitingGradients(())
            for part in self.parts_of(piece):
                part.beside = beside

    def share(self, space: SpaceGroup) -> None:
        """Compute this rank's rows of images, which a space group computes together, from now on."""
        rows = self.layer.rows
        self.arriving = Band(space, rows.arriving) if rows.arriving else None
        self.leaving = Band(space, rows.leaving) if rows.leaving else None
        for part in self.modules():
            if isinstance(part, ops.GroupNorm | ops.KeyedDropout):
                part.band = self.arriving
            elif isinstance(part, ops.Convolution) and self.leaving is not None:
                part.padding = 0, part.padding[1]  # neighbours' rows are there
        for norm, convolution in self.convolved.items() if self.arriving is not None else ():
            part = getattr(self, convolution)
            part.beside = WaitingGradients(())
            getattr(self, norm).read_by = (part,)

    def forward(self, carry: Carry, given: Callable[[Tensor], tuple[Any, ...]] | None = None) -> Carry:
        """Return the next carry; ``given`` is called instead of :meth:`given`."""
        h, emb, *skips = carry
        stored = h.dtype
        if self.layer.skip_channels:
            h = torch.cat((h, skips.pop()), dim=1)
        dtype = ops.arithmetic_dtype(h.device.type, stored)
        others = (skips.pop().to(dtype),) if self.layer.closes else (given or self.given)(emb)
        if self.layer.opens:
            skips.append(h)
        h = self.compute(h.to(dtype), *others).to(stored)
        return (h, emb, *skips, h) if self.layer.pushes else (h, emb, *skips)

    def summed(self, piece: str, h: Tensor, *given: Any) -> Tensor:
        """Return a piece's output, summed over the ranks among which the layer is split."""
        compute = getattr(self, piece)
        if self.tensor.size == 1:
            return compute(h, *given)
        parts = self.parts_of(piece)
        part = compute(self.tensor.enter(h, parts), *given)
        if (queue := parts[0].beside) is not None:
            queue.root = None
        return self.tensor.sum(part)

    def parts_of(self, piece: str) -> list[Weighted]:
        """Return the convolutions and linear layers of a piece."""
        parts = (getattr(self, part) for part in self.pieces[piece])
        return [part for part in parts if part is not None] or weighted_parts(self)

    def given(self, emb: Tensor) -> tuple[Any, ...]:
        """Return the inputs of :meth:`compute` beside h, from an emb in its stored dtype."""
        return ()

    def compute(self, h: Tensor, *given: Any) -> Tensor:
        """Compute the new h, in the dtype of h, from the arguments and parameters alone."""
        raise NotImplementedError


def sinusoid(t: Tensor, channels: int, *, sine_first: bool, shift: int) -> Tensor:
    """Return the sinusoidal embedding of timesteps (N,) in fp32 (Vaswani et al. 2017, 3.5, as DDPM uses it).

    Frequencies fall geometrically from 1 to 1e-4, over ``channels // 2 - shift`` steps.
    """
    half = channels // 2
    exponent = torch.arange(half, dtype=torch.float32, device=t.device) / max(half - shift, 1)
    angle = t.float()[:, None] * torch.exp(-math.log(10_000) * exponent)  # (N, channels // 2)
    waves = (angle.sin(), angle.cos()) if sine_first else (angle.cos(), angle.sin())
    return F.pad(torch.cat(waves, dim=1), (0, channels % 2))  # (N, channels)


class Embed(CarryLayer, kind=kinds.EmbedLayer):
    """First layer: ``(x_t, t[, labels][, level][, vector])`` to the carry ``(x_t, emb)`` in the dtype of the weights.

    x_t (N, C, H, W) with its condition's channels, t (N,) int64 or float32; the others differ in kind:
    labels (N,) are whole numbers, a level (N,) is of a float dtype, and so is a vector (N, `numbers`). Without labels a
    class-conditional U-Net uses "no label", which is label `classes`; without a level it uses 0; without a vector it
    uses zeros, which add nothing. With pooled text the vector is that text and the :data:`ddpm_ds.unet.layers.SIZES`
    of its image, (N, pooled_channels + 6), and may not be left out.
    """

    layer: kinds.EmbedLayer

    def __init__(self, layer: kinds.EmbedLayer) -> None:
        super().__init__(layer)
        sinusoid, embedding = layer.sinusoid_channels, layer.embedding_channels
        self.linear1, self.linear2 = ops.Linear(sinusoid, embedding), ops.Linear(embedding, embedding)
        self.label_embedding = None if layer.classes is None else ops.LabelEmbedding(layer.classes, embedding)
        self.condition_embedding = ops.VectorEmbedding(layer.numbers, embedding) if layer.numbers else None
        self.level1 = self.level2 = self.text1 = self.text2 = None
        if layer.condition_level:
            self.level1, self.level2 = ops.Linear(sinusoid, embedding), ops.Linear(embedding, embedding)
        if layer.pooled_channels:
            self.text1, self.text2 = ops.Linear(layer.text_channels, embedding), ops.Linear(embedding, embedding)

    def forward(self, inputs: tuple[Tensor, ...]) -> Carry:  # type: ignore[override]
        x_t, t, *rest = inputs
        x_t = x_t.to(self.linear1.weight.dtype, memory_format=torch.channels_last)
        label = next((part for part in rest if not part.is_floating_point()), None)
        level = next((part for part in rest if part.is_floating_point() and part.ndim == 1), None)
        vector = next((part for part in rest if part.ndim == 2), None)
        assert vector is not None or not self.layer.pooled_channels, "pooled text is not left out"
        t = t.float()  # one dtype of t, else the warm-up compiles for another
        if self.layer.classes is not None and label is None:
            label = torch.full_like(t, self.layer.classes, dtype=torch.int64)
        if self.layer.condition_level and level is None:
            level = torch.zeros_like(t)
        dtype = ops.arithmetic_dtype(x_t.device.type, x_t.dtype)
        return x_t, self.compute(t, label, level, vector, dtype).to(x_t.dtype)

    def compute(
        self, t: Tensor, label: Tensor | None, level: Tensor | None, vector: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Compute the embedding (N, E) of timesteps, labels and levels, (N,) each, and vectors in ``dtype``."""
        emb: Tensor = self.linear2(F.silu(self.linear1(self._waves(t, dtype))))
        if self.label_embedding is not None and label is not None:
            emb = emb + self.label_embedding(label).to(dtype)
        if self.level1 is not None and self.level2 is not None and level is not None:
            emb = emb + self.level2(F.silu(self.level1(self._waves(level, dtype))))
        if self.condition_embedding is not None and vector is not None:
            emb = emb + self.condition_embedding(vector.to(dtype))
        if self.text1 is not None and self.text2 is not None and vector is not None:
            pooled, sizes = vector.split([self.layer.pooled_channels, kinds.SIZES], dim=1)
            waves = self._waves(sizes.flatten(), dtype, self.layer.size_channels).unflatten(0, sizes.shape).flatten(1)
            emb = emb + self.text2(F.silu(self.text1(torch.cat((pooled.to(dtype), waves), dim=1))))
        return emb

    def _waves(self, t: Tensor, dtype: torch.dtype, channels: int = 0) -> Tensor:
        layer, channels = self.layer, channels or self.layer.sinusoid_channels
        return sinusoid(t, channels, sine_first=layer.sine_first, shift=layer.sinusoid_shift).to(dtype)


class Input(CarryLayer, kind=kinds.InputLayer):
    """First convolution."""

    def __init__(self, layer: kinds.Layer) -> None:
        super().__init__(layer)
        self.conv = ops.Convolution(layer.in_channels, layer.out_channels)

    def compute(self, h: Tensor) -> Tensor:
        return self.conv(h if self.arriving is None else self.arriving.wide(h))


class ResidualBlock(CarryLayer, kind=kinds.BlockLayer):
    """Residual block: DDPM's, which adds the embedding, or ADM's, which modulates the second normalisation."""

    def __init__(self, layer: kinds.BlockLayer, index: int, seed: int) -> None:
        super().__init__(layer)
        self.norm1 = ops.GroupNorm(layer.groups, layer.width, layer.epsilon)
        self.conv1 = ops.Convolution(layer.width, layer.out_channels)
        self.time_projection = ops.EmbeddingProjection(layer.embedding_channels, layer.time_channels)
        self.norm2 = ops.GroupNorm(layer.groups, layer.out_channels, layer.epsilon)
        self.dropout = ops.KeyedDropout(layer.dropout, seed, index, layer.output_shape)
        self.conv2 = ops.Convolution(layer.out_channels, layer.out_channels, starts_at_zero=True)
        self.shortcut = ops.Convolution(layer.width, layer.out_channels, kernel=1) if layer.has_shortcut else None
        self.scale_shift = layer.scale_shift
        self.summed_pieces = {"part": ("conv1", "conv2", "shortcut")}
        self.convolved = {"norm1": "conv1", "norm2": "conv2"}

    def given(self, emb: Tensor) -> tuple[Any, ...]:
        return block_inputs([self], emb)[0]

    def split(self, tensor: TensorGroup) -> None:
        super().split(tensor)
        self.norm2.num_groups //= tensor.size
        self.dropout.beside = tensor.place(len(self.norm2.weight))

    def compute(self, h: Tensor, time: Tensor, keep: Tensor | None) -> Tensor:
        if self.tensor.size == 1:
            branch = self.branch(h, time, keep)  # first, since it needs more memory than the shortcut
            return (h if self.shortcut is None else self.shortcut(h)) + branch
        summed = self.summed("part", h, time, keep)
        return summed if self.shortcut is not None else h + summed

    def branch(self, h: Tensor, time: Tensor, keep: Tensor | None) -> Tensor:
        """Return the residual (N, C, H, W), added to h or its shortcut; of a split block this rank's part."""
        branch = self.conv1(ops.norm_silu(self.norm1, h))  # (N, C, H, W)
        if self.scale_shift:
            scale, shift = time.chunk(2, dim=1)
            branch = ops.norm_silu(self.norm2, branch, scale=scale, shift=shift)
        else:
            branch = ops.norm_silu(self.norm2, branch, add=time)
        return self.conv2(self.dropout(branch, keep))  # (N, C, H, W)

    def part(self, h: Tensor, time: Tensor, keep: Tensor | None) -> Tensor:
        """Return this rank's part of the sum: its part of the branch, and its channels of the shortcut."""
        branch = self.branch(h, time, keep)
        if self.shortcut is None:
            return branch
        own = self.shortcut(h)
        return branch + F.pad(own, (0, 0, 0, 0, *self.tensor.place(own.shape[1])))


def block_inputs(blocks: Sequence[ResidualBlock], emb: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """Return each block's projection of emb, (N, C or 2C) in the arithmetic's dtype, and the mask of its dropout."""
    emb, times = emb.to(ops.arithmetic_dtype(emb.device.type, emb.dtype)), dict[ResidualBlock, Tensor]()
    for tensor in dict.fromkeys(block.tensor for block in blocks):
        entered = tensor.enter(emb)
        for trained in (True, False):
            together = [
                one for one in blocks if (one.tensor, one.time_projection.weight.requires_grad) == (tensor, trained)
            ]
            if together:
                projected = ops.project([one.time_projection for one in together], entered)
                times.update(zip(together, projected, strict=True))
    masks = ops.draw_masks([block.dropout for block in blocks])
    return [(times[block], mask) for block, mask in zip(blocks, masks, strict=True)]


def walk(layers: Iterable[nn.Module], carry: Any) -> Any:
    """Run layers in order; the first residual block makes the inputs of all of them, which takes fewer launches."""
    blocks = [layer for layer in layers if isinstance(layer, ResidualBlock)]
    made: list[tuple[Tensor, Tensor | None]] = []

    def given(emb: Tensor) -> tuple[Tensor, Tensor | None]:
        if not made:
            made.extend(reversed(block_inputs(blocks, emb)))
        return made.pop()

    for layer in layers:
        carry = layer(carry, given) if isinstance(layer, ResidualBlock) else layer(carry)
    return carry


class Attention(CarryLayer, kind=kinds.AttentionLayer):
    """Self-attention over the pixels, added to h."""

    def __init__(self, layer: kinds.AttentionLayer) -> None:
        super().__init__(layer)
        width = layer.in_channels
        self.head_channels = layer.in_channels // layer.heads
        self.norm = ops.GroupNorm(layer.groups, width, layer.epsilon)
        self.qkv = ops.Linear(width, 3 * width, parts=3)
        self.projection = ops.Linear(width, width, starts_at_zero=True)
        self.summed_pieces = {"mixed": ("qkv", "projection")}

    def compute(self, h: Tensor) -> Tensor:
        return h + as_image(self.summed("mixed", h), h)

    def mixed(self, h: Tensor) -> Tensor:
        """Return the term of this rank's heads, (N, pixels, C)."""
        qkv = self.qkv(as_pixels(self.norm(h)))
        return self.projection(attend_itself(qkv, width=self.head_channels, band=self.arriving))


class TransformerInput(CarryLayer, kind=kinds.TransformerInputLayer):
    """Entry to transformer blocks: normalises h and projects it."""

    def __init__(self, layer: kinds.TransformerInputLayer) -> None:
        super().__init__(layer)
        self.norm = ops.GroupNorm(layer.groups, layer.in_channels, 1e-6)
        self.projection = ops.Linear(layer.in_channels, layer.in_channels)

    def compute(self, h: Tensor) -> Tensor:
        return as_image(self.projection(as_pixels(self.norm(h))), h)


class TransformerBlock(CarryLayer, kind=kinds.TransformerBlockLayer):
    """Self-attention over the pixels, cross-attention to the context and a gated network (GEGLU, Shazeer 2020), each
    normalised first and added. Source: Vaswani et al. 2017; Rombach et al. 2022, appendix E.2.1.

    :func:`set_context` sets ``context``, (N, tokens, channels), before each pass.
    """

    def __init__(self, layer: kinds.TransformerBlockLayer) -> None:
        super().__init__(layer)
        width = layer.in_channels
        self.head_channels = layer.in_channels // layer.heads
        self.context: Tensor | None = None
        self.norm1 = ops.LayerNorm(width)
        self.qkv = ops.Linear(width, 3 * width, parts=3, bias=False)
        self.projection1 = ops.Linear(width, width)
        self.norm2 = ops.LayerNorm(width)
        self.q = ops.Linear(width, width, bias=False)
        self.kv = ops.Linear(layer.context_channels, 2 * width, parts=2, bias=False)
        self.projection2 = ops.Linear(width, width)
        self.norm3 = ops.LayerNorm(width)
        self.gated = ops.Linear(width, 8 * width, parts=2)
        self.projection3 = ops.Linear(4 * width, width)
        self.summed_pieces = {
            "mixed": ("qkv", "projection1"),
            "read": ("q", "kv", "projection2"),
            "widened": ("gated", "projection3"),
        }

    def given(self, emb: Tensor) -> tuple[Any, ...]:
        if self.context is None:
            raise RuntimeError("cross-attention needs the encoded text: call set_context before the forward")
        return (self.context.to(ops.arithmetic_dtype(emb.device.type, emb.dtype)),)

    def compute(self, h: Tensor, context: Tensor) -> Tensor:
        pixels = as_pixels(h)
        pixels = pixels + self.summed("mixed", pixels)
        pixels = pixels + self.summed("read", pixels, context)
        return as_image(pixels + self.summed("widened", pixels), h)

    def mixed(self, pixels: Tensor) -> Tensor:
        """Return the term of self-attention, (N, pixels, C); here and below it is this rank's."""
        qkv = self.qkv(self.norm1(pixels))
        return self.projection1(attend_itself(qkv, width=self.head_channels, band=self.arriving))

    def read(self, pixels: Tensor, context: Tensor) -> Tensor:
        """Return the term of attention to the context."""
        query = self.q(self.norm2(pixels))
        return self.projection2(attend(query, *self.kv(context).chunk(2, dim=2), width=self.head_channels))

    def widened(self, pixels: Tensor) -> Tensor:
        """Return the term of the gated network."""
        values, gate = self.gated(self.norm3(pixels)).chunk(2, dim=2)  # (N, pixels, 4C) each
        return self.projection3(values * F.gelu(gate))


class TransformerOutput(CarryLayer, kind=kinds.TransformerOutputLayer):
    """Exit of transformer blocks: projects h and adds the residual."""

    def __init__(self, layer: kinds.TransformerOutputLayer) -> None:
        super().__init__(layer)
        self.projection = ops.Linear(layer.in_channels, layer.in_channels, starts_at_zero=True)

    def compute(self, h: Tensor, residual: Tensor) -> Tensor:
        return residual + as_image(self.projection(as_pixels(h)), h)


def as_pixels(h: Tensor) -> Tensor:
    """Return an image (N, C, H, W) as pixels (N, H W, C), a view of a channels-last one."""
    return rearrange(h, "n c h w -> n (h w) c")


def as_image(pixels: Tensor, like: Tensor) -> Tensor:
    """Return pixels (N, H W, C) as an image (N, C, H, W), as high as the image ``like``."""
    return rearrange(pixels, "n (h w) c -> n c h w", h=like.shape[2])


def attend(query: Tensor, key: Tensor, value: Tensor, *, width: int) -> Tensor:
    """Return attention of ``query`` (N, pixels, C), C / width heads, over key and value (N, tokens, C): as query."""
    query, key, value = (rearrange(part, "n p (heads c) -> n heads p c", c=width) for part in (query, key, value))
    return rearrange(F.scaled_dot_product_attention(query, key, value), "n heads p c -> n p (heads c)")


def attend_itself(qkv: Tensor, *, width: int, band: Band | None) -> Tensor:
    """Return attention of queries over keys and values of all pixels, side by side in ``qkv`` (N, pixels, 3 C).

    If ranks share the pixels, they gather keys and values, or exchange rows for heads.
    """
    if band is None:
        return attend(*qkv.chunk(3, dim=2), width=width)
    ranks, channels = band.group.size, qkv.shape[2] // 3
    if kinds.exchanges_heads(channels // width, ranks):
        own = band.to_heads(qkv.unflatten(2, (3, channels)))  # (N, all pixels, 3, C / ranks)
        return band.to_rows(attend(*own.unbind(2), width=width).unsqueeze(2)).squeeze(2)
    query, keyed = qkv.split([channels, 2 * channels], dim=2)
    query = query.contiguous()  # else it keeps the memory of this rank's keys and values, which are gathered
    return attend(query, *band.gathered(keyed).chunk(2, dim=2), width=width)


def set_context(blocks: Iterable[TransformerBlock], context: Tensor | None) -> None:
    """Set the encoded text, (N, tokens, channels), before each forward, and each backward, which may recompute."""
    for block in blocks:
        block.context = context


def transformer_blocks(modules: Iterable[nn.Module]) -> list[TransformerBlock]:
    """Return the layers among ``modules`` that read the encoded text."""
    return [module for module in modules if isinstance(module, TransformerBlock)]


class Downsample(CarryLayer, kind=kinds.DownsampleLayer):
    """Convolution of stride 2, which halves the image."""

    def __init__(self, layer: kinds.DownsampleLayer) -> None:
        super().__init__(layer)
        self.asymmetric = layer.asymmetric
        self.conv = ops.Convolution(layer.in_channels, layer.out_channels, stride=2)
        if layer.asymmetric:
            self.conv.padding = 0, 0

    def compute(self, h: Tensor) -> Tensor:
        below = int(self.asymmetric)
        if self.arriving is not None and self.leaving is None:
            h = self.arriving.image(h)
        elif self.arriving is not None:
            h, below = self.arriving.wide(h, 1 - below, below), 0
        return self.conv(F.pad(h, (0, 1, 0, below)) if self.asymmetric else h)  # (N, C, H / 2, W / 2)


class Upsample(Input, kind=kinds.UpsampleLayer):
    """Upsampling: doubles the image by repeating pixels, then convolves."""

    def compute(self, h: Tensor) -> Tensor:
        if self.leaving is None:
            return self.conv(_doubled(h))  # (N, C, 2H, 2W)
        first, stop = self.leaving.first - 1, self.leaving.stop + 1  # a row from each side
        before, after = first // 2, (stop + 1) // 2
        h = F.pad(h, (0, 0, 1, 1))[:, :, before + 1 : after + 1] if self.arriving is None else self.arriving.wide(h)
        return self.conv(_doubled(h)[:, :, first - 2 * before : stop - 2 * before])


def _doubled(h: Tensor) -> Tensor:
    return F.interpolate(h, scale_factor=2.0, mode="nearest")


class Output(CarryLayer, kind=kinds.OutputLayer):
    """Last layer: the carry ``(h, emb)`` to the prediction (N, C, H, W), a tensor."""

    def __init__(self, layer: kinds.OutputLayer) -> None:
        super().__init__(layer)
        self.norm = ops.GroupNorm(layer.groups, layer.in_channels, layer.epsilon)
        self.conv = ops.Convolution(layer.in_channels, layer.out_channels, starts_at_zero=True)
        self.convolved = {"norm": "conv"}

    def forward(self, carry: Carry) -> Tensor:  # type: ignore[override]
        return super().forward(carry)[0]

    def compute(self, h: Tensor) -> Tensor:
        return self.conv(ops.norm_silu(self.norm, h))
