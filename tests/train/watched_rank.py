"""A rank that trains nothing under a watchdog. Started by the launcher, it plays a part of test_watchdog.py:

deepspeed tests/train/watched_rank.py PART
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from ddpm_ds.errors import EXIT_PEER_LOST
from ddpm_ds.exit_record import record_exit, recorded
from ddpm_ds.train.heartbeat import make_store
from ddpm_ds.train.watchdog import Watchdog

CULPRIT = 1


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # as training, which finishes its step first
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    rank, size = dist.get_rank(), dist.get_world_size()
    names = [f"rank {peer} (stage {peer})" for peer in range(size)]
    watchdog = Watchdog(rank, size, names, make_store(rank, size), dead_seconds=8, hang_seconds=2)
    try:
        for step in range(3):
            watchdog.progress()
            dist.barrier()
            if step == 1 and rank == CULPRIT:
                misbehave(sys.argv[-1])
    except RuntimeError:
        print(f"{names[rank]} misses {watchdog.who_is_missing(3)}", file=sys.stderr, flush=True)
        record_exit(EXIT_PEER_LOST)
        watchdog.stop()
        os._exit(EXIT_PEER_LOST)
    watchdog.stop()
    dist.destroy_process_group()
    return 0


def misbehave(part: str) -> None:
    if part == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while part == "hang":
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(recorded(main))
