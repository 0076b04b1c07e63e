"""Weight gradients deferred from the backward, to be computed for several micro-batches at once.

To defer its weight gradient, a convolution or linear layer (:class:`Weighted`) computes with the detached weight, and a
node of the graph queues the two factors of the gradient: the layer's input, which autograd keeps anyway, and its
output's gradient. Biases and normalisations have small gradients, which stay in the backward.

A compiled graph can't queue anything; it returns both tensors as the gradients of two more inputs (:class:`Tapped`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ENOUGH_PIXELS = {"cpu": 512, "cuda": 8192}
"""Pixels over all images beyond which a product gets no more efficient; micro-batches are joined up to this number.
Measured on a CPU (docs/performance.md), estimated for a GPU."""


class Waiting(NamedTuple):
    """Factors of the weight gradient of a layer, or of several that have one product."""

    layers: Sequence[Weighted]
    x: Tensor  # input
    gradient: Tensor  # of the output, the outputs of several layers side by side


class WaitingGradients:
    """Queue of weight gradients, deferred in the (phase, micro-batch) of ``split``; others are in the backward."""

    def __init__(self, split: Collection[tuple[int, int]]) -> None:
        self._split = split
        self.number = 0
        """Micro-batch of the pass that is running."""
        self.open = True
        """Whether the weight gradients of this pass wait."""
        self.root: Tensor | None = None
        """Scalar from which the nodes that queue gradients are made, if the scalar's own node computes them."""
        self._queued: dict[int, dict[Weighted, Waiting]] = defaultdict(dict)

    def new_root(self) -> Tensor:
        """Return a scalar for a node without another input that has a gradient; else its backward would not run."""
        return torch.zeros((), requires_grad=True) if self.root is None else self.root

    def begin(self, phase: int, number: int) -> None:
        """Set the phase and micro-batch of the next forward or backward."""
        self.number, self.open = number, (phase, number) in self._split

    def ways(self, phase: int, micro_batches: int) -> set[bool]:
        """Return whether weight gradients are deferred in a phase: {True}, {False}, or both if only in some passes."""
        return {(phase, number) in self._split for number in range(micro_batches)}

    def put(self, layers: Sequence[Weighted], x: Tensor, gradient: Tensor) -> None:
        """Queue the input and the output's gradient of a layer, or of several that have one product.

        A layer used twice in a micro-batch raises RuntimeError, since its two gradients would not be summed.
        """
        queued = self._queued[self.number]
        for layer in layers:
            if layer in queued:
                raise RuntimeError(f"a weight of shape {tuple(layer.weight.shape)} is used twice in a micro-batch")
            queued[layer] = Waiting(layers, x, gradient)

    def compute(
        self, layers: Iterable[Weighted], numbers: Sequence[int], give: Callable[[Tensor, Tensor], None]
    ) -> None:
        """Give each weight its gradient over some micro-batches; layers of one product get theirs together."""
        for layer in layers:
            if not layer.weight.requires_grad:
                continue
            waiting = [self._queued[number].pop(layer) for number in numbers]
            together = waiting[0].layers
            if layer is not together[0]:
                continue
            total: Tensor | None = None
            for x, gradient in _joined(waiting):
                part = layer.weight_gradient(x, gradient)
                total = part if total is None else total.float().add_(part)
            assert total is not None
            total = total.to(layer.weight.dtype)
            totals = total.split([len(one.weight) for one in together]) if len(together) > 1 else [total]
            for one, own in zip(together, totals, strict=True):
                give(one.weight, own)
        for number in numbers:
            if not self._queued[number]:
                del self._queued[number]

    def clear(self) -> None:
        """Discard all deferred gradients."""
        self._queued.clear()

    def check_empty(self) -> None:
        """Raise RuntimeError if a weight gradient is still deferred."""
        if self._queued:
            raise RuntimeError(f"weight gradients of micro-batches {sorted(self._queued)} were never computed")


