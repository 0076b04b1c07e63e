"""What a rank owns of the parameters, and its copy in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WRITE_BYTES = 2**24


@dataclass(frozen=True)
class Fragment:
    """A piece of one parameter, or of what is kept of it, that this rank alone owns."""

    kind: str
    """``master``, ``exp_avg``, ``exp_avg_sq``, ``ema``, ...: no slash."""
    name: str
    """Global name of the parameter."""
    start: int
    """Index of the first value in the flattened parameter."""
    values: Tensor  # (length,) fp32, any device

    def __post_init__(self) -> None:
        if self.values.dtype != torch.float32 or self.values.ndim != 1:
            found = f"{self.values.dtype} of shape {tuple(self.values.shape)}"
            raise TypeError(f"{self.kind} of {self.name} is {found}; a fragment is 1-D fp32")


class HostCopy:
    """Fragments as they were at one moment, one after the other; the memory is used again for the next moment."""

    def __init__(self) -> None:
        self._values = torch.empty(0)
        self._used = 0

    def take(self, fragments: Sequence[Fragment]) -> None:
        """Copy all values; returns when they may change. Pinned memory where any are on CUDA."""
        devices = {fragment.values.device for fragment in fragments if fragment.values.is_cuda}
        self._used = sum(fragment.values.numel() for fragment in fragments)
        if self._values.numel() < self._used:
            self._values = torch.empty(0)  # frees the old before the new is there
            self._values = torch.empty(self._used, dtype=torch.float32, pin_memory=bool(devices))
        at = 0
        for fragment in fragments:
            end = at + fragment.values.numel()
            values = fragment.values.detach()
            if values.device.type == "cpu":  # numpy, since torch would start its threads anew for every fragment
                self._values.numpy()[at:end] = values.numpy()
            else:
                self._values[at:end].copy_(values, non_blocking=True)
            at = end
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def chunks(self) -> Iterator[memoryview]:
        """The bytes that were copied."""
        raw = self._values.numpy().data[: self._used]
        step = WRITE_BYTES // raw.itemsize
        for at in range(0, self._used, step):
            yield raw[at : at + step].cast("B")
