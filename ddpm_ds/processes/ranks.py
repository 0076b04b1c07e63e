"""Start and end of a process as a rank: it finds its rank under any launcher, and records its exit code for ``ddpm-ds
run``, since a process may still fail as it exits. Does not import torch.
"""

import contextlib
import faulthandler
import gc
import json
import os
import platform
import random
import re
import resource
import secrets
import select
import signal
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ddpm_ds.ground.errors import EXIT_PREEMPTED, HostError, OptionError, SpecError, print_to_stderr
from ddpm_ds.ground.options import whole
from ddpm_ds.ground.units import MOST_PROCESSES
from ddpm_ds.processes.hosts import find_environment, user_name
from ddpm_ds.processes.signals import STOP_SIGNALS, SignalThread, handle

DEAD_SECONDS, HANG_SECONDS = 15.0, 600.0
"""Default silence after which a rank counts as dead, and time without a step after which a run counts as hanging."""
OTHERS_WAIT_SECONDS = 5.0
"""Time for which ranks other than 0 delay an error, so that rank 0 prints it."""
EXIT_FILE_VARIABLE = "DDPM_DS_EXIT_FILE"
"""Variable that names the :class:`ExitFile` for every process of a run; without it nothing is recorded."""
RUN_SECRET = "DDPM_DS_RUN_SECRET"
"""Variable with the secret that the ranks of a run share; see :mod:`ddpm_ds.processes.rendezvous`."""
FILES, FILES_PER_RANK = 512, 5
"""Files that a process has open at most, and more for each rank: connections to rank 0's store, and gloo's."""
STARTED, TRAINING = "started", "training"
LAUNCHED = ("CROSS_RANK", "TORCHELASTIC_RUN_ID")
"""Variables of DeepSpeed's and PyTorch's launchers; without them the parent may be a shell, which may exit."""
SLURM_TASK = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"}
FIRST_OWN_STEP_OF_SLURM = 0xFFFFFFF0
"""First step number that Slurm gives to batch scripts, interactive shells and external processes."""


def set_environment() -> None:
    """Set missing variables: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, .deepspeed_env.

    The rank is the launcher's, else Slurm's, else 0 of 1. Raises SpecError if variables can't be parsed or contradict
    each other, or the first host is unknown; HostError if this process may not open the files that so many ranks need.
    """
    os.environ.setdefault("LOGNAME", user_name())  # PyTorch's compiler asks, and a container's user may have no name
    if "LOCAL_SIZE" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["LOCAL_SIZE"]  # DeepSpeed's overrides an outer program's
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    started = {} if "RANK" in os.environ else _of_slurm()
    unknown = {name: value for name, value in (started or alone).items() if name not in os.environ}
    os.environ.update(unknown)
    secret: dict[str, str] = {}
    if path := _exit_file():  # ddpm-ds run is on this host
        with contextlib.suppress(OSError), path.open() as file:
            secret = json.loads(file.readline())
    for name, value in (find_environment() | secret).items():
        os.environ.setdefault(name, value)
    _check_environment([name for name in alone if started or name not in unknown])
    if "OMP_WAIT_POLICY" not in os.environ:  # long spinning made steps ten times slower on two shared cores
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if started and "MASTER_ADDR" not in os.environ and on_several_hosts():
        several = f"{os.environ['WORLD_SIZE']} ranks were started on several hosts"
        raise SpecError(f"{several}, and MASTER_ADDR, the host of rank 0, is not set; see launch/clusters/slurm.sh")
    if not on_several_hosts() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # so that no other host can connect
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    ranks, (soft, hard) = int(os.environ["WORLD_SIZE"]), resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES + FILES_PER_RANK * ranks
    if resource.RLIM_INFINITY != hard < needed:
        raise HostError(
            f"{ranks:,} ranks need up to {needed:,} open files in a process, and the hard limit on host {host_name()} "
            f"is {hard:,} (ulimit -Hn); raise it: nofile in /etc/security/limits.conf, LimitNOFILE of a systemd service"
        )
    if resource.RLIM_INFINITY != soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _check_environment(given: Collection[str]) -> None:
    """Raise SpecError if a variable is no number within its range, or ``given`` ones contradict each other."""
    ranges = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "CROSS_SIZE", "GROUP_WORLD_SIZE"), (1, MOST_PROCESSES))
    ranges |= {"RANK": (0, MOST_PROCESSES), "LOCAL_RANK": (0, MOST_PROCESSES), "MASTER_PORT": (0, 2**16 - 1)}
    numbers = {}
    for name in os.environ.keys() & ranges.keys():
        lowest, highest = ranges[name]
        try:
            numbers[name] = whole(os.environ[name], lowest, highest, f"a whole number from {lowest} to {highest:,}")
        except OptionError as error:
            raise SpecError(f"{name} in the environment: {error}; unset it, or start with a launcher") from None
    below = [("RANK", "WORLD_SIZE", 1), ("LOCAL_RANK", "LOCAL_WORLD_SIZE", 1)]
    for small, large, least in (*below, ("LOCAL_RANK", "RANK", 0), ("LOCAL_WORLD_SIZE", "WORLD_SIZE", 0)):
        if ({small, large} <= set(given) or small == "RANK") and numbers[small] + least > numbers[large]:
            raise SpecError(
                f"{small} = {numbers[small]} and {large} = {numbers[large]} in the environment contradict each other; "
                "correct the launcher's numbers, or unset all and let ddpm-ds train start the ranks"
            )


