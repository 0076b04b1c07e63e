"""A process on a host that is asked, and answers, in lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from ddpm_ds.doctor.probe import MARK

LEAVE_SECONDS = 5.0
LINES_KEPT = 50


class Ended(Exception):
    """The process has left; ``code`` is its exit code, where it has one, and ``last_line`` its last complaint."""

    def __init__(self, code: int | None, last_line: str) -> None:
        super().__init__(last_line)
        self.code = code
        self.last_line = last_line


class Silent(Ended):
    """The process is there and says nothing."""


class Conversation:
    """A context: a process of its own group, whose input is closed and which is ended on leaving."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=None if environment is None else dict(environment),
            start_new_session=True,  # Ctrl-C is for the doctor alone, which then ends them all
        )
        self._said: queue.Queue[Any] = queue.Queue()
        self._complaints: list[str] = []
        assert self._process.stdout is not None and self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._hear_complaints, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, ask: str, seconds: float, /, **arguments: Any) -> Any:
        """The answer to a question.

        Raises:
            Silent: there was none within ``seconds``.
            Ended: there will be none.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has left, which is said below
            self._process.stdin.write(json.dumps({"ask": ask, **arguments}) + "\n")
            self._process.stdin.flush()
        return self.next(seconds)

    def next(self, seconds: float) -> Any:
        """The next thing that is said.

        Raises:
            Silent: nothing was said within ``seconds``.
            Ended: nothing more will be.
        """
        try:
            said = self._said.get(timeout=seconds)
        except queue.Empty:
            raise Silent(None, f"no answer in {seconds:g} s") from None
        if said is _NOTHING_MORE:
            self._said.put(said)
            self._readers[1].join(LEAVE_SECONDS)
            raise Ended(self._exit_code(), self._complaints[-1] if self._complaints else "")
        return said

    def close(self) -> None:
        """Close its input, at which it leaves, and end it where it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        for reader in self._readers:
            reader.join(LEAVE_SECONDS)

    def kill(self) -> None:
        """End it at once, with what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _exit_code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(LEAVE_SECONDS)
        return None

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            if line.startswith(MARK):
                self._said.put(json.loads(line.removeprefix(MARK)))
        self._said.put(_NOTHING_MORE)

    def _hear_complaints(self, stream: IO[str]) -> None:
        for line in stream:
            if line.strip():
                self._complaints = [*self._complaints, line.strip()][-LINES_KEPT:]


_NOTHING_MORE = object()
