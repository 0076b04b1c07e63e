"""The kernels in tiles: a pass that leaves sums per tile and channel, a small one that combines them to groups, and one
that writes. A tile is some pixels of an image and a block of channels. See ``fused_norm_parts`` for the formulas.

Forward reads x twice and writes y, backward reads x and dy twice and writes dx.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ddpm_ds.unet.fused_norm_parts import activation, activation_slope, affine, place, store_gradients, vector


@triton.jit
def tile_statistics(
    x: tl.tensor,
    means: tl.tensor,
    squares: tl.tensor,
    pixels: tl.tensor,
    tiles: tl.tensor,
    tile_pixels: tl.tensor,
    channel_blocks: tl.tensor,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Mean and sum of squared deviations of each channel of x over a tile: (N, tiles, C) each.

    Each place of the block runs Welford's recurrence; rows are merged as in Chan, Golub and LeVeque 1983.
    """
    image, tile, block = place(tl.program_id(0), tiles, channel_blocks)
    channel = block * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    first = tile * tile_pixels
    stop = tl.minimum(first + tile_pixels, pixels)
    x += image * pixels * C
    mean = tl.zeros((ROWS, COLUMNS), tl.float32)
    square = tl.zeros((ROWS, COLUMNS), tl.float32)
    seen = 0.0
    for start in range(first, stop, ROWS):
        pixel = start + row
        mask = (pixel < stop)[:, None] & (channel < C)[None, :]
        value = tl.load(x + pixel[:, None] * C + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        seen += 1.0
        difference = tl.where(mask, value - mean, 0.0)
        mean += difference / seen
        square += difference * (value - mean)
    count = tl.maximum((stop - first - row + ROWS - 1) // ROWS, 0).to(tl.float32)[:, None]
    merged = tl.sum(mean * count, axis=0) / (stop - first)
    apart = mean - merged[None, :]
    place_of_sums = (image * tiles + tile) * C + channel
    tl.store(means + place_of_sums, merged, mask=channel < C)
    tl.store(squares + place_of_sums, tl.sum(square + apart * apart * count, axis=0), mask=channel < C)


@triton.jit
def combine_statistics(
    means: tl.tensor,
    squares: tl.tensor,
    add: tl.tensor,
    add_stride: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    epsilon: tl.tensor,
    pixels: tl.tensor,
    tiles: tl.tensor,
    tile_pixels: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Mean and rstd of a group of x + add, (N, G) each, from what :func:`tile_statistics` left."""
    image, group = tl.cast(tl.program_id(0) // G, tl.int64), tl.program_id(0) % G
    width: tl.constexpr = C // G
    tile, member = tl.arange(0, TILES), tl.arange(0, WIDTH)
    channel = group * width + member
    inside = member < width
    mask = (tile < tiles)[:, None] & inside[None, :]
    at = (image * tiles + tile)[:, None] * C + channel[None, :]
    count = tl.where(mask, tl.minimum(pixels - tile * tile_pixels, tile_pixels)[:, None], 0).to(tl.float32)
    part = tl.load(means + at, mask=mask, other=0.0) + vector(add, image, add_stride, channel, inside)[None, :]
    square = tl.load(squares + at, mask=mask, other=0.0)
    merged = tl.sum(tl.sum(part * count, axis=0), axis=0) / (pixels * width)
    apart = part - merged
    variance = tl.sum(tl.sum(square + apart * apart * count, axis=0), axis=0) / (pixels * width)
    tl.store(mean + image * G + group, merged)
    tl.store(rstd + image * G + group, 1.0 / tl.sqrt(variance + epsilon))


@triton.jit
def normalise_tile(
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
    pixels: tl.tensor,
    tiles: tl.tensor,
    tile_pixels: tl.tensor,
    channel_blocks: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    """Write y of a tile. Tiles go backwards: what the statistics have read last may still be in the cache."""
    image, tile, block = place(tl.num_programs(0) - 1 - tl.program_id(0), tiles, channel_blocks)
    channel = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < C
    row = tl.arange(0, ROWS)
    group = image * G + channel // (C // G)
    centre = tl.load(mean + group, mask=inside, other=0.0) - vector(add, image, add_stride, channel, inside)
    factor, offset = affine(weight, bias, scale, scale_stride, shift, shift_stride, image, channel, inside)
    factor *= tl.load(rstd + group, mask=inside, other=0.0)
    first = tile * tile_pixels
    stop = tl.minimum(first + tile_pixels, pixels)
    x += image * pixels * C
    y += image * pixels * C
    for start in range(first, stop, ROWS):
        pixel = start + row
        mask = (pixel < stop)[:, None] & inside[None, :]
        at = pixel[:, None] * C + channel[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        u = (value - centre[None, :]) * factor[None, :] + offset[None, :]
        tl.store(y + at, activation(u, SILU).to(y.dtype.element_ty), mask=mask)


@triton.jit
def tile_gradient_sums(
    x: tl.tensor,
    dy: tl.tensor,
    sums: tl.tensor,
    kind: tl.tensor,
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
    pixels: tl.tensor,
    tiles: tl.tensor,
    tile_pixels: tl.tensor,
    channel_blocks: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    """Sums over a tile of du, du h and, for dadd, h of each channel: (2 or 3, N, tiles, C), first stride `kind`."""
    image, tile, block = place(tl.program_id(0), tiles, channel_blocks)
    channel = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < C
    row = tl.arange(0, ROWS)
    group = image * G + channel // (C // G)
    centre = tl.load(mean + group, mask=inside, other=0.0) - vector(add, image, add_stride, channel, inside)
    deviation = tl.load(rstd + group, mask=inside, other=0.0)
    factor, offset = affine(weight, bias, scale, scale_stride, shift, shift_stride, image, channel, inside)
    first = tile * tile_pixels
    stop = tl.minimum(first + tile_pixels, pixels)
    x += image * pixels * C
    dy += image * pixels * C
    sum_du = tl.zeros((ROWS, COLUMNS), tl.float32)
    sum_du_h = tl.zeros((ROWS, COLUMNS), tl.float32)
    sum_h = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, stop, ROWS):
        pixel = start + row
        mask = (pixel < stop)[:, None] & inside[None, :]
        at = pixel[:, None] * C + channel[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        h = tl.where(mask, (value - centre[None, :]) * deviation[None, :], 0.0)
        du = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        du *= activation_slope(h * factor[None, :] + offset[None, :], SILU)
        sum_du += du
        sum_du_h += du * h
        if add is not None:
            sum_h += h
    place_of_sums = (image * tiles + tile) * C + channel
    tl.store(sums + place_of_sums, tl.sum(sum_du, axis=0), mask=inside)
    tl.store(sums + kind + place_of_sums, tl.sum(sum_du_h, axis=0), mask=inside)
    if add is not None:
        tl.store(sums + 2 * kind + place_of_sums, tl.sum(sum_h, axis=0), mask=inside)


@triton.jit
def combine_gradient_sums(
    sums: tl.tensor,
    kind: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    scale: tl.tensor,
    scale_stride: tl.tensor,
    rstd: tl.tensor,
    mean_dh: tl.tensor,
    mean_dh_h: tl.tensor,
    per_image: tl.tensor,
    per_image_kind: tl.tensor,
    dadd: tl.tensor,
    dscale: tl.tensor,
    dshift: tl.tensor,
    pixels: tl.tensor,
    tiles: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Means of dh and dh h over a group, (N, G) each, and all gradients but that of x, of what
    :func:`tile_gradient_sums` left."""
    image, group = tl.cast(tl.program_id(0) // G, tl.int64), tl.program_id(0) % G
    width: tl.constexpr = C // G
    tile, member = tl.arange(0, TILES), tl.arange(0, WIDTH)
    channel = group * width + member
    inside = member < width
    mask = (tile < tiles)[:, None] & inside[None, :]
    sums += (image * tiles + tile)[:, None] * C + channel[None, :]
    sum_du = tl.sum(tl.load(sums, mask=mask, other=0.0), axis=0)
    sum_du_h = tl.sum(tl.load(sums + kind, mask=mask, other=0.0), axis=0)
    factor = vector(weight, 0, 0, channel, inside) * (1.0 + vector(scale, image, scale_stride, channel, inside))
    of_dh = tl.sum(sum_du * factor, axis=0) / (pixels * width)
    of_dh_h = tl.sum(sum_du_h * factor, axis=0) / (pixels * width)
    tl.store(mean_dh + image * G + group, of_dh)
    tl.store(mean_dh_h + image * G + group, of_dh_h)
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
        sum_h = tl.sum(tl.load(sums + 2 * kind, mask=mask, other=0.0), axis=0)
        change = tl.load(rstd + image * G + group) * (sum_du * factor - pixels * of_dh - of_dh_h * sum_h)
        tl.store(dadd + image * C + channel, change.to(dadd.dtype.element_ty), mask=inside)


@triton.jit
def write_gradient_tile(
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
    mean_dh: tl.tensor,
    mean_dh_h: tl.tensor,
    pixels: tl.tensor,
    tiles: tl.tensor,
    tile_pixels: tl.tensor,
    channel_blocks: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SILU: tl.constexpr,
) -> None:
    """Write dx of a tile; backwards, as :func:`normalise_tile`."""
    image, tile, block = place(tl.num_programs(0) - 1 - tl.program_id(0), tiles, channel_blocks)
    channel = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < C
    row = tl.arange(0, ROWS)
    group = image * G + channel // (C // G)
    centre = tl.load(mean + group, mask=inside, other=0.0) - vector(add, image, add_stride, channel, inside)
    deviation = tl.load(rstd + group, mask=inside, other=0.0)
    factor, offset = affine(weight, bias, scale, scale_stride, shift, shift_stride, image, channel, inside)
    of_dh = tl.load(mean_dh + group, mask=inside, other=0.0)[None, :]
    of_dh_h = tl.load(mean_dh_h + group, mask=inside, other=0.0)[None, :]
    first = tile * tile_pixels
    stop = tl.minimum(first + tile_pixels, pixels)
    x += image * pixels * C
    dy += image * pixels * C
    dx += image * pixels * C
    for start in range(first, stop, ROWS):
        pixel = start + row
        mask = (pixel < stop)[:, None] & inside[None, :]
        at = pixel[:, None] * C + channel[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        h = (value - centre[None, :]) * deviation[None, :]
        dh = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        dh *= activation_slope(h * factor[None, :] + offset[None, :], SILU) * factor[None, :]
        change = deviation[None, :] * (dh - of_dh - h * of_dh_h)
        tl.store(dx + at, change.to(dx.dtype.element_ty), mask=mask)
