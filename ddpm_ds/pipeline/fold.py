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
from ddpm_ds.pipeline.chain import Room, lightest_chain, running_sum
from ddpm_ds.unet.layers import Layer, boundary_shapes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def balanced(
    layers: Sequence[Layer],
    weights: Sequence[float],
    ranks: int,
    crossing: float = 0.0,
    room: Room | None = None,
) -> tuple[int, ...]:
    """Mirrored bounds of ``2 * ranks`` stages: the heaviest rank is lightest, and then the least crosses. Exact.

    An element that crosses a pair weighs ``crossing`` on both sides of it. The turn, which only divides the last rank's
    layers, is where its two stages are most alike.

    Raises:
        LayoutError: there are not so many mirrored pairs, or none leaves every rank in the ``room``.
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
    prices = [0.0, *(_crossing(layers, *pair) for pair in pairs), 0.0]
    before = running_sum(weights)
    lefts, rights = (np.array(side) for side in zip(*nodes, strict=True))
    parts = np.full((len(prices), len(prices)), math.inf)  # [outer pair, inner pair]; the last is the middle
    nested = (lefts[:, None] < lefts[None, :]) & (rights[:, None] > rights[None, :])
    inside = before[rights] - before[lefts]
    parts[:-1, :-1] = np.where(nested, inside[:, None] - inside[None, :], math.inf)
    parts[:-1, -1] = inside
    parts += crossing * np.add.outer(prices, prices)
    if lightest_chain([parts] * ranks, prices) is None:
        most = next(count for count in range(ranks - 1, 0, -1) if lightest_chain([parts] * count, prices))
        raise LayoutError(
            f'pipeline.stages = {ranks}, but with pipeline.schedule = "folded" this U-Net has mirrored cuts for {most} '
            f"at most; use fewer stages"
        )
    edges, middles = [parts] * ranks, {node: [turn for turn in turns if node[0] < turn < node[1]] for node in nodes}
    if room is not None:
        down, up = ([running_sum(room.layer_bytes(rank, phase)) for rank in range(ranks)] for phase in (0, 1))
        middles = {
            (left, right): [
                turn for turn in within if down[-1][turn] - down[-1][left] + up[-1][right] - up[-1][turn] <= room.limit
            ]
            for (left, right), within in middles.items()
        }
        edges = [_in_room(parts, lefts, rights, *sums, room.limit) for sums in zip(down, up, strict=True)]
        edges[-1][:-1, -1] = np.where([bool(middles[node]) for node in nodes], parts[:-1, -1], math.inf)
    chain = lightest_chain(edges, prices)
    if chain is None:
        raise LayoutError(f"the layers can't be folded onto {ranks} ranks that hold no more than their memory")
    chosen = [nodes[number] for number in chain[1:-1]]
    first, last = chosen[-1] if chosen else nodes[0]
    turn = min(middles[first, last], key=lambda turn: abs(2 * before[turn] - before[first] - before[last]))
    return (0, *(cut for cut, _ in chosen), turn, *(mirror for _, mirror in reversed(chosen)), len(layers))


def _in_room(
    parts: npt.NDArray[np.float64],
    lefts: npt.NDArray[np.int64],
    rights: npt.NDArray[np.int64],
    down: npt.NDArray[np.float64],
    up: npt.NDArray[np.float64],
    limit: float,
) -> npt.NDArray[np.float64]:
    """``parts`` without those whose layers, of which ``down`` and ``up`` are running sums of bytes, take too much."""
    import numpy as np

    held = (down[lefts][None, :] - down[lefts][:, None]) + (up[rights][:, None] - up[rights][None, :])
    allowed = parts.copy()
    allowed[:-1, :-1] = np.where(held <= limit, parts[:-1, :-1], math.inf)
    return allowed


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
