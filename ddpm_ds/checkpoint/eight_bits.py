"""Codes of 8 bits for Adam's moments, which are rounded in blocks of a parameter's elements::

    block of a moment ─▶ scale: its element farthest from 0 ─▶ elements / scale ─▶ number of the nearest in a table

The tables are those of Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"
(https://arxiv.org/abs/2110.02861): seven powers of ten, each with twice as many numbers as the one below it. Two things
differ from the paper, so that rounding what is rounded already changes no bit. A scale has the sign of its element,
which is then the table's 1. A block whose elements are all below :data:`SMALLEST` is 0. And a second moment that is not
0 never becomes 0, since Adam divides by its root.
"""

import functools

import torch
from torch import Tensor

from ddpm_ds.checkpoint.manifest import BLOCK, MOMENTS

POWERS = 7
"""Powers of ten in a table."""
SMALLEST = 2.0**-100
"""Smallest scale that is not taken for 0: products with a table's numbers keep all bits of fp32."""


class Code:
    """Table of the first moment (``signed``) or of the second, on a device."""

    def __init__(self, signed: bool, device: torch.device | str = "cpu") -> None:
        counts = [2**power * (1 if signed else 2) for power in range(POWERS)]
        steps = [(power, (step + 0.5) / count) for power, count in enumerate(counts) for step in range(count)]
        positive = [10.0 ** (power - POWERS + 1) * (0.1 + 0.9 * share) for power, share in steps]
        numbers = torch.tensor(sorted([*positive, *(-one for one in positive if signed), 0.0, 1.0]))
        limits = (numbers[1:] + numbers[:-1]) / 2
        self.error = float(numbers.diff().max()) / 2
        """Largest error of an element, as a share of its block's scale."""
        if not signed:
            limits[0] = 0.0
        self._numbers, self._limits = numbers.to(device), limits.to(device)
        self.zero = int((numbers == 0).nonzero())
        """Code of 0."""

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes (blocks, BLOCK) uint8 and scales (blocks,) fp32 of values (blocks, BLOCK) in fp32."""
        low, high = values.aminmax(dim=1, keepdim=True)
        scales = torch.where(high >= -low, high, low)
        scales.masked_fill_(scales.abs() < SMALLEST, 0.0)
        shares = values / scales.masked_fill(scales == 0.0, float("inf"))
        return torch.bucketize(shares, self._limits, out_int32=True).to(torch.uint8), scales[:, 0]

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the fp32 values of codes of any shape; the scales, one for each code, must fit it by broadcasting."""
        return self._numbers.index_select(0, codes.flatten().int()).view(codes.shape).mul_(scales)


@functools.cache
def code_of(moment: str, device: torch.device | str = "cpu") -> Code:
    """Return the table of one of Adam's moments."""
    return Code(MOMENTS[moment], device)


def decoded(moment: str, first: int, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the fp32 values of codes of a parameter's elements from ``first`` on, with the scales of their blocks."""
    return code_of(moment).decode(codes, scales.repeat_interleave(BLOCK)[first % BLOCK :][: len(codes)])
