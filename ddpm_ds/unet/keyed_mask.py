"""Dropout masks in one Triton kernel instead of the dozen passes over memory of :func:`ddpm_ds.keyed.keep_mask`.

The bits are the same. The module is imported only where Triton is installed: PyTorch for CPUs comes without it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddpm_ds.keyed import HASH_MULTIPLIERS, check_key, drop_threshold

WORDS = 1024
"""Number of hashes per program; each hash decides two neighbouring elements."""


def fused_keep_mask(seed: int, stream: int, images: Tensor, count: int, drop: float) -> Tensor:
    """Return the mask of elements that dropout keeps, (N, count) bool, equal to :func:`ddpm_ds.keyed.keep_mask`.

    `images` must be on the current CUDA device.

    Raises:
        ValueError: seed or stream is out of range, or drop is not in [0, 1).
    """
    check_key(seed, stream)
    return _keep_mask(images, seed, int(stream), count, drop_threshold(drop))


@torch.library.custom_op("ddpm_ds::keep_mask", mutates_args=())
def _keep_mask(images: Tensor, seed: int, stream: int, count: int, threshold: int) -> Tensor:
    keep = images.new_empty((len(images), count), dtype=torch.bool)
    blocks = triton.cdiv(count, 2 * WORDS)
    write_keep_mask[(len(images) * blocks,)](
        images.to(torch.int64).contiguous(),
        keep,
        seed | stream << 32,
        threshold,
        count,
        blocks,
        *HASH_MULTIPLIERS,
        WORDS,
    )
    return keep


@_keep_mask.register_fake
def _(images: Tensor, seed: int, stream: int, count: int, threshold: int) -> Tensor:
    return images.new_empty((len(images), count), dtype=torch.bool)


# Arguments that differ between layers and micro-batches of one shape must not make Triton recompile the kernel.
@triton.jit(do_not_specialize=["key", "threshold"], do_not_specialize_on_alignment=["images"])
def write_keep_mask(
    images: tl.tensor,
    keep: tl.tensor,
    key: tl.tensor,
    threshold: tl.tensor,
    count: tl.tensor,
    blocks: tl.tensor,
    COUNTER_STEP: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Write a block of an image's mask.

    Hashes are uint32, which wraps and whose shifts fill with zeros; addresses are int64, so that a mask may have more
    than 2^31 elements.
    """
    image = tl.cast(tl.program_id(0) // blocks, tl.int64)
    block = tl.cast(tl.program_id(0) % blocks, tl.int64)
    index = tl.load(images + image)
    key_0, key_1, _, _ = tl.philox(key, 0, index.to(tl.uint32), (index >> 32).to(tl.uint32), 0)
    x = key_0 + (block * WORDS + tl.arange(0, WORDS)).to(tl.uint32) * COUNTER_STEP
    x ^= x >> 16
    x = key_1 + x * MIX_1
    x ^= x >> 13
    x *= MIX_2
    x ^= x >> 16
    halves = tl.interleave(x & 0xFFFF, x >> 16)  # (2 WORDS,)
    element = block * (2 * WORDS) + tl.arange(0, 2 * WORDS)
    kept = (halves ^ 0x8000) >= tl.cast(threshold, tl.uint32)  # the flipped bit makes signed order unsigned
    tl.store(keep + image * count + element, kept, mask=element < count)
