"""Cuts are exact, and impossible ones are refused with the fix."""

from __future__ import annotations

import itertools
import random

import pytest

from ddpm_ds.config.ds_config import Schedule
from ddpm_ds.config.spec import Interface
from ddpm_ds.errors import LayoutError
from ddpm_ds.pipeline import cuts as search
from ddpm_ds.pipeline.cuts import Room, balanced, describe, neighbouring, partition, sent_shapes, weighted
from ddpm_ds.unet.layers import unet_layers
from tests.launching import tiny_spec

SPEC = tiny_spec()
CONDITIONED = unet_layers(SPEC.unet, Interface(channels=1, size=(8, 8), condition_channels=3))
LAYERS = unet_layers(SPEC.unet, Interface(channels=1, size=(8, 8)))


def brute_force(
    weights: list[int], stages: int, elements: list[int], crossing: int, room: Room | None
) -> tuple[int, int] | None:
    """Heaviest part and elements crossing of the best partition, by trying them all; None where none has room."""
    n = len(weights)
    options = []
    for cuts in itertools.combinations(range(1, n), stages - 1):
        bounds = (0, *cuts, n)
        if room is None or all(
            sum(room.layer_bytes(rank, 0)[a:b]) <= room.limit for rank, (a, b) in enumerate(itertools.pairwise(bounds))
        ):
            options.append(judge(weights, elements, crossing, bounds))
    return min(options, default=None)


def judge(weights: list[int], elements: list[int], crossing: int, bounds: tuple[int, ...]) -> tuple[int, int]:
    cut = [0, *elements, 0]
    heaviest = max(sum(weights[a:b]) + crossing * (cut[a] + cut[b]) for a, b in itertools.pairwise(bounds))
    return heaviest, sum(cut[bound] for bound in bounds)


@pytest.mark.parametrize("seed", range(60))
def test_balanced_finds_the_lightest_heaviest_stage_in_its_room_and_then_the_least_crossing(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(3, 9)
    weights = [rng.randint(0, 9) for _ in range(n)]
    elements = [rng.randint(1, 9) for _ in range(n - 1)]
    stages, crossing = rng.randint(1, min(4, n)), rng.choice([0, 1])
    sizes = [[rng.randint(0, 9) for _ in range(n)] for _ in range(stages)]
    room = rng.choice([None, Room(rng.randint(5, 30), lambda rank, phase: sizes[rank])])
    best = brute_force(weights, stages, elements, crossing, room)
    if best is None:
        with pytest.raises(LayoutError, match="hold no more than their memory"):
            balanced(weights, stages, elements, crossing, room)
        return
    bounds = balanced(weights, stages, elements, crossing, room)
    assert len(bounds) == stages + 1 and list(bounds) == sorted(set(bounds))
    assert judge(weights, elements, crossing, bounds) == best
    assert room is None or all(
        sum(sizes[rank][a:b]) <= room.limit for rank, (a, b) in enumerate(itertools.pairwise(bounds))
    )


@pytest.mark.parametrize("method", ["flops", "parameters", "uniform"])
@pytest.mark.parametrize("stages", [1, 2, 4, len(LAYERS)])
def test_stages_cover_all_layers_once(method: str, stages: int) -> None:
    rows = describe(LAYERS, partition(LAYERS, stages, method))  # type: ignore[arg-type]
    assert sum(row.layers for row in rows) == len(LAYERS) and all(row.layers for row in rows)
    assert sum(row.parameters for row in rows) == sum(layer.parameters for layer in LAYERS)
    assert rows[-1].sent_elements == 0 and all(row.sent_elements for row in rows[:-1])


def test_given_cuts_are_taken_as_they_are() -> None:
    assert partition(LAYERS, 3, [4, 9]) == (0, 4, 9, len(LAYERS))


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
    said = r"pipeline\.partition cuts before layer 1, conv_in, .*data\.condition is never sent.*layer 2 or later"
    with pytest.raises(LayoutError, match=said) as error:
        partition(CONDITIONED, len(cuts) + 1 if schedule == "1f1b" else 2, cuts, schedule)
    assert "\n" not in str(error.value)
    with pytest.raises(LayoutError, match=f"first two stay together; use at most {most} stages"):
        partition(CONDITIONED, most + 1, "flops")


@pytest.mark.parametrize(
    ("stages", "method", "said"),
    [
        (len(LAYERS) + 1, "flops", f"use at most {len(LAYERS)} stages"),
        (3, [9, 4], "give 2 increasing positions"),
        (3, [4], "give 2 increasing positions"),
        (2, [0], "between 1 and"),
    ],
)
def test_impossible_cuts_are_refused_with_the_fix(stages: int, method: object, said: str) -> None:
    with pytest.raises(LayoutError, match=said) as error:
        partition(LAYERS, stages, method)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_what_a_search_needs_of_the_layers_alone_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner searches thousands of times for cuts of one U-Net."""
    schedules: tuple[Schedule, ...] = "1f1b", "planned"
    found = [weighted(LAYERS, [1.0] * len(LAYERS), 2, schedule) for schedule in schedules]
    monkeypatch.setattr(search, "sent_elements", None)
    assert found == [weighted(LAYERS, [1.0] * len(LAYERS), 2, schedule) for schedule in schedules]
