"""Processors and processes of this host, and the limits of control groups, such as a container's. Imports no torch."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Linux's limits of control groups, such as a container's, and the groups of this process."""


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the folder of this process's control group, in both versions of them, and the folders above it."""
    with contextlib.suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                inside = (CGROUPS / controller if controllers else CGROUPS) / group.lstrip("/")
                yield from (inside, *inside.parents)


def processes_on_host(otherwise: int = 1) -> int:
    """Return the run's number of processes on this host, as the launcher has set it, or ``otherwise`` without one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", otherwise))


def processors() -> int:
    """Return the number of processors that this process may use, by its affinity and its control group's quota."""
    most = len(os.sched_getaffinity(0))
    for folder in control_groups("cpu"):
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                most = min(most, -(-quota // period)) if quota > 0 else most
    return most
