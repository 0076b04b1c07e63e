"""Messages between ranks: tensors between stages, by P2P groups, and values as JSON.

The tensors that cross a cut are one contiguous message per micro-batch and direction::

    stage s                          stage s + 1
       activations.send      ──▶     receive     [ h | emb | skip | skip | ... ]
       gradients.receive     ◀──     send        [ the same shapes, same order ]

Both sides compute the shapes from the list of layers, so nothing is negotiated at run time. Images are channels-last
and travel as they lie in memory. :class:`Channel` decides when a message is posted and waited for, and the model in
``tests/pipeline/order_model.py`` checks whether the channels of all ranks can deadlock.

NCCL executes the operations of a communicator in the order of posting, whatever their destination, and ignores tags. So
each directed edge, phase and kind of message has a P2P group of its two ranks, and no message waits for one of another
edge. A group is made by its two ranks alone, in a time that does not grow with stages or replicas::

    1f1b, a rank in the middle      activations in, activations out, gradients in, gradients out            4
    1f1b, the first and the last    two of these, and predictions, the way back of samples                  3
    folded                          as 1f1b without predictions, once for each phase                        4 or 8

A receive posted on a GPU is a kernel that spins until its message arrives. Anything that waits for the whole device
waits for it too: an allocator short of memory, a profiler, or code that is compiled, tuned or loaded at its first use.
Steps in which this may happen send their messages from host to host over gloo instead.

Values are exchanged as JSON, since unpickling could run code from the sender, and from host to host, so that NCCL needs
no communicator of all ranks. Every function that does it is collective and takes the type of the value, by which the
receiver rebuilds and checks it: numbers, texts, tuples, lists, mappings, dataclasses and named tuples of these.
"""

import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from ddpm_ds.ground.host import processes_on_host

Kind = Literal["activations", "gradients", "predictions"]
Value = TypeVar("Value")


MOST_CONNECTED = 64
"""Number of ranks up to which each is connected to all others to exchange values."""
_value_groups = WeakKeyDictionary[Any, tuple[Any, ...]]()


def value_groups() -> tuple[Any, ...]:
    """Return this rank's gloo groups for values: none if it is alone, one of all ranks, or two of a grid. Collective.

    More than :data:`MOST_CONNECTED` ranks form a grid, since connections and start grow with the members of a group.
    Values that have gone along all rows, then along all columns, have reached every rank::

        0 ─ 1 ─ 2 ─ 3
        4 ─ 5 ─ 6 ─ 7      rank 5 has a row, 4 to 7, and a column, 1 5 9
        8 ─ 9 ─ 10 ─ 11

    The groups are made at the first call, and kept as long as the process group.
    """
    world, size = dist.group.WORLD, dist.get_world_size()
    if size == 1 or dist.get_backend() == "gloo":
        return (world,) if size > 1 else ()
    if world not in _value_groups:
        rows = max(each for each in range(1, math.isqrt(size) + 1) if size % each == 0)
        grid = torch.arange(size).view(rows if size > MOST_CONNECTED else 1, -1)
        lines = [grid.tolist(), grid.T.tolist()] if len(grid) > 1 else [grid.tolist()]
        _value_groups[world] = tuple(dist.new_subgroups_by_enumeration(each, backend="gloo")[0] for each in lines)
    return _value_groups[world]


def barrier() -> None:
    """Wait on the host until all ranks are here; devices wait for nothing."""
    for group in value_groups():
        dist.barrier(group=group)


def all_gather_objects(value: Value, kind: object) -> list[Value]:
    """Return all ranks' values of type ``kind``, by rank."""
    return [_unpacked(text, kind) for text in _all_gathered(_packed(value, kind))]


def gather_objects(value: Value, kind: object) -> list[Value] | None:
    """Return all ranks' values of type ``kind``, by rank, on rank 0; None on the others."""
    texts = _all_gathered(_packed(value, kind))
    return [_unpacked(text, kind) for text in texts] if dist.get_rank() == 0 else None


def broadcast_object(value: object, kind: object) -> Any:
    """Return rank 0's value of type ``kind``; the others' values are ignored."""
    text = _packed(value, kind) if dist.get_rank() == 0 else b""
    broadcast(length := torch.tensor([len(text)]))
    broadcast(message := torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8))
    return _unpacked(message.numpy().tobytes(), kind)


def broadcast(tensor: Tensor) -> None:
    """Copy rank 0's tensor to all ranks; it is in host memory."""
    for group in value_groups():  # along columns, the first row's replaces what other rows have got
        dist.broadcast(tensor, group=group, group_src=0)


def _packed(value: object, kind: Any) -> bytes:
    return json.dumps(TypeAdapter(kind).dump_python(value, mode="json")).encode()  # in one line


def _unpacked(text: bytes, kind: Any) -> Any:
    return TypeAdapter(kind).validate_python(json.loads(text))


