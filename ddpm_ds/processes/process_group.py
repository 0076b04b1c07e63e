"""Process group of a program: its time-outs, its construction, and errors in it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar, cast

import deepspeed
import torch.distributed as dist

from ddpm_ds.ground import errors
from ddpm_ds.ground.errors import KNOWN_TO_ALL_RANKS, HostError, UserError
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.messages import barrier, broadcast_object
from ddpm_ds.processes.hosts import GLOO_INTERFACE, use_interface_towards
from ddpm_ds.processes.ranks import DEAD_SECONDS, HANG_SECONDS, RUN_SECRET, host_name, on_several_hosts
from ddpm_ds.processes.rendezvous import connect, port_taken
from ddpm_ds.processes.watchdog import PAUSE_SECONDS

JOIN_TIMEOUT = timedelta(minutes=30)
"""Time limit for joining the group, which takes a moment after a rendezvous."""
LONGEST_SECONDS = 365 * 86400.0
"""Longest time-out; much longer ones overflow clocks that count nanoseconds."""

Value = TypeVar("Value")


def group_timeout(hang_seconds: float = HANG_SECONDS, dead_seconds: float = DEAD_SECONDS) -> timedelta:
    """Return the time-out of process groups: the watchdog acts first, even after a pause between two steps."""
    return timedelta(seconds=min(2 * max(hang_seconds, dead_seconds) + PAUSE_SECONDS, LONGEST_SECONDS))


@contextlib.contextmanager
def process_group(timeout: timedelta | None = None) -> Iterator[None]:
    """Make the process group for DeepSpeed, and destroy it at the end, since gloo aborts a process that exits with one.

    Groups made inside have the same time-out. A UserError may leave the block only if all ranks raise it. Raises
    LayoutError if another job has the port, HostError if ranks of two hosts can't connect.
    """
    timeout, rank, world_size = timeout or group_timeout(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master, local = os.environ["MASTER_ADDR"], not on_several_hosts()
    address = use_interface_towards(master, local=local)
    # NCCL is not bound to the device, since a bound group is connected eagerly.
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{timeout.total_seconds():.0f}")  # else 8 minutes
    with insides.group_timeout(timeout):
        try:
            store: dist.Store = dist.HashStore()
            if world_size > 1:  # keys that only the run's ranks know
                start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get(RUN_SECRET, "")
                store = dist.PrefixStore("/".join(start), connect(rank, int(os.environ["MASTER_PORT"]), JOIN_TIMEOUT))
                store.set(f"address/{rank}", address)
            if not (address or local):  # here the master's name means loopback: take the way to any other host
                others = store.multi_get([f"address/{other}" for other in range(world_size)])
                use_interface_towards(next(filter(None, others), master.encode()).decode())
            backend = deepspeed.accelerator.get_accelerator().communication_backend_name()
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise port_taken() from None
        except RuntimeError as error:  # gloo raises no other since PyTorch 2.14
            if local or not (isinstance(error, dist.DistBackendError) or "gloo" in str(error).lower()):
                raise
            raise HostError(
                f"rank {rank} (host {host_name()}) can't connect to the ranks of other hosts over interface "
                f"{os.environ.get(GLOO_INTERFACE, 'unknown')} ({str(error).splitlines()[0]}); ddpm-ds doctor "
                f"--hostfile FILE tests it, and {GLOO_INTERFACE} or NCCL_SOCKET_IFNAME chooses another interface"
            ) from error
        deepspeed.init_distributed(verbose=False)
        try:
            yield
        except (UserError, *KNOWN_TO_ALL_RANKS):  # leave together
            barrier()
            dist.destroy_process_group()
            raise
        dist.destroy_process_group()


def decided_by_rank_0(decide: Callable[[], Value], kind: Any) -> Value:
    """Return, on every rank, the value of type ``kind`` that ``decide`` returns on rank 0; collective.

    A UserError of ``decide`` is raised on every rank, so that none waits for rank 0.
    """
    decided, name, why = None, "", ""
    if dist.get_rank() == 0:
        try:
            decided = decide()
        except UserError as error:
            name, why = type(error).__name__, str(error)
    decided, name, why = broadcast_object((decided, name, why), tuple[kind | None, str, str])
    if name:
        raise vars(errors)[name](why)
    return cast(Value, decided)
