"""Order in which ranks post their messages, and a model that finds out whether that order can deadlock.

NCCL executes the operations of one communicator one after another in the order in which this rank posted them; a send
is complete when its receiver takes it. A wait for a message is therefore a wait for everything posted before it on that
communicator, here and at the other end. A rank that waits for its whole device waits for everything it has posted.

:class:`EdgeEnd` decides when an end of a directed edge posts and waits. The engines' channels really send
(:mod:`ddpm_ds.pipeline.messages`); a :class:`RecordedEnd` writes the same operations into an :class:`OrderLog`, and
:func:`execute` plays the ranks' logs against each other::

    rank 0   receive gradients 0 | send activations 0 | ... wait for gradients 0
    rank 1   receive activations 0 | wait for activations 0 | ... | send gradients 0

A wait blocks the host here. On CUDA it blocks the current stream instead, behind which every later operation starts, so
what can lock is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from ddpm_ds.pipeline.schedule import PASSES, Program, Schedule, most_in_flight, neighbours, phases_of

Kind = Literal["activations", "gradients", "predictions"]
Message = TypeVar("Message")


class Edge(NamedTuple):
    """One kind of message of one phase, from one rank of a pipeline to another. Each edge has its own communicator."""

    kind: Kind
    phase: int
    source: int
    target: int


def pipeline_edges(ranks: int, phases: int) -> list[Edge]:
    """Return all edges of a pipeline, in the order in which their communicators are made.

    Edges that share no rank are neighbours in this order, so that they are made at the same time: a rank takes part in
    at most two of each kind and phase, however many ranks and replicas there are.
    """
    edges = []
    for phase in range(phases):
        for kind, forward in (("activations", phase == 0), ("gradients", phase == 1)):
            for parity in (0, 1):
                for rank in range(parity, ranks - 1, 2):
                    ends = (rank, rank + 1) if forward else (rank + 1, rank)
                    edges.append(Edge(kind, phase, *ends))  # type: ignore[arg-type]
    if phases == 1 and ranks > 1:
        edges.append(Edge("predictions", 0, ranks - 1, 0))
    return edges


class Work(Protocol):
    """Posted operation."""

    def wait(self) -> object:
        """Wait until the operation is complete before anything that follows."""


class EdgeEnd(ABC, Generic[Message]):
    """One end of an edge: when it posts its messages, and when it waits for them.

    A send returns at once; of ``most_in_flight`` messages that are not known to be delivered the oldest is waited for.
    Receives are posted one message ahead, so that a message travels while its receiver computes.
    """

    def __init__(self, most_in_flight: int) -> None:
        self._most_in_flight = most_in_flight
        self._in_flight: deque[Work] = deque()
        self._to_post = 0
        self._receives: deque[tuple[Work, Message]] = deque()

    @abstractmethod
    def post_send(self, message: Message) -> Work:
        """Post a send; what is sent is kept alive until the operation is forgotten."""

    @abstractmethod
    def post_receive(self) -> tuple[Work, Message]:
        """Post a receive of the next message; return the operation and the message."""

    def post_message(self, message: Message) -> None:
        """Post a send, after the oldest where too many are in flight."""
        while len(self._in_flight) >= self._most_in_flight:
            self._in_flight.popleft().wait()
        self._in_flight.append(self.post_send(message))

    def start_receiving(self, messages: int) -> None:
        """Post the receive of the first of so many messages; each one that is waited for posts the next."""
        self._to_post += messages
        self._post()

    def next_message(self) -> Message:
        """Wait for the next message, and post the receive of the one after it."""
        work, message = self._receives.popleft()
        self._post()
        work.wait()
        return message

    def drain(self) -> None:
        """Wait until everything sent has been delivered."""
        while self._in_flight:
            self._in_flight.popleft().wait()

    def _post(self) -> None:
        if self._to_post:
            self._to_post -= 1
            self._receives.append(self.post_receive())


class Operation(NamedTuple):
    """Operation of a rank, in the order of its host: it posts, waits or computes."""

    does: Literal["send", "receive", "wait", "pass", "together", "device"]
    edge: Edge | None = None
    number: int = 0
    """Number of the message on its edge, from 0."""
    by_host: bool = False
    """Whether the message goes from host to host, which no device waits for and no order holds up."""
    seconds: float = 0.0
    """Seconds of a pass."""
    name: str = ""
    """Name of a pass, or of a collective operation."""

    def __str__(self) -> str:
        if self.edge is None:
            return {"pass": self.name, "together": f"a collective of {self.name}", "device": "the device"}[self.does]
        kind, phase, source, target = self.edge
        return f"{kind} {self.number} of phase {phase} from rank {source} to rank {target}"


@dataclass
class OrderLog:
    """Log of one rank's operations, in order; messages go from host to host, or between devices."""

    by_host: bool = False
    operations: list[Operation] = field(default_factory=list)


