"""The kernels that hold all pixels of an image and some of its groups in registers: everything is read once, in one
launch. For small images. See ``fused_norm_parts`` for the formulas.

A block of ROWS pixels and GROUPS x WIDTH places, of which a group uses its first C / G.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ddpm_ds.unet.fused_norm_parts import activation, activation_slope, affine, store_gradients, vector


@triton.jit
def channels_of(G: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """This program's image, its channels by place (GROUPS * WIDTH,), whether there is one, and its group."""
    blocks: tl.constexpr = (G + GROUPS - 1) // GROUPS
    places = tl.arange(0, GROUPS * WIDTH)
    group = (tl.program_id(0) % blocks) * GROUPS + places // WIDTH
    inside = (places % WIDTH < C // G) & (group < G)
    return tl.cast(tl.program_id(0) // blocks, tl.int64), group * (C // G) + places % WIDTH, inside, group


@triton.jit
def mean_of_groups(per_channel: tl.tensor, count: tl.tensor, GROUPS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Sums by place (GROUPS * WIDTH,) to the means of their groups, by place again."""
    total = tl.sum(tl.reshape(per_channel, (GROUPS, WIDTH)), axis=1) / count
    return tl.reshape(tl.broadcast_to(total[:, None], (GROUPS, WIDTH)), (GROUPS * WIDTH,))


@triton.jit
def normalise_whole(
    x: tl.tensor,
    y: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    add: tl.tensor,
    add_stride: tl.tensor,
    scale: tl.tensor,
    scale_stride: tl.tensor,
    shift: tl.tensor,
    shift_stride: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    epsilon: tl.tensor,
    pixels: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    """y, and mean and rstd (N, G), of some groups of an image."""
    image, channel, inside, group = channels_of(G, C, GROUPS, WIDTH)
    row = tl.arange(0, ROWS)
    mask = (row < pixels)[:, None] & inside[None, :]
    at = image * pixels * C + row[:, None] * C + channel[None, :]
    count = pixels * (C // G)
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    z += vector(add, image, add_stride, channel, inside)[None, :]
    centre = mean_of_groups(tl.sum(tl.where(mask, z, 0.0), axis=0), count, GROUPS, WIDTH)
    apart = tl.where(mask, z - centre[None, :], 0.0)
    variance = mean_of_groups(tl.sum(apart * apart, axis=0), count, GROUPS, WIDTH)
    deviation = 1.0 / tl.sqrt(variance + epsilon)
    factor, offset = affine(weight, bias, scale, scale_stride, shift, shift_stride, image, channel, inside)
    u = apart * (deviation * factor)[None, :] + offset[None, :]
    tl.store(y + at, activation(u, SILU).to(y.dtype.element_ty), mask=mask)
    first_of_group = inside & (tl.arange(0, GROUPS * WIDTH) % WIDTH == 0)
    tl.store(mean + image * G + group, centre, mask=first_of_group)
    tl.store(rstd + image * G + group, deviation, mask=first_of_group)


@triton.jit
def gradients_whole(
    x: tl.tensor,
    dy: tl.tensor,
    dx: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    add: tl.tensor,
    add_stride: tl.tensor,
    scale: tl.tensor,
    scale_stride: tl.tensor,
    shift: tl.tensor,
    shift_stride: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    per_image: tl.tensor,
    per_image_kind: tl.tensor,
    dadd: tl.tensor,
    dscale: tl.tensor,
    dshift: tl.tensor,
    pixels: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    """dx and, per image, all other gradients of some groups of an image."""
    image, channel, inside, group = channels_of(G, C, GROUPS, WIDTH)
    row = tl.arange(0, ROWS)
    mask = (row < pixels)[:, None] & inside[None, :]
    at = image * pixels * C + row[:, None] * C + channel[None, :]
    count = pixels * (C // G)
    centre = tl.load(mean + image * G + group, mask=inside, other=0.0)
    centre -= vector(add, image, add_stride, channel, inside)
    deviation = tl.load(rstd + image * G + group, mask=inside, other=0.0)
    factor, offset = affine(weight, bias, scale, scale_stride, shift, shift_stride, image, channel, inside)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    h = tl.where(mask, (value - centre[None, :]) * deviation[None, :], 0.0)
    du = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    du *= activation_slope(h * factor[None, :] + offset[None, :], SILU)
    sum_du = tl.sum(du, axis=0)
    sum_du_h = tl.sum(du * h, axis=0)
    of_dh = mean_of_groups(sum_du * factor, count, GROUPS, WIDTH)
    of_dh_h = mean_of_groups(sum_du_h * factor, count, GROUPS, WIDTH)
    change = deviation[None, :] * (du * factor[None, :] - of_dh[None, :] - h * of_dh_h[None, :])
    tl.store(dx + at, change.to(dx.dtype.element_ty), mask=mask)
    store_gradients(
        sum_du,
        sum_du_h,
        weight,
        bias,
        scale,
        scale_stride,
        per_image,
        per_image_kind,
        dscale,
        dshift,
        image,
        channel,
        inside,
        C,
    )
    if dadd is not None:
        change_of_add = tl.sum(tl.where(mask, change, 0.0), axis=0)
        tl.store(dadd + image * C + channel, change_of_add.to(dadd.dtype.element_ty), mask=inside)
