"""Scheduler that computes an order of passes from a run's costs, with separate passes for weight gradients.

:func:`planned` lets the ranks work greedily in simulated time. A free rank takes the first of its passes, in an order
of preference, whose input is ready; weight gradients come last, since no rank waits for them. Several preferences and
limits are tried besides the named schedules, and the shortest simulated step wins. This extends zero-bubble schedules
(Qi et al. 2023, arXiv:2401.10241) to unequal stages.
"""

import functools
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from ddpm_ds.config.ds_config import Layout, Schedule
from ddpm_ds.pipeline import schedule as schedules
from ddpm_ds.pipeline.cuts import folds
from ddpm_ds.pipeline.schedule import PASSES, Instruction, Name, Program, completed, neighbours, phases_of, program
from ddpm_ds.predict.simulate import Link, Links, PhaseCosts, RankCosts, free, simulate

Pass = tuple[Literal["forward", "backward"], int]
"""Kind and phase of a pass."""
NAMES: dict[Literal["forward", "backward"], Name] = {"forward": "ForwardPass", "backward": "InputGradients"}
PREFERENCES: dict[int, tuple[tuple[Pass, ...], ...]] = {
    1: ((("backward", 0), ("forward", 0)), (("forward", 0), ("backward", 0))),
    2: (
        (("forward", 1), ("backward", 1), ("backward", 0), ("forward", 0)),
        (("backward", 1), ("forward", 1), ("backward", 0), ("forward", 0)),
        (("backward", 1), ("backward", 0), ("forward", 1), ("forward", 0)),
        (("backward", 0), ("backward", 1), ("forward", 1), ("forward", 0)),
    ),
}
"""Orders of preference that are tried, by the number of phases."""
FEW = (4, 3, 2)
"""Numbers of micro-batches per weight-gradient pass that are tried besides all held micro-batches and half of them."""
MOST_TRIED_PASSES = 25_000
"""Maximum passes over all ranks and tries; beyond it only the first order of preference is tried."""


def planned(
    schedule: Schedule, micro_batches: int, costs: Sequence[RankCosts], link: Links = free, *, most_held: int
) -> tuple[Program, ...]:
    """Return the programs with the shortest simulated step that is found; a function of the arguments alone.

    Args:
        schedule: decides the placement of stages; 1F1B, or on a fold DualPipeV and ZB-V, are also tried.
        most_held: maximum micro-batches of a rank between their first forward and their last gradients.
    """
    ends = [ends for rank in range(1, len(costs)) for ends in ((rank - 1, rank), (rank, rank - 1))]
    links = tuple((one, link(*one)) for one in ends)
    return _planned(schedule, micro_batches, tuple(costs), links, most_held)


