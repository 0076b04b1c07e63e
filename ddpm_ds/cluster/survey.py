"""A process on a host that is asked, and answers, in lines of JSON.

RemoteStart a module of this package on a host as DeepSpeed's pdsh launcher starts training there.

Ask every host everything that needs no process group, all hosts at the same time.

launching side   facts? ─▶ time? ─▶ token seen? route? ─▶ port listens? ─▶ port reached? ─▶ release
each host        one process (probe.py), started as DeepSpeed's launcher would
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from ddpm_ds.cluster.facts import HostFacts, Question
from ddpm_ds.cluster.probe import MARK
from ddpm_ds.processes.hosts import ssh, ssh_settings

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

REACHED = {"step": "reached"}
"""What a host that ssh has reached says first, before anything is looked for there."""
NO_FOLDER, NO_PYTHON, NO_SSH = 71, 72, 255
"""Exit codes: the working folder or the interpreter is not on the host; ssh's own."""


@dataclass(frozen=True)
class RemoteStart:
    """The same on every host: interpreter, working folder and environment."""

    python: str
    folder: str
    environment: Mapping[str, str]
    connect_seconds: int

    def command(self, host: str | None, module: str, *arguments: str) -> list[str]:
        """The command line that runs ``python -m module`` on ``host``; without ssh where that is None: here.

        Raises:
            SpecError: the host is none of ssh.
        """
        words = [self.python, "-u", "-m", module, *arguments]
        if host is None:
            return words
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        reached = shlex.quote(MARK + json.dumps(REACHED))
        script = (
            f"echo {reached}; cd {shlex.quote(self.folder)} || exit {NO_FOLDER}; "
            f"test -x {shlex.quote(self.python)} || exit {NO_PYTHON}; "
            f"exec {shlex.join(['env', *variables, *words])}"
        )
        return ssh(host, ["sh", "-c", script], connect_seconds=self.connect_seconds)

    def local_environment(self) -> dict[str, str]:
        """The environment of what runs here without ssh: this one, as DeepSpeed gives it on a single host."""
        return {**os.environ, "PYTHONPATH": self.environment["PYTHONPATH"]}


PROBE = "ddpm_ds.cluster.probe"
CLOCK_QUESTIONS = 5
LOGIN_SECONDS = 2.0
CONNECT_SECONDS = 4.0
"""For a TCP connection within a cluster."""


@dataclass(frozen=True)
class Failure:
    """Why nothing is known of a host."""

    at: str
    """How far it came: ssh, folder, python or ddpm_ds."""
    why: str


@dataclass(frozen=True)
class HostReport:
    """What was found out about a host; of one that can't be asked only why."""

    slots: int | None
    """Processes that the hostfile gives to it; None where there is no hostfile."""
    failure: Failure | None = None
    facts: HostFacts | None = None
    clock_ahead_seconds: float = 0.0
    """Of this machine's clock."""
    round_trip_seconds: float = 0.0
    run_dir_shared: bool | None = None
    """Whether the folder of runs is the first host's; None where that was not tried."""
    interface: str = ""
    address: str = ""
    """The interface towards the first host, and this host's address there."""
    route_error: str = ""
    port_error: str = ""
    """On the first host why the port can't be taken, on others why it can't be reached."""
    keepalive_seconds: int | None = None
    """ssh's ServerAliveInterval towards this host; None where ssh is not used."""


@dataclass(frozen=True)
class Survey:
    """All hosts, in the hostfile's order."""

    hosts: dict[str, HostReport]
    master: str
    """The first host that answers; empty where none does."""
    master_address: str
    master_port: int

    @property
    def answering(self) -> dict[str, HostFacts]:
        """What the hosts say that can be asked."""
        return {host: report.facts for host, report in self.hosts.items() if report.facts is not None}


@dataclass
class _Host:
    """A host while it is asked."""

    name: str
    talk: Conversation | None = None
    found: dict[str, Any] = field(default_factory=dict)


