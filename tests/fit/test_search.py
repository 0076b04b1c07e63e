"""Which micro-batches are tried, by a function that only says what would fit and how fast it would be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ddpm_ds.fit.search import knee, largest, look_below


@pytest.mark.parametrize("sizes", [range(1, 70), [7], [3, 4, 5, 50, 51], [6, 1000]], ids=str)
def test_the_largest_that_fits_is_found_whatever_the_memory_and_the_guess(sizes: Sequence[int]) -> None:
    for memory in range(sizes[-1] + 2):
        for guess in sizes:
            asked: list[int] = []

            def fits(size: int, memory: int = memory, asked: list[int] = asked) -> bool:
                assert all(size < other for other in asked if other > memory)  # none larger than one that died
                asked.append(size)
                return size <= memory

            assert largest(sizes, fits, guess) == max((size for size in sizes if size <= memory), default=None)
            assert len(asked) == len(set(asked)) and asked[0] == guess
            assert len(asked) <= 2 * math.log2(sizes[-1]) + 3


def test_a_guess_that_is_right_to_a_tenth_takes_few_tries() -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= 642

    assert largest(range(1, 2**20), fits, 600) == 642
    assert asked == [600, 660, 630, 645, 637, 641, 643, 642]
    assert largest([1, 2, 3, 4, 6, 8, 12, 24], lambda size: size <= 8, 6) == 8


def test_smaller_sizes_are_tried_as_long_as_they_are_nearly_as_fast() -> None:
    speeds = {1: 50.0, 2: 90.0, 3: 94.0, 4: 96.0, 6: 99.0, 8: 98.0, 12: 97.0, 24: 90.0}
    asked: list[int] = []

    def speed(size: int) -> float:
        asked.append(size)
        return speeds[size]

    look_below(sorted(speeds), speed, 24)
    assert asked == [24, 12, 6, 3]  # which is over 5 % slower than 6
    look_below([6], speed, 6)
    assert asked[4:] == [6]


def test_the_knee_is_the_smallest_that_is_nearly_the_fastest() -> None:
    assert knee({1: 50, 2: 94.9, 4: 95, 8: 100, 16: 90}) == 4
    assert knee({1: 50, 2: 40}) == 1
    assert knee({8: 99, 32: 100}) == 8
