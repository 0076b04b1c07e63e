"""Simulator of a training step of a pipeline, from the engines' own programs with a time for each instruction.

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
"""

import functools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ddpm_ds.config.ds_config import Schedule
from ddpm_ds.pipeline.schedule import BACKWARDS, Event, Name, Program, neighbours, program


@dataclass(frozen=True)
class PhaseCosts:
    """Costs of one micro-batch in a phase of a rank: its stage under 1F1B, its encoder or decoder half in the fold."""

    forward_seconds: float
    backward_seconds: float
    """Seconds of the backward, with recomputation and ZeRO-2's reduction after each micro-batch."""
    activation_bytes: int = 0
    """Bytes of the message to the next stage; unused if the schedule sends none."""
    gradient_bytes: int = 0
    """Bytes of the message to the previous stage; unused if the schedule sends none."""
    weight_seconds: float = 0.0
    """Part of ``backward_seconds`` for weight gradients, if they have a separate pass."""
    weight_pass_seconds: float = 0.0
    """Part of ``backward_seconds`` that a weight-gradient pass takes once for all micro-batches: ZeRO-2's reduction."""
    split_seconds: float = 0.0
    """Seconds that a weight-gradient pass takes once in addition to ``backward_seconds``."""

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
        """Part of these seconds that passes of weight gradients take once for all their micro-batches."""
        return sum(phase.weight_pass_seconds for phase in self.phases)


@dataclass(frozen=True)
class Link:
    """Connection from one rank to another, which carries one message at a time."""

    bytes_per_second: float
    latency_seconds: float = 0.0


Links = Callable[[int, int], Link]
"""Function from two neighbouring ranks, the first of which sends, to the link between them."""


def free(source: int, target: int) -> Link:
    """Return a link on which messages cost nothing."""
    return Link(bytes_per_second=math.inf)


@dataclass(frozen=True)
class Simulation:
    """Simulated step; tuples have an entry per rank."""

    step_seconds: float
    events: tuple[tuple[Event, ...], ...]
    """Events in the order of execution; empty if they were not requested."""
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
    link: Links = free,
    *,
    programs: Sequence[Program] | None = None,
    keep_events: bool = False,
) -> Simulation:
    """Simulate one step of a pipeline of ``len(costs)`` ranks, by ``programs`` or by those of the schedule's name.

    Takes a microsecond or so per instruction.

    Raises:
        ValueError: the schedule can't have so few micro-batches.
        RuntimeError: the programs wait for each other for ever: a bug of the schedule.
    """
    ranks = [_Rank(number, own, keep_events) for number, own in enumerate(costs)]
    if programs is None:
        programs = [program(schedule, micro_batches, len(costs), number) for number in range(len(costs))]
    left = [deque(own) for own in programs]
    links = functools.cache(link)
    route = functools.cache(functools.partial(neighbours, schedule, len(costs)))
    free_at: dict[tuple[int, int], float] = defaultdict(float)  # when a direction has sent its last message
    arrivals: dict[tuple[int, bool, int], deque[float]] = defaultdict(deque)  # by rank, direction and phase

    def send(source: int, phase: int, forward: bool) -> int:
        """Post a message; return the rank that receives it."""
        target = route(source, phase)[1 if forward else 0]
        assert target is not None
        own, wire = costs[source].phases[phase], links(source, target)
        size = own.activation_bytes if forward else own.gradient_bytes
        leaves = max(ranks[source].now, free_at[source, target]) + size / wire.bytes_per_second
        free_at[source, target] = leaves
        arrivals[target, forward, phase].append(leaves + wire.latency_seconds)
        return target

    runnable = deque(range(len(costs)))
    while runnable:
        rank = ranks[runnable.popleft()]
        steps = left[rank.number]
        while steps:
            name, phase, numbers = steps[0]
            if name in ("SendActivation", "SendGrad"):
                target = send(rank.number, phase, name == "SendActivation")
                if target not in runnable:
                    runnable.append(target)
            elif name in ("ForwardPass", *BACKWARDS):
                ready, forward = rank.now, name == "ForwardPass"
                if route(rank.number, phase)[0 if forward else 1] is not None:
                    if not (arrived := arrivals[rank.number, forward, phase]):
                        break
                    ready = max(ready, arrived.popleft())
                rank.spend(name, phase, numbers[0], ready, rank.costs.phases[phase].seconds(name))
            elif name == "WeightGradients":
                rank.spend(name, phase, numbers[0], rank.now, rank.costs.phases[phase].seconds(name, len(numbers)))
            steps.popleft()
    if stuck := [f"rank {number} in {steps[0]}" for number, steps in enumerate(left) if steps]:
        raise RuntimeError(f"the {schedule} schedule with {micro_batches} micro-batches deadlocks: {'; '.join(stuck)}")

    for rank in ranks:
        rank.spend("ReduceGrads", 0, -1, rank.now, rank.costs.reduce_seconds)
    agreed = max(rank.now for rank in ranks)
    for rank in ranks:
        rank.spend("OptimizerStep", 0, -1, agreed, rank.costs.optimizer_seconds)
    return Simulation(
        step_seconds=max(rank.now for rank in ranks),
        events=tuple(tuple(rank.events) for rank in ranks),
        busy_seconds=tuple(rank.busy for rank in ranks),
    )


@dataclass
class _Rank:
    number: int
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
