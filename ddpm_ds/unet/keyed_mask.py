"""Dropout masks of several layers in one Triton kernel; imported only where Triton is installed.

The bits are those of :func:`ddpm_ds.ground.keyed.keep_mask`, which takes a dozen passes over memory for each mask.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddpm_ds.ground.cuda_graphs import cached
from ddpm_ds.ground.keyed import HASH_MULTIPLIERS, check_key, drop_threshold

WORDS = 1024  # hashes per program, each of which decides two neighbouring elements
ALIGNED = 16  # elements that a thread stores at once if the numbers of elements of all masks are multiples of it


class Mask(NamedTuple):
    """Mask of the elements that dropout keeps."""

    seed: int
    stream: int
    shape: tuple[int, int, int]
    """(C, H, W) of an image."""
    drop: float
    """Share of the elements that are dropped."""

    @property
    def elements(self) -> int:
        """Number of elements per image."""
        return math.prod(self.shape)


def fused_keep_masks(images: Tensor, masks: Sequence[Mask]) -> list[Tensor]:
    """Return the masks, (N, C, H, W) bool each and channels-last, in one launch.

    An image's elements are those of ``keyed.keep_mask`` in the order of memory. `images` (N,) must be on
    the current CUDA device. The masks share their memory. Numbers out of range raise ValueError.
    """
    rows, mask_of_block = _table(tuple(masks), images.device)
    lengths = [len(images) * mask.elements for mask in masks]
    keep = images.new_empty(sum(lengths), dtype=torch.bool)
    aligned = ALIGNED if all(mask.elements % ALIGNED == 0 for mask in masks) else 1
    counts = len(images), len(mask_of_block)
    write_keep_masks[(math.prod(counts),)](
        images.to(torch.int64).contiguous(), rows, mask_of_block, keep, *counts, *HASH_MULTIPLIERS, WORDS, aligned
    )
    sizes = [(len(images), height, width, channels) for _, _, (channels, height, width), _ in masks]
    parts = zip(keep.split(lengths), sizes, strict=True)
    return [part.view(size).permute(0, 3, 1, 2) for part, size in parts]


@cached
def _table(masks: tuple[Mask, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a row for each mask, (masks, 5) int64, and the mask of each block of an image, (blocks,) int32.

    A row has the key, the threshold, the number of elements of an image, its sum over earlier masks, and the first
    block. Making the table waits for the device; a layout has one for each group of layers that run together.
    """
    blocks = [triton.cdiv(mask.elements, 2 * WORDS) for mask in masks]
    rows, before, first = [], 0, 0
    for mask, of_mask in zip(masks, blocks, strict=True):
        check_key(mask.seed, mask.stream)
        key = mask.seed | mask.stream << 32
        signed = key - (key >> 63 << 64)
        rows.append((signed, drop_threshold(mask.drop), mask.elements, before, first))
        before, first = before + mask.elements, first + of_mask
    mask_of_block = torch.arange(len(masks), dtype=torch.int32).repeat_interleave(torch.tensor(blocks))
    return torch.tensor(rows).to(device), mask_of_block.to(device)


# Numbers that differ between stages, groups of layers and micro-batches must not make Triton compile the kernel again.
@triton.jit(do_not_specialize=["count_of_images", "blocks"], do_not_specialize_on_alignment=["images"])
def write_keep_masks(
    images, rows, mask_of_block, keep, count_of_images, blocks,
    COUNTER_STEP: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr, WORDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write a block of an image's mask. Hashes are uint32, which wraps; addresses are int64, for 2^31 elements."""
    image = tl.cast(tl.program_id(0) // blocks, tl.int64)
    row = rows + 5 * tl.load(mask_of_block + tl.program_id(0) % blocks)
    threshold = tl.load(row + 1)
    count = tl.multiple_of(tl.load(row + 2), ALIGNED)
    start = tl.multiple_of(tl.load(row + 3) * count_of_images + image * count, ALIGNED)
    block = tl.program_id(0) % blocks - tl.load(row + 4)
    index = tl.load(images + image)
    key_0, key_1, _, _ = tl.philox(tl.load(row), 0, index.to(tl.uint32), (index >> 32).to(tl.uint32), 0)
    x = key_0 + (block * WORDS + tl.arange(0, WORDS)).to(tl.uint32) * COUNTER_STEP
    x ^= x >> 16
    x = key_1 + x * MIX_1
    x ^= x >> 13
    x *= MIX_2
    x ^= x >> 16
    halves = tl.interleave(x & 0xFFFF, x >> 16)  # (2 WORDS,)
    element = block * (2 * WORDS) + tl.arange(0, 2 * WORDS)
    kept = (halves ^ 0x8000) >= threshold.to(tl.uint32)  # the flipped bit makes signed order unsigned
    tl.store(keep + start + element, kept, mask=element < count)
