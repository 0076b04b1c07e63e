"""A model that finds out whether the order in which ranks post their messages can lock.

NCCL executes the operations of one communicator one after another in the order in which this rank posted them; a send
is complete when its receiver takes it. A wait for a message is therefore a wait for everything posted before it on that
communicator, here and at the other end. A rank that waits for its whole device waits for everything it has posted.

:class:`RecordedChannel` notes the operations that the engines' channels execute, and :func:`execute` plays the notes of
the ranks against each other::

    rank 0   receive gradients 0 | send activations 0 | ... wait for gradients 0
    rank 1   receive activations 0 | wait for activations 0 | ... | send gradients 0

Between messages come the passes, with what they exchange inside of a tensor or a space group. :func:`swaps_of_passes`
notes the swaps of a space group, and the weight gradients beside them, from a walk through real layers.

A wait blocks the host here. On CUDA it blocks the current stream instead, behind which every later operation starts, so
what can lock is the same.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ddpm_ds.pipeline.messages import Channel, Edge, Kind, P2PGroup, Posted, Work, pipeline_edges
from ddpm_ds.pipeline.schedule import (
    PASSES,
    Instruction,
    Program,
    Schedule,
    most_in_flight,
    phases_of,
    posted_before,
)
from ddpm_ds.unet.blocks import walk
from ddpm_ds.unet.space import SpaceGroup
from ddpm_ds.unet.weight_gradients import WaitingGradients, Weighted


class Operation(NamedTuple):
    """Operation of a rank, in the order of its host: it posts, waits or computes."""

    does: Literal["send", "receive", "wait", "pass", "sum", "swap", "swapped", "put", "compute", "together", "device"]
    edge: Edge | None = None
    number: int = 0
    """Number of the message on its edge, from 0."""
    by_host: bool = False
    """Whether the message goes from host to host, which no device waits for and no order holds up."""
    seconds: float = 0.0
    """Seconds of a pass."""
    name: str = ""
    """Name of a pass, or of the convolution whose weight gradient is queued and computed."""
    bytes: tuple[tuple[int, int, int], ...] = ()
    """Other ranks of the space group, with the bytes that go there and come back in a swap."""

    def __str__(self) -> str:
        if self.edge is None:
            others = {"together": "a collective of all ranks", "device": "the device", "swapped": "a swap"}
            return others.get(self.does, f"a sum in {self.name}" if self.does == "sum" else self.name)
        kind, phase, source, target = self.edge
        return f"{kind} {self.number} of phase {phase} from rank {source} to rank {target}"


@dataclass
class RecordedWork:
    """Posted operation whose wait is noted."""

    operations: list[Operation]
    edge: Edge
    number: int
    work: Work | None = None
    """What is waited for, if it was really posted."""

    def wait(self) -> None:
        self.operations.append(Operation("wait", self.edge, self.number))
        if self.work is not None:
            self.work.wait()


class RecordedChannel(Channel):
    """Channel that notes its operations in the place of executing them."""

    def __init__(self, operations: list[Operation], edge: Edge, most_in_flight: int, *, by_host: bool = False) -> None:
        group: Any = None
        device = torch.device("cpu")
        super().__init__((), torch.float32, device, P2PGroup(edge, edge.target, group, group, 0), most_in_flight)
        self.by_host = by_host
        self._operations = operations
        self._numbers = {"send": 0, "receive": 0}

    def send(self, tensors: Sequence[Tensor] = ()) -> None:
        self.post_message(torch.zeros(1))

    def receive(self) -> tuple[Tensor, ...]:
        return (self.next_message(),) * 2

    def post_send(self, message: Tensor) -> Posted:
        return self._posted("send", message)

    def post_receive(self) -> Posted:
        return self._posted("receive", torch.zeros(1))

    def _posted(self, does: Literal["send", "receive"], message: Tensor) -> Posted:
        number = self._numbers[does]
        self._numbers[does] += 1
        self._operations.append(Operation(does, self.p2p.edge, number, self.by_host))
        return Posted(RecordedWork(self._operations, self.p2p.edge, number), message)


def where_used(own: Program) -> list[list[Instruction]]:
    """Receives are not posted ahead."""
    return [[one] if one.name in PASSES else [] for one in own]


def all_at_once(own: Program) -> list[list[Instruction]]:
    """All receives of a step are posted before it begins."""
    return [[one for one in own if one.name in PASSES], *([] for _ in own[1:])]


def training_order(
    schedule: Schedule,
    programs: Sequence[Program],
    rank: int,
    *,
    device_waits: Collection[str] = (),
    by_host: bool = False,
    seconds: Callable[[str, int], float] = lambda instruction, phase: 1.0,
    posted: Callable[[Program], list[list[Instruction]]] = posted_before,
    inside: Mapping[str, Sequence[Operation]] = MappingProxyType({}),
) -> list[Operation]:
    """Return what one rank of a pipeline posts and waits for in a training step, as the engine does.

    Args:
        programs: of all ranks.
        device_waits: passes inside of which the rank waits for its whole device.
        by_host: messages go from host to host, as in the engine's cautious steps.
        seconds: of a pass, by its instruction and phase.
        posted: the passes whose receives are posted before each instruction.
        inside: operations of the rank with its tensor or space group, by the instruction of the pass.
    """
    operations: list[Operation] = []
    own, ranks, most = programs[rank], len(programs), most_in_flight(programs)
    edges = [edge for edge in pipeline_edges(ranks, phases_of(schedule)) if edge.kind != "predictions"]
    recorded = {edge: RecordedChannel(operations, edge, most, by_host=by_host) for edge in edges if rank in edge[2:]}
    sends = {edge[:2]: end for edge, end in recorded.items() if edge.source == rank}
    receives = {edge[:2]: end for edge, end in recorded.items() if edge.target == rank}

    def source(one: Instruction) -> RecordedChannel | None:
        kind: Kind = "activations" if one.name == "ForwardPass" else "gradients"
        return None if one.name == "WeightGradients" else receives.get((kind, one.phase))

    for one, ahead in zip(own, posted(own), strict=True):
        name, phase, _ = one
        for channel in filter(None, map(source, ahead)):
            channel.post()
        if name in ("SendActivation", "SendGrad"):
            sends["activations" if name == "SendActivation" else "gradients", phase].send()
        elif name in PASSES:
            if (end := source(one)) is not None:
                end.receive()
            operations.append(Operation("pass", name=name, seconds=seconds(name, phase)))
            operations += inside.get(name, ())
            if name in device_waits:
                operations.append(Operation("device"))
    operations.append(Operation("together"))
    for end in sends.values():
        end.drain()
    return operations


class RecordedSpace(SpaceGroup):
    """Rank of a space group that notes its swaps and receives zeros."""

    def __init__(self, rank: int, size: int, operations: list[Operation]) -> None:
        super().__init__(rank, size)
        self.operations = operations

    def post(self, sends: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Sequence[Any]:
        ranks = sorted({*sends, *received})
        swapped = tuple((rank, len(sends.get(rank, ())), len(received.get(rank, ()))) for rank in ranks)
        self.operations.append(Operation("swap", bytes=swapped))
        return [self]

    def wait(self) -> None:
        self.operations.append(Operation("swapped"))


def swaps_of_passes(
    make: Callable[[SpaceGroup], nn.ModuleList], inputs: tuple[Tensor, ...], rank: int, size: int
) -> dict[str, list[Operation]]:
    """Return what a rank of a space group does in each pass, noted from a walk through modules that ``make`` shares."""
    operations: list[Operation] = []
    modules = make(RecordedSpace(rank, size, operations))
    names = {part: name for name, part in modules.named_modules()}

    def noting(does: Literal["put", "compute"]) -> Callable[..., None]:
        call = getattr(WaitingGradients, does)

        def noted(queue: WaitingGradients, parts: Sequence[Weighted], *others: Any) -> None:
            operations.extend(Operation(does, name=names[part]) for part in parts)
            call(queue, parts, *others)

        return noted

    with patch.multiple(WaitingGradients, put=noting("put"), compute=noting("compute")):
        prediction = walk(modules, inputs)
        forward = [*operations]
        operations.clear()
        prediction.sum().backward()
    return {"ForwardPass": forward, "BackwardPass": operations}


class LockError(RuntimeError):
    """Error: the ranks wait for each other for ever, or take what another meant; the message says which and what."""


def execute(
    orders: Sequence[Iterable[Operation]], communicator: Callable[[Edge], Hashable] = lambda edge: edge, group: int = 1
) -> float:
    """Play the orders of the ranks of one pipeline, and return the seconds that they take; messages take none.

    With a tensor or space ``group`` of several ranks for each stage there are as many pipelines, whose orders follow
    each other.

    The replicas of a pipeline execute the same order, so what they do together after a backward, as under ZeRO-2, is no
    wait within one pipeline and is left out. ``communicator`` says which edges share one.

    Raises:
        LockError: some ranks wait for each other for ever, swaps of two ranks differ, or weight gradients stay queued.
    """
    stages = len(orders) // group
    ranks = [_Player(number, tuple(order), stages) for number, order in enumerate(orders)]
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
    stages: int
    position: int = 0
    sums: int = 0
    """Number of sums that this rank has begun."""
    now: float = 0.0
    summing: bool = False
    met: bool = False
    """Whether the rank has reached the collective at its position."""
    queues: dict[Hashable, deque[tuple[Operation, float]]] = field(default_factory=dict)
    """Operations posted and not complete, by communicator, with the time of posting."""
    complete: dict[tuple[Edge, int], float] = field(default_factory=dict)
    swaps: deque[dict[int, tuple[int, int]]] = field(default_factory=deque)
    """Bytes there and back of posted swaps, by the ranks of the space group that have not taken part yet."""
    queued: set[str] = field(default_factory=set)
    """Convolutions whose weight gradients wait for a swap."""

    def step(self, ranks: Sequence[_Player], communicator: Callable[[Edge], Hashable]) -> bool:
        """Do the next operation, if it need not wait."""
        if self.position == len(self.order):
            return False
        operation = self.order[self.position]
        match operation.does:
            case "send" | "receive":
                assert operation.edge is not None
                # Tags distinguish messages between hosts, so each has a queue of its own.
                key = operation[1:4] if operation.by_host else communicator(operation.edge)
                self.queues.setdefault(key, deque()).append((operation, self.now))
                first = self.number - self.number % self.stages
                _match(ranks[first : first + self.stages], key)
            case "sum":
                if not self.summing:
                    self.sums, self.summing = self.sums + 1, True
                group = ranks[self.number % self.stages :: self.stages]
                if any(rank.sums < self.sums for rank in group):
                    return False
                self.now, self.summing = max(rank.now for rank in group), False
            case "swap":
                self.swaps.append({rank: (there, back) for rank, there, back in operation.bytes})
                _swap(ranks[self.number % self.stages :: self.stages])
            case "swapped":
                if self.swaps:
                    return False
            case "put" if operation.name not in self.queued:
                self.queued.add(operation.name)
            case "compute":
                self.queued.remove(operation.name)
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
            case "put" | "together" if self.queued:
                raise LockError(f"rank {self.number} never computes the weight gradients of {sorted(self.queued)}")
            case "together":
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


def _swap(group: Sequence[_Player]) -> None:
    """Match the first swaps that the ranks of a space group have posted and that are not complete."""
    for (own, rank), (number, other) in itertools.permutations(enumerate(group), 2):
        if not rank.swaps or not other.swaps or number not in rank.swaps[0] or own not in other.swaps[0]:
            continue
        (there, back), (sent, wanted) = rank.swaps[0].pop(number), other.swaps[0].pop(own)
        if (there, back) != (wanted, sent):
            raise LockError(
                f"rank {rank.number} swaps {there} for {back} bytes with rank {other.number}, which swaps {sent} for "
                f"{wanted}"
            )
        for end in (rank, other):
            if not end.swaps[0]:
                end.swaps.popleft()
        return _swap(group)
