"""Cuts of the list of layers into stages: exact partitions, under both schedules.

A partition is written as its bounds ``(0, b1, ..., n)``: stage ``s`` owns layers ``bounds[s]`` to
``bounds[s + 1] - 1``. Under ``1f1b`` rank r holds stage r. Under ``folded`` P ranks hold 2P stages, rank r the stages r
and 2P - 1 - r, cut in mirrored pairs, so that every skip is made and used on one rank.

The number of live skips rises along the encoder and falls along the decoder. A cut of the encoder and a cut of the
decoder are mirrored if that number is the same at both: then every skip made between them is used between them::

    live skips   1    2    3         3    2    1
    layers     0 ─┬── ─┬── ─┬── turn ─┬── ─┬── ─┬─ n
                  └────────── rank 0 ───────────┘        outside of the outer pair
                       └───── rank 1 ──────┘             between the pairs
                            └ rank 2 ─┘                  inside of the inner pair

Both searches look for the lightest path through the possible cuts (:func:`lightest_chain`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ddpm_ds.ground.errors import LayoutError
from ddpm_ds.schema.layout import Schedule
from ddpm_ds.unet.layers import Layer, boundary_shapes, context_elements, first_cut, has_residual

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


PartitionMethod = Literal["flops", "parameters", "uniform"]

CROSSING_MACS = 65
"""Cost, to the rank on either side, of an element that crosses a cut and of its gradient, in multiply-accumulates of a
forward.

A CPU core computes this many while it copies the element. An H100 computes 800 while its NVLink carries it, but its
copy engines overlap that with other micro-batches.
"""


def folds(schedule: Schedule) -> bool:
    """Return whether a rank holds two mirrored stages instead of one."""
    return schedule != "1f1b"


@dataclass(frozen=True)
class Room:
    """Memory limit of the ranks, and memory of the layers."""

    limit: float
    """Maximum bytes of a rank."""
    layer_bytes: Callable[[int, int], Sequence[float]]
    """Function from rank and phase to the bytes of each layer there, including its weights and their state."""


def running_sum(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the sums of the first 0, 1, ... values."""
    import numpy as np  # only now: command lines are read without it

    return np.concatenate([[0.0], np.cumsum(values)])


def lightest_chain(weights: Sequence[npt.NDArray[np.float64]], prices: Sequence[float]) -> list[int] | None:
    """Divide a list so that its heaviest part is as light as possible; return the places between the parts.

    Ties are broken by the smallest sum of the places' ``prices``. ``weights[n][a, b]`` is the weight of the n-th part,
    from place a to place b, infinite if there is none; the first part has one row, the last one column. Returns None
    if no division is finite. Exact dynamic programming: O(places^2) for each part but the first and the last.
    """
    import numpy as np

    lightest = np.zeros(1)
    for part in weights:
        lightest = np.maximum(lightest[:, None], part).min(0)
    limit = lightest[0]
    if not math.isfinite(limit):
        return None
    price, charges, choices = np.zeros(1), np.asarray(prices, np.float64), []
    for part in weights[:-1]:
        options = price[:, None] + np.where(part <= limit, charges, math.inf)
        choices.append(options.argmin(0))
        price = options.min(0)
    place = int((price + np.where(weights[-1][:, 0] <= limit, 0.0, math.inf)).argmin())
    chain = []
    for choice in reversed(choices):
        chain.append(place)
        place = int(choice[place])
    return chain[::-1]


def _ends(part: int, parts: int) -> tuple[slice, slice]:
    """Return the places where a part may begin, and those where it may end, among the start, all cuts and the end."""
    return slice(1, -1) if part else slice(1), slice(-1, None) if part == parts - 1 else slice(1, -1)


@dataclass(frozen=True)
class _Pairs:
    """Mirrored pairs of cuts: the two ends of the list first, its turn last."""

    lefts: npt.NDArray[np.int64]
    rights: npt.NDArray[np.int64]
    elements: npt.NDArray[np.float64]
    """Elements per image that cross a pair, in both phases."""
    nested: npt.NDArray[np.bool_]
    """Whether a pair (row) may be around another (column)."""
    turns: npt.NDArray[np.int64]

    @functools.cached_property
    def most(self) -> int:
        """Maximum number of ranks."""
        count, reached = 0, self.nested[0]
        while reached.any():
            count += int(reached[-1])
            reached = (reached[:, None] & self.nested).any(0)
        return count


