"""Busy time: forward and backward, each counted once however deep it is nested."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rivals.busy import busy_time
from torch import Tensor, nn


class Clock:
    """A clock that the work itself sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Work(nn.Module):
    """Takes a second forward and two backward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += 1
        y = 2 * x
        y.register_hook(self.backwards)
        return y

    def backwards(self, gradient: Tensor) -> None:
        self.clock.now += 2


def walk(model: nn.Module, x: Tensor) -> None:
    """By the name that an engine calls."""
    torch.autograd.backward([model(x)], [torch.ones(1)])


def walk_by_method(model: nn.Module, x: Tensor) -> None:
    """By the method that a user calls."""
    model(x).backward()


@pytest.mark.parametrize("step", [walk, walk_by_method])
def test_forward_and_backward_count_and_the_rest_does_not(step: Callable[[nn.Module, Tensor], None]) -> None:
    clock = Clock()
    model = nn.Sequential(Work(clock), nn.Sequential(Work(clock)))
    backward = torch.autograd.backward
    with busy_time(clock=clock) as busy:
        clock.now += 10
        step(model, torch.ones(1, requires_grad=True))
        clock.now += 10
    assert busy.seconds == 2 * (1 + 2)
    walk(model, torch.ones(1, requires_grad=True))
    assert busy.seconds == 6 and torch.autograd.backward is backward


def test_what_a_device_still_computes_when_a_call_returns_counts_too() -> None:
    clock = Clock()

    def catch_up() -> None:
        clock.now += 5

    with busy_time(catch_up, clock) as busy:
        Work(clock)(torch.ones(1, requires_grad=True))
    assert busy.seconds == 1 + 5  # the one afterwards; the one before is not its own


def test_a_forward_that_raises_ends() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            clock.now += 3
            raise ValueError

    clock = Clock()
    with busy_time(clock=clock) as busy:
        with pytest.raises(ValueError):
            Broken()(torch.ones(1))
        clock.now += 100
        Work(clock)(torch.ones(1, requires_grad=True))
    assert busy.seconds == 3 + 1
