"""Simulator of a training step of a pipeline, from the engines' own programs with a time for each instruction, and
scheduler that computes an order of passes by it.

A rank executes its program in order, one instruction at a time. It waits as the engines do:

    SendActivation, SendGrad    post a message and return at once
    RecvActivation, RecvGrad    nothing: receives are posted ahead
    ForwardPass                 waits for the activations of its micro-batch, if they come from another rank
    BackwardPass                waits for the gradients of its micro-batch, likewise
    ReduceGrads                 waits for nothing in this pipeline
    OptimizerStep               waits for all ranks: overflow and gradient norm are agreed upon by all of them

A message leaves when the previous one in its direction has left, takes its bytes divided by the bandwidth, and arrives
after the latency. All messages of a direction between two ranks are posted by one rank, in its order. Therefore ranks
can be simulated one at a time, each as far as its messages allow, and the times are exact.

:func:`planned` lets the ranks work greedily in simulated time, with separate passes for weight gradients. A free rank
takes the first of its passes, in an order of preference, whose input is ready; weight gradients come last, since no
rank waits for them. Several preferences and limits are tried besides the named schedules, and the shortest simulated
step wins. This extends zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241) to unequal stages.
"""

import functools
import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ddpm_ds.pipeline import schedule as schedules
from ddpm_ds.pipeline.cuts import folds
from ddpm_ds.pipeline.schedule import (
    BACKWARDS,
    PASSES,
    Event,
    Instruction,
    Name,
    Program,
    completed,
    neighbours,
    phases_of,
    program,
)
from ddpm_ds.schema.layout import Layout, Schedule

Pass = tuple[Literal["forward", "backward"], int]  # kind and phase of a pass
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
"""Numbers of micro-batches per weight-gradient pass that are tried besides the most in flight and half of them."""
MOST_TRIED_PASSES = 25_000
"""Maximum passes over all ranks and tries; beyond it only the first order of preference is tried."""


@dataclass(frozen=True)
class PhaseCosts:
    """Costs of one micro-batch in a phase of a rank: its stage under 1F1B, its encoder or decoder half in the fold."""

    forward_seconds: float
    backward_seconds: float  # seconds of the backward, with recomputation and ZeRO-2's reduction after each micro-batch
    activation_bytes: int = 0  # bytes of the message to the next stage; unused if the schedule sends none
    gradient_bytes: int = 0  # bytes of the message to the previous stage; unused if the schedule sends none
    weight_seconds: float = 0.0  # part of ``backward_seconds`` for weight gradients, if they have a separate pass
    weight_pass_seconds: float = 0.0
    """Part of ``backward_seconds`` that a weight-gradient pass takes once for all micro-batches: ZeRO-2's reduction."""
    split_seconds: float = 0.0  # seconds that a weight-gradient pass takes once in addition to ``backward_seconds``

    @property
    def pass_seconds(self) -> float:
        """Seconds of a forward and a backward."""
        return self.forward_seconds + self.backward_seconds

    def seconds(self, name: Name, micro_batches: int = 1) -> float:
        """Return the seconds of a pass over ``micro_batches`` micro-batches."""
        match name:
            case "ForwardPass":
                return self.forward_seconds
            case "InputGradients":
                return self.backward_seconds - self.weight_seconds - self.weight_pass_seconds
            case "WeightGradients":
                return micro_batches * self.weight_seconds + self.weight_pass_seconds + self.split_seconds
            case _:
                return self.backward_seconds


@dataclass(frozen=True)
class RankCosts:
    """Costs of a rank's instructions."""

    phases: tuple[PhaseCosts, ...]
    reduce_seconds: float = 0.0
    optimizer_seconds: float = 0.0

    @property
    def pass_seconds(self) -> float:
        """Seconds of one micro-batch's forwards and backwards."""
        return sum(phase.pass_seconds for phase in self.phases)

    @property
    def weight_pass_seconds(self) -> float:
        """Part of ``pass_seconds`` that weight-gradient passes take once for all micro-batches."""
        return sum(phase.weight_pass_seconds for phase in self.phases)


@dataclass(frozen=True)
class Link:
    """Connection from one rank to another, which carries one message at a time."""

    bytes_per_second: float
    latency_seconds: float = 0.0


FREE = Link(math.inf)
Links = tuple[Link, ...]
"""Links between each rank and the next, the same in both directions; () if messages take no time."""


