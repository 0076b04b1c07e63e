"""Supervisor of a run's ranks: orderly stops, exit codes, leftover processes and restarts. Does not import torch.

The ranks are children of this process, or of DeepSpeed's launcher on several hosts. To stop them, it signals the ranks
of this host; a request to one rank counts for all. When a rank has failed, others that train notice it by themselves.
DeepSpeed's launcher alone would kill the ranks 30 s after SIGTERM, would exit with 0 if part of it is killed, and never
restarts.
"""

import contextlib
import ctypes
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ddpm_ds.ground.errors import EXIT_BAD_INPUT, EXIT_BAD_NUMBERS, EXIT_PEER_LOST, EXIT_PREEMPTED, SpecError
from ddpm_ds.ground.files import expanded
from ddpm_ds.ground.options import split_option
from ddpm_ds.ground.secret import is_secret
from ddpm_ds.processes import hosts
from ddpm_ds.processes.ranks import EXIT_FILE_VARIABLE, RUN_SECRET, ExitFile, ExitRecord, free_port
from ddpm_ds.processes.signals import received_signals

DEFAULT_PORT = 29500
SSH_ALIVE = "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
"""Options with which ssh gives up a host after 15 to 20 s without an answer; by default it may wait for hours."""
FINAL = (0, EXIT_BAD_INPUT, EXIT_BAD_NUMBERS, EXIT_PREEMPTED)
"""Exit codes without a restart: it would not help, or the scheduler decides."""
PRINTED_BY_RANK_0 = (EXIT_BAD_INPUT, EXIT_BAD_NUMBERS)
"""Exit codes of errors that all ranks find and rank 0 prints, while the others wait."""
MEANINGS = {1: "an error of the program, see its traceback", EXIT_PEER_LOST: "a process was lost or hung"}

POLL_SECONDS, KILL_SECONDS = 0.1, 10.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Pauses before a restart: the first, and the longest; each is twice as long as the one before."""
SETTLE_SECONDS = 3.0
"""Time for which the ranks' helper processes may outlive them."""
LOSING_SECONDS = 45.0
"""Time for which ranks may go on after one has failed, or the launcher after a rank of this host has lost others. The
launcher gives its ranks 30 s to end, and ssh gives up a lost host after 20 s."""


def gpus() -> int:
    """Return the number of GPUs that CUDA shows to this process, as its driver counts them; 0 without a driver."""
    count = ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return count.value if cuda.cuInit(0) == 0 == cuda.cuDeviceGetCount(ctypes.byref(count)) else 0


