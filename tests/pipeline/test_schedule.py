"""Programs: the order in which each rank works, written out, and faults that are refused."""

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from ddpm_ds.pipeline.schedule import (
    Instruction,
    Program,
    accumulated,
    check_programs,
    most_in_flight,
    most_kept,
    program,
    weight_passes,
    written,
    zero_bubble_v,
)
from ddpm_ds.planning.simulate import PhaseCosts, RankCosts, simulate
from ddpm_ds.schema.layout import Schedule
from tests.pipeline.random_programs import random_programs

# f forward and b backward of phase 0, down the U-Net; F and B those of phase 1, up it; then the micro-batch.
GRIDS: dict[tuple[Schedule, int, int], list[str]] = {
    ("1f1b", 2, 4): ["f0 f1 b0 f2 b1 f3 b2 b3", "f0 b0 f1 b1 f2 b2 f3 b3"],
    ("folded", 2, 4): [
        "f0 f1 f2 F0 B0 F1 f3 B1 F2 b0 B2 F3 b1 B3 b2 b3",
        "f0 F0 f1 F1 f2 B0 F2 b0 f3 B1 F3 b1 B2 b2 B3 b3",
    ],
    ("folded", 4, 8): [
        "f0 f1 f2 f3 f4 f5 f6 F0 B0 F1 B1 F2 B2 F3 f7 B3 F4 b0 B4 F5 b1 B5 F6 b2 B6 F7 b3 B7 b4 b5 b6 b7",
        "f0 f1 f2 f3 f4 F0 f5 F1 B0 F2 B1 F3 f6 B2 F4 b0 f7 B3 F5 b1 B4 F6 b2 B5 F7 b3 B6 b4 B7 b5 b6 b7",
        "f0 f1 f2 F0 f3 F1 f4 F2 B0 F3 f5 B1 F4 b0 f6 B2 F5 b1 f7 B3 F6 b2 B4 F7 b3 B5 b4 B6 b5 B7 b6 b7",
        "f0 F0 f1 F1 f2 F2 f3 F3 f4 B0 F4 b0 f5 B1 F5 b1 f6 B2 F6 b2 f7 B3 F7 b3 B4 b4 B5 b5 B6 b6 B7 b7",
    ],
}
PLACES: list[tuple[Schedule, int, int]] = [("1f1b", 1, 3), ("1f1b", 3, 5), ("folded", 2, 4), ("folded", 3, 7)]


def programs(schedule: Schedule, ranks: int, micro_batches: int) -> list[Program]:
    return [program(schedule, micro_batches, ranks, rank) for rank in range(ranks)]


@pytest.mark.parametrize(("schedule", "ranks", "micro_batches"), GRIDS)
def test_the_grid_of_passes(schedule: Schedule, ranks: int, micro_batches: int) -> None:
    letters = {("ForwardPass", 0): "f", ("BackwardPass", 0): "b", ("ForwardPass", 1): "F", ("BackwardPass", 1): "B"}
    grid = [
        " ".join(f"{letters[one[:2]]}{one.micro_batches[0]}" for one in own if one[:2] in letters)
        for own in programs(schedule, ranks, micro_batches)
    ]
    assert grid == GRIDS[schedule, ranks, micro_batches]


