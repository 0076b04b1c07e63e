"""Processes that share one import: PyTorch and DeepSpeed take seconds in each process that imports them anew.

A server, one for all workers of a test run, has imported them and forks a process for each script, and for each process
that sends to MLflow. Questions and answers are lines of JSON.
"""

import atexit
import contextlib
import ctypes
import errno
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Self, cast

REPOSITORY = Path(__file__).resolve().parent.parent
PYTHON_PATH = os.pathsep.join(filter(None, (f"{REPOSITORY}", f"{REPOSITORY}/launch", os.environ.get("PYTHONPATH"))))
"""Where started processes find the package, these tests and the benchmark of rivals."""
ONE_THREAD = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "PYTHONPATH": PYTHON_PATH,
}
DIE_WITH_PARENT = 1
READS_TEXT = "READS_TEXT"
"""Variable of scripts that open text encoders."""
DETACHED = "import os, sys; os.fork() and os._exit(0); os.execv(sys.executable, [sys.executable, '-u', sys.argv[1]])"
"""Starts a program that is nobody's child: a test may end all children of its process."""


class Server:
    """A process that forks others for all workers of the test run; it starts with the first and ends with the last."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._address = f"\0forking-{os.environ.get('PYTEST_XDIST_TESTRUNUID') or uuid.uuid4().hex}"
        self._started = False
        while not self._connected():
            time.sleep(0.01)

    def _connected(self) -> bool:
        """Whether the server, which is started unless there is one, has sent its id; one that just ends sends none."""
        self._socket = socket.socket(socket.AF_UNIX)
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(self._address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                assert not self._started, "the server has failed"
                self._started = True
                listener.listen()
                subprocess.run(
                    [sys.executable, "-c", DETACHED, __file__],
                    env={**os.environ, **ONE_THREAD},
                    cwd=REPOSITORY,
                    stdin=listener.fileno(),
                    stdout=subprocess.DEVNULL,
                    check=True,
                )
            try:
                self._socket.connect(self._address)
            except ConnectionRefusedError:  # somebody else is about to listen
                return False
        self.pid = receive(self._socket)[0]
        return self.pid is not None

    def ask(self, question: str, details: Mapping[str, Any], fds: Sequence[int] = ()) -> Any:
        with self._asking:
            send(self._socket, {"question": question, **details}, fds)
            return receive(self._socket)[0]


def send(to: socket.socket, value: Any, fds: Sequence[int] = ()) -> None:
    """Send a line of JSON, and open files with its first byte."""
    line = json.dumps(value).encode() + b"\n"
    socket.send_fds(to, [line[:1]], fds)
    to.sendall(line[1:])


def receive(sender: socket.socket) -> tuple[Any, list[int]]:
    try:
        line, fds, _, _ = socket.recv_fds(sender, 1, 8)
    except ConnectionResetError:  # ended before it has read everything
        return None, []
    while line and not line.endswith(b"\n"):
        line = line + more if (more := sender.recv(1 << 16)) else b""
    return json.loads(line or b"null"), fds


def wait_for_end(pids: Sequence[int], deadline: float) -> None:
    """Wait until one of some processes ends, or for a deadline of the monotonic clock, without a busy loop."""
    fds: list[int] = []
    try:
        fds.extend(map(os.pidfd_open, pids))
        left = max(deadline - time.monotonic(), 0.0)
        select.select(fds, [], [], left if left < float("inf") else None)
    except ProcessLookupError:  # another thread has just asked about one that has ended
        pass
    finally:
        for fd in fds:
            os.close(fd)


server = functools.cache(Server)


class Forked:
    """A process that the server has forked, with a part of :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdin = self.stdout = cast(IO[bytes], None)
        self.returncode: int | None = None
        self._polling = threading.Lock()  # the server can say only once that a process has ended

    @classmethod
    def script(cls, words: Sequence[str], *, env: Mapping[str, str], stdout: Path, stderr: Path) -> Self:
        """A script with its arguments; its output is appended to two files, or to one."""
        details = {"words": list(words), "environment": dict(env), "stdout": str(stdout), "stderr": str(stderr)}
        return cls(server().ask("script", details))

    def poll(self) -> int | None:
        with self._polling:
            if self.returncode is None:
                self.returncode = server().ask("poll", {"pid": self.pid})
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            wait_for_end([self.pid], deadline)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def pipes() -> Iterator[tuple[IO[bytes], IO[bytes], list[int]]]:
    (read, orders), (replies, written) = os.pipe(), os.pipe()
    try:
        yield os.fdopen(orders, "wb"), os.fdopen(replies, "rb"), [read, written]
    finally:
        os.close(read)
        os.close(written)


class Workers:
    """Stands for the module ``subprocess`` where a tracker starts its worker."""

    DEVNULL, PIPE = subprocess.DEVNULL, subprocess.PIPE


class ServedWorkers(Workers):
    """Workers are forked by the server."""

    @staticmethod
    def Popen(words: Sequence[str], *, env: Mapping[str, str], **others: int) -> Forked:
        _, _, module, trainer, *more = words
        assert int(trainer) == os.getpid()
        arguments = [str(server().pid), *more]  # a worker ends with its parent
        details = {"module": module, "arguments": arguments, "environment": dict(env)}
        with pipes() as (stdin, stdout, theirs):
            worker = Forked(server().ask("module", details, theirs))
        worker.stdin, worker.stdout = stdin, stdout
        return worker


