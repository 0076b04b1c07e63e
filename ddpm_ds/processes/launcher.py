"""Parser of the command line of DeepSpeed's launcher, and the ssh options that it needs.

Tests hold each of these facts about DeepSpeed 0.19.8 (deepspeed/launcher/runner.py): its options, which hosts of a
hostfile take part, when they are reached from this one, and which GPUs of this host the ranks get.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import runpy
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pynvml

from ddpm_ds.command_line import OneLineParser
from ddpm_ds.errors import EXIT_BAD_INPUT, SpecError, one_line
from ddpm_ds.files import expanded
from ddpm_ds.processes.hosts import DEFAULT_HOSTFILE, PDSH_ARGUMENTS, PDSH_MORE_ARGUMENTS, read_hostfile, this_host
from ddpm_ds.processes.ranks import GIVEN_DEVICES

DEFAULT_PORT = 29500
SSH_ALIVE = "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
"""Options with which ssh gives up a host after 15 to 20 s without an answer; by default it may wait for hours."""
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of GPUs. A host without any of them has no GPU, so PyTorch, whose import takes seconds, is not asked."""

WITH_VALUE = (
    "-H,--hostfile -i,--include -e,--exclude --num_gpus,--num_accelerators --master_addr --node_rank --launcher "
    "--launcher_args --enable_each_rank_log --autotuning --bind_core_list --ssh_port --venv_script --log_level"
)
NUMBERS = "--num_nodes --master_port"
FLAGS = (
    "--module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid --bind_cores_to_rank "
    "-q,--quiet"
)


_HOME = re.compile(r"(?:^|(?<==))~.*")
"""Path in an option, as ``~/hosts`` and ``--hostfile=~/hosts``, that DeepSpeed would not expand."""


@dataclass(frozen=True)
class Launch:
    """Command line of the launcher, with the current content of the hostfile."""

    options: tuple[str, ...]
    script: tuple[str, ...]
    """Training script and its arguments."""
    hosts: tuple[str, ...]
    """Hosts that take part, in the order of their ranks; empty without a hostfile."""
    remote: bool
    """Whether this launcher starts ranks on other hosts than its own."""
    port: int

    def command(self, port: int) -> list[str]:
        """Return the command line with another port for the ranks' rendezvous."""
        own = [] if port == self.port else ["--master_port", str(port)]
        return [*self.options, *own, *self.script]


def has_gpu() -> bool:
    """Return whether this host has the device file of a GPU."""
    return any(Path(file).exists() for file in GPU_FILES)


def local_options(processes: int, *, on_cpu: bool) -> list[str]:
    """Return the launcher's options that start this many processes on this host.

    With ``--num_gpus`` the launcher sets CUDA_VISIBLE_DEVICES to 0, 1, ... So if the variable has the numbers of enough
    GPUs, the first of them are named instead. Otherwise, such as for UUIDs or if it hides all GPUs, this leaves its
    value in this process's environment for the ranks, which restore it.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ.pop(GIVEN_DEVICES, None)
    if on_cpu or given is None:
        return ["--num_gpus", str(processes)]
    visible = [number.strip() for number in given.split(",")]
    if processes <= len(visible) == len(set(visible)) and all(number.isdecimal() for number in visible):
        return ["--include", f"localhost:{','.join(visible[:processes])}"]
    os.environ[GIVEN_DEVICES] = given
    return ["--num_gpus", str(processes)]


def read_launch(command: Sequence[str]) -> Launch:
    """Parse the launcher's command line, and refuse a run that could not start or whose end could not be observed.

    Raises:
        SpecError: an option is wrong, or the hostfile can't be read or lacks requested hosts or this one, whose ranks
            report how the run ends.
    """
    options = _parser().parse_args(command)
    path = expanded(options.hostfile or DEFAULT_HOSTFILE)
    missing = options.hostfile is not None and not path.exists()
    pool = read_hostfile(path) if path.is_file() or missing else {}  # /dev/null means this host alone
    hosts = _taking_part(pool, str(path), options)
    remote = not options.no_ssh and (len(hosts) > 1 or (options.force_multi and bool(hosts)))
    if remote and this_host(hosts) is None:
        raise SpecError(
            f"none of {', '.join(hosts)} of hostfile {path} is this host; start it on one of them, best on the first, "
            "whose ranks can be seen to end; or on each of them with --no_ssh --node_rank"
        )
    if remote and (options.launcher or "pdsh").lower() == "pdsh" and shutil.which("pdsh") is None:
        raise SpecError("pdsh is not installed; install it, or start on each host with --no_ssh --node_rank")
    script = ([options.user_script] if options.user_script is not None else []) + options.user_args
    own = [_HOME.sub(lambda found: str(expanded(found[0])), word) for word in command[: len(command) - len(script)]]
    return Launch(tuple(own), tuple(script), hosts, remote, options.master_port or DEFAULT_PORT)


def ssh_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes pdsh's ssh notice a lost host, unless ``environment`` already sets it."""
    given = environment.get(PDSH_MORE_ARGUMENTS, "")
    if "ServerAlive" in given + environment.get(PDSH_ARGUMENTS, ""):
        return {}
    return {PDSH_MORE_ARGUMENTS: f"{given} {SSH_ALIVE}".strip()}


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="deepspeed", add_help=False, allow_abbrev=True)
    for names in WITH_VALUE.split():
        parser.add_argument(*names.split(","))
    for name in NUMBERS.split():
        parser.add_argument(name, type=int)
    for names in FLAGS.split():
        parser.add_argument(*names.split(","), action="store_true")
    parser.add_argument("user_script", nargs="?")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser


