"""Measurements of rows: equal results, times in turn, seconds of computing, bytes sent, memory."""

from __future__ import annotations

import contextlib
import cProfile
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from ddpm_ds.device import wait_for_device, wait_for_stream
from ddpm_ds.errors import BadNumbersError
from ddpm_ds.pipeline.module import forget_peaks
from ddpm_ds.processes.process_group import decided_by_rank_0
from ddpm_ds.processes.ranks import free_port
from ddpm_ds.train.meters import peak_memory_bytes
from ddpm_ds.unet.weight_gradients import WaitingGradients
from rivals.rows import Probe, Row

LOSS_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
"""Relative difference that rounding explains, by precision. Over 50 steps of the digits it made 1e-7, 3e-4
and 1e-3."""
TF32_TOLERANCE = 1e-2
"""Tolerance for fp32 on a GPU whose convolutions round their factors to TF32's 10 bits."""
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
processes does it; a library may use another algorithm of about the same cost."""
SILENT = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_")
"""Operators that send nothing worth counting."""
BACKWARDS: tuple[tuple[Any, str], ...] = (
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (WaitingGradients, "compute"),
)
"""Functions that compute gradients: those of PyTorch, and of this project's passes of weight gradients."""
PEAK = "peak bytes: "
WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "item")
"""Operators that hand values, or sizes that depend on values, to the host, which waits for the device."""
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operators that launch nothing, beside views."""


def check_losses(names: Sequence[str], losses: Sequence[Sequence[float]], tolerance: float) -> list[float]:
    """Return each row's largest relative difference from the first row's loss; ``losses`` are by row and step.

    Raises:
        BadNumbersError: a row does not train the same; its time would mean nothing.
    """
    largest = []
    for name, own in zip(names, losses, strict=True):
        differences = [abs(loss - other) / abs(other) for loss, other in zip(own, losses[0], strict=True)]
        step = next((step for step, value in enumerate(differences) if not value <= tolerance), None)  # or NaN
        if step is not None:
            raise BadNumbersError(
                f"loss {own[step]:.6g} in step {step} of {name}, where {names[0]} has {losses[0][step]:.6g}: they "
                f"don't train the same, so nothing is timed; where fp16 skipped a step, try a lower "
                f"fp16.initial_scale_power"
            )
        largest.append(max(differences))
    return largest


def tolerance(precision: str, device: torch.device) -> float:
    """Return the relative difference that rounding explains on a device."""
    rounded = precision == "fp32" and device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return TF32_TOLERANCE if rounded else LOSS_TOLERANCE[precision]


def check_probe(name: str, probe: Probe, first: str, reference: Probe, allowed: float) -> dict[str, float]:
    """Return the relative differences of row ``name`` from row ``first``, which has seen the same micro-batch.

    "prediction" is the norm of the difference over the norm; the others are "loss" and "gradients' norm".

    Raises:
        BadNumbersError: the row does not compute the same; its time would mean nothing.
    """
    differences = {
        "prediction": float((probe.prediction - reference.prediction).norm() / reference.prediction.norm()),
        "loss": abs(probe.loss - reference.loss) / abs(reference.loss),
        "gradients' norm": abs(probe.gradient_norm - reference.gradient_norm) / abs(reference.gradient_norm),
    }
    for what, value in differences.items():
        if not value <= allowed:  # NaN differs too
            raise BadNumbersError(
                f"{what} of {name} differs from that of {first} by {value:.2g} (relative; rounding explains "
                f"{allowed:g}): they don't compute the same, so nothing is timed"
            )
    return differences


def all_done(device: torch.device) -> None:
    """Wait until this process's device and all other processes have finished their work."""
    wait_for_device(device)
    dist.barrier()


