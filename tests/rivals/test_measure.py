"""Comparison and observation of rows: losses, times in turn, operators, bytes."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rivals import measure
from rivals.measure import RING_SHARE, SentBytes, check_losses

from ddpm_ds.ground.errors import BadNumbersError


def test_rounds_take_rows_in_turn_and_time_is_taken_when_the_device_has_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[float] = []
    monkeypatch.setattr("time.perf_counter", lambda: sum(taken))
    monkeypatch.setattr(measure, "wait_for_device", lambda device: taken.append(0.5))
    monkeypatch.setattr(measure, "barrier", lambda: None)
    steps = [functools.partial(taken.append, seconds) for seconds in (2.0, 3.0)]
    found = measure.time_rounds(steps, 2, 4, torch.device("cpu"))
    assert [seconds for seconds in taken if seconds > 0.5] == [2.0] * 4 + [3.0] * 8 + [2.0] * 4
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


def test_a_rank_of_a_ring_of_four_sends() -> None:
    sent = {"allreduce_": 600, "_allgather_base_": 300, "_reduce_scatter_base_": 300, "broadcast_": 300}
    sizes = {"_allgather_base_": (400, 100), "_reduce_scatter_base_": (100, 400)}
    assert {name: RING_SHARE[name](*sizes.get(name, (400, 0)), 4) for name in sent} == sent


@pytest.mark.usefixtures("alone")
def test_a_process_alone_sends_nothing_and_unknown_bytes_do_not_count_as_zero() -> None:
    with SentBytes() as traffic:
        dist.all_reduce(torch.ones(3))
        dist.all_gather([torch.ones(3)], torch.ones(3))
        dist.barrier()
    assert traffic.message_bytes == traffic.collective_bytes == 0
    with SentBytes(), pytest.raises(NotImplementedError, match="gather_ are not known; add it"):
        dist.gather(torch.ones(2), [torch.ones(2)])
