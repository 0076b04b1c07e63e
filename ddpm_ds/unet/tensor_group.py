"""Ranks that compute a layer together, each with its own part of the weights.

::

    h ─ enter ─ normalise ─ own outputs ─ own channels, groups or heads ─ own inputs ─ sum ─▶
        │                                                                              │
        backward: sums h's gradient                               forward: sums the parts of the output

Between ``enter`` and ``sum`` a rank works on what it owns; outside of them all ranks compute alike. A parameter that is
whole in a split layer, such as the first normalisation's, gets a part of its gradient on each rank: its spread is
"partial", and the parts are summed once a step. Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpm_ds.unet.layers import COLUMNS, Parameter
from ddpm_ds.unet.shards import Shard
from ddpm_ds.unet.weight_gradients import WaitingGradients, Weighted, queue_of


class TensorGroup:
    """This process's place in a group of ranks that compute layers together; by default it is alone.

    Only sums go over ``group``, in the order of the layers on every rank; without one, a rank's part can be timed.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self.group = rank, size, group

    def enter(self, x: Tensor, parts: Sequence[Weighted] = ()) -> Tensor:
        """Return x; its gradient is summed over ranks while the backward computes the weight gradients of ``parts``."""
        if self.size == 1:
            return x
        queue = queue_of(parts)
        if queue is None or queue is not parts[0].beside:
            return _Enter.apply(x, self, None, ())[0]
        entered, queue.root = _Enter.apply(x, self, queue, parts, *(part.weight for part in parts))
        return entered

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks, in x's memory if that is dense; nothing else may use it."""
        return x if self.size == 1 else _Sum.apply(x, self)

    def start_sum(self, x: Tensor) -> Callable[[], object]:
        """Start to sum x, in the order of its memory, over all ranks and in place; return a function that waits."""
        if self.group is None:
            return lambda: None
        return dist.all_reduce(x, group=self.group, async_op=True).wait

    def by_spread(self, parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], ...]:
        """Return the parameters that this rank counts, each element on one rank; the partial ones; the whole ones."""
        spreads = [(one, getattr(one, "spread", "whole")) for one in parameters]
        counted = [one for one, spread in spreads if self.rank == 0 or isinstance(spread, Shard)]
        return counted, *([one for one, spread in spreads if spread == wanted] for wanted in ("partial", "whole"))

    def agree(self, partial: Sequence[Tensor], alike: Sequence[Tensor]) -> None:
        """Sum dense ``partial`` gradients in place; on GPUs, which may round differently, copy rank 0's ``alike``."""
        if self.size == 1:
            return
        if partial:
            together = torch.cat([one.flatten() for one in partial])
            self.start_sum(together)()
            parts = together.split([one.numel() for one in partial])
            torch._foreach_copy_(list(partial), [part.view_as(one) for part, one in zip(parts, partial, strict=True)])
        for one in alike:
            if one.is_cuda:
                dist.broadcast(one, group=self.group, group_src=0)

    def keep(self, module: nn.Module, kind: str, listed: Parameter) -> None:
        """Replace a parameter of a module by this rank's part, if it is split, and mark it with its spread."""
        kept = module.get_parameter(kind)
        if (shard := Shard.of(listed, self.rank, self.size)) is not None:
            part = part_of(kept.detach(), shard).view(listed.own_shape(self.size))
            kept = nn.Parameter(part, requires_grad=kept.requires_grad)
            setattr(module, kind, kept)
        if isinstance(module, Weighted) and listed.spread == COLUMNS:  # each rank adds the bias of its own outputs
            module.bias_place = self.place(listed.shape[0] // self.size)
        kept.spread = shard or listed.spread  # type: ignore[attr-defined]

    def place(self, own: int) -> tuple[int, int]:
        """Return the numbers of elements of a vector before and after this rank's ``own``."""
        return self.rank * own, (self.size - 1 - self.rank) * own


ALONE = TensorGroup()


def part_of(whole: Tensor, shard: Shard) -> Tensor:
    """Return a copy of a shard's elements of a tensor, (n,), in their order."""
    return whole.reshape(-1, shard.ranks, shard.run)[:, shard.rank].reshape(-1).clone()


def read_part(read: Callable[[int, int], Tensor], shard: Shard | None, start: int, length: int) -> Tensor:
    """Return ``length`` elements of a shard from ``start`` on; ``read(start, length)`` reads the whole parameter's."""
    if shard is None:
        return read(start, length)
    rank, ranks, run = shard
    first, last = start // run, -(-(start + length) // run)
    if last - first <= 1:  # they are neighbours in the whole
        return read((first * ranks + rank) * run + start % run, length)
    whole = read(first * ranks * run, (last - first) * ranks * run)
    return part_of(whole, shard)[start - first * run :][:length]


def shard_of(parameter: Tensor) -> Shard | None:
    """Return a parameter's place in the whole one; None if it is whole."""
    spread: object = getattr(parameter, "spread", None)
    return spread if isinstance(spread, Shard) else None


class _Enter(torch.autograd.Function):
    """Identity whose backward sums the gradient over a tensor group, and meanwhile computes weight gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: TensorGroup, queue: WaitingGradients | None, parts: Sequence[Weighted], *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.queue, ctx.parts = group, queue, parts
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        gradient = gradient.clone(memory_format=_format(gradient))
        wait = ctx.group.start_sum(_in_memory(gradient))
        found = dict[Tensor, Tensor]()
        if ctx.queue is not None:
            ctx.queue.compute(ctx.parts, [0], found.__setitem__)
        wait()
        return gradient, None, None, None, *(found.get(part.weight) for part in ctx.parts)


class _Sum(torch.autograd.Function):
    """Sum over a tensor group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        total = x.detach().contiguous(memory_format=_format(x))
        group.start_sum(_in_memory(total))()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _format(x: Tensor) -> torch.memory_format:
    """Return the order in which a tensor is summed, the same on all ranks: images are channels-last."""
    return torch.channels_last if x.ndim == 4 else torch.contiguous_format


def _in_memory(x: Tensor) -> Tensor:
    """Return a view of a tensor of :func:`_format` in the order of its memory."""
    return x.permute(0, 2, 3, 1) if x.ndim == 4 else x
