"""What a process sends, counted where every message of PyTorch passes: at the operators of ``torch.distributed``.

Python calls, DeepSpeed's and those that DistributedDataParallel makes in C++ all go through them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RING_SHARE: dict[str, Callable[[int, int, int], float]] = {
    "allreduce_": lambda first, second, n: 2 * first * (n - 1) / n,
    "allreduce_coalesced_": lambda first, second, n: 2 * first * (n - 1) / n,
    "broadcast_": lambda first, second, n: first * (n - 1) / n,
    "reduce_": lambda first, second, n: first * (n - 1) / n,
    "allgather_": lambda outputs, inputs, n: inputs * (n - 1),
    "_allgather_base_": lambda outputs, inputs, n: inputs * (n - 1),
    "allgather_into_tensor_coalesced_": lambda outputs, inputs, n: inputs * (n - 1),
    "reduce_scatter_": lambda outputs, inputs, n: outputs * (n - 1),
    "_reduce_scatter_base_": lambda outputs, inputs, n: outputs * (n - 1),
    "reduce_scatter_tensor_coalesced_": lambda outputs, inputs, n: outputs * (n - 1),
}
"""Bytes that each of n processes sends in a collective, from the bytes of its first two arguments, as a ring of
processes does it; what a library really does may be another algorithm of about that cost."""

SILENT = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_")


class SentBytes(TorchDispatchMode):
    """While it is entered, counts what this process sends; slows everything down."""

    def __init__(self) -> None:
        super().__init__()
        self.message_bytes = 0
        """Of messages to one other process, exactly."""
        self.collective_bytes = 0.0
        """Of this process's share of collectives, by :data:`RING_SHARE`."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema, args)
        return func(*args, **(kwargs or {}))

    def _count(self, schema: Any, arguments: Sequence[Any]) -> None:
        name = schema.name.removeprefix("c10d::")
        if name in SILENT:
            return
        if name == "send":
            self.message_bytes += _bytes(arguments[0])
            return
        if name not in RING_SHARE:
            raise NotImplementedError(f"what {schema.name} sends is not known here; add it to RING_SHARE")
        position = [argument.name for argument in schema.arguments].index("process_group")
        processes = dist.ProcessGroup.unbox(arguments[position]).size()
        self.collective_bytes += RING_SHARE[name](_bytes(arguments[0]), _bytes(arguments[1]), processes)


def _bytes(tensors: Any) -> int:
    """Bytes of every tensor in a list of any depth."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))