def _of_slurm() -> dict[str, str]:
    """Return the rank variables of a task of srun; batch scripts and shells of salloc have none."""
    step = os.environ.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= FIRST_OWN_STEP_OF_SLURM or not os.environ.keys() >= SLURM_TASK:
        return {}
    per_node: list[str] = []
    for part in os.environ["SLURM_STEP_TASKS_PER_NODE"].split(","):  # such as 4(x2),3
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part, re.ASCII)
        per_node += [found[1]] * int(found[2] or 1) if found else []
    node = os.environ["SLURM_NODEID"]
    if not re.fullmatch(r"\d{1,6}", node, re.ASCII) or int(node) >= len(per_node):
        tasks = f"SLURM_STEP_TASKS_PER_NODE = {os.environ['SLURM_STEP_TASKS_PER_NODE']}"
        raise SpecError(
            f"SLURM_NODEID = {node} in the environment is no node of {tasks}; start with srun, or unset SLURM_STEP_ID"
        )
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    return {name: os.environ[slurms] for name, slurms in names.items()} | {"LOCAL_WORLD_SIZE": per_node[int(node)]}


def on_several_hosts() -> bool:
    """Return whether this run has ranks on other hosts."""
    world_size = os.environ["WORLD_SIZE"]
    return world_size != os.environ.get("LOCAL_WORLD_SIZE", world_size)


def host_name() -> str:
    """Return this host's name in messages."""
    return re.sub(r"[^\w.-]", "_", platform.node())


def free_port() -> int:
    """Return a free port of this host, outside of the range that Linux lends to connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)  # 32,768: the first that Linux lends
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port


class Launcher:
    """Launcher of this process. It is gone if the parent, the :class:`ExitFile` or the output's reader is gone."""

    def __init__(self) -> None:
        self._parent = os.getppid() if any(name in os.environ for name in LAUNCHED) else None
        # A supervisor on another host has no file here. One on this host may have been killed before this rank began.
        self._supervised = EXIT_FILE_VARIABLE in os.environ and not (on_several_hosts() and _exit_file() is None)
        self._closed = False
        self._outputs = select.poll()
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):  # closed
                mode = os.fstat(descriptor).st_mode
                if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                    self._outputs.register(descriptor, 0)

    def is_gone(self) -> bool:
        """Return whether the launcher is gone; an output without a reader is discarded from then on."""
        for descriptor, _ in self._outputs.poll(0):
            self._outputs.unregister(descriptor)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
            self._closed = True
        lost = self._parent is not None and os.getppid() != self._parent
        return self._closed or lost or (self._supervised and _exit_file() is None)


