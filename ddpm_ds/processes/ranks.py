"""TODO"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import time

from ddpm_ds.errors import SpecError
from ddpm_ds.processes.hosts import find_environment

DEAD_SECONDS, HANG_SECONDS = 15.0, 600.0
"""Silence after which a rank is given up, and time without a step after which a run hangs, unless options say so."""
OTHERS_WAIT_SECONDS = 5.0
"""How long ranks other than 0 hold back an error, so that rank 0 is the one to say it."""
FIRST_OWN_STEP_OF_SLURM = 0xFFFFFFF0
"""Step numbers from here on are not of srun's tasks: batch script, interactive shell, external processes."""
SLURM_TASK = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"}


def set_environment() -> None:
    """What every process does first: take its place among the ranks, and the environment that has not travelled.

    DeepSpeed's launcher and torchrun say the rank. Of a task that srun or OpenMPI's mpirun has started, theirs counts;
    a process that nobody else has started is a world of its own. DeepSpeed's launcher takes ``.deepspeed_env`` along to
    other hosts only by pdsh and MPI, so it is read here as well; what the environment already has stays.

    GNU OpenMP's threads spin for long before they sleep, which takes a core from whoever shares it: on two cores with
    a neighbour a step was ten times slower, and on two idle ones a tenth. It is read when PyTorch is imported.

    Raises:
        SpecError: a line of ``.deepspeed_env`` can't be understood, or the ranks are on several hosts and the first is
            not known.
    """
    of_deepspeed = os.environ.get("LOCAL_SIZE", "1")  # what torchrun calls LOCAL_WORLD_SIZE
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": of_deepspeed}
    started = {} if "RANK" in os.environ else _of_openmpi() or _of_slurm()
    for name, value in (started or alone).items():
        os.environ.setdefault(name, value)
    for name, value in find_environment().items():
        os.environ.setdefault(name, value)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if started and "MASTER_ADDR" not in os.environ and on_several_hosts():
        raise SpecError(
            f"{os.environ['WORLD_SIZE']} ranks were started on several hosts, and MASTER_ADDR, the host of rank 0, is "
            "not set; see launch/slurm.sh, or for OpenMPI: mpirun -x MASTER_ADDR=HOST"
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


def on_several_hosts() -> bool:
    """Whether there are ranks of this run on other hosts."""
    world_size = os.environ["WORLD_SIZE"]
    return world_size != os.environ.get("LOCAL_WORLD_SIZE", world_size)


def _of_openmpi() -> dict[str, str]:
    """The place of a process that mpirun has started. Under Slurm its parent is a task of srun, so this is asked
    first."""
    names = {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    }
    found = {ours: os.environ[theirs] for ours, theirs in names.items() if theirs in os.environ}
    return found if len(found) == len(names) else {}


def _of_slurm() -> dict[str, str]:
    """The place of a task of srun. A batch script and the shell of salloc have a task's number as well, but stand for
    the whole job: they have no step, or one of Slurm's own numbers (docs/launchers.md)."""
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


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def say_once(line: str) -> None:
    """Say what every rank has found, once. A launcher ends the other ranks as soon as rank 0 has left."""
    if int(os.environ["RANK"]) != 0:
        time.sleep(OTHERS_WAIT_SECONDS)
    print(line, file=sys.stderr, flush=True)


def host_name() -> str:
    """What this host is called in names of metrics: as the environment says, else its own name."""
    return re.sub(r"[^\w.-]", "_", os.environ.get(NODE_ID) or platform.node())


NODE_ID = "MLFLOW_SYSTEM_METRICS_NODE_ID"
