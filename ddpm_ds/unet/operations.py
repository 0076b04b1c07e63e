"""Operations that layers are made of: convolution, linear, normalisation, keyed dropout.

Weights are cast to the dtype of the input, so a layer chooses the dtype of its arithmetic. Construction does not
initialise them: :func:`draw_weights` does, from its own generator.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from ddpm_ds.ground.keyed import Stream, keep_mask
from ddpm_ds.unet.fused_norm import fused_norm_silu
from ddpm_ds.unet.space import Band
from ddpm_ds.unet.weight_gradients import Weighted

WIDENED_ON_CPU = (
    (torch.float16,)
    if torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    else (torch.float16, torch.bfloat16)
)
"""Types stored in 16 bits but computed in fp32: without 16-bit arithmetic convolutions take 30 to 70 times as long."""
BY_PRODUCTS = torch.backends.cpu.get_cpu_capability() == "AVX2"
"""Whether the weight gradient of a channels-last 3x3 convolution is computed by nine matrix products of the output's
gradient and the shifted input. With AVX2 but not AVX-512, oneDNN takes up to twice as long (docs/performance.md)."""
FEWEST_CHANNELS = 16  # at which a matrix product is faster

Kernels = Literal["fused", "masks", "reference"]
"""Kernels of normalisations with SiLU and embedding, and of masks: ours, ours for masks alone, or PyTorch's."""


def arithmetic_dtype(device_type: str, stored: torch.dtype) -> torch.dtype:
    """Return the data type that a layer computes in: the carry's, except that CPUs may widen 16 bits to fp32.

    A layer that widens its input once and narrows its output once costs about as much as in fp32.
    """
    return torch.float32 if device_type == "cpu" and stored in WIDENED_ON_CPU else stored


def widening(device_type: str, stored: torch.dtype) -> str | None:
    """Return a notice for the user if 16-bit numbers are computed in fp32, else None."""
    if arithmetic_dtype(device_type, stored) is stored:
        return None
    precision = "fp16" if stored is torch.float16 else "bf16"
    return f"{precision} on a CPU: stored in {precision}, computed in fp32"


def _by_products(x: Tensor, weight: Tensor, stride: int, padding: tuple[int, int]) -> bool:
    return (
        x.device.type == "cpu"
        and BY_PRODUCTS
        and x.dtype is torch.float32
        and (stride, padding[1]) == (1, 1)
        and weight.shape[2:] == (3, 3)
        and min(weight.shape[:2]) >= FEWEST_CHANNELS
        and x.is_contiguous(memory_format=torch.channels_last)
        and weight.is_contiguous(memory_format=torch.channels_last)
    )


class _Convolution3x3(torch.autograd.Function):
    """3x3 convolution of stride 1 that keeps the width of the image; all tensors are channels-last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return F.conv2d(x, weight, bias, padding=padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = conv2d_input(x.shape, weight, gradient, padding=ctx.padding)
        return x_gradient, _weight_backward(gradient, x).permute(0, 3, 1, 2), gradient.sum((0, 2, 3)), None


@torch.library.custom_op("ddpm_ds::convolution_weight_backward", mutates_args=())
def _weight_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the weight gradient (O, 3, 3, C) from the output's gradient (N, O, H, W) and x (N, C, H or H + 2, W)."""
    height, width = gradient.shape[2:]
    beyond = int(x.shape[2] == height)
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, beyond, beyond))  # (N, H + 2, W + 2, C)
    pixels = gradient.permute(0, 2, 3, 1).flatten(0, 2).t()  # (O, N H W)
    products = x.new_empty(len(pixels), 3, 3, x.shape[1])
    for row in range(3):
        for column in range(3):
            shifted = padded[:, row : row + height, column : column + width].flatten(0, 2)  # (N H W, C)
            products[:, row, column] = pixels @ shifted
    return products


