"""Cuts are exact, impossible ones are refused with the fix, and every fold computes what the whole list does."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpm_ds.ground.errors import LayoutError
from ddpm_ds.pipeline import cuts as search
from ddpm_ds.pipeline.cuts import (
    Room,
    check_mirrored,
    describe,
    folds,
    neighbouring,
    partition,
    segments,
    sent_shapes,
    weighted,
)
from ddpm_ds.schema.layout import Schedule
from ddpm_ds.unet.layers import Layer, has_residual, unet_layers
from ddpm_ds.unet.model import UNet
from ddpm_ds.unet.spec import Interface
from tests.launching import tiny_spec, tiny_text_spec
from tests.unet.variants import randomise

SPEC = tiny_spec()
LAYERS = unet_layers(SPEC.unet, Interface(channels=1, size=(8, 8)))
CONDITIONED = unet_layers(SPEC.unet, Interface(channels=1, size=(8, 8), condition_channels=3))
TEXT = {"context_channels": 6, "tokens": 5, "blocks": [1, 2], "middle_blocks": 2, "heads": [2, 4]}
TEXT_LAYERS = unet_layers(tiny_text_spec(unet={"text": TEXT}).unet, Interface(channels=1, size=(8, 8)))


def mirrored_pairs(layers: Sequence[Layer]) -> list[tuple[int, int]]:
    """Every (cut, mirror), found by walking the list with numbered skips."""
    makers: list[list[int]] = [[]]
    for index, layer in enumerate(layers):
        stack = list(makers[-1])
        if layer.skip_channels:
            stack.pop()
        if layer.pushes:
            stack.append(index)
        makers.append(stack)
    middle = max(range(len(makers)), key=lambda cut: len(makers[cut]))
    return [
        (cut, mirror)
        for cut in range(1, middle + 1)
        for mirror in range(middle, len(layers))
        if makers[cut] == makers[mirror] and cut < mirror
    ]


def all_folds(layers: Sequence[Layer], ranks: int) -> list[tuple[int, ...]]:
    """Every mirrored partition, by trying them all."""
    pushes = [index for index, layer in enumerate(layers) if layer.pushes]
    pops = [index for index, layer in enumerate(layers) if layer.skip_channels]
    found = []
    for pairs in itertools.combinations(mirrored_pairs(layers), ranks - 1):
        cuts, mirrors = [cut for cut, _ in pairs], [mirror for _, mirror in pairs]
        if sorted(set(cuts)) != cuts or sorted(set(mirrors), reverse=True) != mirrors:
            continue
        for turn in range(pushes[-1] + 1, pops[0] + 1):
            if not cuts or cuts[-1] < turn < mirrors[-1]:
                found.append((0, *cuts, turn, *reversed(mirrors), len(layers)))
    return found


def all_cuts(layers: Sequence[Layer], ranks: int, schedule: Schedule) -> list[tuple[int, ...]]:
    """Every partition, by trying them all."""
    if folds(schedule):
        return all_folds(layers, ranks)
    return [(0, *cuts, len(layers)) for cuts in itertools.combinations(range(1, len(layers)), ranks - 1)]


def walk_folded(layers: Sequence[Layer], modules: Any, bounds: Sequence[int], inputs: tuple[Tensor, ...]) -> Tensor:
    """The forward of a fold in one process; asserts the shapes of all that crosses, also of a residual that is open."""
    ranks = (len(bounds) - 1) // 2
    parts = [segments(bounds, "folded", rank) for rank in range(ranks)]
    kept: list[tuple[Tensor, ...]] = []
    carry: Any = inputs
    for rank, ((start, stop), _) in enumerate(parts):
        for module in modules[start:stop]:
            carry = module(carry)
        end = len(carry) - (has_residual(layers, stop) and rank < ranks - 1)
        kept.append(carry[1:end])
        carry = (*carry[:2], *carry[end:])
        if rank < ranks - 1:
            assert [tuple(t.shape[1:]) for t in carry] == list(sent_shapes(layers, stop, phase=0, schedule="folded"))
    h, residual = carry[0], ()
    for rank, (_, (start, stop)) in reversed(list(enumerate(parts))):
        carry = (h, *kept.pop(), *residual)
        for module in modules[start:stop]:
            carry = module(carry)
        if rank:
            h, _emb, *residual = carry  # nothing else is left: every skip that was kept has been used
            assert len(residual) == has_residual(layers, stop)
            crossing = [tuple(tensor.shape[1:]) for tensor in (h, *residual)]
            assert crossing == list(sent_shapes(layers, stop, phase=1, schedule="folded"))
    assert isinstance(carry, Tensor)
    return carry


def images(layers: Sequence[Layer]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, *layers[0].output_shape, generator=generator), torch.tensor([3, 7])


@pytest.mark.parametrize(("layers", "tried"), [(LAYERS, 60), (TEXT_LAYERS, 20)], ids=["skips", "text"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_mirrored_cut_computes_what_the_list_does(ranks: int, layers: tuple[Layer, ...], tried: int) -> None:
    unet = UNet(layers, 0).eval()
    randomise(unet, 0)
    context = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = unet(*images(layers), context=context)
        folds = all_folds(layers, ranks)
        assert len(folds) > 1
        for bounds in random.Random(0).sample(folds, min(len(folds), tried)):
            check_mirrored(layers, bounds)
            assert torch.equal(walk_folded(layers, unet.layers, bounds, images(layers)), expected)


@pytest.mark.parametrize("schedule", ["1f1b", "folded"])
@pytest.mark.parametrize("seed", range(40))
def test_the_heaviest_rank_is_the_lightest_possible_in_its_room_and_then_the_least_crosses(
    seed: int, schedule: Schedule
) -> None:
    rng = random.Random(seed)
    weights = [rng.randint(0, 9) for _ in LAYERS]
    ranks, crossing = rng.randint(1, 3 if folds(schedule) else 4), rng.choice([0.0, 0.01])
    sizes = {(rank, phase): [rng.randint(0, 9) for _ in LAYERS] for rank in range(ranks) for phase in (0, 1)}
    room = rng.choice([None, Room(rng.randint(20, 70), lambda rank, phase: sizes[rank, phase])])
    elements = {cut: stage.sent_elements for cut, stage in enumerate(describe(LAYERS, range(len(LAYERS) + 1)), 1)}

    def judge(bounds: tuple[int, ...]) -> tuple[float, int]:
        wires = [elements[cut] for cut in bounds[1:-1]]
        if folds(schedule):
            stages = describe(LAYERS, bounds, schedule)
            wires = [stages[cut].sent_elements + stages[-cut - 2].sent_elements for cut in range(ranks - 1)]
        heaviest = max(
            sum(sum(weights[start:stop]) for start, stop in segments(bounds, schedule, rank))
            + crossing * sum([0, *wires, 0][rank : rank + 2])
            for rank in range(ranks)
        )
        return heaviest, sum(wires)

    def fits(bounds: tuple[int, ...]) -> bool:
        held = (enumerate(segments(bounds, schedule, rank)) for rank in range(ranks))
        return room is None or all(
            sum(sum(sizes[rank, phase][start:stop]) for phase, (start, stop) in parts) <= room.limit
            for rank, parts in enumerate(held)
        )

    fitting = list(filter(fits, all_cuts(LAYERS, ranks, schedule)))
    if not fitting:
        with pytest.raises(LayoutError, match="fits their memory"):
            weighted(LAYERS, weights, ranks, schedule, crossing=crossing, room=room)
        return
    found = weighted(LAYERS, weights, ranks, schedule, crossing=crossing, room=room)
    assert fits(found) and judge(found) == pytest.approx(min(map(judge, fitting)))


@pytest.mark.parametrize("schedule", ["1f1b", "folded"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_neighbours_of_cuts_are_all_with_one_cut_or_pair_moved_by_two_layers_at_most(
    ranks: int, schedule: Schedule
) -> None:
    known = all_cuts(LAYERS, ranks, schedule)

    def near(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        moved = [place for place, (here, there) in enumerate(zip(one, other, strict=True)) if here != there]
        pair = {min(place, len(one) - 1 - place) if schedule == "folded" else place for place in moved}
        return len(pair) == 1 and all(abs(one[place] - other[place]) <= 2 for place in moved)

    for bounds in random.Random(0).sample(known, min(len(known), 5)):
        found = list(neighbouring(LAYERS, bounds, schedule))
        assert sorted(found) == sorted(other for other in known if near(bounds, other))


@pytest.mark.parametrize("schedule", ["1f1b", "folded"])
def test_a_condition_crosses_no_cut(schedule: Schedule) -> None:
    """It is read by the first convolution, so no cut is before that, whatever is balanced, moved or given."""
    most = len(CONDITIONED) - 1
    for stages in range(2, 6 if schedule == "folded" else most + 1):
        for method in ("flops", "parameters", "uniform"):
            bounds = partition(CONDITIONED, stages, method, schedule)
            assert bounds[1] > 1
            for moved in (bounds, *neighbouring(CONDITIONED, bounds, schedule)):
                assert moved[1] > 1
                for phase, cut in ((0, moved[1]), (0, moved[stages - 1])):
                    assert sent_shapes(CONDITIONED, cut, phase, schedule) == sent_shapes(LAYERS, cut, phase, schedule)
    heavy_first = [100.0, 100.0, *[1.0] * (len(LAYERS) - 2)]
    assert weighted(LAYERS, heavy_first, 2, "1f1b")[1] == 1 and weighted(CONDITIONED, heavy_first, 2, "1f1b")[1] == 2
    cuts = [1, len(LAYERS) - 1] if schedule == "1f1b" else [1, *partition(LAYERS, 2, "flops", "folded")[2:4]]
    error = r"pipeline\.partition cuts before layer 1, conv_in, .*data\.condition is never sent.*layer 2 or later"
    with pytest.raises(LayoutError, match=error) as found:
        partition(CONDITIONED, len(cuts) + 1 if schedule == "1f1b" else 2, cuts, schedule)
    assert "\n" not in str(found.value)
    with pytest.raises(LayoutError, match=f"first two stay together; use at most {most} stages"):
        partition(CONDITIONED, most + 1, "flops")


@pytest.mark.parametrize(
    ("schedule", "ranks", "method", "error"),
    [
        ("1f1b", len(LAYERS) + 1, "flops", f"use at most {len(LAYERS)} stages"),
        ("1f1b", 3, [9, 4], "give 2 increasing positions"),
        ("1f1b", 3, [4], "give 2 increasing positions"),
        ("1f1b", 2, [0], "between 1 and"),
        ("folded", 9, "flops", "has mirrored cuts for . at most; use fewer stages"),
        ("folded", 2, [2, 3, 9], "turns at 3, its middle cut; a fold turns .* at 6 or 7"),
        ("folded", 2, [2, 6, 8], "cuts 2 and 8 are not mirrored: 1 skips are alive at one and 4 at.*with 2 goes 15"),
        ("folded", 2, [6, 9, 12], "the cuts 6 and 12 are not mirrored: .*; with 6 goes none after the turn"),
        ("folded", 2, [2, 6], "into 4 stages; give 3 increasing positions"),
    ],
)
def test_impossible_cuts_are_refused_with_the_fix(schedule: Schedule, ranks: int, method: Any, error: str) -> None:
    with pytest.raises(LayoutError, match=error) as found:
        partition(LAYERS, ranks, method, schedule)
    assert "\n" not in str(found.value)


def test_what_a_search_needs_of_the_layers_alone_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner searches thousands of times for cuts of one U-Net."""
    schedules: tuple[Schedule, ...] = "1f1b", "planned"
    found = [weighted(LAYERS, [1.0] * len(LAYERS), 2, schedule) for schedule in schedules]
    monkeypatch.setattr(search, "sent_elements", None)
    assert found == [weighted(LAYERS, [1.0] * len(LAYERS), 2, schedule) for schedule in schedules]
