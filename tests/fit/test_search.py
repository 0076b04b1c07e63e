"""Doubling and bisecting against oracles, and knees of curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ddpm_ds.fit.task import knee, largest_fitting

DIVISORS_OF_360 = [size for size in range(1, 361) if 360 % size == 0]


@pytest.mark.parametrize(
    "sizes",
    [range(1, 70), DIVISORS_OF_360, [2**power for power in range(9)], [7], [3, 4, 5, 50, 51], [6, 1000]],
    ids=str,
)
def test_the_largest_that_fits_is_found_whatever_the_budget(sizes: Sequence[int]) -> None:
    for budget in range(sizes[-1] + 2):
        asked: list[int] = []

        def fits(size: int, budget: int = budget, asked: list[int] = asked) -> bool:
            failed = [other for other in asked if other > budget]
            assert not failed or size < min(failed)  # what is larger than what died is not tried
            asked.append(size)
            return size <= budget

        expected = max((size for size in sizes if size <= budget), default=None)
        assert largest_fitting(sizes, fits) == expected
        assert len(asked) == len(set(asked))
        assert asked[0] == sizes[0]  # of which it can be said what it needs, if it does not fit
        assert len(asked) <= 2 * math.log2(len(sizes)) + 2 + math.log2(sizes[-1] / sizes[0])


def test_sizes_double_until_one_does_not_fit_and_are_bisected_then() -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= 21

    assert largest_fitting(range(1, 2**20 + 1), fits) == 21
    assert asked == [1, 2, 4, 8, 16, 32, 24, 20, 22, 21]


def test_the_last_size_is_tried_although_it_is_no_double() -> None:
    assert largest_fitting([1, 2, 3], lambda size: True) == 3


def test_the_knee_is_the_smallest_that_is_nearly_the_fastest() -> None:
    assert knee({1: 50.0, 2: 94.9, 4: 95.0, 8: 100.0, 16: 90.0}) == 4
    assert knee({1: 50.0, 2: 40.0}) == 1
    assert knee({16: 99.0, 8: 99.0, 32: 100.0}) == 8
