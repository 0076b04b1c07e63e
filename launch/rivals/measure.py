"""Measurements of rows: differences of losses, times in turn, bytes sent, the host's cost of a step."""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddpm_ds.ground.device import wait_for_device
from ddpm_ds.ground.errors import BadNumbersError
from ddpm_ds.pipeline.messages import barrier
from rivals.rows import Row

LOSS_TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2}
"""Relative difference that rounding explains. Over 50 steps of the digits fp32 made 1e-7, fp16 3e-4 and bf16 1e-3."""
GATHERS = ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_")
SCATTERS = ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
RING_SHARE: dict[str, Callable[[int, int, int], float]] = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_"), lambda first, second, n: 2 * first * (n - 1) / n),
    **dict.fromkeys(("broadcast_", "reduce_", "alltoall_base_"), lambda first, second, n: first * (n - 1) / n),
    **dict.fromkeys(GATHERS, lambda _, own, n: own * (n - 1)),
    **dict.fromkeys(SCATTERS, lambda own, _, n: own * (n - 1)),
}
"""Bytes that each of n processes sends in a collective, from the bytes of its first two arguments, if processes form a
ring; a library may use another algorithm of about the same cost."""
SILENT = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_")
"""Operators that send no tensors."""
WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "item")
"""Operators whose results the host reads, so that it waits for the device."""
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operators that, like views, launch nothing."""


def check_losses(rows: Sequence[Row], losses: Sequence[Sequence[float]], allowed: float) -> list[float | None]:
    """Return each row's largest relative difference from the first comparable row, or None; ``losses`` are by row and
    step. BadNumbersError if a difference is larger than ``allowed`` or a loss is not finite.
    """
    largest: list[float | None] = []
    comparable = ((row.name, own) for row, own in zip(rows, losses, strict=True) if row.comparable)
    first, reference = next(comparable, ("", []))
    for row, own in zip(rows, losses, strict=True):
        others = reference if row.comparable else own
        differences = [abs(loss - other) / abs(other) for loss, other in zip(own, others, strict=True)]
        step = next((step for step, value in enumerate(differences) if not value <= allowed), None)  # or NaN
        if step is not None:
            raise BadNumbersError(
                f"loss {own[step]:.6g} in step {step} of {row.name}, where {first} has {others[step]:.6g}: they don't "
                "train the same, so nothing is timed; where fp16 skipped a step, try a lower fp16.initial_scale_power"
            )
        largest.append(max(differences) if row.comparable else None)
    return largest


def tolerance(precision: str, device: torch.device) -> float:
    """Return the relative difference that rounding explains on a device."""
    rounded = precision == "fp32" and device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return LOSS_TOLERANCE["tf32" if rounded else precision]


def time_rounds(
    steps: Sequence[Callable[[], object]], rounds: int, steps_per_round: int, device: torch.device
) -> list[list[float]]:
    """Return the mean seconds of each step in each round, ``[step][round]``; rounds start with different steps."""
    seconds: list[list[float]] = [[] for _ in steps]
    for number in range(rounds):
        for turn in range(len(steps)):
            which = (number + turn) % len(steps)
            wait_for_device(device)
            barrier()
            begin = time.perf_counter()
            for _ in range(steps_per_round):
                steps[which]()
            wait_for_device(device)
            barrier()
            seconds[which].append((time.perf_counter() - begin) / steps_per_round)
    return seconds


class SentBytes(TorchDispatchMode):
    """While entered, counts the bytes that this process sends by operators of ``torch.distributed``."""

    def __init__(self) -> None:
        super().__init__()
        self.message_bytes = 0
        """Bytes of messages to one other process, exactly."""
        self.collective_bytes = 0.0
        """Bytes of its share of collectives, by :data:`RING_SHARE`."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d" and name == "send":
            self.message_bytes += _bytes(args[0])
        elif func.namespace == "c10d" and name not in SILENT:
            if name not in RING_SHARE:
                raise NotImplementedError(f"the bytes of {func._schema.name} are not known; add it to RING_SHARE")
            position = [argument.name for argument in func._schema.arguments].index("process_group")
            processes = dist.ProcessGroup.unbox(args[position]).size()
            self.collective_bytes += RING_SHARE[name](_bytes(args[0]), _bytes(args[1]), processes)
        return func(*args, **(kwargs or {}))


@dataclass
class HostCost:
    """A step's cost on the host as exact counts, which on a CPU depend on its vector instructions."""

    operators: int = 0
    """Operators that reach PyTorch's dispatcher."""
    launches: int = 0
    """Operators that are neither views nor allocations; a GPU may run several kernels for one."""
    calls: int = 0
    """Calls of Python functions."""
    waits: int = 0
    """Times that the host would wait for a GPU."""
    slow: int = 0
    """Foreach operators whose tensors differ in shape, strides or dtype, so that a GPU launches a kernel for each."""

    @classmethod
    def of(cls, step: Callable[[], object]) -> HostCost:
        """Count the cost of a warm step, which is taken twice."""
        cost = cls()
        with CountedOperators(cost):
            step()
        with cProfile.Profile() as profile:
            step()
        cost.calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
        return cost


class CountedOperators(TorchDispatchMode):
    """While entered, adds the operators to a cost."""

    def __init__(self, cost: HostCost) -> None:
        super().__init__()
        self._cost = cost

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name = func.overloadpacket.__name__
        self._cost.operators += 1
        self._cost.launches += not func.is_view and name not in ALLOCATIONS
        self._cost.waits += name in WAITS and not in_optimizer()
        lists = [argument for argument in args if isinstance(argument, list)]
        if name.startswith("_foreach") and len(lists) > 1:
            self._cost.slow += any(
                (one.shape, one.stride()) != (other.shape, other.stride())
                or (one.dtype is not other.dtype and name != "_foreach_copy_")
                for one, other in zip(*lists[:2], strict=True)
            )
        return func(*args, **(kwargs or {}))


def in_optimizer() -> bool:
    """Return whether a PyTorch optimizer is running; it keeps its count of steps on the host."""
    return any("/torch/optim/" in frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))


def _bytes(tensors: object) -> int:
    """Return the bytes of every tensor in a list of any depth."""
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        one = len(values) == 1
        low, median, high = [values[0]] * 3 if one else statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def as_ratio(self) -> str:
        """Return the median as a ratio, with the quartiles in brackets."""
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"

    def as_milliseconds(self) -> str:
        """Return the median of seconds in milliseconds, with the quartiles in brackets."""
        median, low, high = (
            f"{1e3 * value:.4g}" if value < 10 else f"{1e3 * value:.0f}" for value in (self.median, self.low, self.high)
        )
        return f"{median} ({low}-{high})"