@dataclass
class _RecordedWork:
    log: OrderLog
    edge: Edge
    number: int

    def wait(self) -> None:
        self.log.operations.append(Operation("wait", self.edge, self.number))


class RecordedEnd(EdgeEnd[None]):
    """End of an edge whose operations are recorded."""

    def __init__(self, log: OrderLog, edge: Edge, most_in_flight: int) -> None:
        super().__init__(most_in_flight)
        self._log, self._edge = log, edge
        self._sent = self._received = 0

    def post_send(self, message: None) -> Work:
        self._log.operations.append(Operation("send", self._edge, self._sent, self._log.by_host))
        self._sent += 1
        return _RecordedWork(self._log, self._edge, self._sent - 1)

    def post_receive(self) -> tuple[Work, None]:
        self._log.operations.append(Operation("receive", self._edge, self._received, self._log.by_host))
        self._received += 1
        return _RecordedWork(self._log, self._edge, self._received - 1), None


def training_order(
    schedule: Schedule,
    programs: Sequence[Program],
    rank: int,
    *,
    device_waits: Collection[str] = (),
    by_host: bool = False,
    reduces: bool = False,
    seconds: Callable[[str, int], float] = lambda instruction, phase: 1.0,
    end_of_edge: type[RecordedEnd] = RecordedEnd,
) -> list[Operation]:
    """Return what one rank of a pipeline posts and waits for in a training step, as the engine does.

    Args:
        programs: of all ranks.
        device_waits: passes inside of which the rank waits for its whole device.
        by_host: messages go from host to host, as in the engine's cautious steps.
        reduces: the replicas reduce gradients after each backward, as under ZeRO-2.
        seconds: of a pass, by its instruction and phase.
        end_of_edge: when ends of edges post and wait.
    """
    log, most, ranks = OrderLog(by_host), most_in_flight(programs), len(programs)
    edges = [edge for edge in pipeline_edges(ranks, phases_of(schedule)) if edge.kind != "predictions"]
    sends = {(edge.kind, edge.phase): end_of_edge(log, edge, most) for edge in edges if edge.source == rank}
    receives = {(edge.kind, edge.phase): end_of_edge(log, edge, most) for edge in edges if edge.target == rank}
    own = programs[rank]
    for (_, phase), end in receives.items():
        end.start_receiving(sum(one.name == "ForwardPass" and one.phase == phase for one in own))
    for name, phase, _ in own:
        kind: Kind = "activations" if name in ("ForwardPass", "SendActivation") else "gradients"
        if name in ("SendActivation", "SendGrad"):
            sends[kind, phase].post_message(None)
        elif name in PASSES:
            before, after = neighbours(schedule, ranks, rank, phase)
            if name != "WeightGradients" and (before if kind == "activations" else after) is not None:
                receives[kind, phase].next_message()
            log.operations.append(Operation("pass", name=name, seconds=seconds(name, phase)))
            if name in device_waits:
                log.operations.append(Operation("device"))
            if name in ("BackwardPass", "InputGradients", "WeightGradients") and reduces:
                log.operations.append(Operation("together", name=f"the replicas of rank {rank}"))
    log.operations.append(Operation("together", name="all ranks"))
    for end in sends.values():
        end.drain()
    return log.operations


