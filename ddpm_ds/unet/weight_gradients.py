"""Weight gradients apart from input gradients: a backward leaves them, and several micro-batches are done at once.

A convolution or linear layer whose weight gradient waits computes with the detached weight, and a node of the graph
behind it queues what the gradient is made of: the layer's input, which autograd keeps anyway, and its output's
gradient. Biases and normalisations have small gradients, which stay in the backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from ddpm_ds.unet.operations import Convolution, Linear


ENOUGH_PIXELS = {"cpu": 512, "cuda": 8192}
"""Pixels, of all images together, from which on more of them make a product no faster: micro-batches are joined until
there are so many. Measured on a CPU (docs/performance.md), estimated for a GPU."""

Pair = tuple[Tensor, Tensor]
"""A layer's input and its output's gradient."""


class WaitingGradients:
    """Queue of the weight gradients of some layers.

    Args:
        split: phases and micro-batches whose weight gradients wait; those of all others are computed in the backward.
    """

    def __init__(self, split: Collection[tuple[int, int]]) -> None:
        self._split = split
        self.number = 0
        """Micro-batch of the pass that is running."""
        self.open = True
        """Whether the weight gradients of this pass wait."""
        self._queued: dict[int, dict[nn.Module, Pair]] = defaultdict(dict)

    def begin(self, phase: int, number: int) -> None:
        """Note which forward or backward runs next."""
        self.number, self.open = number, (phase, number) in self._split

    def put(self, layer: Convolution | Linear, x: Tensor, gradient: Tensor) -> None:
        """Queue a layer's input and its output's gradient.

        Raises:
            RuntimeError: the layer has been used twice for a micro-batch, whose sum nobody would make.
        """
        queued = self._queued[self.number]
        if layer in queued:
            raise RuntimeError(f"a weight of shape {tuple(layer.weight.shape)} is used twice in a micro-batch")
        queued[layer] = x, gradient

    def compute(self, layers: Iterable[Convolution | Linear], numbers: Sequence[int]) -> None:
        """Compute the weight gradients of some layers for some micro-batches at once, and give each weight its sum.

        The sum is made in the arithmetic's dtype. A weight gets it as from a backward, so that hooks run, once.
        """
        for layer in layers:
            total: Tensor | None = None
            for x, gradient in _joined([self._queued[number].pop(layer) for number in numbers]):
                part = layer.weight_gradient(x, gradient)
                total = part if total is None else total.add_(part)
            assert total is not None
            torch.autograd.backward([get_gradient_edge(layer.weight)], [total.to(layer.weight.dtype)])
        for number in numbers:
            if not self._queued[number]:
                del self._queued[number]

    def clear(self) -> None:
        """Forget all that waits."""
        self._queued.clear()

    def check_empty(self) -> None:
        """Raise RuntimeError if the gradient of a weight is still waiting, or was of another micro-batch."""
        if self._queued:
            raise RuntimeError(f"weight gradients of micro-batches {sorted(self._queued)} were never computed")


def _joined(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Yield the pairs of several micro-batches, small ones joined."""
    waiting: list[Pair] = []
    pixels = 0
    for number, (x, gradient) in enumerate(pairs, 1):
        waiting.append((x, gradient))
        pixels += gradient.numel() // gradient.shape[1 if gradient.ndim == 4 else -1]
        if pixels >= ENOUGH_PIXELS[x.device.type] or number == len(pairs):
            xs, gradients = zip(*waiting, strict=True)
            yield waiting[0] if len(waiting) == 1 else (torch.cat(xs), torch.cat(gradients))
            waiting, pixels = [], 0


class Wait(torch.autograd.Function):
    """Identity on a layer's output whose backward queues the layer's weight gradient, and gives the bias its own.

    Asked for the bias's gradient, oneDNN's convolution would compute the weight's as well.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, bias: Tensor, layer: Convolution | Linear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.layer.waiting.put(ctx.layer, x, gradient)
        channels = 1 if x.ndim == 4 else x.ndim - 1
        return gradient, None, gradient.sum([dim for dim in range(x.ndim) if dim != channels]), None
