"""Processes that share one import: PyTorch and DeepSpeed take seconds in each process that imports them anew.

A server, one for a test process, has imported them and forks a process for each script that is asked for. What it is
asked comes as lines of JSON, and so do its answers. A rank 0 that starts MLflow's worker finds that forked as well.
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
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

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


class ForkedWorker:
    """A child of this process that becomes the first ``python -m MODULE`` that is asked for. It was forked before there
    were threads; whoever takes this for the module ``subprocess`` finds what a tracker uses of that."""

    DEVNULL, PIPE = subprocess.DEVNULL, subprocess.PIPE

    def __init__(self) -> None:
        self._asked, asking = socket.socketpair()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._asked.close()
            run(lambda: self._become(asking))
        asking.close()

    @staticmethod
    def _become(asking: socket.socket) -> None:
        details, received, _, _ = socket.recv_fds(asking, 1 << 20, 8)
        if not details:  # the rank has ended and wanted no worker
            return
        module, arguments, environment, numbers = json.loads(details)
        inherited = [os.dup2(fd, 200 + place) for place, fd in enumerate([os.open(os.devnull, os.O_RDONLY), *received])]
        for fd, number in zip(inherited, (0, 1, *numbers), strict=True):
            os.dup2(fd, number)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    def Popen(self, words: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **others: int) -> Any:
        """This child, or, if it is taken, one that is started as usual."""
        if self._asked.fileno() == -1:
            return subprocess.Popen(words, pass_fds=pass_fds, env=env, **others)  # type: ignore[call-overload]
        _, _, module, *arguments = words
        ours, theirs = os.pipe()
        details = json.dumps([module, arguments, dict(env), list(pass_fds)]).encode()
        with self._asked:
            socket.send_fds(self._asked, [details], [theirs, *pass_fds])
        os.close(theirs)
        self.stdout = os.fdopen(ours, "rb")
        return self

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


@functools.cache
def import_store() -> None:
    """Import what MLflow's worker needs for a store in SQLite, and make SQLAlchemy ready for its tables."""
    import mlflow.store.tracking.sqlalchemy_store
    import sqlalchemy.orm

    sqlalchemy.orm.configure_mappers()
    gc.freeze()


def run(program: Callable[[], object]) -> NoReturn:
    """Run a program and end as Python does, but do not free one by one what the server imported."""
    code = 0
    try:
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def forked(words: Sequence[str], environment: Mapping[str, str], stdout: str, stderr: str) -> int:
    """The process's id. The new process never comes back: it is what the script would be."""
    records = "MLFLOW_TRACKING_URI" in environment  # which says that a store is where the run is
    if records:
        import_store()
    if (pid := os.fork()) != 0:
        return pid
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment)
    for file, number in ((os.devnull, 0), (stdout, 1), (stderr, 2)):
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    if records and environment.get("RANK") == "0":
        setattr(ddpm_ds.tracking.tracker, "subprocess", ForkedWorker())  # noqa: B010
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).parent)
    run(lambda: runpy.run_path(words[0], run_name="__main__"))


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
        print(json.dumps(answers[question](**details)))


if __name__ == "__main__":
    from ddpm_ds.pipeline import import_deepspeed

    import_deepspeed()
    import sklearn.datasets  # noqa: F401  (the digits)
    import torch._dynamo  # noqa: F401  (the first optimizer imports it)

    import ddpm_ds.tracking.tracker
    import ddpm_ds.train.session

    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # which MLflow reads when it is imported
    gc.collect()
    gc.freeze()  # else each process takes a second to free what it did not make

    serve()
