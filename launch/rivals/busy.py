"""How long a process computes in a step: its time inside of modules and of autograd's backward.

What every row does, whoever wrote its engine, so that the idle rest means the same in each.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Busy:
    """Seconds in the outermost calls, of whatever is nested in each other."""

    def __init__(self, synchronize: Callable[[], object], clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._synchronize, self._clock = synchronize, clock
        self._depth, self._begin = 0, 0.0

    def enter(self) -> None:
        if self._depth == 0:
            self._synchronize()
            self._begin = self._clock()
        self._depth += 1

    def leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._synchronize()
            self.seconds += self._clock() - self._begin


@contextlib.contextmanager
def busy_time(
    synchronize: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.perf_counter
) -> Iterator[Busy]:
    """Watch every module and every ``torch.autograd.backward`` of this process.

    ``synchronize`` waits for the stream on which a call has only queued its work; not for the whole device, which may
    have a message to receive that depends on what this process is about to send.
    """
    busy = Busy(synchronize, clock)
    backward = torch.autograd.backward

    def watched(*args: Any, **kwargs: Any) -> None:
        busy.enter()
        try:
            backward(*args, **kwargs)
        finally:
            busy.leave()

    before = register_module_forward_pre_hook(lambda module, inputs: busy.enter())
    after = register_module_forward_hook(lambda module, inputs, outputs: busy.leave(), always_call=True)
    torch.autograd.backward = watched
    try:
        yield busy
    finally:
        torch.autograd.backward = backward
        before.remove()
        after.remove()
