"""Doubling and bisecting, and the knee of a curve of throughput."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

KNEE = 0.05
"""Throughput that a smaller micro-batch may lack, as a share of the best."""


def largest_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of ``sizes``, which ascend, that fits; None if the first does not.

    What is larger than a size that does not fit is taken not to fit. Begins with the first size and goes on with the
    next one that is at least twice as large; after the first that does not fit it bisects between. No size is asked
    about twice, nor is one after the first failure that is larger than it.
    """
    largest, failed = -1, len(sizes)  # places in sizes
    place = 0
    while largest < place < failed:
        if not fits(sizes[place]):
            failed = place
        else:
            largest = place
            place = min(bisect_left(sizes, 2 * sizes[place]), len(sizes) - 1)
    while failed - largest > 1:
        middle = (largest + failed) // 2
        if fits(sizes[middle]):
            largest = middle
        else:
            failed = middle
    return sizes[largest] if largest >= 0 else None


def knee(throughput: Mapping[int, float]) -> int:
    """The smallest micro-batch whose throughput is within :data:`KNEE` of the best."""
    enough = (1 - KNEE) * max(throughput.values())
    return min(size for size, speed in throughput.items() if speed >= enough)