@_weight_backward.register_fake
def _(gradient: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(gradient.shape[1], 3, 3, x.shape[1])


class Undrawn:
    """Module whose weights are left for :func:`draw_weights` to initialise."""

    def reset_parameters(self) -> None:
        """Leave the weights undrawn; the inherited method would draw from torch's global generator."""


class Convolution(Weighted):
    """Convolution with bias; at stride 1 it keeps the size of the image, unless :attr:`padding` is less.

    ``weight`` is (out, k, k, in), the order that a channels-last convolution reads: it survives being flattened.
    """

    bias: nn.Parameter

    def __init__(
        self, channels: int, out_channels: int, kernel: int = 3, *, stride: int = 1, starts_at_zero: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, kernel, kernel, channels))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.stride = stride
        self.padding = kernel // 2, kernel // 2
        """Rows and columns of zeros on each side of the image."""
        self.starts_at_zero = starts_at_zero

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous(memory_format=torch.channels_last))

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)  # (out, in, k, k)
        if weight.requires_grad and torch.is_grad_enabled() and _by_products(x, weight, self.stride, self.padding):
            return _Convolution3x3.apply(x, weight, bias, self.padding)
        return F.conv2d(x, weight, bias, self.stride, self.padding)

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the weight's gradient (out, k, k, in) from x (N, C, H, W) and the output's gradient."""
        like = x.new_empty(self.weight.shape).permute(0, 3, 1, 2)  # (out, in, k, k); only its layout counts
        if _by_products(x, like, self.stride, self.padding):
            return _weight_backward(gradient.contiguous(memory_format=torch.channels_last), x)
        where = ([self.stride] * 2, self.padding, [1, 1], False, [0, 0], 1)
        found = torch.ops.aten.convolution_backward(gradient, x, like, None, *where, [False, True, False])[1]
        return found.permute(0, 2, 3, 1)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        out_channels, *kernel, channels = self.weight.shape
        drawn = _drawn((out_channels, channels, *kernel), 1, self.starts_at_zero, generator)
        self.weight.copy_(drawn.permute(0, 2, 3, 1))
        self.bias.zero_()


class Linear(Undrawn, Weighted, nn.Linear):
    """Linear layer that may fuse several projections (`parts`) of one input, each initialised separately."""

    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(
        self, channels: int, out_channels: int, *, parts: int = 1, bias: bool = True, starts_at_zero: bool = False
    ) -> None:
        super().__init__(channels, out_channels, bias)
        self.parts = parts
        self.starts_at_zero = starts_at_zero

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the weight's gradient (out, in) from x (..., in) and the output's gradient (..., out)."""
        return gradient.flatten(0, -2).t() @ x.flatten(0, -2)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        self.weight.copy_(_drawn(self.weight.shape, self.parts, self.starts_at_zero, generator))
        if self.bias is not None:
            self.bias.zero_()


class EmbeddingProjection(Linear):
    """Linear layer on SiLU of the embedding; :func:`project` computes several at once."""


def projections_of(module: nn.Module) -> list[EmbeddingProjection]:
    """Return the projections of the embedding in a module."""
    return [part for part in module.modules() if isinstance(part, EmbeddingProjection)]


def project(projections: Sequence[EmbeddingProjection], emb: Tensor) -> tuple[Tensor, ...]:
    """Return each projection of SiLU of emb (N, E): (N, out) in emb's dtype, by one product for all, whose weights are
    trained or all frozen.
    """
    weights, biases = [one.weight for one in projections], [one.bias for one in projections]
    queue = projections[0].queue
    put = root = None
    if queue is not None:
        put, root, weights = partial(queue.put, projections), queue.new_root(), [one.detach() for one in weights]
    together: Tensor = _Projections.apply(emb, put, root, *weights, *biases)
    return together.split([len(weight) for weight in weights], dim=1)


