"""How rows are compared: same losses first, then times in turn."""

from __future__ import annotations

import pytest
import torch
from rivals.measure import check_losses, first_losses, ratios, time_rounds
from torch import Tensor

from ddpm_ds.errors import BadNumbersError
from ddpm_ds.experiments.data_rate import Spread


class FakeRow:
    """A row whose steps take a known time on a fake clock."""

    now = 0.0
    note = ""
    is_pipeline = False

    def __init__(self, name: str, seconds: float, losses: list[float], taken: list[str]) -> None:
        self.name, self._seconds, self._losses, self._taken = name, seconds, iter(losses), taken

    def step(self) -> Tensor:
        FakeRow.now += self._seconds
        self._taken.append(self.name)
        return torch.tensor(next(self._losses), dtype=torch.float64)


def alone(parts: list[float]) -> list[float]:
    """The total of one process."""
    return parts


def rows(losses: list[float]) -> tuple[list[FakeRow], list[str]]:
    """A plain row of loss 1 and another one."""
    taken: list[str] = []
    return [FakeRow("plain", 2.0, [1.0] * 99, taken), FakeRow("other", 3.0, losses, taken)], taken


def test_rounds_take_rows_in_turn_and_begin_with_another_one_each_time() -> None:
    pair, taken = rows([1.0] * 99)
    ended: list[int] = []
    seconds = time_rounds(
        pair,
        rounds=2,
        steps=3,
        synchronize=lambda: None,
        after_round=lambda: ended.append(len(taken)),
        clock=lambda: FakeRow.now,
    )
    assert taken == ["plain"] * 3 + ["other"] * 3 + ["other"] * 3 + ["plain"] * 3
    assert seconds == [[2.0, 2.0], [3.0, 3.0]] and ended == [6, 12]
    assert ratios(seconds[1], seconds[0]) == [1.5, 1.5]


def test_time_is_taken_when_the_device_has_caught_up() -> None:
    pair, _ = rows([1.0] * 99)

    def catch_up() -> None:
        FakeRow.now += 0.5

    seconds = time_rounds(
        pair[:1], rounds=1, steps=1, synchronize=catch_up, after_round=list, clock=lambda: FakeRow.now
    )
    assert seconds == [[2.5]]


def test_median_and_quartiles() -> None:
    assert Spread.of([3.0, 1.0, 5.0, 2.0, 4.0]) == Spread(median=3.0, low=2.0, high=4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_losses_within_rounding_pass_and_the_largest_difference_is_kept() -> None:
    pair, _ = rows([1.0, 1.001, 1.0005])
    losses = first_losses(pair, 3, alone)
    assert check_losses(pair, losses, tolerance=1e-2) == pytest.approx([0.0, 1e-3])


@pytest.mark.parametrize("loss", [1.02, 0.98, float("nan"), float("inf")])
def test_a_row_that_trains_something_else_is_named_with_its_step_and_loss(loss: float) -> None:
    pair, _ = rows([1.0, loss, 1.0])
    with pytest.raises(BadNumbersError, match="in step 1 of other, where plain has 1: they don't train the same"):
        check_losses(pair, first_losses(pair, 3, alone), tolerance=1e-2)
