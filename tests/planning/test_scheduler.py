"""The scheduler: never worse than the schedules that have a name, near the busiest rank's work, and deterministic."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ddpm_ds.pipeline.schedule import (
    PASSES,
    Program,
    check_programs,
    neighbours,
    phases_of,
    program,
    split_passes,
    weight_passes,
)
from ddpm_ds.planning.simulate import Link, PhaseCosts, RankCosts, planned, simulate
from ddpm_ds.schema.layout import Schedule
from tests.pipeline.order_model import execute, training_order

EQUAL = PhaseCosts(1.0, 2.0, activation_bytes=1, gradient_bytes=1, weight_seconds=1.0)


def work(costs: Sequence[RankCosts], micro_batches: int) -> float:
    once = micro_batches - 1
    return max(micro_batches * rank.pass_seconds - once * rank.weight_pass_seconds for rank in costs)


def most_kept(own: Program) -> int:
    left: Counter[int] = Counter()
    most = 0
    for name, _, numbers in own:
        left.update(numbers if name == "ForwardPass" else ())
        left.subtract(numbers if name in ("BackwardPass", "WeightGradients") else ())
        most = max(most, sum(passes > 0 for passes in left.values()))
    return most


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "limit"), [(2, 4, 1.042), (2, 8, 1.021), (4, 8, 1.063), (4, 16, 1.032), (8, 16, 1.073)]
)
def test_equal_stages_wait_for_little_more_than_the_first_micro_batch(
    ranks: int, micro_batches: int, limit: float
) -> None:
    """Where only the last rank's first forward is waited for, a step takes (ranks - 1) forwards more than the work."""
    costs = (RankCosts((EQUAL, EQUAL)),) * ranks
    for held in (2 * ranks, ranks):
        programs = planned("folded", micro_batches, costs, most_kept=held)
        step = simulate("folded", micro_batches, costs, programs=programs)
        assert step.step_seconds <= limit * work(costs, micro_batches)
        assert max(map(most_kept, programs)) <= held


@pytest.mark.parametrize("once", [0.3, 1.0])
def test_what_a_pass_of_weight_gradients_takes_once_is_taken_for_several_micro_batches_together(once: float) -> None:
    """Where six are held, three at a time or more: ZeRO-2 sends a third of the bytes of a reduction after each."""
    phase = replace(EQUAL, backward_seconds=2 + once, weight_pass_seconds=once)
    costs, limit = (RankCosts((phase, phase)),) * 2, 6
    programs = planned("planned", 8, costs, most_kept=limit)
    counts = list(itertools.chain(*weight_passes(programs, "planned")))
    assert sum(counts) / len(counts) <= 8 / 3 and max(map(most_kept, programs)) <= limit
    each = (RankCosts((replace(phase, weight_seconds=1 + once, weight_pass_seconds=0.0),) * 2),) * 2
    apart = planned("planned", 8, each, most_kept=limit)
    together, alone = (simulate("planned", 8, costs, programs=own).step_seconds for own in (programs, apart))
    assert work(costs, 8) <= together < alone


@pytest.mark.parametrize("apart", [0.1, 5.0])
def test_a_backward_whose_weight_gradients_would_come_next_is_whole_where_nobody_waits_for_its_input_gradients(
    apart: float,
) -> None:
    costs = (RankCosts((replace(EQUAL, split_seconds=apart),) * 2),) * 2
    programs = planned("planned", 8, costs, most_kept=4)
    for rank, own in enumerate(programs):
        passes = [one for one in own if one.name in PASSES]
        for one, following in itertools.pairwise(passes):
            sends = neighbours("planned", 2, rank, one.phase)[0] is not None
            together = (following.phase, following.micro_batches) == (one.phase, one.micro_batches)
            assert sends or not together or (one.name, following.name) != ("InputGradients", "WeightGradients")
    assert any(map(split_passes, programs)) == (apart < 1)


def random_costs(rng: random.Random, ranks: int, phases: int) -> tuple[RankCosts, ...]:
    def phase() -> PhaseCosts:
        backward, once = rng.uniform(1, 4), rng.choice([0.0, rng.uniform(0, 1)])
        weights = backward * rng.uniform(0.2, 0.6)
        apart = rng.choice([0.0, 0.1 * weights])
        return PhaseCosts(rng.uniform(0.5, 2), backward + once, 1, 1, weights, once, apart)

    return tuple(RankCosts(tuple(phase() for _ in range(phases))) for _ in range(ranks))


@pytest.mark.parametrize("schedule", ["1f1b", "folded"])
def test_on_any_costs_it_holds_no_more_is_never_worse_than_the_named_schedule_and_can_be_executed(
    schedule: Schedule,
) -> None:
    rng = random.Random(1)
    for _ in range(15):
        ranks = rng.randint(1 if schedule == "1f1b" else 2, 5)
        micro_batches, limit = rng.randint(1, 3 * ranks), rng.choice([1, 2, 3]) * ranks
        costs = random_costs(rng, ranks, phases_of(schedule))
        wires = (Link(rng.choice([0.5, 2.0, 1e9]), rng.choice([0.0, 0.5])),) * (ranks - 1)
        programs = planned(schedule, micro_batches, costs, wires, most_kept=limit)
        check_programs(programs, schedule, micro_batches)
        assert execute([training_order(schedule, programs, rank) for rank in range(ranks)]) > 0, "no lock"
        assert max(map(most_kept, programs)) <= limit
        seconds = simulate(schedule, micro_batches, costs, wires, programs=programs).step_seconds
        assert seconds >= work(costs, micro_batches) * (1 - 1e-9)
        if schedule == "1f1b" or micro_batches >= 2 * ranks:
            named = [program(schedule, micro_batches, ranks, rank) for rank in range(ranks)]
            step = simulate(schedule, micro_batches, costs, wires, programs=named)
            assert seconds <= step.step_seconds * (1 + 1e-9) or max(map(most_kept, named)) > limit
