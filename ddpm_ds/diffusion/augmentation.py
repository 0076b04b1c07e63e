"""EDM's non-leaking augmentation of training images: the U-Net is told of it, so that samples are not augmented.

Source: Karras et al. 2022, appendix F.2, and for colours Karras et al. 2020 (StyleGAN2-ADA), appendix B. Each
transformation has one or two parameters, 0 if it is not applied; together they are the U-Net's condition in training.
In sampling the condition is all zeros. EDM's code stretches half of the stretched images horizontally; here, as in the
paper's table, all are stretched along a random axis.
"""

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpm_ds import keyed
from ddpm_ds.keyed import Stream

LOG_SCALE = LOG_STRETCH = 0.2 * math.log(2.0)
"""Standard deviation of the logarithm of the scaling factor, and of the stretching factor."""
TRANSLATION = 1.0 / 8.0
"""Standard deviation of a translation, as a share of the image's width or height."""
FILTER = (
    0.015404109327027373,
    0.0034907120842174702,
    -0.11799011114819057,
    -0.048311742585633,
    0.4910559419267466,
    0.787641141030194,
    0.3379294217276218,
    -0.07263752278646252,
    -0.021060292512300564,
    0.04472490177066578,
    0.0017677118642428036,
    -0.007800708325034148,
)
"""Low-pass filter of Daubechies' least asymmetric wavelet with six vanishing moments (sym6), with norm 1: doubling an
image's size with it and halving it again is the identity."""
BEFORE, AFTER = 5, 6
"""Number of filter coefficients before and after the one nearest the middle."""
MIDDLE = sum(number * factor for number, factor in enumerate(FILTER)) / sum(FILTER) - BEFORE
"""Offset of pixel i from pixel 2 i of the image of twice the size: 0.1 of the latter's pixels."""
REACH = 3
"""Pixels to each side on which a pixel of the image of twice the size depends."""
BRIGHTNESS = 0.2
"""Standard deviation of the brightness added to all channels, on the scale [-1, 1]."""
LOG_CONTRAST, LOG_SATURATION = 0.5 * math.log(2.0), math.log(2.0)
"""Standard deviation of the logarithm of the contrast factor, and of the saturation factor."""


def augmented(images: Tensor, index: Tensor, seed: int, probability: float) -> tuple[Tensor, Tensor]:
    """Return transformed images in [-1, 1], (N, C, H, W) channels-last, and the condition (N, 9), both float32.

    Half of the images are mirrored. Each other transformation happens with ``probability``: flipping upside down,
    scaling, rotation, stretching along a random axis and translation. ``index`` (N,) int64 are the image indices that
    key all draws. Edges are padded by reflection. Images that are neither scaled, rotated, stretched nor translated
    keep their pixels exactly. Nothing waits for the device.
    """
    drawn = keyed.uniform(seed, Stream.AUGMENTATION, index, 9).unbind(1)  # (N,) each
    normal = keyed.normal(seed, Stream.AUGMENTATION + 1, index, 4)  # (N, 4)
    mirrored, turned = drawn[0] < 0.5, drawn[1] < probability / 2.0  # a chosen image is turned with probability 1/2
    scaled, rotated, stretched, moved = (share < probability for share in drawn[2:6])
    size, stretch = (normal[:, number] * chosen for number, chosen in ((0, scaled), (1, stretched)))
    shift = normal[:, 2:] * moved[:, None]  # (N, 2), in standard deviations
    angle = math.pi * (2.0 * drawn[6] - 1.0) * rotated
    axis = math.pi * (2.0 * drawn[7] - 1.0)
    condition = [mirrored, turned, size, angle.cos() - 1.0, angle.sin(), stretch * axis.cos(), stretch * axis.sin()]
    images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    images = torch.where(turned[:, None, None, None], images.flip(2), images)
    matrix = _back(angle, (LOG_SCALE * size).exp(), axis, (LOG_STRETCH * stretch).exp())
    offsets = [part * (TRANSLATION * side) for part, side in zip(shift.unbind(1), images.mT.shape[2:], strict=True)]
    changed = scaled | rotated | stretched | moved
    images = torch.where(changed[:, None, None, None], _resampled(images, matrix, offsets), images)
    images = images.contiguous(memory_format=torch.channels_last)  # (N, C, H, W)
    return images, torch.cat((torch.stack([part.float() for part in condition], dim=1), shift), dim=1)  # (N, 9)