class LockError(RuntimeError):
    """Error: the ranks wait for each other for ever; the message says which rank waits for what."""


def own_communicator(edge: Edge) -> Hashable:
    """Return a communicator for each edge of its own, as the engines have it."""
    return edge


def execute(
    orders: Sequence[Iterable[Operation]], communicator: Callable[[Edge], Hashable] = own_communicator
) -> float:
    """Play the orders of the ranks of one pipeline, and return the seconds that they take; messages take none.

    The replicas of a pipeline execute the same order, so what they do together only keeps them in step and is no wait
    within one pipeline. ``communicator`` says which edges share one.

    Raises:
        LockError: some ranks wait for each other for ever.
    """
    ranks = [_Player(number, tuple(order)) for number, order in enumerate(orders)]
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while rank.step(ranks, communicator):
                moved = True
    stuck = [rank for rank in ranks if rank.position < len(rank.order)]
    if stuck:
        raise LockError("; ".join(rank.describe() for rank in stuck))
    return max(rank.now for rank in ranks)


@dataclass(eq=False)
class _Player:
    """Rank at a position of its order."""

    number: int
    order: tuple[Operation, ...]
    position: int = 0
    now: float = 0.0
    met: bool = False
    """Whether the rank has reached the collective at its position."""
    queues: dict[Hashable, deque[tuple[Operation, float]]] = field(default_factory=dict)
    """Operations posted and not complete, by communicator, with the time of posting."""
    complete: dict[tuple[Edge, int], float] = field(default_factory=dict)

    def step(self, ranks: Sequence[_Player], communicator: Callable[[Edge], Hashable]) -> bool:
        """Do the next operation, if it need not wait."""
        if self.position == len(self.order):
            return False
        operation = self.order[self.position]
        match operation.does:
            case "send" | "receive":
                assert operation.edge is not None
                # Messages between hosts are told apart by their tags, so each has a queue of its own.
                key = operation[1:4] if operation.by_host else communicator(operation.edge)
                self.queues.setdefault(key, deque()).append((operation, self.now))
                _match(ranks, key)
            case "wait":
                assert operation.edge is not None
                done = self.complete.get((operation.edge, operation.number))
                if done is None:
                    return False
                self.now = max(self.now, done)
            case "device":
                if any(not queue[0][0].by_host for queue in self.queues.values() if queue):
                    return False
                self.now = max([self.now, *self.complete.values()])
            case "together" if operation.name == "all ranks":
                self.met = True
                if not all(rank.met or rank.position == len(rank.order) for rank in ranks):
                    return False
                self.now = max(rank.now for rank in ranks)
            case _:
                self.now += operation.seconds
        self.position += 1
        return True

    def describe(self) -> str:
        """Describe what this rank waits for, and its posted operations that are not complete."""
        waited = self.order[self.position]
        text = f"rank {self.number} waits for {waited}"
        held = [queue[0][0] for queue in self.queues.values() if queue]
        ahead = [str(head) for head in held if (head.edge, head.number) != (waited.edge, waited.number)]
        return f"{text}, behind {' and '.join(ahead)}" if ahead else text


def _match(ranks: Sequence[_Player], key: Hashable) -> None:
    """Complete the operations at the heads of both ends' queues of a communicator."""
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            queue = rank.queues.get(key)
            if not queue or queue[0][0].does != "send":
                continue
            sent, posted = queue[0]
            assert sent.edge is not None
            other = ranks[sent.edge.target].queues.get(key)
            if other and other[0][0]._replace(does="send") == sent:
                done = max(posted, other[0][1])
                for end, ends in ((rank, queue), (ranks[sent.edge.target], other)):
                    ends.popleft()
                    end.complete[sent.edge, sent.number] = done
                moved = True
