"""The lightest path through the possible cuts, which is what a partition is, and memory as its constraint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class Room:
    """What ranks may hold."""

    limit: float
    """Bytes of one rank."""
    layer_bytes: Callable[[int, int], Sequence[float]]
    """By rank and phase: bytes that each layer takes if it is there, with its weights and all that is kept of them."""


def running_sum(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Sums of the first 0, 1, ... values."""
    import numpy as np  # only now: command lines are read without it

    return np.concatenate([[0.0], np.cumsum(values)])


def lightest_chain(weights: Sequence[npt.NDArray[np.float64]], prices: Sequence[float]) -> list[int] | None:
    """The nodes of a path from the first node to the last, with an edge of each of ``weights``, heaviest edge lightest.

    Among those the one whose nodes have the least sum of ``prices``. ``weights[n][a, b]`` is that of edge number n from
    a to b, infinite where there is none. Exact dynamic programming, O(edges x nodes^2). None where there is no path.
    """
    import numpy as np

    nodes = len(prices)
    lightest = np.full(nodes, math.inf)
    lightest[0] = 0.0
    for edge in weights:
        lightest = np.maximum(lightest[:, None], edge).min(0)
    limit = lightest[-1]
    if not math.isfinite(limit):
        return None
    price = np.full(nodes, math.inf)
    price[0] = 0.0
    choices = []
    for edge in weights:
        options = price[:, None] + np.where(edge <= limit, np.asarray(prices)[None, :], math.inf)
        choices.append(options.argmin(0))
        price = options.min(0)
    chain = [nodes - 1]
    for choice in reversed(choices):
        chain.append(int(choice[chain[-1]]))
    return chain[::-1]