class ForkedWorker(Workers):
    """A child of this process, forked before there were threads, that becomes the first worker."""

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
        details, fds = receive(asking)
        if details is not None:  # else the rank has ended without a worker
            become(fds, **details)

    def Popen(self, words: Sequence[str], *, env: Mapping[str, str], **others: int) -> Any:
        """This child, or, if it is taken, one that is started as usual."""
        if self._asked.fileno() == -1:
            return subprocess.Popen(words, env=env, **others)  # type: ignore[call-overload]
        _, _, module, *arguments = words
        with self._asked, pipes() as (self.stdin, self.stdout, theirs):
            send(self._asked, {"module": module, "arguments": arguments, "environment": dict(env)}, theirs)
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
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
    import sqlalchemy.orm

    sqlalchemy.orm.configure_mappers()
    gc.freeze()


def run(program: Callable[[], object]) -> NoReturn:
    """Run a program and end as Python does, but without freeing the server's imports one by one."""
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


def become(fds: Sequence[int], module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    for number, fd in enumerate(fds):
        move(fd, number)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv[1:] = arguments
    sys.modules.pop(module, None)  # the server may have imported it, which runpy would warn of
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def move(fd: int, number: int) -> None:
    if fd != number:
        os.dup2(fd, number)
        os.close(fd)


def fork() -> int:
    """The id of a child that ends with this process, or 0 in the child."""
    if (pid := os.fork()) == 0:
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        for connection in CONNECTIONS:
            connection.close()
    return pid


def fork_module(fds: Sequence[int], **details: Any) -> int:
    import_store()
    import ddpm_ds.tracking.sender  # noqa: F401

    if (pid := fork()) == 0:
        run(lambda: become(fds, **details))
    return pid


def fork_script(
    fds: Sequence[int], words: Sequence[str], environment: Mapping[str, str], stdout: str, stderr: str
) -> int:
    records = "MLFLOW_TRACKING_URI" in environment
    if records:
        import_store()
    if READS_TEXT in environment:
        from transformers import CLIPTextModel, CLIPTokenizer  # noqa: F401  (takes longer than PyTorch)
    if (pid := fork()) != 0:
        return pid
    os.environ.clear()
    os.environ.update(environment)
    for file, number in ((os.devnull, 0), (stdout, 1), (stderr, 2)):
        move(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    if records and environment.get("RANK") == "0":
        setattr(ddpm_ds.tracking.tracker, "subprocess", ForkedWorker())  # noqa: B010
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).parent)
    run(lambda: runpy.run_path(words[0], run_name="__main__"))


def poll(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


CONNECTIONS: list[socket.socket] = []
"""The server's: its listener, and one to each worker of the test run."""


def serve(listener: socket.socket) -> None:
    """Answer until all workers of the test run have gone. Processes forked for a worker end with it."""
    forks: dict[str, Callable[..., int]] = {"module": fork_module, "script": fork_script}
    forked: dict[socket.socket, set[int]] = {}
    CONNECTIONS.append(listener)
    while True:
        for ready in select.select(CONNECTIONS, [], [])[0]:
            if ready is listener:
                worker = listener.accept()[0]
                _, user, _ = struct.unpack("3i", worker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if user != os.getuid():  # who could have scripts run as this one
                    worker.close()
                    continue
                CONNECTIONS.append(worker)
                forked[worker] = set()
                answer: int | None = os.getpid()
            elif (details := (asked := receive(worker := ready))[0]) is None:
                CONNECTIONS.remove(worker)
                worker.close()
                for pid in forked.pop(worker):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                if not forked:
                    return
                continue
            elif (question := details.pop("question")) == "poll":
                if (answer := poll(**details)) is not None:
                    forked[worker].remove(details["pid"])
            else:
                forked[worker].add(answer := forks[question](asked[1], **details))
                for fd in asked[1]:
                    os.close(fd)
            with contextlib.suppress(BrokenPipeError):  # it has been killed
                send(worker, answer)


if __name__ == "__main__":
    from ddpm_ds.pipeline import import_deepspeed

    import_deepspeed()
    import deepspeed.comm.mori  # the first group of processes and the first engine import these three
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import einops._torch_specific  # noqa: F401  (the first operation of einops imports it)
    import PIL.Image
    import pytest  # noqa: F401  (many scripts are files of tests)
    import torch._dynamo  # noqa: F401  (the first optimizer imports it)

    import ddpm_ds.cli.rank
    import ddpm_ds.cli.train
    import ddpm_ds.cli.trained
    import ddpm_ds.evaluate.ensembles
    import ddpm_ds.observe.timeline
    import ddpm_ds.planning.decisions
    import ddpm_ds.planning.verdict
    import ddpm_ds.tracking.tracker
    import ddpm_ds.training.session

    PIL.Image.init()  # which imports the kinds of files that there are

    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # which MLflow reads when it is imported
    gc.collect()
    gc.freeze()  # else each process takes a second to free what it did not make

    run(lambda: serve(socket.socket(fileno=0)))
