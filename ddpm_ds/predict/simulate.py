"""One training step of one pipeline on paper: the engines' own instruction streams, with a time for each instruction.

A rank executes its stream in order and does one thing at a time. What it waits for is what the engines wait for:

    SendActivation, SendGrad    post a message and return at once
    RecvActivation, RecvGrad    nothing: receives are posted ahead
    ForwardPass                 waits for the activations of its micro-batch, where they come from another rank
    BackwardPass                waits for the gradients of its micro-batch, likewise
    ReduceGrads                 waits for nothing in this pipeline
    OptimizerStep               waits for all ranks: overflow and gradient norm are agreed upon by all of them

A message leaves when the one posted before it in the same direction has left, takes its bytes over the bandwidth, and
arrives a latency later. All messages of a direction between two ranks are posted by one rank, so their order is that
rank's own. Therefore ranks can be walked one at a time, each as far as the messages reach, and the times are exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ddpm_ds.pipeline.schedule import Event, RankCosts, Schedule, Step, program


@dataclass(frozen=True)
class Link:
    """One direction between two ranks, which carries one message at a time."""

    bytes_per_second: float
    latency_seconds: float = 0.0


FREE = Link(bytes_per_second=float("inf"))
"""A link on which messages cost nothing."""


@dataclass(frozen=True)
class Simulation:
    """What one step comes to; lists have an entry per rank."""

    step_seconds: float
    events: tuple[tuple[Event, ...], ...]
    """In the order of execution; empty where they were not asked for."""
    busy_seconds: tuple[float, ...]
    sent_bytes: dict[tuple[int, int], int]
    """By (from, to), where there was a message."""
    peak_held: tuple[tuple[int, ...], ...]
    """The most micro-batches, per phase, between their forward and their backward."""

    @property
    def wait_seconds(self) -> tuple[float, ...]:
        """Time in which a rank does nothing."""
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
    link: Callable[[int, int], Link] = lambda source, target: FREE,
    *,
    keep_events: bool = True,
) -> Simulation:
    """One step of a pipeline of ``len(costs)`` ranks.

    ``link(source, target)`` gives the link from one rank to a neighbour. Takes a microsecond or so per instruction.

    Raises:
        ValueError: the schedule can't have so few micro-batches.
        RuntimeError: the streams wait for each other for ever, which is a bug of the schedule.
    """
    ranks = [
        _Rank(number, program(schedule, micro_batches, len(costs), number), own) for number, own in enumerate(costs)
    ]
    wires: dict[tuple[int, int], _Wire] = {}

    def send(source: int, target: int, size: int, now: float) -> float:
        wire = wires.get((source, target))
        if wire is None:
            wire = wires[source, target] = _Wire(link(source, target))
        return wire.send(size, now)

    runnable = deque(ranks)
    while runnable:
        rank = runnable.popleft()
        for target in rank.run_until_it_waits(ranks, send, keep_events):
            if ranks[target].waiting and ranks[target] not in runnable:
                runnable.append(ranks[target])
    stuck = [rank for rank in ranks if rank.waiting]
    if stuck:
        where = "; ".join(f"rank {rank.number} in {rank.describe_wait()}" for rank in stuck)
        raise RuntimeError(f"the {schedule} schedule with {micro_batches} micro-batches deadlocks: {where}")

    agreed = max(rank.now for rank in ranks)
    for rank in ranks:
        rank.spend("OptimizerStep", 0, -1, agreed, rank.costs.optimizer_seconds, keep_events)
    return Simulation(
        step_seconds=max(rank.now for rank in ranks),
        events=tuple(tuple(rank.events) for rank in ranks),
        busy_seconds=tuple(rank.busy for rank in ranks),
        sent_bytes={pair: wire.sent for pair, wire in wires.items()},
        peak_held=tuple(tuple(rank.peak_held) for rank in ranks),
    )


@dataclass
class _Wire:
    link: Link
    free_at: float = 0.0
    sent: int = 0

    def send(self, size: int, now: float) -> float:
        """Post a message; returns when it arrives."""
        self.sent += size
        self.free_at = max(now, self.free_at) + size / self.link.bytes_per_second
        return self.free_at + self.link.latency_seconds


@dataclass(eq=False)
class _Rank:
    number: int
    program: tuple[Step, ...]
    costs: RankCosts
    position: int = 0
    now: float = 0.0
    busy: float = 0.0
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        phases = range(len(self.costs.phases))
        self.held = [0 for _ in phases]
        self.peak_held = [0 for _ in phases]
        self.arrivals: dict[tuple[str, int], list[float]] = {
            (kind, phase): [] for kind in ("ForwardPass", "BackwardPass") for phase in phases
        }
        """When the messages arrive that the passes of a phase wait for, in the order of micro-batches."""

    @property
    def waiting(self) -> bool:
        return self.position < len(self.program)

    def describe_wait(self) -> str:
        step = self.program[self.position]
        return f"{step.instruction} {step.micro_batch} of phase {step.phase}"

    def run_until_it_waits(
        self, ranks: Sequence[_Rank], send: Callable[[int, int, int, float], float], keep_events: bool
    ) -> set[int]:
        """Execute until a message is missing that has not been posted; returns the ranks that got one."""
        reached: set[int] = set()
        while self.position < len(self.program):
            instruction, phase, micro_batch, receives = self.program[self.position]
            costs = self.costs.phases[phase]
            if instruction in ("SendActivation", "SendGrad"):
                forward = instruction == "SendActivation"
                target = self.number + (1 if forward == (phase == 0) else -1)
                size = costs.activation_bytes if forward else costs.gradient_bytes
                waiter = "ForwardPass" if forward else "BackwardPass"
                ranks[target].arrivals[waiter, phase].append(send(self.number, target, size, self.now))
                reached.add(target)
            else:
                ready = self.now
                if receives:
                    arrived = self.arrivals[instruction, phase]
                    if len(arrived) <= micro_batch:
                        return reached
                    ready = max(ready, arrived[micro_batch])
                forward = instruction == "ForwardPass"
                seconds = costs.forward_seconds if forward else costs.backward_seconds
                self.spend(instruction, phase, micro_batch, ready, seconds, keep_events)
                self.held[phase] += 1 if forward else -1
                self.peak_held[phase] = max(self.peak_held[phase], self.held[phase])
            self.position += 1
        self.spend("ReduceGrads", 0, -1, self.now, self.costs.reduce_seconds, keep_events)
        return reached

    def spend(
        self, instruction: str, phase: int, micro_batch: int, start: float, seconds: float, keep_events: bool
    ) -> None:
        """Execute something from ``start`` on."""
        self.now = start + seconds
        self.busy += seconds
        if keep_events and seconds:
            self.events.append(Event(instruction, phase, micro_batch, start, self.now))