@dataclass(frozen=True)
class Simulation:
    """Simulated step; tuples have an entry per rank."""

    step_seconds: float
    events: tuple[tuple[Event, ...], ...]  # events in the order of execution; empty if they were not requested
    busy_seconds: tuple[float, ...]

    @property
    def wait_seconds(self) -> tuple[float, ...]:
        """Seconds in which a rank does nothing."""
        return tuple(self.step_seconds - busy for busy in self.busy_seconds)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is spent waiting."""
        total = self.step_seconds * len(self.busy_seconds)
        return sum(self.wait_seconds) / total if total else 0.0


def simulate(
    schedule: Schedule,
    micro_batches: int,
    costs: Sequence[RankCosts],
    links: Links = (),
    *,
    programs: Sequence[Program] | None = None,
    keep_events: bool = False,
) -> Simulation:
    """Simulate one step of a pipeline of ``len(costs)`` ranks, by ``programs`` or by the schedule's own.

    Raises:
        ValueError: the schedule can't have so few micro-batches.
        RuntimeError: the programs wait for each other for ever: a bug of the schedule.
    """
    ranks = [_Rank(own, keep_events) for own in costs]
    own_programs = (program(schedule, micro_batches, len(costs), number) for number in range(len(costs)))
    left = [deque(own) for own in programs or own_programs]
    links = links or (FREE,) * (len(costs) - 1)
    route = functools.cache(functools.partial(neighbours, schedule, len(costs)))
    free_at: dict[tuple[int, int], float] = defaultdict(float)  # when a direction has sent its last message
    arrivals: dict[tuple[int, bool, int], deque[float]] = defaultdict(deque)  # by rank, direction and phase

    runnable = deque(range(len(costs)))
    while runnable:
        rank = ranks[source := runnable.popleft()]
        steps = left[source]
        while steps:
            name, phase, numbers = steps[0]
            own, forward = rank.costs.phases[phase], name in ("ForwardPass", "SendActivation")
            if name in ("SendActivation", "SendGrad"):
                target = route(source, phase)[1 if forward else 0]
                assert target is not None
                wire, size = links[min(source, target)], own.activation_bytes if forward else own.gradient_bytes
                leaves = max(rank.now, free_at[source, target]) + size / wire.bytes_per_second
                free_at[source, target] = leaves
                arrivals[target, forward, phase].append(leaves + wire.latency_seconds)
                if target not in runnable:
                    runnable.append(target)
            elif name in ("ForwardPass", *BACKWARDS):
                ready = rank.now
                if route(source, phase)[0 if forward else 1] is not None:
                    if not (arrived := arrivals[source, forward, phase]):
                        break
                    ready = max(ready, arrived.popleft())
                rank.spend(name, phase, numbers[0], ready, own.seconds(name))
            elif name == "WeightGradients":
                rank.spend(name, phase, numbers[0], rank.now, own.seconds(name, len(numbers)))
            steps.popleft()
    if stuck := [f"rank {number} in {steps[0]}" for number, steps in enumerate(left) if steps]:
        raise RuntimeError(f"the {schedule} schedule with {micro_batches} micro-batches deadlocks: {'; '.join(stuck)}")

    for rank in ranks:
        rank.spend("ReduceGrads", 0, -1, rank.now, rank.costs.reduce_seconds)
    agreed = max(rank.now for rank in ranks)
    for rank in ranks:
        rank.spend("OptimizerStep", 0, -1, agreed, rank.costs.optimizer_seconds)
    step, events = max(rank.now for rank in ranks), tuple(tuple(rank.events) for rank in ranks)
    return Simulation(step, events, tuple(rank.busy for rank in ranks))


@dataclass
class _Rank:
    costs: RankCosts
    keep_events: bool
    now: float = 0.0
    busy: float = 0.0
    events: list[Event] = field(default_factory=list)

    def spend(self, instruction: str, phase: int, micro_batch: int, start: float, seconds: float) -> None:
        """Execute an instruction from ``start`` on."""
        self.now = start + seconds
        self.busy += seconds
        if self.keep_events and seconds:
            self.events.append(Event(instruction, phase, micro_batch, start, self.now))


@functools.lru_cache(maxsize=64)  # layouts of a search that differ in ZeRO alone often cost the same
def planned(
    schedule: Schedule, micro_batches: int, costs: tuple[RankCosts, ...], links: Links = (), *, most_kept: int
) -> tuple[Program, ...]:
    """Return the programs with the shortest simulated step; equal arguments give equal programs.

    ``schedule`` decides the placement of stages; 1F1B, or on a fold DualPipeV and ZB-V, are also tried. ``most_kept``
    is the most micro-batches that a rank has between their first forward and their last gradients.
    """
    ranks, preferences = len(costs), PREFERENCES[phases_of(schedule)]
    links = links or (FREE,) * (ranks - 1)
    named: Schedule = "folded" if folds(schedule) else "1f1b"
    limits = sorted({most_kept, max(1, most_kept - 1), max(1, most_kept - ranks // 2)}, reverse=True)
    phases = [phase for own in costs for phase in own.phases]
    many, few = [most_kept, most_kept // 2], [count for count in FEW if count <= most_kept]
    together = [*many, *few] if any(phase.weight_pass_seconds for phase in phases) else [*few, *many]
    cost_once = any(phase.weight_pass_seconds + phase.split_seconds for phase in phases)
    counts = dict.fromkeys([*together, 1] if cost_once else [1])
    ways = list(itertools.product(limits, preferences, filter(None, counts)))
    passes = 3 * ranks * micro_batches * phases_of(schedule)
    run = _Greedy(schedule, micro_batches, costs, links).run
    made = dict.fromkeys(itertools.starmap(run, ways[: max(1, MOST_TRIED_PASSES // passes)]))  # many are alike
    tried = [_whole(one, schedule, lambda *place: neighbours(schedule, ranks, *place)[0] is None) for one in made]
    known: list[tuple[Program, ...]] = []
    with suppress(ValueError):  # too few micro-batches for a fold
        known.append(tuple(program(named, micro_batches, ranks, rank) for rank in range(ranks)))
    if folds(schedule):
        known.append(tuple(schedules.zero_bubble_v(micro_batches, ranks, rank) for rank in range(ranks)))
    tried += [programs for programs in known if max(map(schedules.most_kept, programs)) <= most_kept]

    def seconds(programs: Sequence[Program]) -> float:
        return simulate(schedule, micro_batches, costs, links, programs=programs).step_seconds

    best = min(tried, key=seconds)
    return min(_whole(best, schedule, lambda rank, phase: True), best, key=seconds)


def _whole(
    programs: Sequence[Sequence[Instruction]], schedule: Schedule, where: Callable[[int, int], bool]
) -> tuple[Program, ...]:
    """Merge input gradients with the same micro-batch's weight gradients if these follow at once, ``where`` asked."""
    joined = []
    for rank, own in enumerate(programs):
        passes: list[Instruction] = []
        for one in own:
            before = [Instruction("InputGradients", *one[1:])]
            if one.name == "WeightGradients" and passes[-1:] == before and where(rank, one.phase):
                passes[-1] = Instruction("BackwardPass", *one[1:])
            elif one.name in PASSES:
                passes.append(one)
        joined.append(completed(passes, schedule, len(programs), rank))
    return tuple(joined)