class Processes:
    """Processes of one program, out of reach of a terminal's Ctrl-C; ``output`` are options of ``subprocess.Popen``.

    ``exits`` is the name of their :class:`ExitFile`, by which their descendants are found in any session.
    """

    def __init__(
        self, words: Sequence[str], environments: Sequence[Mapping[str, str]], exits: str | None = None, **output: Any
    ) -> None:
        quiet = {"stdin": subprocess.DEVNULL, "start_new_session": True, **output}
        self._all = [subprocess.Popen(words, env=environment, **quiet) for environment in environments]
        self._exits = exits
        self.pids = frozenset(process.pid for process in self._all)
        self.failed: tuple[int, int] | None = None
        """Number and exit code of the process that was the first to fail, negative for a signal."""

    def poll(self) -> int | None:
        """Return None while any process runs, and then the exit code of the first that failed, or 0."""
        codes = [process.poll() for process in self._all]
        if self.failed is None:
            self.failed = next(((number, code) for number, code in enumerate(codes) if code), None)
        return None if None in codes else self.failed[1] if self.failed else 0

    def alive(self) -> list[psutil.Process]:
        """Return the processes that have not ended, and all that they have started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = os.getsid(process.pid) in self.pids
                ours = ours or process.environ().get(EXIT_FILE_VARIABLE, "") == self._exits
                found += [process] if ours and process.status() != psutil.STATUS_ZOMBIE else []
        return found

    def kill(self) -> None:
        """End all that are alive."""
        until = time.monotonic() + KILL_SECONDS
        while (processes := self.alive()) and time.monotonic() < until:
            _send(signal.SIGKILL, processes)
            psutil.wait_procs(processes, timeout=1.0)
        for process in self._all:
            process.wait()


@dataclass(frozen=True)
class Place:
    """Hosts of a run's ranks: this one, or ``nodes`` on each of which the command is typed, or a hostfile's.

    ``master`` is the address of the first node.
    """

    processes: int = 1
    node_rank: int = 0
    nodes: int = 1
    master: str = "127.0.0.1"
    hostfile: Path | None = None
    port: int | None = None

    def environments(self, environment: Mapping[str, str]) -> list[dict[str, str]]:
        """Return each local rank's environment: ``environment``, the variables of DeepSpeed's launcher, and a secret.

        Each rank sees all GPUs and takes the one with its local rank's number.
        """
        world: dict[str, object] = {"MASTER_ADDR": self.master, "MASTER_PORT": self.port or DEFAULT_PORT}
        world |= {"LOCAL_SIZE": self.processes, "LOCAL_WORLD_SIZE": self.processes}
        world |= {"WORLD_SIZE": self.nodes * self.processes, "CROSS_RANK": self.node_rank, "CROSS_SIZE": self.nodes}
        if self.nodes == 1:
            world[RUN_SECRET] = environment.get(RUN_SECRET) or secrets.token_hex()
        first = self.node_rank * self.processes
        ranks = [{"RANK": first + local, "LOCAL_RANK": local} for local in range(self.processes)]
        return [{**environment, **{name: str(value) for name, value in (world | rank).items()}} for rank in ranks]

    def hosts(self) -> dict[str, int]:
        """Return the hosts with their numbers of ranks, in the order of the ranks; raises SpecError."""
        if self.hostfile is not None:
            return hosts.read_hostfile(self.hostfile)
        if self.node_rank >= self.nodes:
            numbers = f"hosts are numbered from 0 to {self.nodes - 1}; give each its own number"
            raise SpecError(f"--node-rank {self.node_rank} of --nodes {self.nodes}: {numbers}")
        nodes = [f"node-{rank}" for rank in range(self.nodes)] if self.nodes > 1 else ["localhost"]
        return dict.fromkeys(nodes, self.processes)

    def check(self) -> None:
        """Raise SpecError if this host can't start the ranks, or can't see their end."""
        names = self.hosts()
        if self.hostfile is None:
            return
        if hosts.this_host(names) is None:
            which = f"none of {', '.join(names)} of hostfile {self.hostfile} is this host"
            raise SpecError(f"{which}; start it on one of them, best the first")
        if len(names) > 1 and shutil.which("pdsh") is None:
            raise SpecError("pdsh is not installed; install it, or start on each host: deepspeed --no_ssh --node_rank")

    def deepspeed(self, program: Sequence[str]) -> list[str]:
        """Return the words after ``deepspeed`` that start a program, ``-m MODULE`` or a script, on the hosts."""
        words = ["--module", *program[1:]] if program[0] == "-m" else program
        return ["--hostfile", str(self.hostfile), "--master_port", str(self.port or DEFAULT_PORT), *words]


class Outcome(NamedTuple):
    """How a start of the ranks ended; ``killed``: whether the rank that failed first was killed."""

    code: int
    killed: bool = False


def supervise(
    program: Sequence[str], place: Place, *, max_restarts: int, grace_seconds: float, log: Callable[[str], None]
) -> Outcome:
    """Start the ranks of a training program, and again if that helps; return how the last start ended.

    ``program`` is ``-m MODULE`` or a script, with its options. Each start reads the hostfile again, and takes another
    port of its hosts, so that no rank of the last start can join. Call it in the main thread, as the last work of a
    process: afterwards stop signals are ignored. Raises SpecError without a --run-dir, and as :meth:`Place.check`.
    """
    if not (run_dir := split_option(program, "--run-dir")[0]):
        raise SpecError("no --run-dir for the training script, so no start could resume another; add --run-dir DIR")
    latest = expanded(run_dir) / "checkpoints" / "latest"
    restarts = starts = 0
    with received_signals(leaving=True) as received:
        while True:
            before = _written(latest)
            place.check()
            port = place.port or (DEFAULT_PORT if place.hostfile or place.nodes > 1 else free_port())
            port += starts if place.hostfile else 0
            ended = _Start(tuple(program), replace(place, port=port), received, grace_seconds, log).run()
            if ended.code in FINAL or received:
                return ended
            starts += 1
            saved = _written(latest) != before
            restarts = 1 if saved else restarts + 1
            resume, others = split_option(program, "--resume")
            if saved or resume == "never":  # resume from this run's own folder
                program = others
            why = f"exit code {ended.code} ({MEANINGS.get(ended.code, 'of the script')})"
            if restarts > max_restarts:
                log(f"{why}; no restart of {max_restarts} is left" if max_restarts else why)
                return ended
            pause = min(FIRST_PAUSE_SECONDS * 2 ** (restarts - 1), LONGEST_PAUSE_SECONDS)
            log(f"{why}; restart {restarts} of {max_restarts} in {pause:g} s")
            until = time.monotonic() + pause
            while time.monotonic() < until and not received:
                time.sleep(POLL_SECONDS)
            if received:
                return Outcome(EXIT_PREEMPTED)


def exit_code(first: int, record: ExitRecord, *, stopping: bool, orphaned: bool) -> int:
    """Return the exit code of a start that has not finished the run.

    ``first`` is the code of the rank that failed first, negative for a signal; or of DeepSpeed's launcher, which also
    exits with 0 if its children were killed. ``stopping``: ranks were asked to stop; ``orphaned``: ranks outlived the
    launcher.
    """
    if orphaned and not stopping:
        return EXIT_PEER_LOST
    killed = bool(record.unfinished) or not 0 <= first < 128  # a rank, perhaps before it could record its start
    if record.failure == EXIT_PREEMPTED and killed and not stopping:
        return EXIT_PEER_LOST  # the signal that the others received came after the kill
    if record.failure in FINAL:
        return record.failure
    if 0 < first < 128:  # others record that they lost it
        return first
    return EXIT_PREEMPTED if stopping else EXIT_PEER_LOST


def _written(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


@dataclass
class _Start:
    """One start of the ranks: ``_processes`` are the ranks of this host, or DeepSpeed's launcher on several."""

    program: tuple[str, ...]
    place: Place
    received: Sequence[signal.Signals]
    grace_seconds: float
    log: Callable[[str], None]

    def run(self) -> Outcome:
        """Start the ranks, wait for them, and leave no process running."""
        with contextlib.ExitStack() as cleanup:
            if self.place.hostfile is None:
                self._exits = cleanup.enter_context(contextlib.closing(ExitFile()))
                ranks = self.place.environments({**os.environ, EXIT_FILE_VARIABLE: self._exits.name})
                self._processes = Processes([sys.executable, "-u", *self.program], ranks, self._exits.name)
            else:
                self._processes = self._launcher(cleanup)
            try:
                code = self._wait()
            finally:
                self._processes.kill()
            if self._exits.read().finished:
                return Outcome(0)
        if len(self.received) > 1:
            self.log(f"{self.received[-1].name}: ended everything at once")
            return Outcome(128 + self.received[-1])
        failed = self._processes.failed
        return Outcome(code, killed=failed is not None and failed[1] == -signal.SIGKILL and not self.received)

    def _launcher(self, cleanup: contextlib.ExitStack) -> Processes:
        """Start DeepSpeed's launcher without secrets, which it would print; this host's ranks read them from a file."""
        found = hosts.find_environment()
        taken = {name: os.environ[name] for name in os.environ if name.startswith(hosts.OF_DEEPSPEED) or "NCCL" in name}
        private = {name: value for name, value in (taken | found).items() if is_secret(name, value)}
        self._exits = cleanup.enter_context(contextlib.closing(ExitFile(private)))
        exits = {EXIT_FILE_VARIABLE: self._exits.name}
        sent = {name: value for name, value in found.items() if name not in private} | exits
        cleanup.callback(os.close, file := os.memfd_create("environment"))
        os.write(file, "".join(f"{name}={value}\n" for name, value in sent.items()).encode())
        left_out = {*private, "LOCAL_RANK"}  # see _rank
        ours = {name: value for name, value in os.environ.items() if name not in left_out}
        ours |= exits | {hosts.ENVIRONMENT_FILE_VARIABLE: f"/proc/{os.getpid()}/fd/{file}"}
        quiet = ["-m", "deepspeed.launcher.runner", "--log_level", "critical"]
        if len(names := self.place.hosts()) > 1:  # DeepSpeed would ask by an ssh without pdsh's options
            quiet += ["--no_ssh_check", "--master_addr", hosts.address_of(next(iter(names)))]
        words = [sys.executable, *quiet, *self.place.deepspeed(self.program)]
        given = ours.get(hosts.PDSH_MORE_ARGUMENTS, "")
        if "ServerAlive" not in given + ours.get(hosts.PDSH_ARGUMENTS, ""):
            ours[hosts.PDSH_MORE_ARGUMENTS] = f"{given} {SSH_ALIVE}".strip()
        return Processes(words, [ours], self._exits.name)

    def _wait(self) -> int:
        """Wait until the ranks have ended or must be ended; return the exit code of this start."""
        grace_end = losing_end = math.inf
        while (code := self._processes.poll()) is None and len(self.received) < 2:
            now = time.monotonic()
            if self.received and grace_end == math.inf:
                grace_end = now + self.grace_seconds
                # If all ranks have ended, they have given the reason; the launcher notices within a second.
                if not self._ask_to_stop(self.received[-1].name) and self._exits.read() == ExitRecord():
                    self.log(f"{self.received[-1].name}: stopped before any rank had started")
                    return EXIT_PREEMPTED
            if losing_end == math.inf:
                losing_end = now + self._patience()
            if now > grace_end:
                self.log(f"not saved within {self.grace_seconds:g} s: ending everything; what was saved before stays")
                return EXIT_PREEMPTED
            if now > losing_end:
                if self._lost:
                    self.log(self._lost)
                first = self._processes.failed[1] if self._processes.failed else EXIT_PEER_LOST
                return exit_code(first, self._exits.read(), stopping=bool(self.received), orphaned=False)
            time.sleep(POLL_SECONDS)
        if code is None:
            return 128 + self.received[-1]

        self._wait_until_gone(SETTLE_SECONDS)
        why = f"the launcher has ended (exit code {code}), but its ranks have not"
        if orphaned := self.place.hostfile is not None and self._ask_to_stop(why):
            self._wait_until_gone(self.grace_seconds)
        return exit_code(code, self._exits.read(), stopping=bool(self.received), orphaned=orphaned)

    def _patience(self) -> float:
        """Return how many seconds ranks may go on after one has failed; infinity if none has."""
        record, ago = self._exits.read(), f"{LOSING_SECONDS:g} s ago"
        if self.place.hostfile is not None:
            self._lost = f"ranks were lost {ago} and the launcher has not ended: ending it"
            return LOSING_SECONDS if record.failure == EXIT_PEER_LOST else math.inf
        if self._processes.failed is None:
            return math.inf
        local, code = self._processes.failed
        rank = self.place.node_rank * self.place.processes + local
        if code < 0:  # it can't have printed a line itself
            self.log(f"rank {rank} was ended by signal {-code} ({signal.strsignal(-code)})")
        if not record.training:  # others have nothing to save, and would not notice for long
            _send(signal.SIGTERM, self._alive_ranks())
        printed = rank == 0 and code in PRINTED_BY_RANK_0
        self._lost = "" if printed else f"rank {rank} has ended {ago} and others have not: ending them"
        return 0.0 if printed else LOSING_SECONDS

    def _ask_to_stop(self, why: str) -> bool:
        """Signal the ranks, if there are any; they end their own children."""
        if ranks := self._alive_ranks():
            self.log(f"{why}: asking {len(ranks)} ranks to save and stop; a second signal ends them at once")
            _send(signal.SIGTERM, ranks)
        return bool(ranks)

    def _wait_until_gone(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while len(self.received) < 2 and time.monotonic() < until and self._processes.alive():
            time.sleep(POLL_SECONDS)

    def _alive_ranks(self) -> list[psutil.Process]:
        alive = self._processes.alive()
        if self.place.hostfile is None:
            return [process for process in alive if process.pid in self._processes.pids]
        return [process for process in alive if _rank(process) not in (None, _rank(process.parent()))]


def _rank(process: psutil.Process | None) -> str | None:
    """Return the rank that the launcher has set for a process, which its children inherit."""
    with contextlib.suppress(psutil.Error):
        return process.environ().get("LOCAL_RANK") if process else None
    return None


def _send(number: int, processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
