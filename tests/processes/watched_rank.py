"""A rank that trains nothing under a watchdog, for test_watchdog.py.

Rank 1 hangs. The others wait for it, each in another way: in a collective, for a message, for a device.
"""

import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddpm_ds.processes.ranks import recorded
from ddpm_ds.processes.rendezvous import Rendezvous, connect
from ddpm_ds.processes.watchdog import DeviceWork, Watchdog


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # as training, which finishes its step first
    rendezvous, limit = Rendezvous(100.0), timedelta(seconds=100)
    rank, size, store = rendezvous.rank, rendezvous.world_size, rendezvous.store
    dist.init_process_group(
        "gloo", store=connect(rank, int(os.environ["MASTER_PORT"]), limit), rank=rank, world_size=size, timeout=limit
    )
    rendezvous.close()
    names, stream = [f"rank {peer} (stage {peer})" for peer in range(size)], ThreadPoolExecutor(1)
    given: Future[object] = stream.submit(
        bool
    )  # the last work of what stands for a GPU: a thread that does its work in order
    watchdog = Watchdog(rank, names, store, dead_seconds=8, hang_seconds=2, work=DeviceWork(lambda: given.done()))
    for step in range(3):
        watchdog.progress()
        if rank == 3:  # as under NCCL, waits for a device that waits for a rank
            given = stream.submit(dist.barrier)
            given.result()
        elif rank == 2:
            receive(dist.barrier(async_op=True))
        else:
            dist.barrier()
        while step == 1 and rank == 1:
            time.sleep(0.1)
    watchdog.stop()
    dist.destroy_process_group()
    return 0


def receive(message: Any) -> None:
    message.wait()


if __name__ == "__main__":
    sys.exit(recorded(main))
