"""Random numbers as pure functions of (seed, stream, image index), with no state anywhere.

The image index is the number of images seen before this one in the run: its position in the endless training
sequence. A draw depends on nothing else: not on its batch, ranks, micro-batches, threads or earlier draws. So two
pipeline stages that draw separately agree, and a resumed run draws the same numbers.

Draws are the same on every device, normal ones up to the device's rounding of log, sin and cos. Nothing here waits for
a device.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType

import torch
from torch import Tensor

from ddpm_ds.ground.cuda_graphs import cached
from ddpm_ds.ground.device import runs_triton


class Stream(IntEnum):
    """Purpose of a draw; two streams of one image are independent.

    Dropout of layer i uses DROPOUT + i, held-out noise at timestep t HELD_OUT + t. A sampled image starts from noise of
    SAMPLE and gets noise of SAMPLE + 1 + t on leaving timestep t. With continuous noise levels, t stands for the
    percentile of the held-out level, or for the number of the sampler's step.
    """

    TIMESTEP = 0
    NOISE = 1
    FLIP = 2
    LABEL_DROP = 3
    CROP = 4
    PERTURBATION = 5
    TAGS = 9
    CUT = 10
    CONDITION_DROP = 11
    CONDITION_LEVEL = 12
    CONDITION_NOISE = 13
    CAPTION = 14
    TEXT_DROP = 15
    DROPOUT = 16
    ROUNDING = 2**20 - 4  # above all layers
    MULTIRES = 2**20 - 3
    MULTIRES_RATIO = 2**20 - 2
    NOISE_OFFSET = 2**20 - 1
    HELD_OUT = 2**20
    SAMPLE = 2**21


SAMPLE_SEED = 0
"""Default sampling seed, which is independent of the run's seed so that runs are compared from the same noise."""

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

HASH_MULTIPLIERS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
"""Odd 32-bit multipliers of `keep_mask`: 2^32 / golden ratio for the counter, then the two of MurmurHash3's finaliser
(Appleby)."""
_COUNTER_STEP, _MIX_1, _MIX_2 = (value - 2**32 for value in HASH_MULTIPLIERS)  # as signed int32 for torch


def check_key(seed: int, stream: int) -> None:
    """Raise ValueError unless seed and stream form a Philox key."""
    if not (0 <= seed <= _WORD and 0 <= stream <= _WORD):
        raise ValueError(f"seed = {seed} and stream = {stream} must be 32-bit unsigned integers")


def drop_threshold(drop: float) -> int:
    """Return the number of values, out of 2^16, at which `keep_mask` drops an element.

    Raises ValueError unless drop is in [0, 1).
    """
    if not 0.0 <= drop < 1.0:
        raise ValueError(f"drop = {drop} must be in [0, 1)")
    return min(round(drop * 2**16), 2**16 - 1)


Ranges = tuple[range, ...]
"""Counters of Philox blocks."""