@functools.lru_cache(maxsize=64)
def _mirrored_pairs(layers: tuple[Layer, ...]) -> _Pairs:
    import numpy as np  # only now: command lines are read without it

    live, turns = live_skips(layers), _turns(layers)
    pairs = [
        (cut, mirror)
        for cut in range(first_cut(layers), turns[-1])
        for mirror in range(turns[0] + 1, len(layers))
        if live[cut] == live[mirror] and any(cut < turn < mirror for turn in turns)
    ]
    down, up = ([sent_elements(layers, cut, phase, "folded") for cut in range(1, len(layers))] for phase in (0, 1))
    crosses = [float(down[cut - 1] + up[mirror - 1]) for cut, mirror in pairs]
    lefts, rights = (np.array(side) for side in zip((0, len(layers)), *pairs, (turns[0], turns[0]), strict=True))
    nested = (lefts[:, None] < lefts[None, :]) & (rights[:, None] > rights[None, :])
    nested[:-1, -1], nested[-1] = True, False
    return _Pairs(lefts, rights, np.array([0.0, *crosses, 0.0]), nested, np.array(turns))


def mirrored_cuts(
    layers: Sequence[Layer], weights: Sequence[float], ranks: int, crossing: float = 0.0, room: Room | None = None
) -> tuple[int, ...]:
    """Return the mirrored bounds of ``2 * ranks`` stages that exactly minimise the heaviest rank.

    Ties are broken by the fewest crossing elements, which weigh ``crossing`` each on both sides. The turn, which only
    divides the last rank's layers, makes its two stages as equal as possible. Raises LayoutError as :func:`weighted`.
    """
    import numpy as np

    pairs = _mirrored_pairs(tuple(layers))
    if ranks > pairs.most:
        raise LayoutError(
            f"pipeline.stages = {ranks}, but a fold of this U-Net has mirrored cuts for {pairs.most} at most; "
            'use fewer stages, or "1f1b" as pipeline.schedule'
        )
    lefts, rights, turns, before = pairs.lefts, pairs.rights, pairs.turns, running_sum(weights)
    inside = before[rights] - before[lefts]
    # turns (columns) that the last rank may have if it begins at a place (row)
    within = np.array((lefts[:, None] < turns) & (turns < rights[:, None]))
    parts: list[npt.NDArray[np.float64]] = []
    for rank in range(ranks):
        if room is None and 1 < rank < ranks - 1:
            parts.append(parts[-1])
            continue
        outer, inner = _ends(rank, ranks)
        allowed = pairs.nested[outer, inner]
        if room is not None:
            down, up = (running_sum(room.layer_bytes(rank, phase)) for phase in (0, 1))
            if rank < ranks - 1:
                lower, upper = down[lefts], up[rights]
                taken = (lower[inner][None, :] - lower[outer][:, None]) + (
                    upper[outer][:, None] - upper[inner][None, :]
                )
                allowed = np.logical_and(allowed, taken <= room.limit)
            else:
                taken = down[turns] - down[lefts][:, None] + up[rights][:, None] - up[turns]
                within[taken > room.limit] = False
                allowed = np.any(within[outer], axis=1, keepdims=True)
        sizes = inside[outer][:, None] - inside[inner][None, :]
        sizes += crossing * np.add.outer(pairs.elements[outer], pairs.elements[inner])
        sizes[~allowed] = math.inf
        parts.append(sizes)
    chain = lightest_chain(parts, pairs.elements[1:-1].tolist())
    if chain is None:
        raise LayoutError(f"no fold of the layers onto {ranks} ranks fits their memory")
    chosen = [1 + number for number in chain]
    last = chosen[-1] if chosen else 0
    turn = min(
        turns[within[last]].tolist(),
        key=lambda turn: abs(2 * before[turn] - before[lefts[last]] - before[rights[last]]),
    )
    return (0, *lefts[chosen].tolist(), turn, *rights[chosen[::-1]].tolist(), len(layers))


def check_mirrored(layers: Sequence[Layer], bounds: Sequence[int]) -> None:
    """Raise LayoutError if a skip would leave its rank under these bounds of a fold, and name mirrored cuts."""
    live, turns, ranks = live_skips(layers), _turns(layers), len(bounds) // 2
    if bounds[ranks] not in turns:
        raise LayoutError(
            f"pipeline.partition turns at {bounds[ranks]}, its middle cut; a fold turns between the last layer that "
            f"makes a skip and the first that uses one: at {' or '.join(map(str, turns))}"
        )
    for cut, mirror in zip(bounds[1:ranks], reversed(bounds[ranks + 1 : -1]), strict=True):
        if live[cut] != live[mirror]:
            after = range(bounds[ranks] + 1, len(layers))
            fitting = [str(other) for other in after if live[other] == live[cut]] or ["none after the turn"]
            raise LayoutError(
                f"pipeline.partition: the cuts {cut} and {mirror} are not mirrored: {live[cut]} skips are alive at one "
                f"and {live[mirror]} at the other; with {cut} goes {' or '.join(fitting)}"
            )