def _taking_part(pool: Mapping[str, int], path: str, options: argparse.Namespace) -> tuple[str, ...]:
    """Return the hosts of a hostfile, given with their slots, that --include, --exclude and --num_nodes select.

    Raises:
        SpecError: DeepSpeed would refuse the selection, with a traceback.
    """
    include, exclude, nodes = options.include or "", options.exclude or "", options.num_nodes or -1
    if include and exclude:
        raise SpecError("--include and --exclude exclude each other; use one of them")
    if (include or exclude) and (nodes >= 0 or options.num_gpus is not None):
        raise SpecError("--num_nodes and --num_gpus exclude --include and --exclude; use either")
    if nodes > 1 and not pool:
        raise SpecError(f"--num_nodes {nodes} needs the other hosts in a hostfile; name it with --hostfile")
    option, text = ("--include", include) if include else ("--exclude", exclude)
    if not text:
        return tuple(pool)[:nodes] if nodes > 0 else tuple(pool)
    slots = pool or {"localhost": _devices()}
    where = f"hostfile {path}" if pool else "this host, without a hostfile,"
    named = _filter(option, text)
    for host, numbers in named.items():
        if host not in slots:
            raise SpecError(f"{option} names {host}, which {where} does not; use {', '.join(slots)}")
        if beyond := [number for number in numbers if number >= slots[host]]:
            raise SpecError(
                f"{option} {text} names slot {min(beyond)} of {host}, and {where} has {slots[host]}, from 0 on; use "
                f"{host}:{','.join(map(str, range(min(slots[host], 8))))} or fewer"
            )

    def left(host: str) -> bool:
        if include:
            return host in named
        return host not in named or 0 < len(named[host]) < slots[host]

    taking_part = tuple(host for host in slots if left(host))
    if not taking_part:
        raise SpecError(f"{option} {text} leaves no host; use fewer")
    return taking_part if pool else ()


def _devices() -> int:
    """Return the number of devices as DeepSpeed counts them, for a selection without a hostfile: GPUs, or on a CPU its
    NUMA nodes, which it counts with numactl.
    """
    if has_gpu():
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            return int(pynvml.nvmlDeviceGetCount())
    if count := int(os.environ.get("LOCAL_SIZE", 0)):
        return count
    nodes = [file for file in Path("/sys/devices/system/node").glob("node*/cpulist") if file.read_text().strip()]
    return max(1, len(nodes)) if shutil.which("numactl") else 1


def _filter(option: str, text: str) -> dict[str, set[int]]:
    """Parse hosts and their slots from a text such as ``worker-0@worker-1:0,2``; no slots means all.

    Raises:
        SpecError: a slot is no number.
    """
    found: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, _, named = part.partition(":")
        try:
            found.setdefault(host, set()).update(map(int, named.split(",")) if named else ())
        except ValueError:
            raise SpecError(f"{option} {text}: {named!r} is no list of slots; write HOST:0,1@HOST:0") from None
    return found


def main() -> None:
    """Run DeepSpeed's launcher; what its checks refuse before it starts anything is one line and exit code 2."""
    try:
        runpy.run_module("deepspeed.launcher.runner", run_name="__main__", alter_sys=True)
    except (ValueError, AssertionError, NotImplementedError) as error:
        why = one_line(str(error))
        print(f"ddpm_ds: error: DeepSpeed's launcher: {why}; deepspeed --help explains its options", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
