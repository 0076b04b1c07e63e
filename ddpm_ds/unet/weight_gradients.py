"""Weight gradients apart from input gradients: a backward leaves them, and several micro-batches are done at once.

A convolution or projection whose weight gradient waits computes with the detached weight, and a node of the graph
behind it queues what the gradient is made of: the layer's input, which autograd keeps anyway, and its output's
gradient. Biases, normalisations and the embedding's layers have small gradients, which stay in the backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from ddpm_ds.unet.operations import Convolution, Linear


class WaitingGradients:
    """Queue of the weight gradients of some layers; ``number`` is the micro-batch that goes backwards."""

    def __init__(self) -> None:
        self.number = 0
        self._queued: dict[int, dict[nn.Module, tuple[Tensor, Tensor]]] = defaultdict(dict)

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

        A weight gets it as from a backward, so that hooks run, once.
        """
        for layer in layers:
            found = [self._queued[number].pop(layer) for number in numbers]
            x, gradient = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*found, strict=True))
            with torch.no_grad():
                weight_gradient = layer.weight_gradient(x, gradient).to(layer.weight.dtype)
            torch.autograd.backward([get_gradient_edge(layer.weight)], [weight_gradient])
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
