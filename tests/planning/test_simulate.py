"""The simulator against the schedules' formulas, hand-computed steps, and streams that can't end."""

import itertools
import random

import pytest

from ddpm_ds.pipeline.schedule import Instruction, completed, phases_of
from ddpm_ds.planning.simulate import Link, PhaseCosts, RankCosts, simulate
from ddpm_ds.schema.layout import Schedule

ONE_PHASE = RankCosts((PhaseCosts(1.0, 2.0),))
TWO_PHASES = RankCosts((PhaseCosts(0.5, 1.0), PhaseCosts(0.5, 1.0)))


def rank(forward: float, backward: float, down: int = 0, up: int = 0) -> RankCosts:
    return RankCosts((PhaseCosts(forward, backward, activation_bytes=down, gradient_bytes=up),))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 4), (2, 1), (3, 2), (8, 32)])
def test_the_bubble_of_1f1b_is_its_formula(ranks: int, micro_batches: int) -> None:
    found = simulate("1f1b", micro_batches, [ONE_PHASE] * ranks)
    assert found.bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert found.step_seconds == pytest.approx(3 * (micro_batches + ranks - 1))


@pytest.mark.parametrize(("ranks", "micro_batches", "folded"), [(2, 8, 0.0588), (4, 16, 0.1028), (8, 32, 0.1233)])
def test_the_fold_has_the_smaller_bubble(ranks: int, micro_batches: int, folded: float) -> None:
    assert simulate("1f1b", micro_batches, [ONE_PHASE] * ranks).bubble > folded + 0.02
    assert simulate("folded", micro_batches, [TWO_PHASES] * ranks).bubble == pytest.approx(folded, abs=5e-4)


def test_one_micro_batch_over_a_slow_link() -> None:
    """1 forward, 4 bytes and 0.5 latency, 2 forward, 4 backward, 2 bytes and 0.5 latency, 3 backward."""
    found = simulate("1f1b", 1, [rank(1, 3, down=4), rank(2, 4, up=2)], (Link(1.0, 0.5),))
    assert found.step_seconds == pytest.approx(1 + 4.5 + 2 + 4 + 2.5 + 3)
    assert found.busy_seconds == (4, 6) and found.wait_seconds == (13, 11)


def test_messages_of_a_direction_queue_and_those_of_the_other_do_not() -> None:
    """The second activation waits for the first to leave; the first gradient crosses the second activation."""
    ranks = [rank(1, 1, down=4), rank(1, 1, up=2)]
    first, second = simulate("1f1b", 2, ranks, (Link(1.0),), keep_events=True).events
    # the second activation, posted at 2, leaves from 5 to 9, and the first gradient, made at 7, meanwhile
    assert [(event.instruction[:4], event.micro_batch, event.start) for event in (*second, *first)] == [
        *(("Forw", 0, 5), ("Back", 0, 6), ("Forw", 1, 9), ("Back", 1, 10)),
        *(("Forw", 0, 0), ("Forw", 1, 1), ("Back", 0, 9), ("Back", 1, 13)),
    ]


def test_each_link_has_its_own_speed() -> None:
    found = simulate("1f1b", 1, [rank(1, 1, 100, 100)] * 4, (Link(100.0), Link(1.0), Link(100.0)))
    assert found.step_seconds == pytest.approx(8 + 2 * (1 + 100 + 1))


def test_the_turn_of_the_fold_sends_nothing_and_both_phases_share_a_link() -> None:
    outer, slow = RankCosts((PhaseCosts(1, 2, activation_bytes=10), PhaseCosts(1, 2, gradient_bytes=5))), Link(1.0)
    around = [RankCosts((PhaseCosts(1, 2, turn, 20), PhaseCosts(1, 2, 3, turn))) for turn in (0, 10**6)]
    found = [simulate("folded", 4, [outer, inner], (slow,)).step_seconds for inner in around]
    assert found[0] == found[1] > 4 * (3 + 20)  # on the busier direction


def test_the_optimizer_waits_for_the_slowest_rank() -> None:
    costs = [RankCosts((PhaseCosts(1, 1),), 5.0, 1.0), RankCosts((PhaseCosts(1, 1),), 0.0, 2.0)]
    found = simulate("1f1b", 1, costs, keep_events=True)
    assert [events[-1].start for events in found.events] == [9, 9]  # 4 passes, then 5 of reduction on rank 0
    assert found.step_seconds == 11


@pytest.mark.parametrize("seed", range(6))
def test_a_step_lies_between_its_bounds_and_better_links_never_slow_it(seed: int) -> None:
    rng = random.Random(seed)
    schedule: Schedule = rng.choice(["1f1b", "folded"])
    ranks = rng.randint(2, 4)
    micro_batches = rng.randint(2 * ranks, 4 * ranks)

    def phase() -> PhaseCosts:
        return PhaseCosts(rng.random(), rng.random(), rng.randint(0, 9), rng.randint(0, 9))

    costs = [
        RankCosts(tuple(phase() for _ in range(phases_of(schedule))), rng.random(), rng.random()) for _ in range(ranks)
    ]
    free, fast, slow = (
        simulate(schedule, micro_batches, costs, (own,) * (ranks - 1), keep_events=True)
        for own in map(Link, (float("inf"), 100.0, 10.0))
    )
    assert max(free.busy_seconds) <= free.step_seconds <= sum(free.busy_seconds) + 1e-9
    assert free.step_seconds <= fast.step_seconds <= slow.step_seconds
    for events in slow.events:
        assert all(before.end <= after.start + 1e-12 for before, after in itertools.pairwise(events))
    assert simulate(schedule, micro_batches, costs).step_seconds == free.step_seconds


def test_programs_that_wait_for_each_other_are_a_deadlock() -> None:
    first = (Instruction("BackwardPass", 0, (0,)), Instruction("ForwardPass", 0, (0,)), Instruction("SendActivation"))
    second = (Instruction("ForwardPass", 0, (0,)), Instruction("BackwardPass", 0, (0,)), Instruction("SendGrad"))
    message = "deadlocks: rank 0 in BackwardPass 0 of phase 0; rank 1 in ForwardPass 0 of phase 0"
    with pytest.raises(RuntimeError, match=message):
        simulate("1f1b", 1, [ONE_PHASE] * 2, programs=[first, second])


@pytest.mark.parametrize(("once", "ends"), [(0.0, [1, 4, 5, 8, 12]), (0.5, [1, 4, 5, 8, 12.5])])
def test_a_weight_gradient_pass_takes_its_share_of_each_backward_and_what_it_takes_once(
    once: float, ends: list[float]
) -> None:
    costs = [RankCosts((PhaseCosts(1.0, 5.0 + once, weight_seconds=2.0, weight_pass_seconds=once),))]
    passes = [("ForwardPass", 0), ("InputGradients", 0), ("ForwardPass", 1), ("InputGradients", 1)]
    split = [Instruction(name, 0, (number,)) for name, number in passes]  # type: ignore[arg-type]
    own = completed([*split, Instruction("WeightGradients", 0, (0, 1))], "1f1b", 1, 0)
    found = simulate("1f1b", 2, costs, programs=[own], keep_events=True)
    assert [event.end for event in found.events[0]] == ends
    assert found.step_seconds == simulate("1f1b", 2, costs).step_seconds - once == sum(found.busy_seconds)
