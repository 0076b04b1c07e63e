"""Ask every host everything that needs no process group, all hosts at the same time.

launching side   facts? ─▶ time? ─▶ token seen? route? ─▶ port listens? ─▶ port reached? ─▶ release
each host        one process (probe.py), started as DeepSpeed's launcher would
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from ddpm_ds.doctor.conversation import Conversation, Ended
from ddpm_ds.doctor.facts import Facts, Question
from ddpm_ds.doctor.start import NO_FOLDER, NO_PYTHON, NO_SSH, Start
from ddpm_ds.hosts.ssh import ssh_settings

PROBE = "ddpm_ds.doctor.probe"
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
    facts: Facts | None = None
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
    def answering(self) -> dict[str, Facts]:
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
    start: Start,
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
    everyone: list[_Host], start: Start, local: bool, pool: ThreadPoolExecutor, seconds: float
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
        host.found["facts"] = Facts.read(host.talk.ask("facts", seconds, **asdict(question)))
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
