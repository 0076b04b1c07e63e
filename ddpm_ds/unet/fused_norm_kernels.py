"""Triton kernels of GroupNorm + SiLU, forward and backward; imported only where Triton is installed.

Memory is (N, P, C): P pixels of C channels that lie together. All arithmetic is in fp32. With z = x + add, and
mean and rstd = 1 / sqrt(variance + epsilon) of z's group, the formulas are::

    h = (z - mean) rstd        v = h weight + bias        u = v (1 + scale) + shift        y = u sigmoid(u)
    du = dy silu'(u)           dv = du (1 + scale)        dh = dv weight
    dz = rstd (dh - mean of dh over the group - h (mean of dh h over the group))

All gradients but dz are made of the sums of du, du h and h over the pixels of an image, for each channel.

Large images are computed in tiles, some pixels of an image and a block of channels each: one pass leaves sums per tile
and channel, a small kernel combines them to groups, a last pass writes. Forward reads x twice and writes y; backward
reads x and dy twice and writes dx. Images of y and dy are a stride apart, since other rows may lie between them. For
small images the ``*_whole`` kernels hold all pixels of an image and some of its groups in registers, so that everything
is read once, in one launch: ROWS pixels by GROUPS x WIDTH places. A group uses its first C / G places.

Triton turns arguments of value 1 into constants, which have no methods; hence ``tl.cast``. Kernels have no annotations,
since these could not tell pointers from numbers.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def vector(pointer, image, stride, channel, mask):
    """Return row `image` of an optional (N, C) tensor as fp32; zeros if there is no tensor."""
    values = tl.zeros(channel.shape, tl.float32)
    if pointer is not None:
        values = tl.load(pointer + image * stride + channel, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def activation(u, SILU: tl.constexpr):
    """Return SiLU of u, or u itself."""
    value = u
    if SILU:
        value = u * tl.sigmoid(u)
    return value


@triton.jit
def activation_slope(u, SILU: tl.constexpr):
    """Return the derivative of :func:`activation`."""
    slope = tl.full(u.shape, 1.0, tl.float32)
    if SILU:
        sigmoid = tl.sigmoid(u)
        slope = sigmoid * (1.0 + u * (1.0 - sigmoid))
    return slope


@triton.jit
def place(program, pixels, tiles, tile_pixels, channel_blocks, COLUMNS: tl.constexpr):
    """Return image, tile, its first pixel and that after its last, and channels; neighbours read nearby memory."""
    channel = (program % channel_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    tile = (program // channel_blocks) % tiles
    first = tile * tile_pixels
    stop = tl.minimum(first + tile_pixels, pixels)
    return tl.cast(program // (channel_blocks * tiles), tl.int64), tile, first, stop, channel


@triton.jit
def affine(weight, bias, scale, scale_stride, shift, shift_stride, image, channel, mask):
    """Return the factor and the offset of each channel in u = h factor + offset."""
    modulation = 1.0 + vector(scale, image, scale_stride, channel, mask)
    factor = vector(weight, 0, 0, channel, mask) * modulation
    offset = vector(bias, 0, 0, channel, mask) * modulation + vector(shift, image, shift_stride, channel, mask)
    return factor, offset


@triton.jit
def store_gradients(
    sum_du, sum_du_h, weight, bias, scale, scale_stride, per_image, kind, dscale, dshift, image, channel, mask,
    C: tl.constexpr,
):  # fmt: skip
    """Store an image's dscale and dshift, and its dweight and dbias in `per_image`, (2, N, C), first stride `kind`."""
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
    per_image, kind, dweight, dbias, images,
    C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write dweight and dbias (C,): the sums over images of what :func:`store_gradients` left."""
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


@triton.jit
def tile_statistics(
    x, means, squares,
    pixels, tiles, tile_pixels, channel_blocks,
    C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the mean and the sum of squared deviations of each channel of x over a tile: (N, tiles, C) each.

    Each place of the block runs Welford's recurrence; rows are merged as in Chan, Golub and LeVeque 1983.
    """
    image, tile, first, stop, channel = place(tl.program_id(0), pixels, tiles, tile_pixels, channel_blocks, COLUMNS)
    row = tl.arange(0, ROWS)
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
    centred = mean - merged[None, :]
    place_of_sums = (image * tiles + tile) * C + channel
    tl.store(means + place_of_sums, merged, mask=channel < C)
    tl.store(squares + place_of_sums, tl.sum(square + centred * centred * count, axis=0), mask=channel < C)