@contextlib.contextmanager
def for_good() -> Iterator[None]:
    """Exclude objects made inside, such as PyTorch's modules, from the slow garbage collector for good."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def print_for_all(line: str) -> None:
    """Print a line of all ranks once: by rank 0, since a launcher ends the others when it exits."""
    if os.environ["RANK"].isdecimal() and int(os.environ["RANK"]) != 0:
        time.sleep(OTHERS_WAIT_SECONDS)
    print_to_stderr(line)


def record_exit(code: int) -> int:
    """Record that this rank exits with ``code``, and return it. Never fails."""
    record(str(code))
    return code


def recorded(main: Callable[[], int], *, stoppable: bool = False) -> int:
    """Run a rank's ``main``, and record its start and its exit code; exceptions record nothing.

    With ``stoppable`` a stop signal ends it at once with code 75 until ``main`` handles signals itself.
    """
    faulthandler.enable(2)  # for a crash outside of Python, as on an image file truncated while it is read
    if stoppable:
        SignalThread(lambda number: os._exit(record_exit(EXIT_PREEMPTED)))
    record(STARTED)
    try:
        code = main()
        handle(STOP_SIGNALS if stoppable else (), signal.SIG_IGN)
        return record_exit(code)
    except SystemExit as leaving:  # after --help
        if leaving.code is None or isinstance(leaving.code, int):
            record_exit(leaving.code or 0)
        raise


def record(word: str) -> None:
    """Record an exit code, :data:`STARTED`, or :data:`TRAINING`, after which this rank may outlive lost ones."""
    if path := _exit_file():
        with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:  # its supervisor may just have ended
            file.write(f"{os.environ.get('RANK', '0')} {word}\n".encode())  # in one write, so that lines don't mix


def _exit_file() -> Path | None:
    """Return the supervisor's :class:`ExitFile`; None without a supervisor on this host, or when it has ended."""
    path, _, name = os.environ.get(EXIT_FILE_VARIABLE, "").rpartition("@")
    with contextlib.suppress(OSError):
        if os.readlink(path) == f"/memfd:{name} (deleted)":  # else the path is another process's, or another host's
            return Path(path)
    return None


class ExitRecord(NamedTuple):
    """Records of a start's ranks."""

    failure: int | None = None  # first exit code other than 0
    unfinished: tuple[str, ...] = ()  # ranks that started but have not recorded their end
    finished: bool = False  # a rank has exited with 0, as it does only after the run's last barrier
    training: bool = False  # a rank has begun to train


class ExitFile:
    """The supervisor's file in memory: a line of ``private`` variables for this host's ranks, then their records."""

    def __init__(self, private: Mapping[str, str] | None = None) -> None:
        name = f"ddpm-ds-{secrets.token_hex(8)}"
        self._file = os.fdopen(os.memfd_create(name), "w+b", buffering=0)
        self._file.write(f"{json.dumps(private or {})}\n".encode())
        self.name = f"/proc/{os.getpid()}/fd/{self._file.fileno()}@{name}"
        """Value of :data:`EXIT_FILE_VARIABLE`."""

    def read(self) -> ExitRecord:
        self._file.seek(0)
        lines = [line.split() for line in self._file.read().decode().splitlines()[1:]]
        ended = [(rank, int(word)) for rank, word in lines if word not in (STARTED, TRAINING)]
        unfinished = {rank for rank, word in lines if word == STARTED} - {rank for rank, _ in ended}
        failure = next((code for _, code in ended if code != 0), None)
        finished, training = any(code == 0 for _, code in ended), any(word == TRAINING for _, word in lines)
        return ExitRecord(failure, tuple(sorted(unfinished, key=int)), finished, training)

    def close(self) -> None:
        self._file.close()
