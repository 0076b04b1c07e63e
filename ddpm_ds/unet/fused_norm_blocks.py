"""How the kernels of GroupNorm + SiLU share a tensor out among their programs; a function of the shape alone, so that
the order of summation is one too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

BLOCK_ELEMENTS = 4096
"""Elements of a tile that are in registers at a time."""
PROGRAMS = 1024
"""Tiles that the pixels are cut into, if there are so many; about four for each multiprocessor of a large GPU."""
COMBINED_ELEMENTS = 16384
"""Sums of tiles that the program which combines them holds."""
WHOLE_ELEMENTS = 8192
"""The largest block of an image that is held whole; with more, one program would fill a multiprocessor and have nobody
to compute while it loads."""
ELEMENTS_A_WARP = 1024
"""Of a block that is held whole: 32 a thread."""
ROW_BYTES = (128, 64)
"""Bytes of a pixel's channels which lie together that a program should read, and should at least."""


@dataclass(frozen=True)
class Tiles:
    """How the pixels of the images are cut into tiles, and channels into blocks."""

    count: int
    """Tiles of an image."""
    pixels: int
    """Pixels of a tile; the last one may have fewer."""
    rows: int
    """Pixels in registers at a time."""
    columns: int
    """Channels in registers at a time."""
    channel_blocks: int


@dataclass(frozen=True)
class Whole:
    """How an image is held in registers by groups."""

    rows: int
    """Places for pixels."""
    groups: int
    """Groups of a program."""
    width: int
    """Places for the channels of a group."""
    programs: int
    """Programs of an image."""
    warps: int


def power_above(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


@lru_cache
def tiles(images: int, pixels: int, channels: int, groups: int) -> Tiles:
    """The tiles for a shape."""
    blocks = [size for size in (256, 128, 64) if size <= power_above(channels)] or [power_above(channels)]
    columns = min(blocks, key=lambda size: (-(-channels // size) * size, -size))  # the least idle places
    channel_blocks = -(-channels // columns)
    rows = min(BLOCK_ELEMENTS // columns, power_above(pixels))
    wanted = -(-PROGRAMS // (images * channel_blocks))
    most = COMBINED_ELEMENTS // power_above(channels // groups)
    count = max(1, min(wanted, -(-pixels // rows), most))
    tile_pixels = -(-pixels // (count * rows)) * rows
    return Tiles(-(-pixels // tile_pixels), tile_pixels, rows, columns, channel_blocks)


@lru_cache
def whole(pixels: int, channels: int, groups: int, element_bytes: int) -> Whole | None:
    """How images of a shape are held whole; None where too few channels that lie together would fit."""
    width, rows = power_above(channels // groups), power_above(pixels)
    for row_bytes in ROW_BYTES:
        wanted = -(-row_bytes // (channels // groups * element_bytes))
        together = power_above(min(wanted, groups))
        elements = rows * together * width
        if elements <= WHOLE_ELEMENTS:
            return Whole(rows, together, width, -(-groups // together), max(elements // ELEMENTS_A_WARP, 1))
    return None
