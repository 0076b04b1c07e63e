"""Signals that ask a program to stop. Signals that its parent ignores, as under nohup, stay ignored.

Imports nothing slow, so that a program can handle signals before it imports anything else.
"""

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that ask a rank to stop."""
SUPERVISOR_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)
"""Signals that ask the supervisor of ranks to stop them."""
SAME_SIGNAL_SECONDS = 1.0
"""Time within which signals count as one: a scheduler signals a launcher and its ranks, and the launcher its ranks."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a program that Ctrl-C has ended."""
Handler = Callable[[int, FrameType | None], object] | int | None


def handle(numbers: Iterable[int], handler: Handler) -> dict[int, Handler]:
    """Let signals that this process does not ignore call ``handler``; return their former handlers."""
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heeded}


def leave_on(numbers: Iterable[signal.Signals], code: int) -> None:
    """Let signals end this process at once and silently, with exit code ``code``."""
    handle(numbers, lambda number, frame: os._exit(code))


class SignalThread:
    """Thread that gives the number of each stop signal to ``receive``, from construction to :meth:`close`.

    It is woken through a socket, since Python runs no handler while the main thread waits in a library.
    """

    def __init__(self, receive: Callable[[int], None]) -> None:
        self._received, self.wakeup = socket.socketpair()
        self.wakeup.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self.wakeup.fileno())
        self._handlers = {number: signal.signal(number, lambda number, frame: None) for number in STOP_SIGNALS}

        def run() -> None:
            with self._received:
                while numbers := self._received.recv(1):
                    if numbers[0] in STOP_SIGNALS:
                        receive(numbers[0])

        # The thread keeps this object, and so the socket, which nobody else may refer to.
        self._thread = threading.Thread(target=run, name="signals", daemon=True)
        self._thread.start()

    def close(self, *, leaving: bool = False) -> None:
        """Handle signals as before; with ``leaving`` ignore them, since the process is about to end."""
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_IGN if leaving else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        # Workers of the loader have copies of the socket, so closing it does not end the thread. A thread that ended
        # while Python shuts down would release collectives of the process group, which aborts the process.
        self.wakeup.shutdown(socket.SHUT_WR)
        self._thread.join()
        self.wakeup.close()


@contextlib.contextmanager
def received_signals(*, leaving: bool = False) -> Iterator[list[signal.Signals]]:
    """Yield a list that receives stop signals; afterwards they are handled as before, or with ``leaving`` ignored."""
    received, received_at = list[signal.Signals](), -math.inf

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal received_at
        if time.monotonic() - received_at > SAME_SIGNAL_SECONDS:
            received.append(signal.Signals(number))
        received_at = time.monotonic()

    before = handle(SUPERVISOR_SIGNALS, receive)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if leaving else handler)