def coloured(images: Tensor, index: Tensor, seed: int, probability: float) -> tuple[Tensor, Tensor]:
    """Return images with changed colours, (N, C, H, W) channels-last, and the condition, (N, 6) for three channels or
    (N, 3) for one, both float32.

    Each of five changes happens with ``probability``: brightness, contrast, luma flip (for half of the chosen images),
    hue rotation and saturation. Grey images, which have neither hue nor saturation, get the first three. ``index``
    (N,) int64 are the image indices that key all draws. Unchanged images keep their pixels exactly, and changed ones
    may leave [-1, 1]. Nothing waits for the device.
    """
    drawn = keyed.uniform(seed, Stream.COLOUR, index, 6).unbind(1)  # (N,) each
    normal = keyed.normal(seed, Stream.COLOUR + 1, index, 3).unbind(1)  # (N,) each
    exchanged = drawn[2] < probability / 2.0
    brightness, contrast, saturation = (
        deviations * (share < probability)
        for deviations, share in zip(normal, (drawn[0], drawn[1], drawn[4]), strict=True)
    )
    condition = [brightness, contrast, exchanged.float()]
    grey = (LOG_CONTRAST * contrast).exp()  # factor of the channels' mean; colour: of the rest
    light = torch.where(exchanged, -grey, grey)
    if images.shape[1] == 1:
        factors = [light]
    else:
        angle = math.pi * (2.0 * drawn[5] - 1.0) * (drawn[3] < probability)
        condition += [angle.cos() - 1.0, angle.sin(), saturation]
        # A rotation about the grey axis, with the mean scaled by light and the rest by colour, treats the channels
        # alike: it has one factor for the channel itself, one for the next channel, and one for the channel after that.
        colour = grey * (LOG_SATURATION * saturation).exp()
        even, odd = (light - colour * angle.cos()) / 3.0, colour * angle.sin() / math.sqrt(3.0)
        factors = [even + colour * angle.cos(), even - odd, even + odd]
    # The factors of an unchanged image are exactly 1 for the channel itself and 0 for the others.
    mixed = (BRIGHTNESS * light * brightness)[:, None, None, None]
    for number, factor in enumerate(factors):
        mixed = mixed + factor[:, None, None, None] * images.roll(-number, 1)
    return mixed.contiguous(memory_format=torch.channels_last), torch.stack(condition, dim=1)  # (N, C, H, W), (N, 6)


def _back(angle: Tensor, scale: Tensor, axis: Tensor, stretch: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rows of the inverse of scaling, rotating and stretching, (N,) each: the matrices from a point of the
    new image, relative to its centre and before translation, to the point of the old one.

    Written out because the rounding of matrix products depends on the number of images.
    """
    cos, sin = axis.cos(), axis.sin()
    along, across = cos * cos, sin * sin
    first = along / stretch + across * stretch
    mixed = cos * sin * (1.0 / stretch - stretch)
    last = across / stretch + along * stretch
    cos, sin = angle.cos() / scale, angle.sin() / scale
    return cos * first - sin * mixed, cos * mixed - sin * last, sin * first + cos * mixed, sin * mixed + cos * last


def _resampled(images: Tensor, matrix: tuple[Tensor, Tensor, Tensor, Tensor], offsets: Sequence[Tensor]) -> Tensor:
    """Return images (N, C, H, W) resampled at points moved back by ``offsets``, (N,) pixels each (right, down), and
    then mapped by ``matrix``, four (N,).

    Pixels are interpolated in images of twice the size, which the filter makes and halves again.
    """
    sides = images.mT.shape[2:]  # (W, H): all that follows is first of x, then of y
    middles = [(pixels - 1) / 2.0 for pixels in sides]
    margins = [max(pixels // 2, BEFORE + 1) for pixels in sides]
    padded = F.pad(images.contiguous(), [margin for margin in margins for _ in range(2)], mode="reflect")
    doubled = _doubled(_doubled(padded).mT).mT  # (N, C, D, E)
    # Points in pixels from the centre: of the doubled new image, and the corresponding points of the old one.
    across, down = (
        (torch.arange(-BEFORE, 2 * pixels + AFTER - 1, device=images.device) - MIDDLE) / 2.0 - middle
        for pixels, middle in zip(sides, middles, strict=True)
    )
    x = across[None, None, :] - offsets[0][:, None, None]  # (N, 1, K)
    y = down[None, :, None] - offsets[1][:, None, None]  # (N, L, 1)
    x_by_x, x_by_y, y_by_x, y_by_y = (part[:, None, None] for part in matrix)
    old = (x_by_x * x + x_by_y * y, y_by_x * x + y_by_y * y)  # (N, L, K) each
    # In grid_sample's coordinates: -1 is the first doubled pixel, 1 the last.
    numbers = (
        2.0 * points + (2.0 * (middle + margin - REACH) + MIDDLE)
        for points, middle, margin in zip(old, middles, margins, strict=True)
    )
    grid = torch.stack(
        [number * (2.0 / (side - 1)) - 1.0 for number, side in zip(numbers, doubled.mT.shape[2:], strict=True)], dim=3
    )  # (N, L, K, 2)
    found = F.grid_sample(doubled, grid, mode="bilinear", padding_mode="reflection", align_corners=True)
    return _halved(_halved(found).mT).mT  # (N, C, H, W)


def _doubled(images: Tensor) -> Tensor:
    """Return images (..., 2 W - 4 REACH) of twice the width, without the pixels that need values beyond the edge."""
    length = images.shape[-1] - 2 * REACH
    even, odd = (
        functools.reduce(
            torch.add,
            (FILTER[first - 2 * step] * images[..., begin + step :][..., :length] for step in range(2 * REACH)),
        )
        for first, begin in ((2 * BEFORE + 1, 0), (2 * BEFORE, 1))
    )
    return torch.stack((even, odd), dim=-1).flatten(-2)


def _halved(images: Tensor) -> Tensor:
    """Return images (..., W) of half the width, from (..., 2 W + BEFORE + AFTER - 1)."""
    last = images.shape[-1] - len(FILTER) + 1
    return functools.reduce(
        torch.add, (factor * images[..., start : start + last : 2] for start, factor in enumerate(FILTER))
    )