class _Projections(torch.autograd.Function):
    """Product of SiLU of emb (N, E) with the joined weights (O, E) and biases, whose backward hands the factors of the
    weight gradients to ``put``, if there is one.

    The joined weights are made again in the backward: else each micro-batch in flight would hold a copy of them.
    """

    @staticmethod
    def forward(
        ctx: Any, emb: Tensor, put: Callable[[Tensor, Tensor], None] | None, root: Tensor | None, *parameters: Tensor
    ) -> Tensor:
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        ctx.save_for_backward(emb, *weights)
        ctx.put = put
        return F.linear(F.silu(emb), torch.cat(weights).to(emb.dtype), torch.cat(biases).to(emb.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        emb, *weights = ctx.saved_tensors
        emb_gradient = None
        if ctx.needs_input_grad[0]:
            emb_gradient = torch.ops.aten.silu_backward(gradient @ torch.cat(weights).to(emb.dtype), emb)
        sizes, stored = [len(weight) for weight in weights], weights[0].dtype
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        if ctx.put is not None:
            ctx.put(F.silu(emb), gradient)
        elif ctx.needs_input_grad[3]:  # the weights are trained, or all frozen
            of_weights = (gradient.t() @ F.silu(emb)).to(stored).split(sizes)
        return emb_gradient, None, None, *of_weights, *gradient.sum(0).to(stored).split(sizes)


class VectorEmbedding(Undrawn, nn.Linear):
    """Linear layer without bias, so that a vector of zeros adds nothing; its weights start at zero."""

    def __init__(self, numbers: int, channels: int) -> None:
        super().__init__(numbers, channels, bias=False)

    def forward(self, vector: Tensor) -> Tensor:
        return F.linear(vector, self.weight.to(vector.dtype))

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        self.weight.zero_()


class LabelEmbedding(Undrawn, nn.Embedding):
    """Embedding with a row per class, and a last row for "no label"."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__(classes + 1, channels)

    def forward(self, labels: Tensor) -> Tensor:
        return F.embedding(labels, self.weight)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Draw the rows from a standard normal distribution, as in ADM (Dhariwal and Nichol 2021)."""
        self.weight.copy_(torch.empty(self.weight.shape, device="cpu").normal_(generator=generator))


class LayerNorm(nn.LayerNorm):
    """Normalisation of each pixel's channels, with scale and shift; the last dimension has the channels."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class GroupNorm(nn.GroupNorm):
    """Group normalisation with scale and shift per channel."""

    def __init__(self, groups: int, channels: int, epsilon: float) -> None:
        super().__init__(groups, channels, epsilon)
        self.kernels: Kernels = "reference"
        self.band: Band | None = None
        """Rows that a space group shares, and this rank's; None normalises whole images."""
        self.read_by: tuple[Convolution, ...] = ()
        """Convolution that reads the result, whose weight gradient is computed beside a message."""

    def forward(self, x: Tensor) -> Tensor:
        if self.band is not None:
            fused, vectors = self.kernels == "fused", (self.weight, self.bias, None, None, None)
            return self.band.normalised(x, vectors, self.num_groups, self.eps, silu=False, fused=fused)
        if self.kernels == "fused":
            return fused_norm_silu(x, self.weight, self.bias, self.num_groups, self.eps, silu=False)
        return F.group_norm(x, self.num_groups, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def norm_silu(
    norm: GroupNorm, x: Tensor, *, add: Tensor | None = None, scale: Tensor | None = None, shift: Tensor | None = None
) -> Tensor:
    """Return SiLU(norm(x + add) * (1 + scale) + shift), (N, C, H, W); an embedding gives add, or the others: (N, C).

    Where ranks share the image, a row more from each side follows, for a 3x3 convolution.
    """
    if norm.band is not None:
        fused, vectors = norm.kernels == "fused", (norm.weight, norm.bias, add, scale, shift)
        return norm.band.normalised(x, vectors, norm.num_groups, norm.eps, fused=fused, parts=norm.read_by)
    if norm.kernels == "fused":
        return fused_norm_silu(x, norm.weight, norm.bias, norm.num_groups, norm.eps, add=add, scale=scale, shift=shift)
    x = norm(x if add is None else x + add[:, :, None, None])
    if scale is not None and shift is not None:
        x = x * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
    return F.silu(x)


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of seed, layer and image, independent of the image's batch.

    :func:`set_image_index` sets `images` (N,) int64, the image indices, before each forward, including a checkpoint's
    recomputation. :func:`draw_masks` draws the masks of several layers together, before their use, so that compiled
    code is the same in every layer. `shape` is an image's, (C, H, W), or that of this rank's rows.
    """

    def __init__(self, rate: float, seed: int, layer: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.rate, self.seed, self.stream, self.shape = rate, seed, Stream.DROPOUT + layer, shape
        self.beside = 0, 0
        """Number of channels before and after this rank's."""
        self.band: Band | None = None
        """Rows that a space group shares; masks have this rank's and one more from each side."""
        self.images: Tensor | None = None
        self.kernels: Kernels = "reference"

    @property
    def rows(self) -> tuple[int, int]:
        """First row of an image that is drawn, an even one, and the row after the last; others are beyond the image."""
        if self.band is None:
            return 0, self.shape[1]
        return max(self.band.first - 1, 0) // 2 * 2, min(self.band.stop + 1, self.band.height)

    @property
    def drawn_shape(self) -> tuple[int, int, int]:
        """Shape of the rows that are drawn."""
        return self.shape[0], self.rows[1] - self.rows[0], self.shape[2]

    @property
    def drawn_first(self) -> int:
        """Number of an image's elements before the first drawn row."""
        return self.rows[0] * self.shape[0] * self.shape[2]

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        return x if keep is None else x * keep * (1 / (1 - self.rate))


def draw_masks(dropouts: Sequence[KeyedDropout]) -> list[Tensor | None]:
    """Return each dropout's mask of kept elements, (N, own C, H, W) bool and channels-last; None keeps all.

    The dropouts have the same images and kernels. Our kernel draws all masks in one launch, in one piece of memory.
    Unknown images raise RuntimeError.
    """
    drawing = [one for one in dropouts if one.rate and one.training]
    if not drawing:
        return [None] * len(dropouts)
    images = drawing[0].images
    if images is None:
        raise RuntimeError("dropout needs the images' positions: call set_image_index before the forward")
    if drawing[0].kernels == "reference":
        masks = []
        for one in drawing:
            channels, height, width = one.drawn_shape
            keep = keep_mask(one.seed, one.stream, images, math.prod(one.drawn_shape), one.rate, one.drawn_first)
            masks.append(keep.view(-1, height, width, channels).permute(0, 3, 1, 2))
    else:
        from ddpm_ds.unet.keyed_mask import Mask, fused_keep_masks  # needs Triton, which not every machine has

        kinds = [Mask(one.seed, one.stream, one.drawn_shape, one.rate, one.drawn_first) for one in drawing]
        masks = fused_keep_masks(images, kinds)
    own: dict[KeyedDropout, Tensor | None] = dict.fromkeys(dropouts)
    for one, mask in zip(drawing, masks, strict=True):
        first, after = one.beside
        mask = mask[:, first : mask.shape[1] - after]
        if one.band is not None:
            mask = F.pad(mask, (0, 0, one.rows[0] - one.band.first + 1, one.band.stop + 1 - one.rows[1]))
        own[one] = mask.contiguous(memory_format=torch.channels_last)
    return [*own.values()]


def set_image_index(modules: Iterable[nn.Module], images: Tensor) -> None:
    """Set the image indices of the next forward, `images` (N,) int64, in every dropout of `modules`."""
    for part in itertools.chain.from_iterable(module.modules() for module in modules):
        if isinstance(part, KeyedDropout):
            part.images = images


def use_kernels(modules: Iterable[nn.Module], kernels: Kernels) -> None:
    """Choose the kernels of every module in `modules` that has fused ones."""
    for part in itertools.chain.from_iterable(module.modules() for module in modules):
        if isinstance(part, GroupNorm | KeyedDropout):
            part.kernels = kernels


def draw_weights(module: nn.Module, generator: torch.Generator) -> None:
    """Draw weights as DDPM does: variance scaling (fan_avg, uniform); biases and ends of residual branches are zero.

    Each is drawn in fp32 on the host, whatever the module's device, and copied before the next one.
    """
    for part in module.modules():
        if isinstance(part, Convolution | Linear | LabelEmbedding | VectorEmbedding):
            part.draw(generator)


def _drawn(shape: Sequence[int], parts: int, zero: bool, generator: torch.Generator) -> Tensor:
    weight = torch.empty(*shape, device="cpu")
    for part in weight.chunk(parts):
        nn.init.xavier_uniform_(part, gain=0.0 if zero else 1.0, generator=generator)
    return weight
