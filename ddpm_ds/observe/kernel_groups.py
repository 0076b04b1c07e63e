"""To which kind of work each operator and kernel of a profile belongs: ten groups that share out all of its time.

Only self times are shared out, what an event took less what its children took, so that nothing counts twice and the
groups sum to the whole. An event belongs to the first of these that is found:

1. a group by its own name alone: launches, synchronisation;
2. the group of its nearest ancestor, itself included, that is a convolution, attention, a normalisation, a message, or
   a piece of the optimizer's step;
3. attention, if it is the backward of an operator there, by PyTorch's sequence numbers;
4. copies, if it or an ancestor is one;
5. ``other``.

A node of autograd's graph has no group by its name, since a checkpoint may recompute other operators within it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

Group = Literal[
    "convolution_forward",
    "convolution_backward",
    "attention",
    "normalisation",
    "copies",
    "optimizer",
    "communication",
    "launch_overhead",
    "synchronisation",
    "other",
]
GROUPS: tuple[Group, ...] = get_args(Group)

INSTRUCTION, SPAN, WAIT = "instruction ", "between steps: ", "wait for other ranks"
"""How ranges of our own are named in a profile: an instruction of the pipeline's schedule, what is done between two
steps, and a wait of the host for a message or a collective."""

LEFT_OUT = (SPAN + "inspection", SPAN + "checkpoint")
"""Ranges that are no part of training; with all below them they belong to no group."""

RUNTIME_CALL = re.compile(r"(cuda|cu|hip)[A-Z]")
"""A call into the device's driver, on the host."""

_BY_NAME_ALONE: tuple[tuple[Group, re.Pattern[str]], ...] = (
    ("synchronisation", re.compile(rf"{WAIT}$|(cuda|cu|hip)\w*Synchronize")),
    ("launch_overhead", RUNTIME_CALL),
)

_WITH_DESCENDANTS: tuple[tuple[Group, re.Pattern[str]], ...] = (
    ("communication", re.compile(r"c10d::|gloo:|nccl|mpi:|record_param_comms|_c10d_functional::")),
    ("attention", re.compile(r"aten::\w*(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)")),
    ("convolution_backward", re.compile(r"(aten|ddpm_ds)::\w*conv\w*_backward")),
    ("convolution_forward", re.compile(r"aten::\w*conv(olution|\dd|_transpose|_depthwise)")),
    ("normalisation", re.compile(r"aten::\w*(group|layer|batch|instance|rms)_norm|ddpm_ds::norm_silu")),
    ("optimizer", re.compile(rf"{INSTRUCTION}OptimizerStep$|{SPAN}EMA$|Optimizer\.(step|zero_grad)#")),
)

_COPIES = re.compile(
    r"aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|_foreach_copy_?|_copy_from\w*|flatten_dense_tensors)$"
    r"|Memcpy |void at::native::\w*(Cat|copy)"
)


@dataclass(frozen=True)
class ProfiledOperation:
    """An event of a profile with the time that it took itself."""

    name: str
    seconds: float
    """Self time."""
    parent: int | None = None
    """Position of the event that it ran within, which comes earlier."""
    forward: int | None = None
    """Of a node of autograd's backward: position of the operator that it is the backward of."""


@cache
def _found(table: tuple[tuple[Group, re.Pattern[str]], ...], name: str) -> Group | None:
    return next((group for group, pattern in table if pattern.match(name)), None)