def _philox(seed: int, blocks: Mapping[int, Ranges], images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of each Philox4x32-10 block, (N, blocks) int64 each, of these counters by stream."""
    key_0, index = seed, images.to(torch.int64)[:, None]  # (N, 1)
    x0, key_1 = _columns(tuple(blocks.items()), images.device)
    x1 = index & _WORD
    x2 = index >> 32 & _WORD
    x3 = torch.zeros_like(x0)
    for _ in range(10):
        # Products of 32-bit words wrap in int64, but all 64 bits are right. x1 and x3 keep the whole product:
        # their high halves are noise that the mask on x0 and x2 removes one round later. The first two rounds
        # broadcast, so the shapes grow to (N, blocks) only when they must.
        product_0, product_1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0 = (product_1 >> 32 ^ x1).bitwise_xor_(key_0).bitwise_and_(_WORD)
        x2 = (product_0 >> 32 ^ x3).bitwise_xor_(key_1).bitwise_and_(_WORD)
        x1, x3 = product_1, product_0
        key_0, key_1 = key_0 + _KEY_STEPS[0] & _WORD, key_1 + _KEY_STEPS[1] & _WORD
    return x0, x1 & _WORD, x2, x3 & _WORD  # (N, blocks) each


@cached
def _columns(blocks: tuple[tuple[int, Ranges], ...], device: torch.device) -> tuple[Tensor, Tensor | int]:
    """Return the counters of the blocks, (1, blocks) int64, and their streams; a single stream is a number."""
    counters = torch.cat([torch.arange(one.start, one.stop, device=device) for _, of in blocks for one in of])
    if len(blocks) == 1:
        return counters[None], int(blocks[0][0])
    streams = [torch.full((sum(map(len, ranges)),), int(stream), device=device) for stream, ranges in blocks]
    return counters[None], torch.cat(streams)[None]


@cached
def _codes(blocks: tuple[tuple[int, Ranges], ...], device: torch.device) -> Tensor:
    """Return the counter of each block plus 2^32 times its stream, (blocks,) int64."""
    counters, streams = _columns(blocks, device)
    return (counters + (streams << 32))[0]


@functools.cache
def _fused(device: torch.device) -> Callable[..., None] | None:
    """Return :func:`ddpm_ds.ground.keyed_draws.write` if it runs on a device, else None."""
    if not runs_triton(device):
        return None
    try:
        from ddpm_ds.ground.keyed_draws import write  # needs Triton, which not every machine has

        tried = torch.zeros(4, dtype=torch.int64, device=device)
        write(tried[:1], tried[:1], 0, 0, tried[None], tried[None, :0].float())
    except Exception as error:  # Triton builds at first use and fails in many ways, without a compiler for one
        warnings.warn(f"noise is drawn by PyTorch's operations, since Triton's kernel fails: {error}", stacklevel=2)
        return None
    return write


class Draws:
    """Draws of several streams for the same images, by one Philox4x32-10, since each operator takes the host's time.

    Key (seed, stream), counter (block, image low, image high, 0): four words per block. A stream's bits depend neither
    on the other streams nor on the number drawn. Where Triton runs, one kernel makes all draws. Source: Salmon et al.
    2011, "Parallel random numbers: as easy as 1, 2, 3".

    Args:
        seed: integer in [0, 2^32), as streams; others raise ValueError.
        images: (N,) int64 image indices.
        words: number of 32-bit words of each stream of bits; a uniform draw or an integer takes one.
        normals: number of normal draws of each stream that has some, or ranges of draws whose ends 4 divides.
    """

    def __init__(
        self,
        seed: int,
        images: Tensor,
        words: Mapping[int, int],
        normals: Mapping[int, int | Sequence[range]] = MappingProxyType({}),
    ) -> None:
        asked = {int(stream): count for stream, count in (*words.items(), *normals.items())}
        drawn = {stream: (range(of),) if isinstance(of, int) else of for stream, of in asked.items()}
        self._counts = {stream: sum(map(len, ranges)) for stream, ranges in drawn.items()}
        for stream in self._counts:
            check_key(seed, stream)
        # A block is four words, and two words make two normal draws.
        blocks = {
            stream: tuple(range(one.start // 4, -(-one.stop // 4)) for one in ranges)
            for stream, ranges in drawn.items()
        }
        sizes = {stream: sum(map(len, ranges)) for stream, ranges in blocks.items()}
        self._first = dict(zip(blocks, itertools.accumulate(sizes.values(), initial=0), strict=False))
        self._normals: Tensor | None = None
        write = _fused(images.device)
        if write is None:
            self._bits = torch.stack(_philox(seed, blocks, images), dim=-1).flatten(1)
            return
        lowest, of_words = min(blocks), 4 * sum(sizes[stream] for stream in words)
        codes = _codes(tuple((stream - lowest, ranges) for stream, ranges in blocks.items()), images.device)
        self._bits = images.new_empty((len(images), of_words), dtype=torch.int64)
        self._normals = images.new_empty((len(images), 4 * len(codes) - of_words), dtype=torch.float32)
        write(images.to(torch.int64).contiguous(), codes, seed, lowest, self._bits, self._normals)

    def bits(self, stream: int) -> Tensor:
        """Return a stream's words, (N, words) int64 in [0, 2^32)."""
        return self._bits.narrow(1, 4 * self._first[stream], self._counts[stream])

    def uniform(self, stream: int) -> Tensor:
        """Return uniform draws, (N, words) float32 in [0, 1), multiples of 2^-24."""
        # 24 bits fit a float32 exactly, so nothing rounds up to 1.
        return (self.bits(stream) >> 8).to(torch.float32).mul_(2.0**-24)

    def normal(self, stream: int) -> Tensor:
        """Return standard normal draws, (N, normals) float32, by Box and Muller 1958.

        Two words make two neighbouring draws. Magnitudes are at most 6.8, which 1 of 10^11 exact draws would exceed.
        """
        first, count = 4 * self._first[stream], self._counts[stream]
        if self._normals is not None:
            return self._normals.narrow(1, first - self._bits.shape[1], count)
        pairs = self._bits.narrow(1, first, 2 * -(-count // 2)).unflatten(1, (-1, 2))
        radius_word, angle_word = pairs.to(torch.float32).unbind(-1)  # (N, pairs) each
        # Adding a half keeps the logarithm's argument above 0. The argument may round up to 1, where the radius is 0.
        radius = radius_word.add(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = angle_word * (2.0**-32 * 2.0 * math.pi)
        return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(1)[:, :count]

    def integers(self, stream: int, high: int) -> Tensor:
        """Return one draw per image, (N,) int64, uniform in [0, high) up to a bias below high / 2^32.

        Raises ValueError unless high is in 1 .. 2^31.
        """
        if not 0 < high <= 2**31:
            raise ValueError(f"high = {high} must be in 1 .. 2^31")
        return self.bits(stream)[:, 0] * high >> 32  # (N,)

    def coins(self, stream: int) -> Tensor:
        """Return one draw per image, (N,) bool: :meth:`integers` in [0, 2), in one operation."""
        return self.bits(stream)[:, 0] >= 2**31


def normal(seed: int, stream: int, images: Tensor, count: int) -> Tensor:
    """Return (N, count) draws of one stream as :meth:`Draws.normal`."""
    return Draws(seed, images, {}, {stream: count}).normal(stream)


def keep_mask(seed: int, stream: int, images: Tensor, count: int, drop: float, first: int = 0) -> Tensor:
    """Return the mask of elements that dropout keeps, (N, count) bool, from an even `first` one on: False with
    probability `drop`.

    To be fast for large activations, Philox gives each image two 32-bit keys and an integer hash of (keys, counter)
    gives 16 bits per element, so `drop` is rounded to a multiple of 2^-16. An element does not depend on `first` and
    `count`. ``ddpm_ds.unet.keyed_mask`` computes the same bits in one kernel. Numbers out of range raise ValueError.
    """
    threshold = drop_threshold(drop) - 2**15  # compared with the bits as a signed integer
    key_0, key_1, _, _ = (word.to(torch.int32) for word in _philox(seed, {stream: (range(1),)}, images))  # (N, 1) each
    counter = torch.arange(first // 2, -(-(first + count) // 2), dtype=torch.int32, device=images.device)
    x = torch.add(key_0, counter, alpha=_COUNTER_STEP)  # (N, words)
    # MurmurHash3's finaliser, except that the second key enters half-way: with one key, two images with close keys
    # would share a shifted mask. >> copies the sign, so a mask makes each shift logical.
    spare = x >> 16
    x ^= spare.bitwise_and_(0xFFFF)
    torch.add(key_1, x, alpha=_MIX_1, out=x)
    x ^= torch.bitwise_right_shift(x, 13, out=spare).bitwise_and_(0x7FFFF)
    x *= _MIX_2
    x ^= torch.bitwise_right_shift(x, 16, out=spare).bitwise_and_(0xFFFF)
    return (x.view(torch.int16) >= threshold)[:, :count]  # (N, count)
