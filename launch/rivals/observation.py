"""Observation of a process in a step of any engine: seconds of computing, bytes sent, memory held."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddpm_ds.device import wait_for_device, wait_for_stream
from ddpm_ds.pipeline.module import forget_peaks
from ddpm_ds.processes.process_group import decided_by_rank_0
from ddpm_ds.processes.ranks import free_port
from ddpm_ds.train.meters import peak_memory_bytes
from ddpm_ds.unet.weight_gradients import WaitingGradients
from rivals.rows import Row

RING_SHARE: dict[str, Callable[[int, int, int], float]] = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_"), lambda first, second, n: 2 * first * (n - 1) / n),
    **dict.fromkeys(("broadcast_", "reduce_"), lambda first, second, n: first * (n - 1) / n),
    **dict.fromkeys(
        ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"),
        lambda outputs, inputs, n: inputs * (n - 1),
    ),
    **dict.fromkeys(
        ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
        lambda outputs, inputs, n: outputs * (n - 1),
    ),
}
"""Bytes that each of n processes sends in a collective, from the bytes of its first two arguments, as a ring of
processes does it; what a library really does may be another algorithm of about that cost."""
SILENT = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_")
"""Operators that send nothing worth counting."""
BACKWARDS: tuple[tuple[Any, str], ...] = (
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (WaitingGradients, "compute"),
)
"""Functions that compute gradients: those of PyTorch, and of this project's passes of weight gradients."""
MEMORY_STEPS = 2
"""Steps of a process whose memory is measured: the second has the optimizer's state and the gradients at once."""
PREFIX = "peak bytes: "


class BusyTime:
    """While entered, adds up the seconds in modules' forwards and in :data:`BACKWARDS`; nested calls count once.

    ``synchronize`` waits for the stream on which a call has only queued its work; not for the whole device, which may
    have a message to receive that depends on what this process is about to send.
    """

    def __init__(
        self, synchronize: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds = 0.0
        self._synchronize, self._clock = synchronize, clock
        self._depth, self._begin = 0, 0.0

    def __enter__(self) -> BusyTime:
        def watched(call: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                self._begin_call()
                try:
                    return call(*args, **kwargs)
                finally:
                    self._end_call()

            return timed

        self._calls = [(owner, name, getattr(owner, name)) for owner, name in BACKWARDS]
        for owner, name, call in self._calls:
            setattr(owner, name, watched(call))
        self._hooks = (
            register_module_forward_pre_hook(lambda module, inputs: self._begin_call()),
            register_module_forward_hook(lambda module, inputs, outputs: self._end_call(), always_call=True),
        )
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name, call in self._calls:
            setattr(owner, name, call)
        for hook in self._hooks:
            hook.remove()

    def _begin_call(self) -> None:
        if self._depth == 0:
            self._synchronize()
            self._begin = self._clock()
        self._depth += 1

    def _end_call(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._synchronize()
            self.seconds += self._clock() - self._begin


class SentBytes(TorchDispatchMode):
    """While entered, counts what this process sends, at the operators of ``torch.distributed``: Python calls,
    DeepSpeed's and those that DistributedDataParallel makes in C++ all go through them. Slows everything down."""

    def __init__(self) -> None:
        super().__init__()
        self.message_bytes = 0
        """Bytes of messages to one other process, exactly."""
        self.collective_bytes = 0.0
        """Bytes of this process's share of collectives, by :data:`RING_SHARE`."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema, args)
        return func(*args, **(kwargs or {}))

    def _count(self, schema: Any, arguments: Sequence[Any]) -> None:
        name = schema.name.removeprefix("c10d::")
        if name == "send":
            self.message_bytes += _bytes(arguments[0])
        elif name not in SILENT:
            if name not in RING_SHARE:
                raise NotImplementedError(f"what {schema.name} sends is not known here; add it to RING_SHARE")
            position = [argument.name for argument in schema.arguments].index("process_group")
            processes = dist.ProcessGroup.unbox(arguments[position]).size()
            self.collective_bytes += RING_SHARE[name](_bytes(arguments[0]), _bytes(arguments[1]), processes)


def _bytes(tensors: Any) -> int:
    """Return the bytes of every tensor in a list of any depth."""
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))


@dataclass(frozen=True)
class Observation:
    """Observation of one process in a step of one row."""

    message_bytes: int
    """Bytes sent in messages to one other process."""
    collective_bytes: int
    """Bytes sent as a part of collectives, by :data:`RING_SHARE`."""
    idle: float
    """Share of the step's time outside of forward and backward."""


def observe(row: Row, steps: int, device: torch.device) -> Observation:
    """Count what one step of ``row`` sends, then watch ``steps`` steps; every process calls this.

    The steps end when the last process is done with them.
    """
    with SentBytes() as traffic:
        row.step()
    wait_for_device(device)
    dist.barrier()
    begin = time.perf_counter()
    with BusyTime(lambda: wait_for_stream(device)) as busy:
        for _ in range(steps):
            row.step()
    wait_for_device(device)
    dist.barrier()
    seconds = time.perf_counter() - begin
    return Observation(traffic.message_bytes, round(traffic.collective_bytes), 1 - busy.seconds / seconds)


def peak_in_child(row: str) -> int:
    """Return the peak bytes of ``row`` in a child of this process that trains nothing else; in one process what a row
    has freed the next one takes. Every process calls this; the children find each other at a port of their own.

    Raises:
        RuntimeError: a child failed; with the end of what it printed.
    """
    port = decided_by_rank_0(free_port, int)
    done = subprocess.run(
        [sys.executable, *sys.argv, "--memory-of", row],
        env={**os.environ, "MASTER_PORT": str(port)},
        capture_output=True,
        text=True,
    )
    found = [line.removeprefix(PREFIX) for line in done.stdout.splitlines() if line.startswith(PREFIX)]
    if done.returncode or len(found) != 1:
        raise RuntimeError(f"the process that measures the memory of {row} failed:\n{done.stderr[-2000:]}")
    return int(found[0])


def print_peak(build: Callable[[], Row], device: torch.device) -> None:
    """Print, in the child, by how much a row's steps raise the peak of its tensors, on a CPU of its resident set."""
    before = 0 if device.type == "cuda" else psutil.Process().memory_info().rss
    row = build()
    for _ in range(MEMORY_STEPS):
        forget_peaks(device)  # on a GPU the first step tries algorithms
        row.step()
    print(f"{PREFIX}{max(peak_memory_bytes(device) - before, 0)}", flush=True)