def group_of_each(operations: Sequence[ProfiledOperation]) -> list[Group | None]:
    """The group of every operation; None for what is left out."""
    groups: list[Group | None] = []
    strong: list[Group | None] = []
    copies: list[bool] = []
    out: list[bool] = []
    forwards: list[int | None] = []
    for operation in operations:
        name, above = operation.name, operation.parent
        out.append(name in LEFT_OUT or (above is not None and out[above]))
        strong.append(_found(_WITH_DESCENDANTS, name) or (strong[above] if above is not None else None))
        copies.append(bool(_COPIES.match(name)) or (above is not None and copies[above]))
        forwards.append(operation.forward if operation.forward is not None or above is None else forwards[above])
    for position, operation in enumerate(operations):
        forward = forwards[position]
        backward: Group | None = "attention" if forward is not None and strong[forward] == "attention" else None
        group = (
            _found(_BY_NAME_ALONE, operation.name)
            or strong[position]
            or backward
            or ("copies" if copies[position] else "other")
        )
        groups.append(None if out[position] else group)
    return groups


@dataclass(frozen=True)
class Shares:
    """The self times of one rank's profile by group."""

    seconds: dict[Group, float]
    """Every group has an entry."""
    names: dict[Group, dict[str, float]]
    """Seconds of each name in a group."""

    @property
    def total(self) -> float:
        """Seconds of all groups, which are those of all operations but what is left out."""
        return sum(self.seconds.values())


def shares(operations: Sequence[ProfiledOperation]) -> Shares:
    """Share out the self times of all operations."""
    seconds: dict[Group, float] = dict.fromkeys(GROUPS, 0.0)
    names: dict[Group, dict[str, float]] = {group: defaultdict(float) for group in GROUPS}
    for operation, group in zip(operations, group_of_each(operations), strict=True):
        if group is not None:
            seconds[group] += operation.seconds
            names[group][operation.name] += operation.seconds
    return Shares(seconds, {group: dict(found) for group, found in names.items()})


def operations_of(events: Iterable[Any], *, on_device: bool) -> list[ProfiledOperation]:
    """The operations of ``torch.profiler.profile.events()``.

    Without a device an operation's time is the host's. With one it is that of its kernels, each an operation within
    the one that launched it; of the host then only calls into the driver and waits have a time, which runs beside the
    device's.
    """
    host = [event for event in events if event.device_type.name == "CPU" and not event.is_async]
    host.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    positions = {id(event): position for position, event in enumerate(host)}
    forward_of = _forwards(host, positions)
    operations = [
        ProfiledOperation(
            event.name,
            event.self_cpu_time_total * 1e-6 if not on_device or _host_matters(event.name) else 0.0,
            None if event.cpu_parent is None else positions[id(event.cpu_parent)],
            forward_of(event),
        )
        for event in host
    ]
    return operations + _kernels(events, host) if on_device else operations


def _host_matters(name: str) -> bool:
    return _found(_BY_NAME_ALONE, name) is not None


def _forwards(host: Sequence[Any], positions: dict[int, int]) -> Callable[[Any], int | None]:
    """Finds the forward operator of a node of the backward: the last one that began with its sequence number.

    Operators that make no node carry the number of the next one that does; the one that takes it comes last. Events of
    the backward, and no others, know the thread of their forward.
    """
    made = {(event.sequence_nr, event.thread): positions[id(event)] for event in host if not event.fwd_thread}

    def forward_of(event: Any) -> int | None:
        if not event.fwd_thread or event.sequence_nr < 0:
            return None
        return made.get((event.sequence_nr, event.fwd_thread))

    return forward_of


def _kernels(events: Iterable[Any], host: Sequence[Any]) -> list[ProfiledOperation]:
    """What ran on the device, each under the host's operation that launched it; the rest under none."""
    left: dict[str, float] = defaultdict(float)
    for event in events:
        if event.device_type.name != "CPU" and not event.is_user_annotation:
            left[event.name] += event.self_device_time_total * 1e-6
    linked = [
        ProfiledOperation(kernel.name, kernel.duration * 1e-6, position)
        for position, event in enumerate(host)
        for kernel in event.kernels
        if kernel.name in left  # others are ranges, which have kernels of their own
    ]
    for kernel in linked:
        left[kernel.name] -= kernel.seconds
    return linked + [ProfiledOperation(name, seconds) for name, seconds in left.items() if seconds > 1e-9]
