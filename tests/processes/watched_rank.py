"""A rank that trains nothing under a watchdog, for test_watchdog.py: watched_rank.py die|hang.

Rank 1 dies or hangs. The others wait for it, each in another way: in a collective, for a message, for a device.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddpm_ds.errors import EXIT_PEER_LOST
from ddpm_ds.processes.heartbeat import DeviceWork, make_store
from ddpm_ds.processes.ranks import record_exit, recorded
from ddpm_ds.processes.watchdog import Watchdog

CULPRIT = 1


class Device:
    """Stands for a GPU: does what it was given in order, beside the main thread, which waits where it reads from it."""

    def __init__(self) -> None:
        self._stream = ThreadPoolExecutor(1)
        self._given: list[Future[Any]] = []

    def give(self, work: Callable[[], Any]) -> None:
        self._given.append(self._stream.submit(work))

    def is_done(self) -> bool:
        return all(work.done() for work in self._given)

    def read(self) -> None:
        """As ``item()`` of a tensor."""
        self._given[-1].result()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # as training, which finishes its step first
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    rank, size, part = dist.get_rank(), dist.get_world_size(), sys.argv[-1]
    names = [f"rank {peer} (stage {peer})" for peer in range(size)]
    store, device = make_store(rank, size), Device()
    work = DeviceWork(device.is_done)
    watchdog = Watchdog(rank, names, store, dead_seconds=8, hang_seconds=2, work=work)
    try:
        for step in range(3):
            watchdog.progress()
            wait_for_all(rank, device)
            if step == 1 and rank == CULPRIT:
                misbehave(part)
    except RuntimeError:
        print(f"{names[rank]} misses {watchdog.who_is_missing(3)}", file=sys.stderr, flush=True)
        record_exit(EXIT_PEER_LOST)
        watchdog.stop()
        os._exit(EXIT_PEER_LOST)
    watchdog.stop()
    dist.destroy_process_group()
    return 0


def wait_for_all(rank: int, device: Device) -> None:
    """Meet all ranks: in a collective, for a message, or as under NCCL for a device that waits for one."""
    if rank == 3:
        device.give(dist.barrier)
        device.read()
    elif rank == 2:
        arrival = dist.barrier(async_op=True)
        arrival.wait()
    else:
        dist.barrier()


def misbehave(part: str) -> None:
    if part == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(recorded(main))