def _all_gathered(text: bytes) -> list[bytes]:
    """Return all ranks' texts of one line, by rank."""
    for group in value_groups():
        dist.all_reduce(longest := torch.tensor([len(text)]), op=dist.ReduceOp.MAX, group=group)
        own = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8)
        messages = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(messages, own, group=group)
        text = b"\n".join(message.numpy().tobytes().rstrip() for message in messages)
    return text.split(b"\n")


class Edge(NamedTuple):
    """One kind of message in one phase, from one rank of a pipeline to another, over a communicator of its own."""

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
        """Make everything that follows wait until the operation is complete."""


Start = Callable[[Callable[[], Work]], Work]
"""Function that starts a send or receive."""


def at_once(operation: Callable[[], Work]) -> Work:
    """Start an operation."""
    return operation()


class Posted(NamedTuple):
    """Posted send or receive, which keeps its message alive."""

    work: Work
    message: Tensor


@dataclass(frozen=True)
class P2PGroup:
    """Groups over which one end of an edge reaches the other."""

    edge: Edge
    peer: int
    """Global rank of the other end."""
    group: dist.ProcessGroup
    """Group of the edge's own two ranks, connected from device to device."""
    host_group: dist.ProcessGroup | None
    """Group of the same two ranks, connected from host to host by gloo; None if ``group`` already is."""
    tag: int
    """Number of the edge; edges share ``host_group``, where gloo matches messages by it. NCCL ignores it."""


class Channel:
    """End of an edge, which decides when messages are posted and waited for; shapes include the micro-batch.

    ``others`` are the shapes for images of other sizes; :meth:`begin` gives the size of each message.

    A send returns at once, unless ``most_in_flight`` messages are not known to be delivered: then it waits for the
    oldest, since gloo does not report delivery before a wait. The owner posts each receive before the pass that
    precedes its use, or lets :meth:`start_receiving` post one message ahead, so that messages travel while it computes.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        p2p: P2PGroup,
        most_in_flight: int,
        others: Sequence[Sequence[tuple[int, ...]]] = (),
    ) -> None:
        self._shapes = (tuple(shapes), *map(tuple, others))
        self._dtype, self._device, self.p2p = dtype, device, p2p
        self._most_in_flight = most_in_flight
        self.begin(by_host=False)

    def begin(self, *, by_host: bool, start: Start = at_once, sizes: Sequence[int] = ()) -> None:
        """Begin anew: forget all messages, such as those of a graph that could not be captured.

        ``sizes`` numbers the images' size of each message from now on: 0, or 1 for the first of ``others``; without it
        all are 0.
        """
        self.by_host = by_host
        """Whether messages go from host to host, so that waiting for the device does not wait for them."""
        self._start = start
        self._in_flight: deque[Posted] = deque()
        self._to_post = 0
        self._receives: deque[Posted] = deque()
        shapes = [self._shapes[size] for size in sizes]
        self._of_sends, self._of_posts, self._of_receives = (
            iter(shapes) if shapes else itertools.repeat(self._shapes[0]) for _ in range(3)
        )

    @property
    def message_bytes(self) -> int:
        """Bytes of one message, with images of the first size."""
        return elements_of(self._shapes[0]) * self._dtype.itemsize

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send ``tensors`` (of the message's shapes, in order) as one message."""
        expected = elements_of(next(self._of_sends))
        parts = [as_in_memory(tensor.detach()).reshape(-1) for tensor in tensors]
        message = parts[0] if len(parts) == 1 else torch.cat(parts)
        if message.numel() != expected or message.dtype != self._dtype:
            raise RuntimeError(f"boundary expected {expected} x {self._dtype}, got {message.numel()} x {message.dtype}")
        self.post_message(message)

    def receive(self) -> tuple[Tensor, ...]:
        """Wait for the next message; return views of one buffer."""
        message, shapes = self.next_message().to(self._device), next(self._of_receives)
        parts, views = message.split([math.prod(shape) for shape in shapes]), []
        for part, shape in zip(parts, shapes, strict=True):
            if len(shape) == 4:  # in the order of as_in_memory
                images, channels, height, width = shape
                views.append(part.view(images, height, width, channels).permute(0, 3, 1, 2))
            else:
                views.append(part.view(shape))
        return tuple(views)

    def post_message(self, message: Tensor) -> None:
        """Post a send, after waiting for the oldest if too many are in flight."""
        while len(self._in_flight) >= self._most_in_flight:
            self._in_flight.popleft().work.wait()
        self._in_flight.append(self.post_send(message))

    def start_receiving(self, messages: int) -> None:
        """Post the receive of the first of ``messages`` messages; each wait posts the next."""
        self._to_post += messages
        self._post_ahead()

    def post(self) -> None:
        """Post the receive of the next message."""
        self._receives.append(self.post_receive())

    def next_message(self) -> Tensor:
        """Wait for the next message, whose receive is posted."""
        work, message = self._receives.popleft()
        self._post_ahead()
        work.wait()
        return message

    def drain(self) -> None:
        """Wait until everything sent has been delivered."""
        while self._in_flight:
            self._in_flight.popleft().work.wait()

    def _post_ahead(self) -> None:
        if self._to_post:
            self._to_post -= 1
            self.post()

    def post_send(self, message: Tensor) -> Posted:
        """Post a send."""
        if self.by_host:
            message = message.cpu()
        operation: Any = partial(dist.isend, message, dst=self.p2p.peer, **self._way())
        return Posted(self._start(operation), message)

    def post_receive(self) -> Posted:
        """Post a receive of the next message, which has its memory from now on."""
        count, device = elements_of(next(self._of_posts)), "cpu" if self.by_host else self._device
        message = torch.empty(count, dtype=self._dtype, device=device)
        operation: Any = partial(dist.irecv, message, src=self.p2p.peer, **self._way())
        return Posted(self._start(operation), message)

    def _way(self) -> dict[str, Any]:
        if self.by_host and self.p2p.host_group is not None:
            return {"group": self.p2p.host_group, "tag": self.p2p.tag}
        return {"group": self.p2p.group}


