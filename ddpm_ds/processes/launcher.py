"""Start of a run's ranks: those of this host as children of this process, those of several by DeepSpeed's launcher.

Does not import torch. Tests hold what DeepSpeed 0.19.8 does (deepspeed/launcher): which variables tell a process its
rank, and which hosts of a hostfile take part.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpm_ds.errors import SpecError
from ddpm_ds.processes.hosts import PDSH_ARGUMENTS, PDSH_MORE_ARGUMENTS, read_hostfile, this_host
from ddpm_ds.processes.ranks import RUN_SECRET

DEFAULT_PORT = 29500
SSH_ALIVE = "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
"""Options with which ssh gives up a host after 15 to 20 s without an answer; by default it may wait for hours."""


def gpus() -> int:
    """Return the number of GPUs that CUDA shows to this process, as its driver counts them; 0 without a driver."""
    count = ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return count.value if cuda.cuInit(0) == 0 == cuda.cuDeviceGetCount(ctypes.byref(count)) else 0


@dataclass(frozen=True)
class Node:
    """One of the hosts of a run, on each of which the same command is typed."""

    rank: int = 0
    """Its place among the hosts."""
    of: int = 1
    """Number of hosts; each has as many processes."""
    master: str = "127.0.0.1"
    """Address of the first host."""


def rank_environments(
    processes: int, port: int, environment: Mapping[str, str], node: Node = Node()
) -> list[dict[str, str]]:
    """Return the environment of each rank on this host: ``environment``, and what DeepSpeed's launcher sets.

    If it is the only host, its ranks share a secret. Each rank sees all GPUs that ``environment`` shows, and takes the
    one with its local rank's number.
    """
    size = str(processes)
    world = {"WORLD_SIZE": str(node.of * processes), "LOCAL_SIZE": size, "LOCAL_WORLD_SIZE": size}
    world |= {"CROSS_RANK": str(node.rank), "CROSS_SIZE": str(node.of)}
    world |= {"MASTER_ADDR": node.master, "MASTER_PORT": str(port)}
    if node.of == 1:
        world[RUN_SECRET] = environment.get(RUN_SECRET) or secrets.token_hex()
    first = node.rank * processes
    return [{**environment, **world, "RANK": str(first + rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


class Processes:
    """Processes of one program, such as the ranks of a run, each with its environment and in a session of its own.

    A terminal's Ctrl-C does not reach them. They have no input; ``output`` are options of :class:`subprocess.Popen`.
    """

    def __init__(self, words: Sequence[str], environments: Sequence[Mapping[str, str]], **output: Any) -> None:
        quiet = {"stdin": subprocess.DEVNULL, "start_new_session": True, **output}
        self._all = [subprocess.Popen(words, env=environment, **quiet) for environment in environments]
        self.pids = frozenset(process.pid for process in self._all)
        self.failed: tuple[int, int] | None = None
        """Number and exit code of the process that was the first to fail, negative for a signal."""

    @property
    def codes(self) -> list[int | None]:
        """Exit codes, negative for a signal; None for a process that runs."""
        return [process.poll() for process in self._all]

    def poll(self) -> int | None:
        """Return None while any process runs, and then the exit code of the first that failed, or 0."""
        codes = self.codes
        if self.failed is None:
            self.failed = next(((number, code) for number, code in enumerate(codes) if code), None)
        return None if None in codes else self.failed[1] if self.failed else 0

    def kill(self) -> None:
        """End what is left of the processes and of their process groups."""
        for process in self._all:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass(frozen=True)
class Place:
    """Where the ranks of a run are: processes of this host, perhaps one of several hosts on each of which the same
    command is typed; or those that a hostfile names.
    """

    processes: int = 1
    """Processes of this host."""
    node: Node = Node()
    """This host among others without a hostfile."""
    hostfile: Path | None = None
    include: str = ""
    exclude: str = ""
    port: int | None = None

    def hosts(self) -> dict[str, int]:
        """Return the hosts of the hostfile that take part, with their numbers of ranks, in the order of the ranks.

        Raises:
            SpecError: the hostfile can't be read, or DeepSpeed would refuse what is included or excluded.
        """
        if self.hostfile is None:
            if self.include or self.exclude:
                raise SpecError(
                    "--include and --exclude choose hosts of a --hostfile; GPUs of this host are chosen by "
                    "CUDA_VISIBLE_DEVICES=0,1"
                )
            if self.node.rank >= self.node.of:
                raise SpecError(
                    f"--node-rank {self.node.rank} of --nodes {self.node.of}: hosts are numbered from 0 to "
                    f"{self.node.of - 1}; give each its own number"
                )
            if self.node.of == 1:
                return {"localhost": self.processes}
            return {f"node-{rank}": self.processes for rank in range(self.node.of)}
        pool = read_hostfile(self.hostfile)
        option, text = ("--include", self.include) if self.include else ("--exclude", self.exclude)
        named: dict[str, set[str]] = {}
        for part in filter(None, text.split("@")):
            host, colon, slots = part.partition(":")
            if host not in pool:
                raise SpecError(
                    f"{option} names {host}, which hostfile {self.hostfile} does not; use {', '.join(pool)}"
                )
            known = [str(slot) for slot in range(pool[host])]
            given = slots.split(",") if colon else known
            if unknown := set(given) - set(known):
                use = f"{host}:{','.join(known[:8])}"
                raise SpecError(f"{option} {text}: {min(unknown)!r} is no slot of {host}; write {use} or fewer")
            named.setdefault(host, set()).update(given)
        chosen = {host: len(named.get(host, ())) for host in pool}
        left = chosen if self.include else {host: slots - chosen[host] for host, slots in pool.items()}
        if not any(left.values()):
            raise SpecError(f"{option} {text} leaves no host; use fewer")
        return {host: slots for host, slots in left.items() if slots}

    def check(self) -> None:
        """Raise SpecError if the ranks could not be started from this host, or it could not be seen how they end."""
        hosts = self.hosts()
        if self.hostfile is not None and this_host(hosts) is None:
            raise SpecError(
                f"none of {', '.join(hosts)} of hostfile {self.hostfile} is this host; start it on one of them, best "
                "on the first, whose ranks can be seen to end"
            )
        if self.hostfile is not None and len(hosts) > 1 and shutil.which("pdsh") is None:
            raise SpecError("pdsh is not installed; install it, or start on each host: deepspeed --no_ssh --node_rank")

    def deepspeed(self, program: Sequence[str]) -> list[str]:
        """Return the words after ``deepspeed`` that start a program, ``-m MODULE`` or a script, on the hosts."""
        filters = [f"--{name}={text}" for name in ("include", "exclude") if (text := getattr(self, name))]
        own = ["--hostfile", str(self.hostfile), *filters, "--master_port", str(self.port or DEFAULT_PORT)]
        return [*own, *(["--module", *program[1:]] if program[0] == "-m" else program)]


def ssh_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes pdsh's ssh notice a lost host, unless ``environment`` already sets it."""
    given = environment.get(PDSH_MORE_ARGUMENTS, "")
    if "ServerAlive" in given + environment.get(PDSH_ARGUMENTS, ""):
        return {}
    return {PDSH_MORE_ARGUMENTS: f"{given} {SSH_ALIVE}".strip()}
