"""Runs on each host: answers questions, one JSON line each, until its input ends.

    python -m ddpm_ds.cluster.probe

Questions are objects with ``ask``, the name of a method of :class:`Probe`, and its arguments; answers are lines that
begin with ``MARK``, because a login shell may print lines of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddpm_ds.cluster.facts import Question, existing, gather, travelling

MARK = "ddpm-ds-doctor "


def say(value: Any) -> None:
    """Tell the asking side."""
    print(MARK + json.dumps(value), flush=True)


class Probe:
    """The answers. Each method takes and returns what JSON can hold."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._tokens: list[Path] = []

    def facts(self, **question: Any) -> dict[str, Any]:
        """Everything about this host that needs no other."""
        return asdict(gather(Question(**question), travelling(os.environ)))

    def time(self) -> float:
        """Seconds since 1970 by this host's clock."""
        return time.time()

    def make_token(self, run_dir: str) -> str:
        """Put a file where the run's folder is or will be; returns its path, or nothing where that can't be done."""
        token = existing(Path(run_dir)) / f".ddpm-ds-doctor-{uuid.uuid4().hex}"
        try:
            token.touch()
        except OSError:
            return ""
        self._tokens.append(token)
        return str(token)

    def see_token(self, token: str, seconds: float = 3.0) -> bool:
        """Whether another host's file is seen here; file systems on a network may take some time."""
        until = time.monotonic() + seconds
        while not Path(token).exists():
            if time.monotonic() > until:
                return False
            time.sleep(0.2)
            with contextlib.suppress(OSError):
                os.listdir(Path(token).parent)  # makes NFS ask its server again
        return True

    def route(self, address: str) -> dict[str, str]:
        """The interface that leads to an address, and this host's own address on it."""
        from ddpm_ds.processes.hosts import interface_towards

        with socket.socket(_family(address), socket.SOCK_DGRAM) as way:
            try:
                way.connect((address, 9))  # sends nothing
            except OSError as error:
                return {"error": error.strerror or str(error)}
            return {"interface": interface_towards(address) or "", "address": way.getsockname()[0]}

    def listen(self, address: str, port: int) -> str:
        """Take the port of an address of this host until ``release``; returns why that can't be done."""
        listener = socket.socket(_family(address))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            return error.strerror or str(error)
        self._listener = listener
        return ""

    def connect(self, address: str, port: int, seconds: float) -> str:
        """Connect to another host's port; returns why that can't be done."""
        try:
            socket.create_connection((address, port), timeout=seconds).close()
        except TimeoutError:
            return f"no answer in {seconds:g} s"
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def release(self) -> None:
        """Free the port and remove the token."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        while self._tokens:
            self._tokens.pop().unlink(missing_ok=True)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def main() -> None:
    """Answer every line of standard input."""
    probe = Probe()
    try:
        for line in sys.stdin:
            question = json.loads(line)
            say(getattr(probe, question.pop("ask"))(**question))
    finally:
        probe.release()


if __name__ == "__main__":
    main()
