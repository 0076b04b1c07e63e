"""Processes that share a work in parts: who does which, and how they wait for each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from ddpm_ds.errors import PeerLostError

JOIN_LIMIT = timedelta(minutes=10)
"""For all processes to have loaded the weights."""
WAIT_LIMIT = timedelta(days=1)
"""For the slowest process to finish; one that has died is noticed at once, by its connection."""


class Share(NamedTuple):
    """Which part of the work is this process's."""

    rank: int
    world_size: int


ALONE = Share(0, 1)


def share_of_launcher() -> Share:
    """As a launcher says in the environment; alone without one."""
    return Share(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


@contextlib.contextmanager
def together(share: Share) -> Iterator[Callable[[], None]]:
    """Meet the other processes; the block gets a function that waits until all have called it.

    Raises:
        PeerLostError: from that function, when another process has died or does not come. Nothing that waits for the
            others may follow.
    """
    if share.world_size == 1:
        yield lambda: None
        return
    dist.init_process_group("gloo", timeout=JOIN_LIMIT)
    try:
        yield _wait_for_all
    finally:
        dist.destroy_process_group()  # a process that leaves with a gloo group can abort after it has succeeded


def _wait_for_all() -> None:
    try:
        dist.monitored_barrier(timeout=WAIT_LIMIT)
    except RuntimeError:
        raise PeerLostError(
            "another process was lost before it had done its share; what is done is kept, start it again"
        ) from None