def survey(
    hosts: Mapping[str, int | None],
    start: RemoteStart,
    question: Question,
    *,
    local: bool,
    master_address: str | None,
    master_port: int,
    seconds: float,
    say: Callable[[str], None],
) -> Survey:
    """Ask the hosts, by ssh unless ``local``; one that does not answer for ``seconds`` is given up.

    Args:
        hosts: slots by host.
        master_address: of the first host; None asks it, as DeepSpeed does.
        say: shows what is going on.
    """
    everyone = [_Host(name) for name in hosts]
    with ThreadPoolExecutor(len(everyone)) as pool, _conversations(everyone, start, local, pool, seconds):

        def each(of: list[_Host], step: Callable[[_Host], None]) -> None:
            list(pool.map(lambda host: _guarded(host, step), of))

        say(f"asking {', '.join(hosts)}")
        if not local:
            each(everyone, lambda host: _reach(host, start.connect_seconds))
        reached = [host for host in everyone if "failure" not in host.found]
        each(reached, lambda host: _ask_facts(host, question, seconds))
        answering = [host for host in everyone if "failure" not in host.found]
        master, address = None, master_address or ""
        if answering:
            first = answering[0]
            address = address or ("127.0.0.1" if local else next(iter(first.found["facts"].addresses), ""))
            say(
                f"clocks, folders, and the way to port {master_port} of {first.name} at {address or 'no known address'}"
            )
            each([first], lambda host: _open(host, question.run_dir, address, master_port, seconds))
            if "failure" not in first.found:
                master, token = first, first.found.pop("token")
                each(answering, lambda host: _ask_about_first(host, first, address, master_port, token, seconds))
        if not local:
            each(everyone, lambda host: host.found.update(keepalive_seconds=_keepalive(host.name)))
    reports = {host.name: HostReport(slots=hosts[host.name], **host.found) for host in everyone}
    return Survey(reports, master.name if master else "", address, master_port)


@contextlib.contextmanager
def _conversations(
    everyone: list[_Host], start: RemoteStart, local: bool, pool: ThreadPoolExecutor, seconds: float
) -> Iterator[None]:
    """A probe on each host, until the end of the body."""

    def begin(host: _Host) -> None:
        command = start.command(None if local else host.name, PROBE)
        host.talk = Conversation(command, start.local_environment() if local else None)

    try:
        list(pool.map(begin, everyone))
        yield
    except BaseException:  # Ctrl-C: nobody may wait for answers any longer
        for host in everyone:
            if host.talk:
                host.talk.kill()
        raise
    finally:
        list(pool.map(lambda host: host.talk.close() if host.talk else None, everyone))


def _guarded(host: _Host, step: Callable[[_Host], None]) -> None:
    """Take a step with a host; one that leaves meanwhile has failed."""
    assert host.talk is not None
    try:
        step(host)
    except Ended as ended:
        host.talk.kill()
        host.found = {"failure": _failure(ended)}


def _failure(ended: Ended) -> Failure:
    if ended.code in (NO_FOLDER, NO_PYTHON):
        return Failure("folder" if ended.code == NO_FOLDER else "python", ended.last_line or "missing")
    at = "ssh" if ended.code in (NO_SSH, None) else "ddpm_ds"
    return Failure(at, ended.last_line.removeprefix("ssh: ") or f"exit code {ended.code}")


def _reach(host: _Host, connect_seconds: int) -> None:
    """Wait until ssh has reached a host; looking up its name takes time that ssh's own limit does not count."""
    assert host.talk is not None
    host.talk.next(connect_seconds + LOGIN_SECONDS)


def _ask_facts(host: _Host, question: Question, seconds: float) -> None:
    assert host.talk is not None
    try:
        host.found["facts"] = HostFacts.read(host.talk.ask("facts", seconds, **asdict(question)))
    except (TypeError, KeyError):
        host.found["failure"] = Failure("ddpm_ds", "another version of ddpm_ds answers")
        return
    best = float("inf")
    for _ in range(CLOCK_QUESTIONS):
        asked = time.time()
        told = host.talk.ask("time", seconds)
        round_trip = time.time() - asked
        if round_trip < best:
            best = round_trip
            host.found["clock_ahead_seconds"] = told - (asked + round_trip / 2)
    host.found["round_trip_seconds"] = best


def _open(host: _Host, run_dir: str, address: str, port: int, seconds: float) -> None:
    """On the first host: take the port, and leave a file for the others to see."""
    assert host.talk is not None
    host.found["port_error"] = host.talk.ask("listen", seconds, address=address, port=port)
    host.found["token"] = host.talk.ask("make_token", seconds, run_dir=run_dir)


def _ask_about_first(host: _Host, master: _Host, address: str, port: int, token: str, seconds: float) -> None:
    """The way from a host to the first one: route, port and the shared folder."""
    assert host.talk is not None
    if address:
        route = host.talk.ask("route", seconds, address=address)
        host.found["route_error"] = route.pop("error", "")
        host.found |= route
    else:
        host.found["route_error"] = "the first host's address is unknown"
    if host is master:
        return
    if token:
        host.found["run_dir_shared"] = host.talk.ask("see_token", seconds, token=token)
    if address and not master.found.get("port_error"):
        host.found["port_error"] = host.talk.ask(
            "connect", seconds + CONNECT_SECONDS, address=address, port=port, seconds=CONNECT_SECONDS
        )


def _keepalive(host: str) -> int | None:
    """ssh's ServerAliveInterval towards a host; None where ssh does not tell."""
    seconds = ssh_settings(host).get("serveraliveinterval", "")
    return int(seconds) if seconds.isdecimal() else None