@functools.lru_cache(maxsize=64)  # layouts of a search that differ in ZeRO alone often cost the same
def _planned(
    schedule: Schedule,
    micro_batches: int,
    costs: tuple[RankCosts, ...],
    links: tuple[tuple[tuple[int, int], Link], ...],
    most_held: int,
) -> tuple[Program, ...]:
    ranks, between = len(costs), dict(links)

    def link(source: int, target: int) -> Link:
        return between[source, target]

    known: list[tuple[Program, ...]] = []
    named: Schedule = "folded" if folds(schedule) else "1f1b"
    with suppress(ValueError):  # too few micro-batches for a fold
        known.append(tuple(program(named, micro_batches, ranks, rank) for rank in range(ranks)))
    if folds(schedule):
        known.append(tuple(schedules.zero_bubble_v(micro_batches, ranks, rank) for rank in range(ranks)))
    tried: list[tuple[Program, ...]] = []
    preferences = PREFERENCES[phases_of(schedule)]
    limits = sorted({most_held, max(1, most_held - 1), max(1, most_held - ranks // 2)}, reverse=True)
    phases = [phase for own in costs for phase in own.phases]
    many, few = [most_held, most_held // 2], [count for count in FEW if count <= most_held]
    together = [*many, *few] if any(phase.weight_pass_seconds for phase in phases) else [*few, *many]
    counts = dict.fromkeys(
        [*together, 1] if any(one.weight_pass_seconds + one.split_seconds for one in phases) else [1]
    )
    ways = list(itertools.product(limits, preferences, filter(None, counts)))
    passes = 3 * ranks * micro_batches * phases_of(schedule)
    run = _Greedy(schedule, micro_batches, costs, link).run
    for made in dict.fromkeys(itertools.starmap(run, ways[: max(1, MOST_TRIED_PASSES // passes)])):  # many are alike
        tried.append(_whole(made, schedule, lambda rank, phase: neighbours(schedule, ranks, rank, phase)[0] is None))
    tried += [programs for programs in known if max(map(schedules.most_held, programs)) <= most_held]

    def seconds(programs: Sequence[Program]) -> float:
        return simulate(schedule, micro_batches, costs, link, programs=programs).step_seconds

    best = min(tried, key=seconds)
    return min(_whole(best, schedule, lambda rank, phase: True), best, key=seconds)


def _whole(
    programs: Sequence[Sequence[Instruction]], schedule: Schedule, where: Callable[[int, int], bool]
) -> tuple[Program, ...]:
    """Merge the input gradients of a micro-batch with its weight gradients into a whole backward, if they follow
    directly and alone; ``where`` selects ranks and phases.
    """
    joined = []
    for rank, own in enumerate(programs):
        passes: list[Instruction] = []
        for one in own:
            if one.name not in PASSES:
                continue
            if one.name == "WeightGradients" and passes and where(rank, one.phase):
                last = passes[-1]
                if last.name == "InputGradients" and last[1:] == one[1:]:
                    passes[-1] = Instruction("BackwardPass", *one[1:])
                    continue
            passes.append(one)
        joined.append(completed(passes, schedule, len(programs), rank))
    return tuple(joined)


def order_of(layout: Layout, costs: Sequence[RankCosts], link: Links = free) -> tuple[Program, ...] | None:
    """Return the programs of a planned schedule, or of a single stage that holds several micro-batches; None if the
    schedule's name defines them.
    """
    if layout.stages == 1 and layout.most_held > 1:
        return (schedules.accumulated(layout.micro_batches, layout.most_held),)
    if layout.schedule != "planned":
        return None
    return planned(layout.schedule, layout.micro_batches, costs, link, most_held=layout.most_held)


@functools.lru_cache(maxsize=1024)
def typical_programs(schedule: Schedule, micro_batches: int, ranks: int, most_held: int) -> tuple[Program, ...]:
    """Return the programs of all ranks, for a planned schedule as if all passes took equally long."""
    if ranks == 1 and most_held > 1:
        return (schedules.accumulated(micro_batches, most_held),)
    if schedule != "planned":
        return tuple(program(schedule, micro_batches, ranks, rank) for rank in range(ranks))
    costs = [RankCosts((PhaseCosts(1.0, 2.0, weight_seconds=1.0),) * phases_of(schedule))] * ranks
    return planned(schedule, micro_batches, costs, most_held=most_held)


class _Greedy:
    """Greedy simulation in which each rank takes the first pass that can start."""

    def __init__(self, schedule: Schedule, micro_batches: int, costs: Sequence[RankCosts], link: Links) -> None:
        self._micro_batches, self._costs, self._phases = micro_batches, costs, range(phases_of(schedule))
        self._alone: dict[Pass, list[Instruction]] = {
            (kind, phase): [Instruction(name, phase, (number,)) for number in range(micro_batches)]
            for phase in self._phases
            for kind, name in NAMES.items()
        }
        """Passes of one micro-batch."""
        self._after = [
            {one: self._what_follows(schedule, rank, one, link) for one in self._alone} for rank in range(len(costs))
        ]

    def _what_follows(self, schedule: Schedule, rank: int, one: Pass, link: Links) -> "_Following":
        """Return the seconds of a pass, and which passes can then start, on this rank or the one that it sends to."""
        kind, phase = one
        own, forward, last = self._costs[rank].phases[phase], kind == "forward", self._phases[-1]
        seconds, target = own.seconds(NAMES[kind]), neighbours(schedule, len(self._costs), rank, phase)[forward]
        if target is not None:
            wire, size = link(rank, target), own.activation_bytes if forward else own.gradient_bytes
            return _Following(seconds, one, target, size / wire.bytes_per_second, wire.latency_seconds)
        if forward:
            return _Following(seconds, ("forward", phase + 1) if phase < last else ("backward", phase))
        return _Following(seconds, ("backward", phase - 1) if phase else None)

    def run(self, most_held: int, preference: Sequence[Pass], together: int) -> tuple[tuple[Instruction, ...], ...]:
        """Return the passes of each rank, in order.

        ``most_held`` is as in :func:`planned`. ``together`` is the number of micro-batches per weight-gradient pass,
        unless no more are left or memory is full.
        """
        ranks = [_Rank({one: deque() for one in self._alone}, self._phases) for _ in self._costs]
        ranks[0].ready["forward", 0].extend([0.0] * self._micro_batches)
        free_at: dict[tuple[int, int], float] = defaultdict(float)
        wakes = [(0.0, number) for number in range(len(ranks))]
        while wakes:
            now, number = heapq.heappop(wakes)
            rank = ranks[number]
            if now < rank.busy_until:
                continue
            if (one := rank.begin(preference, now, most_held)) is not None:
                rank.order.append(self._alone[one][rank.done[one] - 1])
                seconds, following, target, wire_seconds, latency_seconds = self._after[number][one]
                rank.busy_until = now + seconds
                if target is not None:
                    leaves = max(rank.busy_until, free_at[number, target]) + wire_seconds
                    free_at[number, target] = leaves
                    ranks[target].ready[one].append(leaves + latency_seconds)
                    heapq.heappush(wakes, (leaves + latency_seconds, target))
                elif following is not None:
                    rank.ready[following].append(rank.busy_until)
            elif (weights := rank.weights(self._micro_batches, most_held, together)) is not None:
                rank.order.append(weights)
                own = self._costs[number].phases[weights.phase]
                rank.busy_until = now + own.seconds("WeightGradients", len(weights.micro_batches))
            else:
                continue
            heapq.heappush(wakes, (rank.busy_until, number))
        return tuple(tuple(rank.order) for rank in ranks)


class _Following(NamedTuple):
    """What comes after a pass: its seconds, the pass that takes its output, and the message to another rank."""

    seconds: float
    taker: Pass | None
    target: int | None = None
    wire_seconds: float = 0.0
    latency_seconds: float = 0.0


class _Rank:
    """Rank of the greedy simulation."""

    def __init__(self, ready: dict[Pass, deque[float]], phases: range) -> None:
        self.ready = ready
        """Times when the inputs of the next passes of a kind arrive."""
        self.done = dict.fromkeys(ready, 0)
        """Number of passes of a kind that are done or have begun."""
        self.waiting: list[list[int]] = [[] for _ in phases]
        """Micro-batches whose weight gradients are still to be computed, by phase."""
        self.over = [0 for _ in phases]
        """Number of micro-batches whose weight gradients are done or have begun, by phase."""
        self.order: list[Instruction] = []
        self.busy_until = 0.0

    def begin(self, preference: Sequence[Pass], now: float, most_held: int) -> Pass | None:
        """Return the forward or input gradients that begin now, if any can."""
        for one in preference:
            arrivals = self.ready[one]
            if not arrivals or arrivals[0] > now:
                continue
            if one == ("forward", 0) and self.done[one] - min(self.over) >= most_held:
                continue
            arrivals.popleft()
            if one[0] == "backward":
                self.waiting[one[1]].append(self.done[one])
            self.done[one] += 1
            return one
        return None

    def weights(self, micro_batches: int, most_held: int, together: int) -> Instruction | None:
        """Return the weight gradients that begin now, if any can."""
        full = self.done["forward", 0] - min(self.over) >= most_held
        for phase in range(len(self.waiting) - 1, -1, -1):
            waiting = self.waiting[phase]
            no_more = self.done["backward", phase] == micro_batches
            if waiting and ((full and self.over[phase] == min(self.over)) or no_more or len(waiting) >= together):
                numbers = tuple(waiting if self.done["backward", 0] == micro_batches else waiting[:together])
                del waiting[: len(numbers)]
                self.over[phase] += len(numbers)
                return Instruction("WeightGradients", phase, numbers)
        return None