def order_of(layout: Layout, costs: Sequence[RankCosts], links: Links = ()) -> tuple[Program, ...] | None:
    """Return the programs of a planned schedule, or of one stage that holds several micro-batches; else None."""
    if layout.stages == 1 and layout.most_kept > 1:
        return (schedules.accumulated(layout.micro_batches, layout.most_kept),)
    if layout.schedule != "planned":
        return None
    return planned(layout.schedule, layout.micro_batches, tuple(costs), links, most_kept=layout.most_kept)


@functools.lru_cache(maxsize=1024)
def typical_programs(schedule: Schedule, micro_batches: int, ranks: int, most_kept: int) -> tuple[Program, ...]:
    """Return the programs of all ranks, for a planned schedule as if all passes took equally long."""
    if ranks == 1 and most_kept > 1:
        return (schedules.accumulated(micro_batches, most_kept),)
    if schedule != "planned":
        return tuple(program(schedule, micro_batches, ranks, rank) for rank in range(ranks))
    costs = (RankCosts((PhaseCosts(1.0, 2.0, weight_seconds=1.0),) * phases_of(schedule)),) * ranks
    return planned(schedule, micro_batches, costs, most_kept=most_kept)


class _Greedy:
    def __init__(self, schedule: Schedule, micro_batches: int, costs: Sequence[RankCosts], links: Links) -> None:
        self._micro_batches, self._costs, self._phases = micro_batches, costs, range(phases_of(schedule))
        self._alone: dict[Pass, list[Instruction]] = {
            (kind, phase): [Instruction(name, phase, (number,)) for number in range(micro_batches)]
            for phase in self._phases
            for kind, name in NAMES.items()
        }
        ranks = range(len(costs))
        self._after = [{one: self._what_follows(schedule, rank, one, links) for one in self._alone} for rank in ranks]

    def _what_follows(self, schedule: Schedule, rank: int, one: Pass, links: Links) -> "_Following":
        kind, phase = one
        own, forward, last = self._costs[rank].phases[phase], kind == "forward", self._phases[-1]
        seconds, target = own.seconds(NAMES[kind]), neighbours(schedule, len(self._costs), rank, phase)[forward]
        if target is not None:
            wire, size = links[min(rank, target)], own.activation_bytes if forward else own.gradient_bytes
            return _Following(seconds, one, target, size / wire.bytes_per_second, wire.latency_seconds)
        if forward:
            return _Following(seconds, ("forward", phase + 1) if phase < last else ("backward", phase))
        return _Following(seconds, ("backward", phase - 1) if phase else None)

    def run(self, most_kept: int, preference: Sequence[Pass], together: int) -> tuple[tuple[Instruction, ...], ...]:
        """Return the passes of each rank, in order.

        ``together`` is the number of micro-batches per weight-gradient pass, unless no more are left or memory is full.
        """
        ranks = [_GreedyRank(self._alone, self._phases) for _ in self._costs]
        ranks[0].ready["forward", 0].extend([0.0] * self._micro_batches)
        free_at: dict[tuple[int, int], float] = defaultdict(float)
        wakes = [(0.0, number) for number in range(len(ranks))]
        while wakes:
            now, number = heapq.heappop(wakes)
            rank = ranks[number]
            if now < rank.busy_until:
                continue
            if (one := rank.begin(preference, now, most_kept)) is not None:
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
            elif (weights := rank.weights(self._micro_batches, most_kept, together)) is not None:
                rank.order.append(weights)
                own = self._costs[number].phases[weights.phase]
                rank.busy_until = now + own.seconds("WeightGradients", len(weights.micro_batches))
            else:
                continue
            heapq.heappush(wakes, (rank.busy_until, number))
        return tuple(tuple(rank.order) for rank in ranks)