def _joined(waiting: Sequence[Waiting]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the factors of several micro-batches, small neighbours joined if their images have one size."""
    pairs: list[tuple[Tensor, Tensor]] = []
    pixels = 0
    for number, (_, x, gradient) in enumerate(waiting, 1):
        pairs.append((x, gradient))
        pixels += gradient.numel() // gradient.shape[1 if gradient.ndim == 4 else -1]
        ends = number == len(waiting) or waiting[number].x.shape[1:] != x.shape[1:]
        if ends or pixels >= ENOUGH_PIXELS[x.device.type]:
            xs, gradients = zip(*pairs, strict=True)
            yield pairs[0] if len(pairs) == 1 else (torch.cat(xs), torch.cat(gradients))
            pairs, pixels = [], 0


class Taps(NamedTuple):
    """Inputs of compiled code in place of a convolution's or linear layer's weight while its gradient is deferred.

    A parameter as an input would run its hooks in every backward, even without a gradient.
    """

    weight: Tensor  # detached
    x: Tensor  # of the shape of the layer's input, without memory; its gradient is that input
    y: Tensor  # of the shape of the layer's output, without memory; its gradient is the output's gradient


class Weighted(nn.Module):
    """Convolution or linear layer whose weight gradient can be deferred."""

    weight: Tensor
    bias: nn.Parameter | None
    bias_place: tuple[int, int] | None = None
    """Number of outputs before and after those with a bias, if only some have one."""
    waiting: WaitingGradients | None = None
    """Queue for a weight gradient that has a pass of its own."""
    beside: WaitingGradients | None = None
    """Queue for gradients that a layer's backward computes while it sums; without one autograd computes them."""
    taps: Taps | None = None

    @property
    def queue(self) -> WaitingGradients | None:
        """Queue for the weight gradient of the pass that is running; None if there is none, or it is not deferred."""
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return None
        return self.waiting if self.waiting is not None and self.waiting.open else self.beside

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if bias is not None and self.bias_place is not None:
            bias = F.pad(bias, self.bias_place)
        queue = self.queue
        if queue is None:
            return self.product(x, self.weight.to(x.dtype), bias)
        weight = self.weight.detach() if self.taps is None else self.taps.weight
        y = self.product(x, weight.to(x.dtype), None if bias is None else bias.detach())  # _Wait adds its backward
        if self.taps is None:
            root = bias if bias is not None and bias.requires_grad else queue.new_root()
            return _Wait.apply(y, x.detach(), root, self, queue)
        return _Wait.apply(y, x.detach(), bias, None, None, self.taps.x, self.taps.y)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output for a weight and a bias of the dtype of x."""
        raise NotImplementedError

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the weight's gradient from x and the output's gradient."""
        raise NotImplementedError


def queue_of(parts: Sequence[Weighted]) -> WaitingGradients | None:
    """Return the queue of the parts of a layer in which weight gradients are deferred."""
    return next((part.queue for part in parts if part.queue is not None), None)


def weighted_parts(layer: nn.Module) -> list[Weighted]:
    """Return the convolutions and linear layers of a layer, whose weight gradients may have a pass of their own."""
    return [part for part in layer.modules() if isinstance(part, Weighted)]


class _Wait(torch.autograd.Function):
    """Identity on a layer's output whose backward defers the weight gradient and computes the bias's.

    The factors of the weight gradient go into the layer's queue, or leave as the gradients of two ``taps``. The bias's
    gradient is computed here because oneDNN's convolution would compute the weight's with it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        bias: Tensor | None,
        layer: Weighted | None,
        queue: WaitingGradients | None,
        *_: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.queue = layer, queue
        ctx.has_bias = bias is not None and bias.ndim == 1
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        channels = 1 if x.ndim == 4 else x.ndim - 1
        of_bias = gradient.sum([dim for dim in range(x.ndim) if dim != channels]) if ctx.has_bias else None
        inside = gradient, None, of_bias, None, None
        if ctx.layer is None:
            return *inside, x, gradient
        ctx.queue.put([ctx.layer], x, gradient)
        return inside


class Tapped:
    """Compiled arithmetic of a layer of the U-Net, whose weight gradients may be deferred.

    A compiled graph can't queue anything, but returns gradients of its inputs. So to defer weight gradients, each
    convolution and linear layer gets :class:`Taps`, and the node that made them, outside of the graph, queues their
    gradients::

        taps ───────▶ compiled forward ──▶ h       forwards
        queue ◀ taps ◀ compiled backward ◀ h       backwards: x and the output's gradient of each part

    Args:
        compute: the arithmetic as written.
        compiled: the same arithmetic, compiled.
        parts: its convolutions and linear layers, which share one queue.
    """

    def __init__(
        self, compute: Callable[..., Tensor], compiled: Callable[..., Tensor], parts: Sequence[Weighted]
    ) -> None:
        self._compute, self._compiled = compute, compiled
        self._parts = [part for part in parts if part.weight.requires_grad]
        self._known: dict[tuple[object, ...], list[Tensor]] = {}
        """A tensor without memory for each part's input and output, by the shapes of the inputs."""

    def __call__(self, *inputs: object) -> Tensor:
        """Compute, with taps if weight gradients are deferred."""
        # Code is compiled for one layout, and a block's projection of the embedding is a part of all blocks' product.
        inputs = tuple(one.contiguous() if isinstance(one, Tensor) and one.ndim == 2 else one for one in inputs)
        queue = queue_of(self._parts)
        if queue is None:
            return self._compiled(*inputs)
        key = tuple((one.shape, one.dtype) if isinstance(one, Tensor) else one for one in inputs)
        if key not in self._known:  # compute once, to get the shapes
            seen: dict[nn.Module, list[Tensor]] = {}

            def see(part: nn.Module, arguments: tuple[Tensor], y: Tensor) -> None:
                seen[part] = [one.new_empty_strided(one.shape, [0] * one.ndim) for one in (*arguments, y)]

            hooks = [part.register_forward_hook(see) for part in self._parts]
            with torch.no_grad():
                self._compute(*inputs)
            for hook in hooks:
                hook.remove()
            self._known[key] = [alike for part in self._parts for alike in seen[part]]
        taps = _MakeTaps.apply(queue.new_root(), self._parts, queue, self._known[key])
        for part, x, y in zip(self._parts, taps[::2], taps[1::2], strict=True):
            part.taps = Taps(part.weight.detach(), x, y)
        try:
            return self._compiled(*inputs)
        finally:
            for part in self._parts:
                part.taps = None


class _MakeTaps(torch.autograd.Function):
    """Creation of two taps for each part, whose backward queues the taps' gradients."""

    @staticmethod
    def forward(
        ctx: Any, root: Tensor, parts: Sequence[Weighted], queue: WaitingGradients, alike: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.parts, ctx.queue = parts, queue
        return tuple(one.detach() for one in alike)

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor) -> tuple[None, None, None, None]:
        for part, x, gradient in zip(ctx.parts, arrived[::2], arrived[1::2], strict=True):
            ctx.queue.put([part], x, gradient)
        return None, None, None, None
