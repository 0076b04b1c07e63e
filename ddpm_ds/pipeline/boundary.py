"""What crosses a cut between two stages: one contiguous message per micro-batch and direction.

    stage s                          stage s + 1
       activations.send      ──▶     receive     [ h | emb | skip | skip | ... ]
       gradients.receive     ◀──     send        [ the same shapes, same order ]

Both sides compute the shapes from the list of layers, so nothing is negotiated at run time. Images are channels-last
and travel as they lie in memory. When a message is posted and waited for is said in :mod:`ddpm_ds.pipeline.order`, over
which communicators it goes in :mod:`ddpm_ds.pipeline.wires`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpm_ds.pipeline.order import Edge, Line, Work


@dataclass(frozen=True)
class Wire:
    """How one end of an edge reaches the other."""

    edge: Edge
    peer: int
    """Global rank of the other end."""
    group: dist.ProcessGroup
    """The edge's own two ranks, connected from device to device."""
    host_group: dist.ProcessGroup | None
    """The same two ranks, connected from host to host by gloo; None where ``group`` is that."""
    tag: int
    """Tells the edges apart that share ``host_group``; gloo matches messages by it, NCCL can't."""


class Channel(Line[Tensor]):
    """One end of an edge with the shapes of its messages, micro-batch included.

    A message that is sent is kept until it is known to be delivered, of which gloo says nothing before it is waited
    for. A message that is expected has its memory from when its receive is posted.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        wire: Wire,
        most_in_flight: int,
    ) -> None:
        super().__init__(most_in_flight)
        self._shapes = tuple(shapes)
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._dtype, self._device, self.wire = dtype, device, wire
        self.by_host = False
        """Whether messages go from host to host, where nothing that waits for the device can wait for them."""

    @property
    def message_bytes(self) -> int:
        """Bytes of one message."""
        return sum(self._sizes) * self._dtype.itemsize

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send ``tensors`` (of the channel's shapes, in order) as one message."""
        parts = [as_in_memory(tensor.detach()).reshape(-1) for tensor in tensors]
        message = parts[0] if len(parts) == 1 else torch.cat(parts)
        if message.numel() != sum(self._sizes) or message.dtype != self._dtype:
            raise RuntimeError(
                f"boundary expected {sum(self._sizes)} x {self._dtype}, got {message.numel()} x {message.dtype}"
            )
        self.put(message)

    def receive(self) -> tuple[Tensor, ...]:
        """Wait for the next expected message; views of one buffer."""
        message = self.take().to(self._device)
        return tuple(_view(part, shape) for part, shape in zip(message.split(self._sizes), self._shapes, strict=True))

    def post_send(self, message: Tensor) -> Work:
        if self.by_host:
            message = message.cpu()
        return _Sent(dist.isend(message, dst=self.wire.peer, **self._way()), message)

    def post_receive(self) -> tuple[Work, Tensor]:
        message = torch.empty(sum(self._sizes), dtype=self._dtype, device="cpu" if self.by_host else self._device)
        work = dist.irecv(message, src=self.wire.peer, **self._way())
        assert work is not None
        return work, message

    def _way(self) -> dict[str, Any]:
        if self.by_host and self.wire.host_group is not None:
            return {"group": self.wire.host_group, "tag": self.wire.tag}
        return {"group": self.wire.group}


@dataclass(frozen=True)
class _Sent:
    """A posted send, which keeps its message alive."""

    work: dist.Work | None
    message: Tensor

    def wait(self) -> None:
        assert self.work is not None
        self.work.wait()


def as_in_memory(tensor: Tensor) -> Tensor:
    """A view with dimensions in the order of memory: (N, H, W, C) of images, which are channels-last."""
    return tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor


def _view(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of a shape from its values in the order of :func:`as_in_memory`; nothing is copied."""
    if len(shape) != 4:
        return part.view(shape)
    images, channels, height, width = shape
    return part.view(images, height, width, channels).permute(0, 3, 1, 2)