def elements_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the number of elements of tensors of these shapes."""
    return sum(map(math.prod, shapes))


def as_in_memory(tensor: Tensor) -> Tensor:
    """Return a view with dimensions in the order of memory: (N, H, W, C) of images, which are channels-last."""
    return tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor


BLOCKS_IN_HOST, BLOCKS_ACROSS_HOSTS = 2, 8
"""Most thread blocks of NCCL's kernel for a message; each occupies a multiprocessor while it waits (docs/gpu.md)."""


@dataclass(frozen=True)
class StageChannels:
    """Channels of a stage; None if it has no neighbour there on another rank."""

    activations_in: Channel | None = None
    activations_out: Channel | None = None
    gradients_in: Channel | None = None
    gradients_out: Channel | None = None

    def begin(self, *, by_host: bool, start: Start = at_once, sizes: Sequence[int] = ()) -> None:
        """Begin a step's messages; ``sizes`` numbers the images' size of each micro-batch."""
        for channel in (self.activations_in, self.activations_out, self.gradients_in, self.gradients_out):
            if channel is not None:
                channel.begin(by_host=by_host, start=start, sizes=sizes)

    def drain(self) -> None:
        """Wait until everything sent has been delivered."""
        for channel in (self.activations_out, self.gradients_out):
            if channel is not None:
                channel.drain()


def runs_behind(device: torch.device) -> bool:
    """Return whether a device works asynchronously, so that a posted receive can block all later work."""
    return device.type == "cuda"


def open_p2p_groups(pipelines: Sequence[Sequence[int]], phases: int, device: torch.device) -> dict[Edge, P2PGroup]:
    """Connect this rank's edges of its pipeline; all ranks call this, with the global ranks of all ``pipelines``.

    All ranks make the groups in one order, since PyTorch names a group by their count. Only the two ranks of a group
    communicate, as long as the default group is not bound to a device; the others only count it. NCCL connects two
    ranks at their first message and blocks both until then, so a token goes through each edge here, and no ranks
    connect in the middle of a schedule.
    """
    if dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        raise RuntimeError(
            "the default process group is bound to a device; make it with ddpm_ds.processes.process_group"
        )
    own, per_host = dist.get_rank(), processes_on_host(dist.get_world_size())
    host_groups: dict[frozenset[int], Any] = {}
    connected = {}
    for tag, edge in enumerate(pipeline_edges(len(pipelines[0]), phases)):
        for pipeline in pipelines:
            source, target = pair = pipeline[edge.source], pipeline[edge.target]
            if runs_behind(device) and frozenset(pair) not in host_groups:
                host_groups[frozenset(pair)] = dist.new_group(pair, backend="gloo")
            in_host = source // per_host == target // per_host
            group = edge_group(pair, device, BLOCKS_IN_HOST if in_host else BLOCKS_ACROSS_HOSTS)
            if own not in pair:
                continue
            peer = target if own == source else source
            connected[edge] = P2PGroup(edge, peer, group, host_groups.get(frozenset(pair)), tag)
            token = torch.zeros(1, device=device)
            if own == source:
                dist.send(token, dst=peer, group=group)
            else:
                dist.recv(token, src=peer, group=group)
    return connected


def edge_group(ranks: Sequence[int], device: torch.device, blocks: int) -> Any:
    """Return a group of devices for an edge's messages, or for scalars; on other ranks PyTorch's marker for no group.

    With NCCL its kernels have at most ``blocks`` thread blocks: as many as for collectives would hold as many
    multiprocessors, and take ten times the memory.
    """
    if device.type != "cuda":
        return dist.new_group(ranks)
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = blocks
    return dist.new_group(ranks, backend="nccl", pg_options=options, device_id=device)
