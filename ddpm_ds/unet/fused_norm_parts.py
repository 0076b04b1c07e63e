"""What the kernels of ``fused_norm_tiles`` and ``fused_norm_whole`` share; imported only where Triton is.

Memory is (N, P, C): P pixels of C channels that lie together. All arithmetic is in fp32. With z = x + add, mean and
rstd = 1 / sqrt(variance + epsilon) those of z's group, v and u are what the embedding modulates and what SiLU takes::

    h = (z - mean) rstd        v = h weight + bias        u = v (1 + scale) + shift        y = u sigmoid(u)
    du = dy silu'(u)           dv = du (1 + scale)        dh = dv weight
    dz = rstd (dh - mean of dh over the group - h (mean of dh h over the group))

Everything but dz is made of the sums over the pixels of an image of du, du h and h, for each channel. Integers that are
given as 1 become constants in Triton, which have no methods: hence ``tl.cast``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def vector(pointer: tl.tensor, image: tl.tensor, stride: tl.tensor, channel: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Row `image` of an optional (N, C) tensor as fp32; zeros where there is none."""
    values = tl.zeros(channel.shape, tl.float32)
    if pointer is not None:
        values = tl.load(pointer + image * stride + channel, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def activation(u: tl.tensor, SILU: tl.constexpr) -> tl.tensor:
    """SiLU, or u."""
    value = u
    if SILU:
        value = u * tl.sigmoid(u)
    return value


@triton.jit
def activation_slope(u: tl.tensor, SILU: tl.constexpr) -> tl.tensor:
    """Derivative of :func:`activation`."""
    slope = tl.full(u.shape, 1.0, tl.float32)
    if SILU:
        sigmoid = tl.sigmoid(u)
        slope = sigmoid * (1.0 + u * (1.0 - sigmoid))
    return slope


@triton.jit
def place(program: tl.tensor, tiles: tl.tensor, channel_blocks: tl.tensor) -> tl.tensor:
    """Image, tile and block of channels of a program; neighbours read neighbouring memory."""
    block = program % channel_blocks
    tile = (program // channel_blocks) % tiles
    return tl.cast(program // (channel_blocks * tiles), tl.int64), tile, block


@triton.jit
def affine(
    weight: tl.tensor,
    bias: tl.tensor,
    scale: tl.tensor,
    scale_stride: tl.tensor,
    shift: tl.tensor,
    shift_stride: tl.tensor,
    image: tl.tensor,
    channel: tl.tensor,
    mask: tl.tensor,
) -> tl.tensor:
    """Per channel: the two of u = h factor + offset."""
    modulation = 1.0 + vector(scale, image, scale_stride, channel, mask)
    factor = vector(weight, 0, 0, channel, mask) * modulation
    offset = vector(bias, 0, 0, channel, mask) * modulation + vector(shift, image, shift_stride, channel, mask)
    return factor, offset


@triton.jit
def store_gradients(
    sum_du: tl.tensor,
    sum_du_h: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    scale: tl.tensor,
    scale_stride: tl.tensor,
    per_image: tl.tensor,
    kind: tl.tensor,
    dscale: tl.tensor,
    dshift: tl.tensor,
    image: tl.tensor,
    channel: tl.tensor,
    mask: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Per channel of an image: dscale, dshift, and its parts of dweight and dbias in (2, N, C) `per_image`, whose first
    stride is `kind`."""
    modulation = 1.0 + vector(scale, image, scale_stride, channel, mask)
    at = image * C + channel
    tl.store(per_image + at, sum_du_h * modulation, mask=mask)
    tl.store(per_image + kind + at, sum_du * modulation, mask=mask)
    if dscale is not None:
        change = sum_du_h * vector(weight, 0, 0, channel, mask) + sum_du * vector(bias, 0, 0, channel, mask)
        tl.store(dscale + at, change.to(dscale.dtype.element_ty), mask=mask)
    if dshift is not None:
        tl.store(dshift + at, sum_du.to(dshift.dtype.element_ty), mask=mask)


@triton.jit
def sum_over_images(
    per_image: tl.tensor,
    kind: tl.tensor,
    dweight: tl.tensor,
    dbias: tl.tensor,
    images: tl.tensor,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """dweight and dbias (C,) of what :func:`store_gradients` left."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < C
    row = tl.arange(0, ROWS)
    sum_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    sum_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, images, ROWS):
        image = first + row
        mask = (image < images)[:, None] & inside[None, :]
        at = image[:, None] * C + channel[None, :]
        sum_weight += tl.load(per_image + at, mask=mask, other=0.0)
        sum_bias += tl.load(per_image + kind + at, mask=mask, other=0.0)
    tl.store(dweight + channel, tl.sum(sum_weight, axis=0).to(dweight.dtype.element_ty), mask=inside)
    tl.store(dbias + channel, tl.sum(sum_bias, axis=0).to(dbias.dtype.element_ty), mask=inside)
