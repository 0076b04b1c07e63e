"""GroupNorm, SiLU and the embedding around them as one operator on channels-last memory, made of Triton kernels.

Statistics and arithmetic are in fp32 for every dtype; only x, mean and rstd are kept for the backward. The operator is
opaque to ``torch.compile`` and causes no graph break. The division of a tensor among programs, and so the order of
summation, depends on its shape alone. Triton is imported at the first call, since PyTorch for CPUs comes without it.

Where ranks share images, :mod:`ddpm_ds.unet.space` calls the passes over tiles one by one and swaps between them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK_ELEMENTS = 4096  # of a tile in registers at a time
PROGRAMS = 1024  # target number of tiles, about four for each multiprocessor of a large GPU
COMBINED_ELEMENTS = 16384  # largest number of tile sums that one program combines
WHOLE_ELEMENTS = 8192  # most elements in the registers of a program; a larger one would fill a multiprocessor alone
ELEMENTS_A_WARP = 1024  # of a block in registers as a whole: 32 a thread
ROW_BYTES = (128, 64)  # preferred and smallest number of bytes of a pixel's neighbouring channels that a program reads
GRADIENT_WARPS = 8  # of kernels with a block of x and one of dy in registers; others take Triton's four


Vectors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Weight and bias (C,), and add, scale and shift (N, C) or None."""

Given = tuple[Vectors, Tensor, Tensor]
"""Vectors, and mean and rstd (N, G)."""


class Tiles(NamedTuple):
    """Division of the pixels of the images into tiles, and of the channels into blocks."""

    tiles: int  # in an image
    pixels: int  # of a tile; the last one may have fewer
    rows: int  # pixels in registers at a time
    columns: int  # channels in registers at a time
    channel_blocks: int


class WholeImages(NamedTuple):
    """Share of an image's groups that a program has in registers."""

    rows: int  # places for pixels
    groups: int  # of a program
    width: int  # places for the channels of a group
    programs: int  # per image
    warps: int


def power_above(number: int) -> int:
    """Return the smallest power of two that is at least a positive number."""
    return 1 << (number - 1).bit_length()