class _Following(NamedTuple):
    """Seconds of a pass, the pass that takes its output, and the message to another rank."""

    seconds: float
    taker: Pass | None
    target: int | None = None
    wire_seconds: float = 0.0
    latency_seconds: float = 0.0


class _GreedyRank:
    def __init__(self, passes: Iterable[Pass], phases: range) -> None:
        self.ready: dict[Pass, deque[float]] = {one: deque() for one in passes}  # times when the next inputs arrive
        self.done = dict.fromkeys(passes, 0)  # passes of a kind that are done or have begun
        self.waiting: list[list[int]] = [[] for _ in phases]  # micro-batches whose weight gradients are to be computed
        self.over = [0 for _ in phases]  # micro-batches whose weight gradients are done or have begun
        self.order: list[Instruction] = []
        self.busy_until = 0.0

    def begin(self, preference: Sequence[Pass], now: float, most_kept: int) -> Pass | None:
        """Return the forward or input gradients that begin now, if any can."""
        for one in preference:
            arrivals = self.ready[one]
            if not arrivals or arrivals[0] > now:
                continue
            if one == ("forward", 0) and self.done[one] - min(self.over) >= most_kept:
                continue
            arrivals.popleft()
            if one[0] == "backward":
                self.waiting[one[1]].append(self.done[one])
            self.done[one] += 1
            return one
        return None

    def weights(self, micro_batches: int, most_kept: int, together: int) -> Instruction | None:
        """Return the weight gradients that begin now, if any can."""
        full = self.done["forward", 0] - min(self.over) >= most_kept
        for phase in range(len(self.waiting) - 1, -1, -1):
            waiting = self.waiting[phase]
            no_more = self.done["backward", phase] == micro_batches
            if waiting and ((full and self.over[phase] == min(self.over)) or no_more or len(waiting) >= together):
                numbers = tuple(waiting if self.done["backward", 0] == micro_batches else waiting[:together])
                del waiting[: len(numbers)]
                self.over[phase] += len(numbers)
                return Instruction("WeightGradients", phase, numbers)
        return None
