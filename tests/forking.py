"""Processes that share one import: PyTorch and DeepSpeed take seconds in each process that imports them anew.

A server, one for a test process, has imported them and forks a process for each script that is asked for. What it is
asked comes as lines of JSON, and so do its answers.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PYTHON_PATH = os.pathsep.join(filter(None, (f"{REPOSITORY}", f"{REPOSITORY}/launch", os.environ.get("PYTHONPATH"))))
"""Where started processes find the package, these tests and the benchmark of rivals."""
ONE_THREAD = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "PYTHONPATH": PYTHON_PATH,
}
DIE_WITH_PARENT = 1


@functools.cache
def server() -> subprocess.Popen[str]:
    """The server of this process, which ends with it."""
    found = subprocess.Popen(
        [sys.executable, "-u", __file__],
        env={**os.environ, **ONE_THREAD},
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(found.wait)
    atexit.register(found.kill)
    return found


def ask(question: str, **details: Any) -> Any:
    """The server's answer."""
    asked, answers = server().stdin, server().stdout
    assert asked is not None and answers is not None
    print(json.dumps({"question": question, **details}), file=asked, flush=True)
    return json.loads(answers.readline())


class Forked:
    """A script that runs in a process of its own, with what is used of :class:`subprocess.Popen`."""

    def __init__(self, words: Sequence[str], *, env: Mapping[str, str], stdout: Path, stderr: Path) -> None:
        files = {"stdout": str(stdout), "stderr": str(stderr)}
        self.pid: int = ask("fork", words=list(words), environment=dict(env), **files)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = ask("poll", pid=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def forked(words: Sequence[str], environment: Mapping[str, str], stdout: str, stderr: str) -> int | None:
    """The new process's id; None in the new process, which is then what the script would be."""
    if (pid := os.fork()) != 0:
        return pid
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment)
    for file, number in ((os.devnull, 0), (stdout, 1), (stderr, 2)):
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")
    return None


def polled(pid: int) -> int | None:
    """The exit code of a process that has ended."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def serve() -> None:
    """Answer until nobody asks any more."""
    answers: dict[str, Callable[..., int | None]] = {"fork": forked, "poll": polled}
    while line := sys.stdin.readline():
        details = json.loads(line)
        question = details.pop("question")
        answer = answers[question](**details)
        if question == "fork" and answer is None:
            return
        print(json.dumps(answer))


if __name__ == "__main__":
    from ddpm_ds.pipeline import import_deepspeed

    import_deepspeed()
    import torch._dynamo  # noqa: F401  (the first optimizer imports it)

    import ddpm_ds.train.session  # noqa: F401

    gc.collect()
    gc.freeze()  # else each process takes a second to free what it did not make

    serve()
