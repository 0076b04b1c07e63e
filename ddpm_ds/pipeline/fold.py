"""Cuts of a U-Net into mirrored pairs, so that what an encoder layer gives a decoder layer stays on one rank.

The number of live skips rises along the encoder and falls along the decoder. A cut of the encoder and a cut of the
decoder are mirrored where that number is the same: between them the skips of the layers between are made and used::

    live skips   1    2    3         3    2    1
    layers     0 ─┬── ─┬── ─┬── turn ─┬── ─┬── ─┬─ n
                  └────────── rank 0 ───────────┘        outside of the outer pair
                       └───── rank 1 ──────┘             between the pairs
                            └ rank 2 ─┘                  inside of the inner pair
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpm_ds.errors import LayoutError
from ddpm_ds.unet.layers import Layer, boundary_shapes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def balanced(layers: Sequence[Layer], weights: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Mirrored bounds of ``2 * ranks`` stages: the heaviest rank is lightest, and then the least crosses. Exact.

    The turn, which only divides the last rank's layers, is where its two stages are most alike.

    Raises:
        LayoutError: there are not so many mirrored pairs.
    """
    import numpy as np  # only now: command lines are read without it

    live, turns = live_skips(layers), _turns(layers)
    pairs = [
        (cut, mirror)
        for cut in range(1, turns[-1])
        for mirror in range(turns[0] + 1, len(layers))
        if live[cut] == live[mirror] and any(cut < turn < mirror for turn in turns)
    ]
    nodes = [(0, len(layers)), *pairs]
    before = np.concatenate([[0.0], np.cumsum(weights)])
    lefts, rights = (np.array(side) for side in zip(*nodes, strict=True))
    parts = np.full((len(nodes) + 1, len(nodes) + 1), math.inf)  # [outer pair, inner pair]; the last is the middle
    nested = (lefts[:, None] < lefts[None, :]) & (rights[:, None] > rights[None, :])
    inside = before[rights] - before[lefts]
    parts[:-1, :-1] = np.where(nested, inside[:, None] - inside[None, :], math.inf)
    parts[:-1, -1] = inside
    chain = lightest_chain(parts, ranks, [0.0, *(_crossing(layers, *pair) for pair in pairs), 0.0])
    if chain is None:
        most = next(count for count in range(ranks - 1, 0, -1) if lightest_chain(parts, count, [0.0] * len(parts)))
        raise LayoutError(
            f'pipeline.stages = {ranks}, but with pipeline.schedule = "folded" this U-Net has mirrored cuts for {most} '
            f"at most; use fewer stages"
        )
    chosen = [nodes[number] for number in chain[1:-1]]
    first, last = chosen[-1] if chosen else nodes[0]
    middles = [turn for turn in turns if first < turn < last]
    turn = min(middles, key=lambda turn: abs(2 * before[turn] - before[first] - before[last]))
    return (0, *(cut for cut, _ in chosen), turn, *(mirror for _, mirror in reversed(chosen)), len(layers))


def check_mirrored(layers: Sequence[Layer], bounds: Sequence[int]) -> None:
    """Refuse bounds of an even number of stages between which a skip would leave its rank.

    Raises:
        LayoutError: with the cuts that would be mirrored.
    """
    live, turns, ranks = live_skips(layers), _turns(layers), len(bounds) // 2
    if bounds[ranks] not in turns:
        raise LayoutError(
            f"pipeline.partition turns at {bounds[ranks]}, its middle cut; a fold turns between the last layer that "
            f"makes a skip and the first that uses one: at {' or '.join(map(str, turns))}"
        )
    for cut, mirror in zip(bounds[1:ranks], reversed(bounds[ranks + 1 : -1]), strict=True):
        if live[cut] != live[mirror]:
            fitting = [str(other) for other in range(turns[0], len(layers)) if live[other] == live[cut]]
            raise LayoutError(
                f"pipeline.partition: the cuts {cut} and {mirror} are not mirrored: {live[cut]} skips are alive at one "
                f"and {live[mirror]} at the other; with {cut} goes {' or '.join(fitting)}"
            )


def live_skips(layers: Sequence[Layer]) -> list[int]:
    """How many skips have been made and not used before each layer, and at the end."""
    changes = (layer.pushes - (layer.skip_channels > 0) for layer in layers)
    return list(itertools.accumulate(changes, initial=0))


def lightest_chain(weights: npt.NDArray[np.float64], length: int, prices: Sequence[float]) -> list[int] | None:
    """The nodes of a path with ``length`` edges from the first node to the last whose heaviest edge is lightest.

    Among those the one whose nodes have the least sum of ``prices``. ``weights[a, b]`` is that of the edge from a to b,
    infinite where there is none. Exact dynamic programming, O(length x nodes^2). None where there is no path.
    """
    import numpy as np

    nodes = len(weights)
    lightest = np.full(nodes, math.inf)
    lightest[0] = 0.0
    for _ in range(length):
        lightest = np.maximum(lightest[:, None], weights).min(0)
    limit = lightest[-1]
    if not math.isfinite(limit):
        return None
    price = np.full(nodes, math.inf)
    price[0] = 0.0
    step_price = np.where(weights <= limit, np.asarray(prices)[None, :], math.inf)
    choices = []
    for _ in range(length):
        options = price[:, None] + step_price
        choices.append(options.argmin(0))
        price = options.min(0)
    chain = [nodes - 1]
    for choice in reversed(choices):
        chain.append(int(choice[chain[-1]]))
    return chain[::-1]


def _turns(layers: Sequence[Layer]) -> range:
    """The cuts after the last layer that makes a skip and before or at the first that uses one."""
    last_push = max(index for index, layer in enumerate(layers) if layer.pushes)
    first_pop = min(index for index, layer in enumerate(layers) if layer.skip_channels)
    return range(last_push + 1, first_pop + 1)


def sent_shapes(layers: Sequence[Layer], cut: int, phase: int) -> tuple[tuple[int, ...], ...]:
    """Per-image shapes that cross before layer ``cut``, in each direction: (h, emb) going down, h alone coming up."""
    h, emb, *_ = boundary_shapes(layers, cut)
    return (h,) if phase else (h, emb)


def _crossing(layers: Sequence[Layer], cut: int, mirror: int) -> int:
    """Elements per image that cross a mirrored pair in each direction."""
    return sum(map(math.prod, (*sent_shapes(layers, cut, phase=0), *sent_shapes(layers, mirror, phase=1))))
