"""How rows are compared and observed: same outputs first, times in turn, computing, sending."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rivals import measure
from rivals.measure import RING_SHARE, SentBytes, check_losses

from ddpm_ds.ground.errors import BadNumbersError


class Clock:
    """A clock that the work itself sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds


def test_rounds_take_rows_in_turn_and_time_is_taken_when_the_device_has_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, taken = Clock(), list[str]()
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(measure, "wait_for_device", lambda device: clock.take(0.5))
    monkeypatch.setattr(dist, "barrier", lambda: None)

    def step(name: str, seconds: float) -> Callable[[], None]:
        def taking() -> None:
            taken.append(name)
            clock.take(seconds)

        return taking

    found = measure.time_rounds([step("plain", 2.0), step("other", 3.0)], 2, 4, torch.device("cpu"))
    assert taken == ["plain"] * 4 + ["other"] * 8 + ["plain"] * 4
    assert found == [[2.125, 2.125], [3.125, 3.125]]  # the wait after four steps


def test_a_row_that_trains_something_else_is_named_with_its_step_and_loss() -> None:
    rows: Any = [SimpleNamespace(name=name, comparable=name != "random") for name in ("random", "plain", "other")]
    losses = [[7.0, 8.0, 9.0], [1.0, 1.0, 1.0], [1.0, 1.001, 1.0005]]
    assert check_losses(rows, losses, 1e-2) == [None, 0.0, pytest.approx(1e-3)]
    for loss in (0.98, math.nan):
        with pytest.raises(BadNumbersError, match="in step 1 of other, where plain has 1: they don't train the same"):
            check_losses(rows, [losses[0], [1.0, 1.0], [1.0, loss]], 1e-2)
    with pytest.raises(BadNumbersError, match="loss nan in step 0 of random"):
        check_losses(rows, [[math.nan], [1.0], [1.0]], 1e-2)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_rank_of_a_ring_of_four_sends() -> None:
    sent = {"allreduce_": 600, "_allgather_base_": 300, "_reduce_scatter_base_": 300, "broadcast_": 300}
    sizes = {"_allgather_base_": (400, 100), "_reduce_scatter_base_": (100, 400)}
    assert {name: RING_SHARE[name](*sizes.get(name, (400, 0)), 4) for name in sent} == sent


@pytest.mark.usefixtures("group")
def test_a_process_alone_sends_nothing_and_unknown_bytes_do_not_count_as_zero() -> None:
    with SentBytes() as traffic:
        dist.all_reduce(torch.ones(3))
        dist.all_gather([torch.ones(3)], torch.ones(3))
        dist.barrier()
    assert traffic.message_bytes == traffic.collective_bytes == 0
    with SentBytes(), pytest.raises(NotImplementedError, match="alltoall_base_ are not known; add it"):
        dist.all_to_all_single(torch.ones(2), torch.ones(2))
