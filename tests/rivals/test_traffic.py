"""Counting what is sent; that real rows are counted exactly, ``test_command.py`` shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from rivals.traffic import RING_SHARE, SentBytes


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_rank_of_a_ring_of_four_sends() -> None:
    assert RING_SHARE["allreduce_"](400, 0, 4) == 600  # three quarters to reduce, as many to gather
    assert RING_SHARE["_allgather_base_"](400, 100, 4) == 300  # each of the three other parts passes
    assert RING_SHARE["_reduce_scatter_base_"](100, 400, 4) == 300
    assert RING_SHARE["broadcast_"](400, 0, 4) == 300


@pytest.mark.usefixtures("group")
def test_a_process_alone_sends_nothing() -> None:
    with SentBytes() as traffic:
        dist.all_reduce(torch.ones(3))
        dist.all_gather([torch.ones(3)], torch.ones(3))
        dist.barrier()
    assert traffic.message_bytes == traffic.collective_bytes == 0


@pytest.mark.usefixtures("group")
def test_what_is_not_known_is_not_counted_as_nothing() -> None:
    with SentBytes(), pytest.raises(NotImplementedError, match="alltoall_base_ sends is not known here"):
        dist.all_to_all_single(torch.ones(2), torch.ones(2))
