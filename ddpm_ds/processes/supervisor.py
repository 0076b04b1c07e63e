"""Supervisor of DeepSpeed's launcher, which adds handling of signals, exit codes, leftover processes and restarts.

On SIGTERM the launcher alone ends the ranks, with SIGKILL after 30 s; if a part of it is killed, it exits with 0 and
leaves ranks running; and it never restarts. Here the ranks themselves are signalled, so that they finish their step and
save, after which the launcher ends.

On several hosts the ranks of this host are signalled and watched: all ranks follow a request to one, and the end of one
ends all. Ranks on other hosts exit by themselves when they have lost the others or their launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddpm_ds.errors import EXIT_BAD_INPUT, EXIT_BAD_NUMBERS, EXIT_PEER_LOST, EXIT_PREEMPTED, SpecError
from ddpm_ds.files import expanded, read_bytes
from ddpm_ds.processes.hosts import (
    ENVIRONMENT_FILE_VARIABLE,
    OF_DEEPSPEED,
    PRINTED,
    find_environment,
    write_environment,
)
from ddpm_ds.processes.launcher import Launch, read_launch, ssh_environment
from ddpm_ds.processes.ranks import EXIT_FILE_VARIABLE, RUN_SECRET, ExitFile, ExitRecord
from ddpm_ds.processes.signals import heard_signals
from ddpm_ds.secret import is_secret

FINAL = (0, EXIT_BAD_INPUT, EXIT_BAD_NUMBERS, EXIT_PREEMPTED)
"""Exit codes after which a restart would be wrong or is up to the scheduler."""
MEANINGS = {1: "an error of the program, see its traceback", EXIT_PEER_LOST: "a process was lost or hung"}

RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")

POLL_SECONDS = 0.2
SETTLE_SECONDS = 3.0
"""Time for which the ranks' helper processes may outlive the launcher."""
LOSING_SECONDS = 45.0
"""Time for which the launcher may continue after a rank of this host has lost others: it gives its ranks 30 s to end,
and ssh gives up a lost host after 20 s."""
KILL_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 60.0