@pytest.mark.parametrize(("schedule", "ranks", "micro_batches"), PLACES)
def test_any_order_that_the_format_allows_passes_the_check_and_runs_to_its_end(
    schedule: Schedule, ranks: int, micro_batches: int
) -> None:
    costs = [RankCosts((PhaseCosts(1.0, 2.0, weight_seconds=1.0),) * 2)] * ranks
    for seed in range(20):
        made = random_programs(schedule, micro_batches, ranks, seed)
        check_programs(made, schedule, micro_batches)
        assert simulate(schedule, micro_batches, costs, programs=made).step_seconds > 0
        assert 1 < most_in_flight(made) <= micro_batches + 1
    check_programs(programs(schedule, ranks, micro_batches), schedule, micro_batches)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_zero_bubble_v_is_the_order_that_pytorch_has(ranks: int) -> None:
    theirs = torch_schedules.ScheduleZBVZeroBubble.__new__(torch_schedules.ScheduleZBVZeroBubble)
    theirs.pp_group_size, theirs.num_stages = ranks, 2 * ranks
    names = {"F": "ForwardPass", "I": "InputGradients", "W": "WeightGradients"}
    for count in (1, ranks, 2 * ranks - 1, 2 * ranks + 3):
        theirs._n_microbatches = count
        made = [zero_bubble_v(count, ranks, rank) for rank in range(ranks)]
        check_programs(made, "folded", count)
        for rank, own in enumerate(made):
            order = [action for action in theirs._calculate_single_rank_operations(rank) if action is not None]
            assert [one for one in own if one.name in names.values()] == [
                (names[kind.value], int(stage != rank), (number,)) for stage, kind, number, *_ in order
            ]


def test_a_single_stage_computes_weight_gradients_of_some_micro_batches_together() -> None:
    own = accumulated(5, 2)
    check_programs([own], "1f1b", 5)
    assert written([own]) == "rank 0: f0 i0 f1 i1 w0,1 f2 i2 f3 i3 w2,3 f4 i4 w4\n"
    assert (most_kept(own), weight_passes([own], "1f1b")) == (2, ((3,),))


def changed(own: Program, *changes: tuple[int, list[Instruction]]) -> Program:
    """A program in which some instructions, by their number, are replaced by others."""
    replaced = dict(changes)
    return tuple(one for number, old in enumerate(own) for one in replaced.get(number, [old]))


def test_programs_that_miss_or_repeat_a_gradient_are_refused_with_rank_and_micro_batch() -> None:
    """Each fault alone, on one rank: lost, twice, too early, out of order."""
    weights = Instruction("WeightGradients", 0, (0, 1))
    split = [
        Instruction("LoadMicroBatch", 0, (0,)),
        Instruction("ForwardPass", 0, (0,)),
        Instruction("InputGradients", 0, (0,)),
        Instruction("LoadMicroBatch", 0, (1,)),
        Instruction("ForwardPass", 0, (1,)),
        Instruction("InputGradients", 0, (1,)),
        weights,
        Instruction("ReduceGrads"),
        Instruction("OptimizerStep"),
    ]
    good = tuple(split)
    check_programs([good], "1f1b", 2)
    faults: list[tuple[Program, str]] = [
        (changed(good, (6, [])), r"weight gradients of phase 0 are of \[\]"),
        (changed(good, (6, [weights, weights])), r"are of \[0, 0, 1, 1\]"),
        (changed(good, (4, [weights, good[4]])), "WeightGradients of micro-batch 1 in phase 0 comes before its Input"),
        (changed(good, (1, []), (2, [good[2], good[1]])), "InputGradients of micro-batch 0 in phase 0 comes before"),
        (
            changed(good, (4, []), (5, []), (6, [weights._replace(micro_batches=(0,))])),
            r"forwards of phase 0 are \[0\], not 0 to 1 in order",
        ),
        (changed(good, (3, [])), "loads, sends or the end of the step"),
        (changed(good, (7, [])), "loads, sends or the end of the step"),
    ]
    for fault, message in faults:
        with pytest.raises(ValueError, match=f"rank 0 of 1: (.*)?{message}"):
            check_programs([fault], "1f1b", 2)
    fold = programs("folded", 2, 4)
    early = next(number for number, one in enumerate(fold[1]) if one[:2] == ("BackwardPass", 1))
    with pytest.raises(ValueError, match="rank 1 of 2: BackwardPass of micro-batch 0 in phase 0 comes before that of"):
        check_programs([fold[0], changed(fold[1], (early, [Instruction("BackwardPass", 0, (0,))]))], "folded", 4)
