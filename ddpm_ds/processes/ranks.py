"""Every program's beginning and end as one of several ranks. No torch.

At its start a process takes its place among the ranks, whichever launcher started it, and the environment that has not
travelled to its host. At its end it records its exit code for ``ddpm-ds run``: DeepSpeed's launcher ends the other
ranks when one has left, reports the code of whichever it looked at first, and exits with 0 when a part of it was
killed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import platform
import re
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ddpm_ds.command_line import MOST_PROCESSES, whole
from ddpm_ds.errors import EXIT_PREEMPTED, SpecError
from ddpm_ds.processes.hosts import find_environment

DEAD_SECONDS, HANG_SECONDS = 15.0, 600.0
"""Silence after which a rank is given up, and time without a step after which a run hangs, unless options say so."""
OTHERS_WAIT_SECONDS = 5.0
"""Time for which ranks other than 0 hold an error back, so that rank 0 is the one to print it."""
NODE_ID = "MLFLOW_SYSTEM_METRICS_NODE_ID"
EXIT_FILE_VARIABLE = "DDPM_DS_EXIT_FILE"
"""Names the file of exit codes in the environment of every process of a run; without it nothing is recorded."""
PRIVATE_FILE = "private.json"
"""File beside that one with the secret variables of ``ddpm-ds run``, which travel on no command line."""
RUN_SECRET = "DDPM_DS_RUN_SECRET"
"""Variable with what only the ranks of a run know; see :mod:`ddpm_ds.processes.store`."""
STARTED = "started"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that ask a rank to stop."""
SAME_SIGNAL_SECONDS = 1.0
"""A terminal or a scheduler signals a launcher and its ranks, and the launcher its ranks again: what comes so soon is
not a second signal."""
LAUNCHED = ("CROSS_RANK", "TORCHELASTIC_RUN_ID")
"""Variables that DeepSpeed's and PyTorch's launchers set. The parent of a process without them may be a shell, which
may leave."""

SLURM_TASK = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"}
FIRST_OWN_STEP_OF_SLURM = 0xFFFFFFF0
"""First of the step numbers that are not of srun's tasks: batch script, interactive shell, external processes."""
OPENMPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