def supervise(
    command: Sequence[str],
    *,
    max_restarts: int,
    grace_seconds: float,
    pause_seconds: float = 1.0,
    log: Callable[[str], None],
    starting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> int:
    """Run DeepSpeed's launcher with arguments ``command``, restarting it if that helps; return the last exit code.

    A start that wrote a checkpoint resets the count of restarts; the next one resumes from the newest, whatever
    ``--resume`` says. Each start reads the hostfile again; on several hosts each restart uses another port, so that no
    straggler of the last start can join. ``starting`` is entered until the launcher has started a rank of this host.
    Must run in the main thread, and as the last of a process: from its end on stop signals are ignored.

    Raises:
        SpecError: ``command`` has no --run-dir; see also :func:`read_launch` and :func:`find_environment`.
    """
    latest = _run_dir(command) / "checkpoints" / "latest"
    restarts = ports = 0
    with heard_signals(leaving=True) as heard:
        while True:
            before = _written(latest)
            launch = read_launch(command)
            with contextlib.ExitStack() as shown:
                shown.enter_context(starting())
                code = _Start(launch, launch.port + ports, heard, grace_seconds, log, shown).run()
            ports += launch.remote
            if code in FINAL or heard:
                return code
            saved = _written(latest) != before
            restarts = 1 if saved else restarts + 1
            command = _restarted(command, saved)
            why = f"exit code {code} ({MEANINGS.get(code, 'of the script')})"
            if restarts > max_restarts:
                log(f"{why}; no restart of {max_restarts} is left" if max_restarts else why)
                return code
            pause = min(pause_seconds * 2 ** (restarts - 1), LONGEST_PAUSE_SECONDS)
            log(f"{why}; restart {restarts} of {max_restarts} in {pause:g} s")
            until = time.monotonic() + pause
            while time.monotonic() < until:
                if heard:
                    return EXIT_PREEMPTED
                time.sleep(POLL_SECONDS)


def exit_code(launcher: int, record: ExitRecord, *, stopping: bool, orphaned: bool) -> int:
    """Return the exit code of a start that has not finished the run: the ranks' or else the meaning of the launcher's.

    The launcher's 0 proves nothing, since it also exits with 0 if its children were killed.

    Args:
        launcher: its return code, negative for a signal.
        stopping: whether the ranks were asked to stop.
        orphaned: whether ranks were still alive after it had ended.
    """
    if orphaned and not stopping:
        return EXIT_PEER_LOST
    killed = bool(record.unfinished) or not 0 <= launcher < 128  # a rank, perhaps before it could record its start
    if record.failure == EXIT_PREEMPTED and killed and not stopping:
        return EXIT_PEER_LOST  # the launcher's own signal to the others is no request to stop the run
    if record.failure in FINAL:
        return record.failure
    if 0 < launcher < 128:  # the code of the rank that failed first; others record that they lost it
        return launcher
    return EXIT_PREEMPTED if stopping else EXIT_PEER_LOST


def _run_dir(command: Sequence[str]) -> Path:
    """Return the training script's --run-dir, without which each start would use a new folder and none would resume."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run-dir", type=expanded, nargs="?")
    if folder := parser.parse_known_args(command)[0].run_dir:
        return Path(folder)
    raise SpecError("no --run-dir for the training script, so that no start could resume another; add --run-dir DIR")


def _written(path: Path) -> tuple[bytes, int]:
    """Return a file's content and the time at which it was written; a checkpoint may be written again."""
    try:
        return read_bytes(path), path.stat().st_mtime_ns
    except OSError:
        return b"", 0


def _restarted(command: Sequence[str], saved: bool) -> list[str]:
    """Return the command of a restart.

    ``--resume`` with a path would start again from before what has been ``saved`` since, and ``--resume never`` would
    refuse the folder that the start before has made.
    """
    kept: list[str] = []
    words = iter(command)
    for word in words:
        option = [word, next(words, "")] if word == "--resume" else [word]
        name, _, value = "=".join(option).partition("=")
        if name != "--resume" or not (saved or value == "never"):
            kept += option
    return kept


@dataclass
class _Start:
    """Start of the launcher in a separate session, so that a terminal's Ctrl-C does not reach the ranks."""

    launch: Launch
    port: int
    heard: Sequence[signal.Signals]
    grace_seconds: float
    log: Callable[[str], None]
    starting: contextlib.ExitStack
    """Contexts that are closed once a rank of this host has started."""

    def run(self) -> int:
        """Start the launcher, wait for it, and leave no process running."""
        found = find_environment()
        taken = {name: value for name, value in os.environ.items() if name.startswith(OF_DEEPSPEED) or PRINTED in name}
        private = {name: value for name, value in (taken | found).items() if is_secret(name, value)}
        with contextlib.closing(ExitFile(private)) as self._exits, open(os.memfd_create("environment"), "wb") as file:
            travels = Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
            open_to_all = {name: value for name, value in found.items() if name not in private}
            write_environment(travels, open_to_all | {EXIT_FILE_VARIABLE: self._exits.name})
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "ddpm_ds.processes.launcher", *self.launch.command(self.port)],
                env=self._environment(private, travels),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                code = self._wait()
            finally:
                self.starting.close()
                self._kill()
            if self._exits.read().finished:
                return 0
        if len(self.heard) > 1:
            self.log(f"{self.heard[-1].name}: ended everything at once")
            return 128 + self.heard[-1]
        return code

    def _environment(self, private: Iterable[str], travels: Path) -> dict[str, str]:
        """Return the launcher's environment; ``travels`` has the variables that DeepSpeed sends to every host.

        DeepSpeed sends them on command lines, which every user of a host can read, and prints those with NCCL in their
        name on this one too, so ``private`` ones are left out: this host's ranks read them from the exit file, which
        only exists on this host.
        """
        left_out = {name for name in private if self.launch.remote or PRINTED in name} | {*RANK_VARIABLES}  # see _rank
        ours = {name: value for name, value in os.environ.items() if name not in left_out}
        ours |= {EXIT_FILE_VARIABLE: self._exits.name, ENVIRONMENT_FILE_VARIABLE: str(travels)}
        if not self.launch.remote:  # other hosts' ranks would not have it
            ours.setdefault(RUN_SECRET, secrets.token_hex())
        return ours | ssh_environment(ours)

    def _wait(self) -> int:
        """Wait until the launcher ends or must be ended; return the exit code of this start."""
        limits: dict[int, float] = {}  # times at which all processes are ended, by the exit code then
        while (code := self._launcher.poll()) is None and len(self.heard) < 2:
            now = time.monotonic()
            if self.heard and EXIT_PREEMPTED not in limits:
                self.starting.close()
                limits[EXIT_PREEMPTED] = now + self.grace_seconds
                # Ranks that have all ended have given their reason; the launcher notices within a second.
                if not self._ask_to_stop(self.heard[-1].name) and not self._exits.read().started:
                    self._stop_launcher()
                    return EXIT_PREEMPTED
            record = self._exits.read()
            if record.started:
                self.starting.close()
            if EXIT_PEER_LOST not in limits and record.failure == EXIT_PEER_LOST:
                limits[EXIT_PEER_LOST] = now + LOSING_SECONDS
            if now > limits.get(EXIT_PREEMPTED, math.inf):
                self.log(f"not saved within {self.grace_seconds:g} s: ending everything; what was saved before stays")
                return EXIT_PREEMPTED
            if now > limits.get(EXIT_PEER_LOST, math.inf):
                self.log(f"ranks were lost {LOSING_SECONDS:g} s ago and the launcher has not ended: ending it")
                return EXIT_PEER_LOST
            time.sleep(POLL_SECONDS)
        if code is None:
            return 128 + self.heard[-1]

        self._wait_until_gone(SETTLE_SECONDS)
        orphaned = self._ask_to_stop(f"the launcher has ended (exit code {code}), but its ranks have not")
        if orphaned:
            self._wait_until_gone(self.grace_seconds)
        return exit_code(code, self._exits.read(), stopping=bool(self.heard), orphaned=orphaned)

    def _stop_launcher(self) -> None:
        """End a launcher that has no ranks yet, and its children."""
        self.log(f"{self.heard[-1].name}: stopped before any rank had started")
        if self.launch.remote:  # on a signal it would end all launchers of this user on all hosts
            self._launcher.kill()
        _send(signal.SIGTERM, self._processes())
        self._wait_until_gone(SETTLE_SECONDS)

    def _ask_to_stop(self, why: str) -> bool:
        """Signal the ranks, if there are any; they end their own children."""
        ranks = [process for process in self._processes() if _rank(process) not in (None, _rank(process.parent()))]
        if ranks:
            self.log(f"{why}: asking {len(ranks)} ranks to save and stop; a second signal ends them at once")
            _send(signal.SIGTERM, ranks)
        return bool(ranks)

    def _wait_until_gone(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while len(self.heard) < 2 and time.monotonic() < until and self._processes():
            time.sleep(POLL_SECONDS)

    def _processes(self) -> list[psutil.Process]:
        """Return the processes of this start: those in its session, and those outside with its environment."""

        def ours(process: psutil.Process) -> bool:
            with contextlib.suppress(psutil.Error, OSError):
                return process.status() != psutil.STATUS_ZOMBIE and (
                    os.getsid(process.pid) == self._launcher.pid
                    or process.environ().get(EXIT_FILE_VARIABLE) == self._exits.name
                )
            return False

        return [process for process in psutil.process_iter() if ours(process)]

    def _kill(self) -> None:
        until = time.monotonic() + KILL_SECONDS
        while (processes := self._processes()) and time.monotonic() < until:
            _send(signal.SIGKILL, processes)
            psutil.wait_procs(processes, timeout=1.0)
        self._launcher.wait()


def _rank(process: psutil.Process | None) -> str | None:
    """Return the rank that the launcher or mpirun has set for a process, which its children inherit."""
    with contextlib.suppress(psutil.Error):
        environment = process.environ() if process else {}
        return next((environment[name] for name in RANK_VARIABLES if name in environment), None)
    return None


def _send(number: int, processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
