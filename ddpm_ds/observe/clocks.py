"""When something happened: on a device by its own events, on a CPU by the host's clock; one time for all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddpm_ds.device import wait_for_device

MEETINGS = 8
"""How often the ranks meet to compare their clocks."""

Meeting = tuple[float, float]
"""When a rank came to a barrier and when it was let go, on the host's clock."""


class Clock(Protocol):
    """Takes marks while a step runs, and says afterwards when they were."""

    def mark(self) -> Any:
        """Now, in the order of what the device was given. Does not wait for the device."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When each mark was, on the host's clock. Waits for the device."""


class HostClock:
    """Of work that is done when a call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class DeviceClock:
    """CUDA events on the stream that is current; made once per trace, which waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        wait_for_device(device)
        self._zero = self.mark()
        wait_for_device(device)
        self._zero_seconds = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        wait_for_device(self._device)
        return [self._zero_seconds + self._zero.elapsed_time(mark) / 1e3 for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock of what this process gives ``device``."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


def meet() -> tuple[Meeting, ...]:
    """Meet all ranks a few times; collective."""
    meetings = []
    for _ in range(MEETINGS):
        came = time.perf_counter()
        dist.barrier()
        meetings.append((came, time.perf_counter()))
    return tuple(meetings)


def clock_offset(own: Sequence[Meeting], others: Sequence[Meeting]) -> tuple[float, float]:
    """How far a rank's clock is before another's, and by how much that may be wrong; both in seconds.

    Nobody is let go from a barrier before everybody has come, so each meeting bounds the difference from both sides.
    Clocks that the bounds allow to be one are taken for one: so they are on one host, where processes share it.
    """
    pairs = list(zip(own, others, strict=True))
    lowest = max(came - others_left for (came, _), (_, others_left) in pairs)
    highest = min(left - others_came for (_, left), (others_came, _) in pairs)
    offset = 0.0 if lowest <= 0.0 <= highest else (lowest + highest) / 2
    return offset, max(highest - offset, offset - lowest)
