"""The scheduler: never worse than the schedules that have a name, near the busiest rank's work, and deterministic."""

from __future__ import annotations

import random

import pytest

from ddpm_ds.pipeline.cuts import Schedule
from ddpm_ds.pipeline.order import execute, training_order
from ddpm_ds.pipeline.schedule import BACKWARDS, Program, check_programs, phases_of
from ddpm_ds.predict.scheduler import planned
from ddpm_ds.predict.simulate import Link, PhaseCosts, RankCosts, simulate

EQUAL = PhaseCosts(1.0, 2.0, activation_bytes=1, gradient_bytes=1, weight_seconds=1.0)


def work(costs: list[RankCosts], micro_batches: int) -> float:
    """Seconds of the busiest rank, if it never waited."""
    return micro_batches * max(rank.pass_seconds for rank in costs)


def most_held(own: Program) -> int:
    held = most = 0
    for name, phase, _ in own:
        held += (phase == 0) * ((name == "ForwardPass") - (name in BACKWARDS))
        most = max(most, held)
    return most


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "limit"), [(2, 4, 1.042), (2, 8, 1.021), (4, 8, 1.063), (4, 16, 1.032), (8, 16, 1.073)]
)
def test_equal_stages_wait_for_little_more_than_the_first_micro_batch(
    ranks: int, micro_batches: int, limit: float
) -> None:
    """Where only the last rank's first forward is waited for, a step takes (ranks - 1) forwards more than the work."""
    costs = [RankCosts((EQUAL, EQUAL))] * ranks
    for held in (2 * ranks, ranks):
        programs = planned("folded", micro_batches, costs, most_held=held)
        assert simulate("folded", micro_batches, costs, programs=programs).step_seconds <= limit * work(
            costs, micro_batches
        )
        assert max(map(most_held, programs)) <= held


def random_costs(rng: random.Random, ranks: int, phases: int) -> list[RankCosts]:
    def phase() -> PhaseCosts:
        backward = rng.uniform(1, 4)
        return PhaseCosts(rng.uniform(0.5, 2), backward, 1, 1, weight_seconds=backward * rng.uniform(0.2, 0.6))

    return [RankCosts(tuple(phase() for _ in range(phases))) for _ in range(ranks)]


@pytest.mark.parametrize("schedule", ["1f1b", "folded"])
def test_on_any_costs_it_is_never_worse_than_the_named_schedule_and_its_order_can_be_executed(
    schedule: Schedule,
) -> None:
    rng = random.Random(1)
    for _ in range(15):
        ranks = rng.randint(1 if schedule == "1f1b" else 2, 5)
        micro_batches = rng.randint(1, 3 * ranks)
        costs = random_costs(rng, ranks, phases_of(schedule))
        wire = Link(rng.choice([0.5, 2.0, 1e9]), rng.choice([0.0, 0.5]))
        programs = planned(schedule, micro_batches, costs, lambda *_, wire=wire: wire, most_held=2 * ranks)
        check_programs(programs, schedule, micro_batches)
        assert execute([training_order(schedule, programs, rank) for rank in range(ranks)]) > 0, "no lock"
        seconds = simulate(schedule, micro_batches, costs, lambda *_, wire=wire: wire, programs=programs).step_seconds
        assert seconds >= work(costs, micro_batches) * (1 - 1e-9)
        if schedule == "1f1b" or micro_batches >= 2 * ranks:
            named = simulate(schedule, micro_batches, costs, lambda *_, wire=wire: wire)
            assert seconds <= named.step_seconds * (1 + 1e-9)


def test_without_splitting_every_backward_is_whole_and_the_order_is_a_function_of_its_arguments() -> None:
    costs = random_costs(random.Random(2), 3, 2)
    whole = planned("folded", 6, costs, most_held=6, splits=False)
    assert {one.name for own in whole for one in own}.isdisjoint({"InputGradients", "WeightGradients"})
    assert planned("folded", 6, costs, most_held=6) == planned("folded", 6, list(costs), most_held=6)