def neighbouring(layers: Sequence[Layer], bounds: Sequence[int], schedule: Schedule) -> Iterator[tuple[int, ...]]:
    """Yield the bounds in which one cut, or one mirrored pair of a fold, moves by up to two layers."""
    stages, steps = len(bounds) - 1, (-2, -1, 1, 2)
    if folds(schedule):
        middle = stages // 2
        pairs = itertools.product(range(1, middle), (0, *steps), (0, *steps))
        moves = [{place: down, stages - place: up} for place, down, up in pairs if down or up]
        moves += [{middle: step} for step in steps]
    else:
        moves = [{place: step} for place in range(1, stages) for step in steps]
    for move in moves:
        moved = tuple(bound + move.get(place, 0) for place, bound in enumerate(bounds))
        if all(left < right for left, right in itertools.pairwise(moved)):
            with contextlib.suppress(LayoutError):
                _check_condition(layers, moved)
                if folds(schedule):
                    check_mirrored(layers, moved)
                yield moved


def live_skips(layers: Sequence[Layer]) -> list[int]:
    """Return the number of live skips (made but not yet used) before each layer, and at the end."""
    changes = (layer.pushes - (layer.skip_channels > 0) for layer in layers)
    return list(itertools.accumulate(changes, initial=0))


def _turns(layers: Sequence[Layer]) -> range:
    """Return the cuts after the last layer that makes a skip, up to the one before the first layer that uses one."""
    last_push = max(index for index, layer in enumerate(layers) if layer.pushes)
    first_pop = min(index for index, layer in enumerate(layers) if layer.skip_channels)
    return range(last_push + 1, first_pop + 1)


def partition(
    layers: Sequence[Layer], stages: int, method: PartitionMethod | Sequence[int], schedule: Schedule = "1f1b"
) -> tuple[int, ...]:
    """Return the bounds for a pipeline of ``stages`` ranks.

    ``flops`` exactly minimises the slowest rank's layers and transfers, ``parameters`` and ``uniform`` the maximum
    parameters and layers of a rank; ties are broken by the fewest crossing elements. A sequence gives the first layer
    of every stage but the first.

    Raises LayoutError if the list can't be cut so: too many stages, or given cuts that do not increase or, in a fold,
    are not mirrored.
    """
    if not isinstance(method, str):
        count = 2 * stages if folds(schedule) else stages
        bounds = (0, *map(int, method), len(layers))
        if len(bounds) != count + 1 or any(left >= right for left, right in itertools.pairwise(bounds)):
            raise LayoutError(
                f"pipeline.partition = {list(method)} does not cut {len(layers)} layers into {count} stages; "
                f"give {count - 1} increasing positions between 1 and {len(layers) - 1}"
            )
        _check_condition(layers, bounds)
        if folds(schedule):
            check_mirrored(layers, bounds)
        return bounds
    measures: dict[str, Sequence[float]] = {
        "flops": [layer.work for layer in layers],
        "parameters": [layer.parameters for layer in layers],
        "uniform": [1 for _ in layers],
    }
    return weighted(layers, measures[method], stages, schedule, crossing=CROSSING_MACS if method == "flops" else 0.0)


def weighted(
    layers: Sequence[Layer],
    weights: Sequence[float],
    stages: int,
    schedule: Schedule,
    *,
    crossing: float = 0.0,
    room: Room | None = None,
) -> tuple[int, ...]:
    """Return the bounds that minimise the heaviest rank's sum of ``weights``, one for each layer.

    Each element that crosses a cut, per image, adds ``crossing`` to the ranks on both sides; no rank exceeds ``room``.
    Raises LayoutError if the list can't be cut into so many stages, or not within the ``room``.
    """
    if folds(schedule):
        return mirrored_cuts(layers, weights, stages, crossing, room)
    first = first_cut(layers)
    most = len(layers) - first + 1
    if stages > most:
        together = ", and its first two stay together" if first > 1 else ""
        raise LayoutError(
            f"pipeline.stages = {stages}, but the U-Net has {len(layers)} layers{together}; use at most {most} stages"
        )
    return balanced(weights, stages, _crossing_elements(tuple(layers)), crossing, room, first)


@functools.lru_cache(maxsize=64)
def _crossing_elements(layers: tuple[Layer, ...]) -> list[int]:
    """Return the elements per image that cross before each layer but the first."""
    return [sent_elements(layers, cut) for cut in range(1, len(layers))]


def _check_condition(layers: Sequence[Layer], bounds: Sequence[int]) -> None:
    """Refuse a cut that a condition would cross; raises LayoutError."""
    if bounds[1] < (first := first_cut(layers)):
        raise LayoutError(
            f"pipeline.partition cuts before layer {bounds[1]}, {layers[bounds[1]].name}, and data.condition is never "
            f"sent between stages; begin the second stage at layer {first} or later"
        )


