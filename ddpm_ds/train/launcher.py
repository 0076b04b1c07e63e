"""Whether what has started this rank is still there.

A launcher that is killed leaves its ranks running, and so does an ssh that drops: on that host nobody would end them.
Both are seen from inside: the parent of the process changes, or nobody reads its output any more.
"""

from __future__ import annotations

import os
import select
import stat

LAUNCHED = ("CROSS_RANK", "TORCHELASTIC_RUN_ID")
"""Variables that DeepSpeed's and PyTorch's launchers set. The parent of a process without them may be a shell, which
may leave."""


class Launcher:
    """What has started this process: its parent, where that is a launcher, and the readers of its output pipes."""

    def __init__(self) -> None:
        self._parent = os.getppid() if any(name in os.environ for name in LAUNCHED) else None
        self._closed = False
        self._outputs = select.poll()
        for descriptor in (1, 2):
            if _is_pipe(descriptor):
                self._outputs.register(descriptor, 0)

    def is_gone(self) -> bool:
        """Whether it has gone; from then on this process writes to nowhere, where it would fail."""
        for descriptor, _ in self._outputs.poll(0):
            self._outputs.unregister(descriptor)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
            self._closed = True
        return self._closed or (self._parent is not None and os.getppid() != self._parent)


def _is_pipe(descriptor: int) -> bool:
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:  # closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