def set_environment() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and what ``.deepspeed_env`` adds.

    What the environment already has stays. DeepSpeed's launcher and torchrun say the rank; without them that of a task
    of OpenMPI's mpirun or Slurm's srun counts, and a process that nobody else has started is a world of its own.
    DeepSpeed takes ``.deepspeed_env`` to other hosts only by pdsh and MPI, so each process reads it as well.

    GNU OpenMP's threads, which read their setting when PyTorch is imported, spin for long before they sleep. That takes
    a core from whoever shares it: on two cores with a neighbour a step was ten times slower, on two idle ones a tenth.

    Raises:
        SpecError: a line of ``.deepspeed_env`` can't be understood, or the ranks are on several hosts and the first is
            not known.
    """
    of_deepspeed = os.environ.get("LOCAL_SIZE")  # what torchrun calls LOCAL_WORLD_SIZE
    if of_deepspeed is not None and "TORCHELASTIC_RUN_ID" not in os.environ:
        os.environ["LOCAL_WORLD_SIZE"] = of_deepspeed  # else one that an outer program has left would count
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    started = {} if "RANK" in os.environ else _of_openmpi() or _of_slurm()
    for name, value in (started or alone).items():
        os.environ.setdefault(name, value)
    for name, value in (find_environment() | _handed_on()).items():
        os.environ.setdefault(name, value)
    _check_environment()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if started and "MASTER_ADDR" not in os.environ and on_several_hosts():
        raise SpecError(
            f"{os.environ['WORLD_SIZE']} ranks were started on several hosts, and MASTER_ADDR, the host of rank 0, is "
            "not set; see launch/slurm.sh, or for OpenMPI: mpirun -x MASTER_ADDR=HOST"
        )
    if not on_several_hosts() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # where nobody else can connect, whatever name the host was given
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


def _check_environment() -> None:
    """Raise an error where a launcher, or whoever played one, has set numbers that place no rank.

    Raises:
        SpecError: one is no number or out of its range.
    """
    ranges = {
        name: (1, MOST_PROCESSES) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "CROSS_SIZE", "GROUP_WORLD_SIZE")
    }
    ranges |= {"RANK": (0, MOST_PROCESSES), "LOCAL_RANK": (0, MOST_PROCESSES), "MASTER_PORT": (0, 2**16 - 1)}
    for name in os.environ.keys() & ranges.keys():
        lowest, highest = ranges[name]
        try:
            whole(os.environ[name], lowest, highest, f"a whole number from {lowest} to {highest:,}")
        except argparse.ArgumentTypeError as error:
            raise SpecError(f"{name} in the environment: {error}; unset it, or start with a launcher") from None
    if int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):
        rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
        raise SpecError(f"RANK = {rank} in the environment is none of WORLD_SIZE = {world} ranks; unset both")


def _handed_on() -> dict[str, str]:
    """The secret variables of ``ddpm-ds run``, where it runs on this host and as this user."""
    with (
        contextlib.suppress(KeyError, OSError, ValueError),
        Path(os.environ[EXIT_FILE_VARIABLE]).with_name(PRIVATE_FILE).open() as file,
    ):
        if os.fstat(file.fileno()).st_uid == os.geteuid():
            return dict(json.load(file))
    return {}


def _of_openmpi() -> dict[str, str]:
    """The place of a task of mpirun, whose parent may itself be a task of srun."""
    found = {ours: os.environ[theirs] for ours, theirs in OPENMPI.items() if theirs in os.environ}
    return found if len(found) == len(OPENMPI) else {}


def _of_slurm() -> dict[str, str]:
    """The place of a task of srun. A batch script and the shell of salloc stand for the whole job, though they have a
    task's number as well: they have no step, or one of Slurm's own numbers."""
    step = os.environ.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= FIRST_OWN_STEP_OF_SLURM or not os.environ.keys() >= SLURM_TASK:
        return {}
    per_node: list[str] = []
    for part in os.environ["SLURM_STEP_TASKS_PER_NODE"].split(","):  # such as 4(x2),3
        tasks, _, times = part.rstrip(")").partition("(x")
        per_node += [tasks] * int(times or 1)
    return {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": os.environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": per_node[int(os.environ["SLURM_NODEID"])],
    }


def on_several_hosts() -> bool:
    """Whether this run has ranks on other hosts."""
    world_size = os.environ["WORLD_SIZE"]
    return world_size != os.environ.get("LOCAL_WORLD_SIZE", world_size)


def host_name() -> str:
    """This host's name in metrics and messages: MLflow's node id where that is set, else its own name."""
    return re.sub(r"[^\w.-]", "_", os.environ.get(NODE_ID) or platform.node())


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


class Launcher:
    """The launcher of this process: its parent, where that is one, and the readers of its output pipes.

    A launcher that is killed leaves its ranks running, and so does an ssh that drops. Both are seen from inside: the
    parent of the process changes, or nobody reads its output any more.
    """

    def __init__(self) -> None:
        self._parent = os.getppid() if any(name in os.environ for name in LAUNCHED) else None
        self._closed = False
        self._outputs = select.poll()
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):  # closed
                mode = os.fstat(descriptor).st_mode
                if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                    self._outputs.register(descriptor, 0)

    def is_gone(self) -> bool:
        """Whether it has gone; from then on what this process prints goes nowhere, where it would fail."""
        for descriptor, _ in self._outputs.poll(0):
            self._outputs.unregister(descriptor)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
            self._closed = True
        return self._closed or (self._parent is not None and os.getppid() != self._parent)


def print_once(line: str) -> None:
    """Print what every rank has found, once: a launcher ends the other ranks as soon as rank 0 has left."""
    if os.environ["RANK"].isdecimal() and int(os.environ["RANK"]) != 0:
        time.sleep(OTHERS_WAIT_SECONDS)
    print(line, file=sys.stderr, flush=True)


def record_exit(code: int) -> int:
    """Record that this rank leaves, as intended, with ``code``; returns the code. Never fails."""
    _record(str(code))
    return code


def recorded(main: Callable[[], int], *, stoppable: bool = False) -> int:
    """Run a rank's ``main`` and record that it started and the code it ends with; exceptions record nothing.

    With ``stoppable`` a signal that asks for a stop ends it at once with 75, until ``main`` handles signals itself: so
    far there is nothing to save. A crash outside of Python, as on a file of images that is cut while it is copied from,
    prints where it was; to others this is then a lost rank, and the next start names the file.
    """
    faulthandler.enable(2)
    for number in STOP_SIGNALS if stoppable else ():
        signal.signal(number, lambda number, frame: os._exit(record_exit(EXIT_PREEMPTED)))
    _record(STARTED)
    try:
        return record_exit(main())
    except SystemExit as leaving:  # argparse leaves like this after --help
        if leaving.code is None or isinstance(leaving.code, int):
            record_exit(leaving.code or 0)
        raise


def _record(word: str) -> None:
    if path := os.environ.get(EXIT_FILE_VARIABLE):
        with contextlib.suppress(OSError):  # the file is gone with its supervisor, or its disk is full
            file = os.open(
                path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
            )  # one write, so that lines of several ranks don't mix
            try:
                os.write(file, f"{os.environ.get('RANK', '0')} {word}\n".encode())
            finally:
                os.close(file)


class ExitRecord(NamedTuple):
    """The records of all ranks of one start."""

    failure: int | None
    """The first code other than 0."""
    unfinished: tuple[str, ...]
    """Ranks that started and have not recorded how they ended."""
    finished: bool = False
    """Whether a rank has ended with 0. It leaves the run's last barrier only with all others."""


def read_exits(path: Path) -> ExitRecord:
    """Read what the ranks have recorded in ``path``."""
    lines = [line.split() for line in path.read_text().splitlines() if line]
    ended = [(rank, int(word)) for rank, word in lines if word != STARTED]
    unfinished = {rank for rank, word in lines if word == STARTED} - {rank for rank, _ in ended}
    failure = next((code for _, code in ended if code != 0), None)
    return ExitRecord(failure, tuple(sorted(unfinished, key=int)), any(code == 0 for _, code in ended))
