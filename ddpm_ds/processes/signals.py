"""Signals that ask a program to stop. Those that its parent ignores, as under nohup, stay ignored.

Imports nothing slow, so that a program can handle them before it imports anything else.
"""

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that ask a rank to stop."""
SUPERVISOR_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)
"""Signals that ask the supervisor of ranks to stop them."""
SAME_SIGNAL_SECONDS = 1.0
"""Time within which repeated signals count as one: a terminal or a scheduler signals a launcher and its ranks, and the
launcher signals its ranks again."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a program that Ctrl-C has ended."""


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that this process does not ignore."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def leave_on(numbers: Iterable[signal.Signals], code: int) -> None:
    """Let signals end this process at once, without a word, with exit code ``code``."""
    for number in heeded(numbers):
        signal.signal(number, lambda number, frame: os._exit(code))


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, as in any program of Python."""
    for number in heeded([signal.SIGINT]):
        signal.signal(number, signal.default_int_handler)


def ignore(numbers: Iterable[int]) -> None:
    """Ignore signals from now on, since the process has done its work and is about to end."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def heard_signals(*, leaving: bool = False) -> Iterator[list[signal.Signals]]:
    """Yield the list of received stop signals.

    Afterwards signals are handled as before, or with ``leaving`` ignored, since the process is about to end.
    """
    heard: list[signal.Signals] = []
    heard_at = -math.inf

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal heard_at
        if time.monotonic() - heard_at > SAME_SIGNAL_SECONDS:
            heard.append(signal.Signals(number))
        heard_at = time.monotonic()

    before = {number: signal.signal(number, hear) for number in heeded(SUPERVISOR_SIGNALS)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if leaving else handler)
