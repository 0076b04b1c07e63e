"""Kinds of work in a profile: ten groups of operators and kernels, whose times sum to the profile's.

Only self times count, an event's time less that of its children, so that nothing counts twice. An event belongs to the
first of these groups:

1. a group by its own name alone: launches, synchronisation;
2. the group of its nearest ancestor, itself included, that is a convolution, attention, a normalisation, a message, or
   a piece of the optimizer's step;
3. attention, if PyTorch's sequence numbers say that it is the backward of an attention operator;
4. copies, if it or an ancestor is one;
5. ``other``.

A node of autograd's graph has no group by its name, since a checkpoint may recompute other operators within it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
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
"""Names of our own ranges in a profile: an instruction of the pipeline's schedule, work between two steps, and a wait
of the host for a message or a collective.
"""

LEFT_OUT = (SPAN + "inspection", SPAN + "checkpoint")
"""Ranges that are not training; neither they nor the operators within them belong to a group."""

RUNTIME_CALL = re.compile(r"(cuda|cu|hip)[A-Z]")  # pattern of calls into the device's driver, on the host

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
    ("optimizer", re.compile(rf"{INSTRUCTION}OptimizerStep$|Optimizer\.(step|zero_grad)#")),
)

_COPIES = re.compile(
    r"aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|_foreach_copy_?|_copy_from\w*|flatten_dense_tensors)$"
    r"|Memcpy |void at::native::\w*(Cat|copy)"
)


@dataclass(frozen=True)
class ProfiledOperation:
    """Event of a profile with its self time."""

    name: str
    seconds: float
    """Self time in seconds."""
    parent: int | None = None
    """Position of the event that this one ran within, which comes earlier."""
    forward: int | None = None
    """Position of the forward operator, for a node of autograd's graph."""


@cache
def _found(table: tuple[tuple[Group, re.Pattern[str]], ...], name: str) -> Group | None:
    return next((group for group, pattern in table if pattern.match(name)), None)


def group_of_each(operations: Sequence[ProfiledOperation]) -> list[Group | None]:
    """Return the group of every operation; None for those left out."""
    inherited: list[tuple[bool, Group | None, bool, int | None]] = []  # by an operation's children as well
    for operation in operations:
        name, above = operation.name, operation.parent
        out, strong, copies, forward = (False, None, False, None) if above is None else inherited[above]
        inherited.append(
            (
                out or name in LEFT_OUT,
                _found(_WITH_DESCENDANTS, name) or strong,
                copies or bool(_COPIES.match(name)),
                forward if operation.forward is None else operation.forward,
            )
        )
    groups: list[Group | None] = []
    for operation, (out, strong, copies, forward) in zip(operations, inherited, strict=True):
        group = _found(_BY_NAME_ALONE, operation.name) or strong
        if group is None and forward is not None and inherited[forward][1] == "attention":
            group = "attention"
        groups.append(None if out else group or ("copies" if copies else "other"))
    return groups


Shares = dict[Group, dict[str, float]]
"""Seconds of each name in each group; every group has an entry."""


def shares(operations: Sequence[ProfiledOperation]) -> Shares:
    """Return the self times of all operations by group and name."""
    names: Shares = {group: defaultdict(float) for group in GROUPS}
    for operation, group in zip(operations, group_of_each(operations), strict=True):
        if group is not None:
            names[group][operation.name] += operation.seconds
    return {group: dict(found) for group, found in names.items()}


def operations_of(events: Iterable[Any], *, on_device: bool) -> list[ProfiledOperation]:
    """Return the operations of ``torch.profiler.profile.events()``.

    Without a device an operation's time is the host's. With one, each kernel is an operation within the one that
    launched it. Then only calls into the driver and waits have a time of the host, which runs beside the device's.
    """
    host = [event for event in events if event.device_type.name == "CPU" and not event.is_async]
    host.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    positions = {id(event): position for position, event in enumerate(host)}
    # An operator that makes no node of the backward carries the sequence number of the next one that does: of all with
    # one number, the last has made the node. Only events of the backward know the thread of their forward.
    made = {(event.sequence_nr, event.thread): positions[id(event)] for event in host if not event.fwd_thread}
    operations = [
        ProfiledOperation(
            event.name,
            event.self_cpu_time_total * 1e-6 if not on_device or _found(_BY_NAME_ALONE, event.name) else 0.0,
            None if event.cpu_parent is None else positions[id(event.cpu_parent)],
            made.get((event.sequence_nr, event.fwd_thread)) if event.fwd_thread and event.sequence_nr >= 0 else None,
        )
        for event in host
    ]
    return operations + _kernels(events, host) if on_device else operations


def _kernels(events: Iterable[Any], host: Sequence[Any]) -> list[ProfiledOperation]:
    """Return the device's events, each under the host's operation that launched it; the rest under none."""
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
