"""A rank that trains nothing under a watchdog, for test_watchdog.py.

Rank 1 hangs. The others wait for it, each in another way: in a collective, for a message, for a device.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddpm_ds.processes.ranks import recorded
from ddpm_ds.processes.rendezvous import Rendezvous, connect
from ddpm_ds.processes.watchdog import DeviceWork, Watchdog


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
        self._given[-1].result()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # as training, which finishes its step first
    rendezvous, limit = Rendezvous(100.0), timedelta(seconds=100)
    rank, size, store = rendezvous.rank, rendezvous.world_size, rendezvous.store
    dist.init_process_group(
        "gloo", store=connect(rank, int(os.environ["MASTER_PORT"]), limit), rank=rank, world_size=size, timeout=limit
    )
    rendezvous.close()
    names, device = [f"rank {peer} (stage {peer})" for peer in range(size)], Device()
    watchdog = Watchdog(rank, names, store, dead_seconds=8, hang_seconds=2, work=DeviceWork(device.is_done))
    for step in range(3):
        watchdog.progress()
        wait_for_all(rank, device)
        while step == 1 and rank == 1:
            time.sleep(0.1)
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


if __name__ == "__main__":
    sys.exit(recorded(main))