@triton.jit
def combine_statistics(
    means, squares, add, add_stride, mean, rstd, epsilon,
    pixels, tiles, tile_pixels,
    C: tl.constexpr, G: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the mean and rstd of a group of x + add, (N, G) each, from the sums of :func:`tile_statistics`."""
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
    centred = part - merged
    variance = tl.sum(tl.sum(square + centred * centred * count, axis=0), axis=0) / (pixels * width)
    tl.store(mean + image * G + group, merged)
    tl.store(rstd + image * G + group, 1.0 / tl.sqrt(variance + epsilon))


@triton.jit
def normalise_tile(
    x, y, y_stride, weight, bias, add, add_stride, scale, scale_stride, shift, shift_stride, mean, rstd,
    pixels, tiles, tile_pixels, channel_blocks,
    C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Write y of a tile. Tiles run backwards, since the last ones that the statistics read may still be cached."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    image, _, first, stop, channel = place(program, pixels, tiles, tile_pixels, channel_blocks, COLUMNS)
    inside = channel < C
    row = tl.arange(0, ROWS)
    group = image * G + channel // (C // G)
    centre = tl.load(mean + group, mask=inside, other=0.0) - vector(add, image, add_stride, channel, inside)
    factor, offset = affine(weight, bias, scale, scale_stride, shift, shift_stride, image, channel, inside)
    factor *= tl.load(rstd + group, mask=inside, other=0.0)
    x += image * pixels * C
    y += image * y_stride
    for start in range(first, stop, ROWS):
        pixel = start + row
        mask = (pixel < stop)[:, None] & inside[None, :]
        at = pixel[:, None] * C + channel[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        u = (value - centre[None, :]) * factor[None, :] + offset[None, :]
        tl.store(y + at, activation(u, SILU).to(y.dtype.element_ty), mask=mask)


@triton.jit
def tile_gradient_sums(
    x, dy, dy_stride, sums, kind, weight, bias, add, add_stride, scale, scale_stride, shift, shift_stride, mean, rstd,
    pixels, tiles, tile_pixels, channel_blocks,
    C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Write a tile's sums of du, du h and, for dadd, h by channel: (2 or 3, N, tiles, C), first stride `kind`."""
    image, tile, first, stop, channel = place(tl.program_id(0), pixels, tiles, tile_pixels, channel_blocks, COLUMNS)
    inside = channel < C
    row = tl.arange(0, ROWS)
    group = image * G + channel // (C // G)
    centre = tl.load(mean + group, mask=inside, other=0.0) - vector(add, image, add_stride, channel, inside)
    deviation = tl.load(rstd + group, mask=inside, other=0.0)
    factor, offset = affine(weight, bias, scale, scale_stride, shift, shift_stride, image, channel, inside)
    x += image * pixels * C
    dy += image * dy_stride
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
    sums, kind, weight, bias, scale, scale_stride, rstd,
    mean_dh, mean_dh_h, per_image, per_image_kind, dadd, dscale, dshift,
    pixels, tiles,
    C: tl.constexpr, G: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the means of dh and dh h over a group, (N, G) each, and all gradients but dx, from the sums of tiles."""
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
        sum_du, sum_du_h, weight, bias, scale, scale_stride, per_image, per_image_kind, dscale, dshift, image,
        channel, inside, C,
    )  # fmt: skip
    if dadd is not None:
        sum_h = tl.sum(tl.load(sums + 2 * kind, mask=mask, other=0.0), axis=0)
        change = tl.load(rstd + image * G + group) * (sum_du * factor - pixels * of_dh - of_dh_h * sum_h)
        tl.store(dadd + image * C + channel, change.to(dadd.dtype.element_ty), mask=inside)


@triton.jit
def write_gradient_tile(
    x, dy, dy_stride, dx, weight, bias, add, add_stride, scale, scale_stride, shift, shift_stride, mean, rstd,
    mean_dh, mean_dh_h,
    pixels, tiles, tile_pixels, channel_blocks,
    C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Write dx of a tile. Tiles go backwards, as in :func:`normalise_tile`."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    image, _, first, stop, channel = place(program, pixels, tiles, tile_pixels, channel_blocks, COLUMNS)
    inside = channel < C
    row = tl.arange(0, ROWS)
    group = image * G + channel // (C // G)
    centre = tl.load(mean + group, mask=inside, other=0.0) - vector(add, image, add_stride, channel, inside)
    deviation = tl.load(rstd + group, mask=inside, other=0.0)
    factor, offset = affine(weight, bias, scale, scale_stride, shift, shift_stride, image, channel, inside)
    of_dh = tl.load(mean_dh + group, mask=inside, other=0.0)[None, :]
    of_dh_h = tl.load(mean_dh_h + group, mask=inside, other=0.0)[None, :]
    x += image * pixels * C
    dy += image * dy_stride
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


@triton.jit
def channels_of(G: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Return this program's image and, by place (GROUPS * WIDTH,), the channel, whether there is one, and its group."""
    blocks: tl.constexpr = (G + GROUPS - 1) // GROUPS
    places = tl.arange(0, GROUPS * WIDTH)
    group = (tl.program_id(0) % blocks) * GROUPS + places // WIDTH
    inside = (places % WIDTH < C // G) & (group < G)
    return tl.cast(tl.program_id(0) // blocks, tl.int64), group * (C // G) + places % WIDTH, inside, group


@triton.jit
def mean_of_groups(per_channel, count, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the means of groups, by place, from sums by place (GROUPS * WIDTH,)."""
    total = tl.sum(tl.reshape(per_channel, (GROUPS, WIDTH)), axis=1) / count
    return tl.reshape(tl.broadcast_to(total[:, None], (GROUPS, WIDTH)), (GROUPS * WIDTH,))


@triton.jit
def normalise_whole(
    x, y, weight, bias, add, add_stride, scale, scale_stride, shift, shift_stride, mean, rstd, epsilon,
    pixels,
    C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Write y, and mean and rstd (N, G), of some groups of an image."""
    image, channel, inside, group = channels_of(G, C, GROUPS, WIDTH)
    row = tl.arange(0, ROWS)
    mask = (row < pixels)[:, None] & inside[None, :]
    at = image * pixels * C + row[:, None] * C + channel[None, :]
    count = pixels * (C // G)
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    z += vector(add, image, add_stride, channel, inside)[None, :]
    centre = mean_of_groups(tl.sum(tl.where(mask, z, 0.0), axis=0), count, GROUPS, WIDTH)
    centred = tl.where(mask, z - centre[None, :], 0.0)
    variance = mean_of_groups(tl.sum(centred * centred, axis=0), count, GROUPS, WIDTH)
    deviation = 1.0 / tl.sqrt(variance + epsilon)
    factor, offset = affine(weight, bias, scale, scale_stride, shift, shift_stride, image, channel, inside)
    u = centred * (deviation * factor)[None, :] + offset[None, :]
    tl.store(y + at, activation(u, SILU).to(y.dtype.element_ty), mask=mask)
    first_of_group = inside & (tl.arange(0, GROUPS * WIDTH) % WIDTH == 0)
    tl.store(mean + image * G + group, centre, mask=first_of_group)
    tl.store(rstd + image * G + group, deviation, mask=first_of_group)


@triton.jit
def gradients_whole(
    x, dy, dx, weight, bias, add, add_stride, scale, scale_stride, shift, shift_stride, mean, rstd, per_image,
    per_image_kind, dadd, dscale, dshift,
    pixels,
    C: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Write dx and, per image, all other gradients of some groups of an image."""
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
        sum_du, sum_du_h, weight, bias, scale, scale_stride, per_image, per_image_kind, dscale, dshift, image,
        channel, inside, C,
    )  # fmt: skip
    if dadd is not None:
        change_of_add = tl.sum(tl.where(mask, change, 0.0), axis=0)
        tl.store(dadd + image * C + channel, change_of_add.to(dadd.dtype.element_ty), mask=inside)
