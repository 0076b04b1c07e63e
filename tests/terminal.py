"""A command as a person sees it, typed in a terminal."""

import os
import pty
import re
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.forking import ONE_THREAD, REPOSITORY
from tests.launching import PATIENCE_SECONDS

PROGRAM = [sys.executable, "-m", "ddpm_ds.cli.main"]
"""Words that start ``ddpm-ds`` of this repository."""


class Terminal:
    """A command in a terminal. ``folder`` is its working folder and its home."""

    def __init__(self, words: Sequence[str], folder: Path, *, columns: int = 80) -> None:
        ours, its = pty.openpty()
        termios.tcsetwinsize(its, (24, columns))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, **ONE_THREAD, "PATH": path, "PYTHONPATH": str(REPOSITORY), "HOME": str(folder)}
        self.process = subprocess.Popen(
            words, stdin=its, stdout=its, stderr=its, cwd=folder, env=environment, start_new_session=True
        )
        os.close(its)
        self._terminal, self.text = ours, ""

    def read(self, until: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not until(self.text) and time.monotonic() < deadline:
            try:
                self.text += os.read(self._terminal, 2**16).decode(errors="replace")
            except OSError:  # the command has closed the terminal
                return

    def ended(self) -> int:
        """Return the exit code; ``lines`` then has the lines on the screen."""
        self.read(lambda text: False)
        os.close(self._terminal)
        self.lines = [re.split("\r(?:\x1b\\[K)?", line)[-1] for line in self.text.replace("\r\n", "\n").split("\n")]
        return self.process.wait(PATIENCE_SECONDS)

    def assert_clean(self) -> None:
        """Fail if the screen has shown a traceback or a dated log line of DeepSpeed."""
        assert "Traceback" not in self.text and "KeyboardInterrupt" not in self.text, self.text
        assert re.search(r"^\[20\d\d-", self.text, re.MULTILINE) is None, self.text