@lru_cache
def tiles(images: int, pixels: int, channels: int, groups: int) -> Tiles:
    """Return the tiles for a shape."""
    blocks = [size for size in (256, 128, 64) if size <= power_above(channels)] or [power_above(channels)]
    columns = min(blocks, key=lambda size: (-(-channels // size) * size, -size))  # fewest idle places
    channel_blocks = -(-channels // columns)
    rows = min(BLOCK_ELEMENTS // columns, power_above(pixels))
    wanted = -(-PROGRAMS // (images * channel_blocks))
    most = COMBINED_ELEMENTS // power_above(channels // groups)
    count = max(1, min(wanted, -(-pixels // rows), most))
    tile_pixels = -(-pixels // (count * rows)) * rows
    return Tiles(-(-pixels // tile_pixels), tile_pixels, rows, columns, channel_blocks)


@lru_cache
def whole(pixels: int, channels: int, groups: int, element_bytes: int) -> WholeImages | None:
    """Return a program's share of a whole image of a shape; None if too few neighbouring channels would fit."""
    width, rows = power_above(channels // groups), power_above(pixels)
    for row_bytes in ROW_BYTES:
        wanted = -(-row_bytes // (channels // groups * element_bytes))
        together = power_above(min(wanted, groups))
        elements = rows * together * width
        if elements <= WHOLE_ELEMENTS:
            return WholeImages(rows, together, width, -(-groups // together), max(elements // ELEMENTS_A_WARP, 1))
    return None


def fused_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    epsilon: float,
    *,
    add: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """Return SiLU(GroupNorm(x + add) * (1 + scale) + shift), (N, C, H, W) in x's dtype, channels-last as x must be;
    without applying SiLU if ``silu`` is false.

    x fp32, fp16 or bf16; weight and bias (C,) of x's dtype or fp32; add, scale and shift (N, C) of x's dtype. x must be
    on the current CUDA device; another order of memory raises ValueError. Gradients are deterministic; there is no
    second derivative.
    """
    y, _, _ = _norm_silu(x, weight, bias, add, scale, shift, groups, epsilon, silu)
    return y


def _row_stride(vectors: Tensor | None) -> tuple[Tensor | None, int]:
    """Return optional (N, C) vectors with contiguous channels, and the stride between images."""
    if vectors is None:
        return None, 0
    vectors = vectors if vectors.stride(1) == 1 else vectors.contiguous()
    return vectors, vectors.stride(0)


def _strided(vectors: Vectors) -> tuple[Any, ...]:
    """Return weight, bias, add, scale and shift as a kernel takes them."""
    weight, bias, *others = vectors
    return weight, bias, *(part for one in others for part in _row_stride(one))


def _empty_outputs(x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate y, and mean and rstd (N, G) in fp32."""
    mean, rstd = (x.new_empty((len(x), groups), dtype=torch.float32) for _ in range(2))
    return torch.empty_like(x), mean, rstd


def _tiled(kernel: Any, x: Tensor, groups: int, *arguments: Any, **constants: int) -> None:
    """Launch a kernel for the tiles of x."""
    images, channels, height, width = x.shape
    cut = tiles(images, height * width, channels, groups)
    where = height * width, cut.tiles, cut.pixels, cut.channel_blocks
    block = {"C": channels, "ROWS": cut.rows, "COLUMNS": cut.columns}
    kernel[(images * cut.tiles * cut.channel_blocks,)](x, *arguments, *where, **block, **constants)


def _statistics(x: Tensor, add: Tensor | None, groups: int, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return mean and rstd (N, G) of x + add."""
    from ddpm_ds.unet import fused_norm_kernels as kernels

    images, channels, height, width = x.shape
    cut = tiles(images, height * width, channels, groups)
    means, squares = (x.new_empty((images, cut.tiles, channels), dtype=torch.float32) for _ in range(2))
    mean, rstd = (x.new_empty((images, groups), dtype=torch.float32) for _ in range(2))
    _tiled(kernels.tile_statistics, x, groups, means, squares)
    combined = {"TILES": power_above(cut.tiles), "WIDTH": power_above(channels // groups)}
    where = height * width, cut.tiles, cut.pixels
    kernels.combine_statistics[(images * groups,)](
        means, squares, *_row_stride(add), mean, rstd, epsilon, *where, C=channels, G=groups, **combined
    )
    return mean, rstd


def moments(x: Tensor, add: Tensor | None, groups: int) -> Tensor:
    """Return mean and variance of x + add, (2, N, G)."""
    mean, rstd = _statistics(x, add, groups, 0.0)
    return torch.stack((mean, rstd.square().reciprocal()))


def prepare(*given: *Given) -> Given:
    """Return what the functions below take, from vectors and statistics."""
    return given


def normalise(x: Tensor, y: Tensor, given: Given, silu: bool) -> None:
    """Write y (N, C, H, W) of x; other rows may lie between the images of y."""
    from ddpm_ds.unet import fused_norm_kernels as kernels

    vectors, mean, rstd = given
    sizes = {"G": mean.shape[1], "SILU": silu}
    _tiled(kernels.normalise_tile, x, mean.shape[1], y, y.stride(0), *_strided(vectors), mean, rstd, **sizes)


def gradient_sums(x: Tensor, dy: Tensor, given: Given, silu: bool) -> tuple[Tensor, Tensor]:
    """Return the sums of du and du h over pixels, (2, N, C), and what :func:`input_gradient` takes; dy is as y."""
    return _tile_sums(x, dy, given, silu)[:2].sum(2), dy


def input_gradient(
    x: Tensor, dy: Tensor, given: Given, of_dh: Sequence[Tensor], silu: bool, dx: Tensor | None = None
) -> Tensor:
    """Return dx, in its memory if there is one, from the means of dh and dh h over groups, (N, G) each."""
    from ddpm_ds.unet import fused_norm_kernels as kernels

    vectors, mean, rstd = given
    dx = torch.empty_like(x) if dx is None else dx
    places, sizes = (dy, dy.stride(0), dx), {"G": mean.shape[1], "SILU": silu, "num_warps": GRADIENT_WARPS}
    _tiled(kernels.write_gradient_tile, x, mean.shape[1], *places, *_strided(vectors), mean, rstd, *of_dh, **sizes)
    return dx


def _tile_sums(x: Tensor, dy: Tensor, given: Given, silu: bool) -> Tensor:
    """Return the sums of du, du h and, if there is an add, h by tile and channel, (2 or 3, N, tiles, C)."""
    from ddpm_ds.unet import fused_norm_kernels as kernels

    (vectors, mean, rstd), (images, channels, height, width) = given, x.shape
    groups, kinds = mean.shape[1], 2 + (vectors[2] is not None)
    count = tiles(images, height * width, channels, groups).tiles
    sums = x.new_empty((kinds, images, count, channels), dtype=torch.float32)
    places, sizes = (dy, dy.stride(0), sums, sums.stride(0)), {"G": groups, "SILU": silu, "num_warps": GRADIENT_WARPS}
    _tiled(kernels.tile_gradient_sums, x, groups, *places, *_strided(vectors), mean, rstd, **sizes)
    return sums


@torch.library.custom_op("ddpm_ds::norm_silu", mutates_args=())
def _norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    add: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    groups: int,
    epsilon: float,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and mean and rstd (N, G) in fp32."""
    from ddpm_ds.unet import fused_norm_kernels as kernels

    if not x.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(f"the fused normalisation needs channels-last memory, not strides {x.stride()}")
    images, channels, height, width = x.shape
    pixels = height * width
    y, mean, rstd = _empty_outputs(x, groups)
    vectors = weight, bias, add, scale, shift
    sizes: dict[str, int] = {"C": channels, "G": groups}
    fitting = whole(pixels, channels, groups, x.element_size())
    if fitting is not None:
        sizes |= {"ROWS": fitting.rows, "GROUPS": fitting.groups, "WIDTH": fitting.width, "SILU": silu}
        launch = kernels.normalise_whole[(images * fitting.programs,)]
        launch(x, y, *_strided(vectors), mean, rstd, epsilon, pixels, **sizes, num_warps=fitting.warps)
        return y, mean, rstd
    mean, rstd = _statistics(x, add, groups, epsilon)
    normalise(x, y, (vectors, mean, rstd), silu)
    return y, mean, rstd


@_norm_silu.register_fake
def _(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    groups, _, _ = arguments[-3:]
    return _empty_outputs(x, groups)


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of x, weight, bias, add, scale and shift; an empty tensor for a missing input."""


def _empty_gradients(x: Tensor, weight: Tensor, bias: Tensor, *vectors: Tensor | None) -> Gradients:
    add, scale, shift = (x.new_empty(0) if vector is None else vector.new_empty(vector.shape) for vector in vectors)
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias), add, scale, shift


@torch.library.custom_op("ddpm_ds::norm_silu_backward", mutates_args=())
def _norm_silu_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    add: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    silu: bool,
) -> Gradients:
    from ddpm_ds.unet import fused_norm_kernels as kernels

    dy = dy.contiguous(memory_format=torch.channels_last)
    images, channels, height, width = x.shape
    pixels, groups = height * width, mean.shape[1]
    gradients = _empty_gradients(x, weight, bias, add, scale, shift)
    dx, dweight, dbias, *others = gradients
    dvectors = [None if vector is None else of for of, vector in zip(others, (add, scale, shift), strict=True)]
    per_image = x.new_empty((2, images, channels), dtype=torch.float32)
    kind = images * channels
    given: Given = (weight, bias, add, scale, shift), mean, rstd
    sizes: dict[str, int] = {"C": channels, "G": groups}
    fitting = whole(pixels, channels, groups, x.element_size())
    if fitting is not None:
        sizes |= {"ROWS": fitting.rows, "GROUPS": fitting.groups, "WIDTH": fitting.width, "SILU": silu}
        launch, statistics = kernels.gradients_whole[(images * fitting.programs,)], (*_strided(given[0]), mean, rstd)
        launch(x, dy, dx, *statistics, per_image, kind, *dvectors, pixels, **sizes, num_warps=fitting.warps)
    else:
        sums = _tile_sums(x, dy, given, silu)
        of_dh = torch.empty_like(mean), torch.empty_like(mean)
        combined = {"TILES": power_above(sums.shape[2]), "WIDTH": power_above(channels // groups)}
        modulation = weight, bias, *_row_stride(scale), rstd
        kernels.combine_gradient_sums[(images * groups,)](
            *(sums, sums.stride(0), *modulation, *of_dh, per_image, kind, *dvectors, pixels, sums.shape[2]),
            **sizes,
            **combined,
        )
        input_gradient(x, dy, given, of_dh, silu, dx)
    columns = min(32, power_above(channels))
    kernels.sum_over_images[(-(-channels // columns),)](
        per_image, kind, dweight, dbias, images, C=channels, ROWS=min(64, power_above(images)), COLUMNS=columns
    )
    return gradients


@_norm_silu_backward.register_fake
def _(dy: Tensor, *arguments: Any) -> Gradients:
    return _empty_gradients(*arguments[:6])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _groups, _epsilon, ctx.silu = inputs
    _, mean, rstd = output
    ctx.save_for_backward(*tensors, mean, rstd)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, _dmean: None, _drstd: None) -> tuple[Tensor | None, ...]:
    *tensors, mean, rstd = ctx.saved_tensors
    if dy is None:
        return (None,) * (len(tensors) + 3)
    gradients = _norm_silu_backward(dy, *tensors, mean, rstd, ctx.silu)
    wanted = [gradient if tensor is not None else None for gradient, tensor in zip(gradients, tensors, strict=True)]
    return (*wanted, None, None, None)


_norm_silu.register_autograd(_differentiate, setup_context=_keep)
