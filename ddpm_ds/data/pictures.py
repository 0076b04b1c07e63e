"""Conversion of uint8 tensors to PNG files and grids."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

GAP_PIXELS = 2
SMALLEST_SIDE_PIXELS = 32
"""Side in pixels below which images are enlarged in a grid, by a whole factor."""


def picture(image: Tensor) -> Image.Image:
    """Return a uint8 (C, H, W) image, grey or RGB, for Pillow."""
    pixels = image.permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def grid(images: Tensor, columns: int | None = None) -> Image.Image:
    """Return uint8 images (N, C, H, W) row by row in one picture, as square as possible unless ``columns`` is given."""
    count, _, height, width = images.shape
    factor = max(1, math.ceil(SMALLEST_SIDE_PIXELS / min(height, width)))
    images = images.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    blank = torch.full((rows * columns - count, *images.shape[1:]), 255, dtype=torch.uint8)
    cells = F.pad(torch.cat([images.cpu(), blank]), (GAP_PIXELS,) * 4, value=255)  # (rows x columns, C, h, w)
    _, channels, h, w = cells.shape
    return picture(cells.view(rows, columns, channels, h, w).permute(2, 0, 3, 1, 4).reshape(channels, rows * h, -1))


def write_png(image: Image.Image, path: Path) -> None:
    """Write a PNG file that is complete or does not exist."""
    temporary = path.with_name(f".{path.name}.writing")
    image.save(temporary, format="PNG")
    temporary.replace(path)