def time_rounds(
    steps: Sequence[Callable[[], object]],
    rounds: int,
    steps_per_round: int,
    synchronize: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Return the seconds of each kind of step in each round: ``[step][round]``. Rounds start with different kinds."""
    seconds: list[list[float]] = [[] for _ in steps]
    hidden = os.environ.get("RANK", "0") != "0"
    for number in tqdm(range(rounds), desc="measuring", unit="round", disable=hidden):
        for turn in range(len(steps)):
            which = (number + turn) % len(steps)
            synchronize()
            begin = clock()
            for _ in range(steps_per_round):
                steps[which]()
            synchronize()
            seconds[which].append((clock() - begin) / steps_per_round)
    return seconds


def ratios(seconds: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the seconds of one row over those of another, round by round."""
    return [own / other for own, other in zip(seconds, reference, strict=True)]


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
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> BusyTime:
        def watched(call: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                self._begin_call()
                try:
                    return call(*args, **kwargs)
                finally:
                    self._end_call()

            return timed

        for owner, name in BACKWARDS:
            self._undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, watched(getattr(owner, name)))
        before = register_module_forward_pre_hook(lambda module, inputs: self._begin_call())
        after = register_module_forward_hook(lambda module, inputs, outputs: self._end_call(), always_call=True)
        for hook in (before, after):
            self._undo.callback(hook.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

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


@dataclass
class HostCost:
    """What a step costs the host: exact counts, which on a CPU depend on its vector instructions."""

    operators: int = 0
    """Operators that reach PyTorch's dispatcher."""
    launches: int = 0
    """Operators that are neither views nor allocations; a library's may be several kernels of a GPU."""
    calls: int = 0
    """Calls of Python functions."""
    waits: int = 0
    """Times that the host would wait for a GPU."""
    slow: int = 0
    """Foreach operators whose tensors differ in shape, strides or dtype, so that a GPU launches each by itself."""

    @classmethod
    def of(cls, step: Callable[[], object]) -> HostCost:
        """Count what a warm step does; it is taken twice."""
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

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
    """Return whether PyTorch's optimizers are at work, which keep their counts of steps on the host."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if "/torch/optim/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _bytes(tensors: Any) -> int:
    """Return the bytes of every tensor in a list of any depth."""
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))


def observe(row: Row, steps: int, device: torch.device) -> tuple[int, int, float]:
    """Return the bytes that one step of ``row`` sends from here in messages and in collectives, and the share of
    ``steps`` further steps outside of forward and backward; every process calls this.
    """
    with SentBytes() as sent:
        row.step()
    all_done(device)
    begin = time.perf_counter()
    with BusyTime(lambda: wait_for_stream(device)) as busy:
        for _ in range(steps):
            row.step()
    all_done(device)
    return sent.message_bytes, round(sent.collective_bytes), 1 - busy.seconds / (time.perf_counter() - begin)


def peak_in_child(row: str) -> int:
    """Return the peak bytes of ``row`` in a child of this process that trains nothing else, since rows in one process
    reuse each other's freed memory. Every process calls this; the children find each other at a port of their own.

    Raises:
        RuntimeError: a child failed; the message has the end of its output.
    """
    port = decided_by_rank_0(free_port, int)
    command, environment = [sys.executable, *sys.argv, "--memory-of", row], {**os.environ, "MASTER_PORT": str(port)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = [line.removeprefix(PEAK) for line in done.stdout.splitlines() if line.startswith(PEAK)]
    if done.returncode or len(found) != 1:
        raise RuntimeError(f"the process that measures the memory of {row} failed:\n{done.stderr[-2000:]}")
    return int(found[0])


def print_peak(build: Callable[[], Row], device: torch.device) -> None:
    """Print, in the child, a row's peak bytes: of its tensors on a GPU, the growth of its resident set on a CPU."""
    before = 0 if device.type == "cuda" else psutil.Process().memory_info().rss
    row = build()
    for _ in range(2):  # the second has the optimizer's state and the gradients at once
        forget_peaks(device)  # on a GPU the first step tries algorithms
        row.step()
    print(f"{PEAK}{max(peak_memory_bytes(device) - before, 0)}", flush=True)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a quantity over the rounds."""

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
