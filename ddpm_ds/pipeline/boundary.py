"""What crosses a cut between two stages: one contiguous message per micro-batch and direction.

    stage s                          stage s + 1
       Boundary.send_activations  ──▶  receive_activations     [ h | emb | skip | skip | ... ]
       receive_gradients          ◀──  send_gradients          [ the same shapes, same order ]

Both sides compute the shapes from the list of layers, so nothing is negotiated at run time. Activations and
gradients use process groups of their own: under NCCL the messages of one pair of ranks are executed in order per
group, and the two directions must never wait for each other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Channel:
    """One direction of one boundary.

    ``shapes`` include the micro-batch; ``peer`` is the global rank of the other side. Sending returns at once; the
    message is kept until it is delivered.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        peer: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._shapes = tuple(shapes)
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._dtype, self._device, self._peer, self._group = dtype, device, peer, group
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()

    @property
    def message_bytes(self) -> int:
        """Bytes of one message."""
        return sum(self._sizes) * self._dtype.itemsize

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send ``tensors`` (of the channel's shapes, in order) as one message."""
        while self._in_flight and self._in_flight[0][0].is_completed():
            self._in_flight.popleft()[0].wait()
        message = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        if message.numel() != sum(self._sizes) or message.dtype != self._dtype:
            raise RuntimeError(
                f"boundary expected {sum(self._sizes)} x {self._dtype}, got {message.numel()} x {message.dtype}"
            )
        work = dist.isend(message, dst=self._peer, group=self._group)
        assert work is not None
        self._in_flight.append((work, message))

    def receive(self) -> tuple[Tensor, ...]:
        """Receive one message as views of one fresh buffer; nothing is copied."""
        message = torch.empty(sum(self._sizes), dtype=self._dtype, device=self._device)
        dist.recv(message, src=self._peer, group=self._group)
        return tuple(part.view(shape) for part, shape in zip(message.split(self._sizes), self._shapes, strict=True))

    def drain(self) -> None:
        """Wait until everything sent has been delivered."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()
