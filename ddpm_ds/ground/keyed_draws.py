"""Draws of several streams in one Triton kernel; imported only where Triton is installed.

Words have the bits of :class:`ddpm_ds.ground.keyed.Draws`. Normal draws round as PyTorch's do on CUDA, since both use
log, sin and cos of CUDA's libdevice.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCKS = 256
"""Number of Philox blocks of a program; each is four words or four normal draws."""


def write(images: Tensor, codes: Tensor, seed: int, stream: int, words: Tensor, normals: Tensor) -> None:
    """Write the words, (N, 4 W) int64, and the normal draws, (N, 4 M) float32, of `images` (N,) int64.

    `codes` (W + M,) int64 has the counter of each block, plus 2^32 times the distance of its stream from `stream`;
    blocks of words come first. All tensors are contiguous and on the current CUDA device.
    """
    programs = triton.cdiv(len(codes), BLOCKS)
    of_words = words.shape[1] // 4
    write_draws[(len(images) * programs,)](
        images, codes, words, normals, seed, stream, of_words, len(codes), programs, BLOCKS
    )


# Streams and numbers of draws differ between callers; Triton must not compile the kernel for each of them.
@triton.jit(
    do_not_specialize=["seed", "stream", "of_words", "count", "programs"], do_not_specialize_on_alignment=["images"]
)
def write_draws(images, codes, words, normals, seed, stream, of_words, count, programs, BLOCKS: tl.constexpr):
    """Write some blocks of an image: the first ``of_words`` of its ``count`` as words, the others as normal draws."""
    image = tl.cast(tl.program_id(0) // programs, tl.int64)
    first = (tl.program_id(0) % programs) * BLOCKS
    block = first + tl.arange(0, BLOCKS)
    code = tl.load(codes + block, mask=block < count, other=0)
    key = tl.cast(seed, tl.uint64) + (tl.cast(stream, tl.uint64) + (code >> 32).to(tl.uint64) << 32)
    index = tl.load(images + image)
    word_0, word_1, word_2, word_3 = tl.philox(
        key, code.to(tl.uint32), index.to(tl.uint32), (index >> 32).to(tl.uint32), 0
    )
    place = 4 * first + tl.arange(0, 4 * BLOCKS)
    drawn = tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3))
    tl.store(words + image * 4 * of_words + place, drawn.to(tl.int64), mask=place < 4 * of_words)
    even_0, odd_0 = box_muller(word_0, word_1)
    even_1, odd_1 = box_muller(word_2, word_3)
    normal = tl.interleave(tl.interleave(even_0, even_1), tl.interleave(odd_0, odd_1))
    inside = (place >= 4 * of_words) & (place < 4 * count)
    tl.store(normals + image * 4 * (count - of_words) + place - 4 * of_words, normal, mask=inside)


@triton.jit
def box_muller(radius_word, angle_word):
    """Return two normal draws from two words, by the operations of ``keyed.Draws.normal`` in their order."""
    logarithm = libdevice.log((radius_word.to(tl.float32) + 0.5) * 2.3283064365386963e-10)  # 2^-32
    radius = tl.sqrt_rn(logarithm * -2.0)
    angle = angle_word.to(tl.float32) * 1.4629180792671596e-09  # 2 pi 2^-32
    return radius * libdevice.cos(angle), radius * libdevice.sin(angle)
