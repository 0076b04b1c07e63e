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
from rivals.measure import RING_SHARE, BusyTime, SentBytes, check_losses, ratios
from torch import Tensor, nn

from ddpm_ds.errors import BadNumbersError


class Clock:
    """A clock that the work itself sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds


def test_rounds_take_rows_in_turn_and_time_is_taken_when_the_device_has_caught_up() -> None:
    clock, taken = Clock(), list[str]()

    def step(name: str, seconds: float) -> Callable[[], None]:
        def taking() -> None:
            taken.append(name)
            clock.take(seconds)

        return taking

    steps = [step("plain", 2.0), step("other", 3.0)]
    found = measure.time_rounds(steps, 2, 4, lambda: clock.take(0.5), clock)
    assert taken == ["plain"] * 4 + ["other"] * 8 + ["plain"] * 4
    assert found == [[2.125, 2.125], [3.125, 3.125]]  # the wait after four steps
    assert ratios([3.0, 6.0], [2.0, 4.0]) == [1.5, 1.5]


def test_a_row_that_trains_something_else_is_named_with_its_step_and_loss() -> None:
    rows: Any = [SimpleNamespace(name=name, comparable=name != "random") for name in ("random", "plain", "other")]
    losses = [[7.0, 8.0, 9.0], [1.0, 1.0, 1.0], [1.0, 1.001, 1.0005]]
    assert check_losses(rows, losses, 1e-2) == [None, 0.0, pytest.approx(1e-3)]
    for loss in (0.98, math.nan):
        with pytest.raises(BadNumbersError, match="in step 1 of other, where plain has 1: they don't train the same"):
            check_losses(rows, [losses[0], [1.0, 1.0], [1.0, loss]], 1e-2)
    with pytest.raises(BadNumbersError, match="loss nan in step 0 of random"):
        check_losses(rows, [[math.nan], [1.0], [1.0]], 1e-2)


def test_what_rounding_explains_depends_on_precision_and_on_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert measure.tolerance("fp32", cpu) < measure.tolerance("fp16", cpu) < measure.tolerance("bf16", cpu)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert measure.tolerance("fp32", cuda) == 1e-2
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert measure.tolerance("fp32", cuda) == measure.tolerance("fp32", cpu)


class Work(nn.Module):
    """Takes a second forward and two backward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.take(1)
        y = 2 * x
        y.register_hook(lambda gradient: self.clock.take(2))
        return y


def test_busy_is_forward_and_backward_however_deep_they_are_nested() -> None:
    clock, before = Clock(), torch.autograd.backward
    model = nn.Sequential(Work(clock), nn.Sequential(Work(clock)))
    with BusyTime(clock=clock) as busy:
        clock.take(10)
        torch.autograd.backward([model(torch.ones(1, requires_grad=True))], [torch.ones(1)])  # as engines do
        model(torch.ones(1, requires_grad=True)).backward()  # as users do
        clock.take(10)
    assert busy.seconds == 2 * 2 * (1 + 2)
    model(torch.ones(1, requires_grad=True)).backward()
    assert busy.seconds == 12 and torch.autograd.backward is before


def test_busy_is_also_what_a_device_still_computes_when_a_call_returns() -> None:
    clock = Clock()
    with BusyTime(lambda: clock.take(5), clock) as busy:
        Work(clock)(torch.ones(1, requires_grad=True))
    assert busy.seconds == 1 + 5  # the one afterwards; the one before is not its own


def test_busy_ends_with_a_forward_that_raises() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            clock.take(3)
            raise ValueError

    clock = Clock()
    with BusyTime(clock=clock) as busy:
        with pytest.raises(ValueError):
            Broken()(torch.ones(1))
        clock.take(100)
        Work(clock)(torch.ones(1, requires_grad=True))
    assert busy.seconds == 3 + 1


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
def test_a_process_alone_sends_nothing_and_what_is_not_known_is_not_counted_as_nothing() -> None:
    with SentBytes() as traffic:
        dist.all_reduce(torch.ones(3))
        dist.all_gather([torch.ones(3)], torch.ones(3))
        dist.barrier()
    assert traffic.message_bytes == traffic.collective_bytes == 0
    with SentBytes(), pytest.raises(NotImplementedError, match="alltoall_base_ sends is not known here"):
        dist.all_to_all_single(torch.ones(2), torch.ones(2))