def balanced(
    weights: Sequence[float],
    stages: int,
    elements: Sequence[float],
    crossing: float = 0.0,
    room: Room | None = None,
    first: int = 1,
) -> tuple[int, ...]:
    """Return the contiguous partition that exactly minimises the heaviest part, and then the elements that cross.

    ``elements[i]`` cross a cut before item ``i + 1``, and weigh ``crossing`` each in the parts on both sides. No cut is
    before item ``first``. Raises LayoutError if no partition fits every part into the ``room``.
    """
    import numpy as np  # only now: command lines are read without it

    before, cut = running_sum(weights), np.array([0.0, *elements, 0.0])
    parts = before[None, :] - before[:, None] + crossing * (cut[None, :] + cut[:, None])  # [start, stop]
    parts[np.tril_indices(len(before))] = math.inf
    parts[0, 1:first] = math.inf
    edges = [parts] * stages
    if room is not None:
        sums = [running_sum(room.layer_bytes(rank, 0)) for rank in range(stages)]
        edges = [np.where(one[None, :] - one[:, None] <= room.limit, parts, math.inf) for one in sums]
    chain = lightest_chain([edge[_ends(rank, stages)] for rank, edge in enumerate(edges)], elements)
    if chain is None:
        raise LayoutError(f"no cut of the layers into {stages} stages fits their memory")
    return (0, *(place + 1 for place in chain), len(weights))


def stages_of(rank: int, ranks: int, schedule: Schedule) -> tuple[int, ...]:
    """Return the stages that a rank holds, in the order in which a micro-batch meets them."""
    return (rank, 2 * ranks - 1 - rank) if folds(schedule) else (rank,)


def segments(bounds: Sequence[int], schedule: Schedule, rank: int) -> tuple[tuple[int, int], ...]:
    """Return the layers [start, stop) that a rank owns: one range, or in a fold one for each phase."""
    ranks = (len(bounds) - 1) // (2 if folds(schedule) else 1)
    return tuple((bounds[stage], bounds[stage + 1]) for stage in stages_of(rank, ranks, schedule))


@dataclass(frozen=True)
class Stage:
    """Layers, costs and messages of one stage; one row of the table that ``--dry-run`` prints."""

    index: int
    rank: int
    """Rank in the pipeline that holds the stage."""
    start: int
    stop: int
    """End of the stage: its layers are ``start`` to ``stop - 1`` of the list."""
    first_layer: str
    last_layer: str
    layers: int
    parameters: int
    forward_flops: int
    """Flops of a forward per image; a multiply and an add count as two."""
    activation_elements: int
    """Elements per image kept from forward to backward without checkpointing."""
    sent_elements: int
    """Elements per image sent to another rank in forward; the gradient comes back in backward."""
    received_elements: int
    """Elements per image received from another rank in forward."""


def describe(layers: Sequence[Layer], bounds: Sequence[int], schedule: Schedule = "1f1b") -> tuple[Stage, ...]:
    """Return the stages of a partition, in the order of the layers."""
    count = len(bounds) - 1
    ranks = count // 2 if folds(schedule) else count
    stages: list[Stage] = []
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        own = layers[start:stop]
        stages.append(
            Stage(
                index=index,
                rank=min(index, count - 1 - index) if folds(schedule) else index,
                start=start,
                stop=stop,
                first_layer=own[0].name,
                last_layer=own[-1].name,
                layers=len(own),
                parameters=sum(layer.parameters for layer in own),
                forward_flops=2 * sum(layer.macs for layer in own),
                activation_elements=sum(layer.activation_elements for layer in own),
                sent_elements=sent_elements(layers, stop, index // ranks, schedule)
                if stop < len(layers) and not (folds(schedule) and index == ranks - 1)
                else 0,
                received_elements=stages[-1].sent_elements if stages else 0,
            )
        )
    return tuple(stages)


def sent_shapes(layers: Sequence[Layer], cut: int, phase: int, schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return the per-image shapes of the tensors that cross before layer ``cut``, in each direction.

    A fold keeps skips, and for phase 1 the embedding, on their rank: phase 0 sends (h, emb), phase 1 only h, each with
    a residual that is open.
    """
    shapes = boundary_shapes(layers, cut)
    if not folds(schedule):
        return shapes
    return shapes[: 1 if phase else 2] + shapes[len(shapes) - has_residual(layers, cut) :]


def relayed_elements(layers: Sequence[Layer], stages: int) -> int:
    """Return the elements per image that a line of stages, cut by flops, sends each way: skips and encoded text."""
    cuts = partition(layers, stages, "flops")[1:-1]
    return sum(sent_elements(layers, cut) + context_elements(layers, (cut, len(layers))) for cut in cuts)


def sent_elements(layers: Sequence[Layer], cut: int, phase: int = 0, schedule: Schedule = "1f1b") -> int:
    """Return the elements per image of :func:`sent_shapes`."""
    return sum(map(math.prod, sent_shapes(layers, cut, phase, schedule)))
