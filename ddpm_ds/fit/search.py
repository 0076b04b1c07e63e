"""Search for the largest size that fits and for the smallest that is nearly as fast, by functions that try a size."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

KNEE = 0.05
"""Maximum share of the best speed that training with a smaller micro-batch may give up."""


def largest(sizes: Sequence[int], fits: Callable[[int], bool], guess: int) -> int | None:
    """Return the largest of the ascending ``sizes`` that fits; None if the first does not.

    The search begins with ``guess``, one of the sizes, which is probably right to a few percent: it moves away from it
    by a tenth of it, then by twice as much each time, until one size fits and a larger one does not. Then it bisects.
    No size is tried twice, and none that is larger than one that did not fit.
    """
    fitting, failed = -1, len(sizes)  # places in sizes
    place, step = bisect_left(sizes, guess), max(guess // 10, 1)
    while failed - fitting > 1:
        if fits(sizes[place]):
            fitting = place
        else:
            failed = place
        if fitting < 0:
            place = max(bisect_right(sizes, sizes[failed] - step) - 1, 0)
        elif failed == len(sizes):
            place = min(bisect_left(sizes, sizes[fitting] + step), failed - 1)
        else:
            place = (fitting + failed) // 2
        step *= 2
    return sizes[fitting] if fitting >= 0 else None


def knee(speeds: dict[int, float]) -> int:
    """Return the smallest size whose speed is within :data:`KNEE` of the best; ``speeds`` are by size."""
    enough = (1 - KNEE) * max(speeds.values())
    return min(size for size, speed in speeds.items() if speed >= enough)


def look_below(sizes: Sequence[int], speed: Callable[[int], float], size: int) -> None:
    """Try the speed of ``size`` and of smaller ``sizes``, each at most half of the one before, until one is slow."""
    speeds: dict[int, float] = {}
    place = bisect_left(sizes, size)
    while place >= 0 and (not speeds or knee(speeds) == min(speeds)):
        speeds[sizes[place]] = speed(sizes[place])
        place = bisect_right(sizes, sizes[place] // 2) - 1
