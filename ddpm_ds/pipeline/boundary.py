"""What crosses a cut between two stages: one contiguous message per micro-batch and direction.

    stage s                          stage s + 1
       activations.send      ──▶     receive     [ h | emb | skip | skip | ... ]
       gradients.receive     ◀──     send        [ the same shapes, same order ]

Both sides compute the shapes from the list of layers, so nothing is negotiated at run time. Images are channels-last
and travel as they lie in memory. A send returns at once, and
the next message is asked for before it is needed, so that it travels while its receiver computes. Each direction of
each boundary has a process group of its own: under NCCL the messages of a group are executed in their order, and no
message may wait for one of another kind.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Channel:
    """One direction of one boundary, as one of its two sides has it.

    ``shapes`` include the micro-batch; ``peer`` is the global rank of the other side. A message that is sent is kept
    until it is known to be delivered, of which gloo says nothing before it is waited for: when ``most_in_flight`` are
    kept, the next one waits for the oldest. A message that is expected has its memory from when it is asked for.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        peer: int,
        group: dist.ProcessGroup,
        most_in_flight: int,
    ) -> None:
        self._most_in_flight = most_in_flight
        self._shapes = tuple(shapes)
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._dtype, self._device, self._peer, self._group = dtype, device, peer, group
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()
        self._expected = 0
        self._asked: deque[tuple[dist.Work, Tensor]] = deque()

    @property
    def message_bytes(self) -> int:
        """Bytes of one message."""
        return sum(self._sizes) * self._dtype.itemsize

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send ``tensors`` (of the channel's shapes, in order) as one message."""
        while len(self._in_flight) >= self._most_in_flight:
            self._in_flight.popleft()[0].wait()
        parts = [as_in_memory(tensor.detach()).reshape(-1) for tensor in tensors]
        message = parts[0] if len(parts) == 1 else torch.cat(parts)
        if message.numel() != sum(self._sizes) or message.dtype != self._dtype:
            raise RuntimeError(
                f"boundary expected {sum(self._sizes)} x {self._dtype}, got {message.numel()} x {message.dtype}"
            )
        work = dist.isend(message, dst=self._peer, group=self._group)
        assert work is not None
        self._in_flight.append((work, message))

    def expect(self, messages: int) -> None:
        """Say how many messages will be received: the first is asked for now, each other when one is taken."""
        self._expected += messages
        self._ask()

    def receive(self) -> tuple[Tensor, ...]:
        """Wait for the next expected message; views of one buffer, nothing is copied."""
        work, message = self._asked.popleft()
        self._ask()
        work.wait()
        return tuple(_view(part, shape) for part, shape in zip(message.split(self._sizes), self._shapes, strict=True))

    def _ask(self) -> None:
        if not self._expected:
            return
        self._expected -= 1
        message = torch.empty(sum(self._sizes), dtype=self._dtype, device=self._device)
        work = dist.irecv(message, src=self._peer, group=self._group)
        assert work is not None
        self._asked.append((work, message))

    def drain(self) -> None:
        """Wait until everything sent has been delivered."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()


def as_in_memory(tensor: Tensor) -> Tensor:
    """A view with dimensions in the order of memory: (N, H, W, C) of images, which are channels-last."""
    return tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor


def _view(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of a shape from its values in the order of :func:`as_in_memory`; nothing is copied."""
    if len(shape) != 4:
        return part.view(shape)
    images, channels, height, width = shape
    return part.view(images, height, width, channels).permute(0, 3, 1, 2)


def open_line(ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device, *, up: bool) -> None:
    """Pass a token from each of ``ranks`` to the next one, or with ``up`` to the one before; they all call this.

    NCCL connects two ranks at their first message and holds both until they have met: met here, one after the other,
    they need not meet in the middle of a schedule.
    """
    own = dist.get_rank()
    for first, second in itertools.pairwise(ranks):
        sender, receiver = (second, first) if up else (first, second)
        token = torch.zeros(1, device=device)
        if own == sender:
            dist.send(token, dst=receiver, group=group)
        elif own == receiver:
            dist.recv(token, src=sender, group=group)
