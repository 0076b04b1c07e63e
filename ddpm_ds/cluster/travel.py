"""The variables that have to be the same on every host, and the ``.deepspeed_env`` that takes them there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ddpm_ds.processes.hosts import OF_DEEPSPEED, read_environment, write_environment
from ddpm_ds.secret import is_secret, shown, write_private

TRAVELS = re.compile(
    r"DS_ACCELERATOR|CUDA_DEVICE_MAX_CONNECTIONS|(OMP|GOMP|MKL|OPENBLAS)_\w+|(NCCL|GLOO|MLFLOW|TORCH|UCX)_\w+"
)
OF_ONE_PROCESS = re.compile(r"MLFLOW_RUN_ID|TORCHELASTIC_\w+|TORCH_HOME")
"""Variables of a single run or host."""
NEEDED_SECRET = re.compile(r"(MLFLOW|AWS)_\w+")


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that every rank needs, without secrets."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if TRAVELS.fullmatch(name) and not OF_ONE_PROCESS.fullmatch(name) and not is_secret(name, value)
    }


def secrets(environment: Mapping[str, str]) -> list[str]:
    """Names of variables that training may need and that stay where they are."""
    return sorted(
        name for name, value in environment.items() if NEEDED_SECRET.fullmatch(name) and is_secret(name, value)
    )


def exported(environment: Mapping[str, str], file: Mapping[str, str], folder: str) -> dict[str, str]:
    """The environment that DeepSpeed's pdsh launcher gives to the processes on every host.

    It is the file's variables over those that DeepSpeed takes along, with the working folder first in ``PYTHONPATH``.
    Secrets are left out, since nothing that is asked of hosts needs them.
    """
    taken = {name: value for name, value in environment.items() if name.startswith(OF_DEEPSPEED)}
    python_path = ":".join([folder, *filter(None, [environment.get("PYTHONPATH")])])
    everything = taken | {"PYTHONPATH": python_path} | dict(file)
    return {name: value for name, value in everything.items() if not is_secret(name, value)}


def chosen_by_hosts(on_cuda: bool, interfaces: Iterable[str]) -> dict[str, str]:
    """The variables that follow from the hosts: the CPU accelerator where none has a CUDA device, and gloo's interface
    where all use one name for it."""
    values = {} if on_cuda else {"DS_ACCELERATOR": "cpu"}
    names = set(interfaces)
    return values | ({"GLOO_SOCKET_IFNAME": names.pop()} if len(names) == 1 and "" not in names else {})


def merge_into(path: Path, values: Mapping[str, str], defaults: Mapping[str, str]) -> list[str]:
    """Write ``values`` over those of an environment file, and these over ``defaults``; a file that changes is kept
    beside itself as ``.bak``. Returns lines that describe what was done.

    Raises:
        SpecError: the file can't be understood, or a value can't be written into it.
        OSError: it can't be written.
    """
    before = read_environment(path) if path.exists() else {}
    after = dict(defaults) | before | dict(values)
    old = path.read_bytes() if path.exists() else None
    write_environment(path, after)
    lines = [f"{path}: {', '.join(after) or 'nothing has to travel'}"]
    lines += [f"  {name} was {shown(name, value)}" for name, value in before.items() if after[name] != value]
    if old is not None and old != path.read_bytes():
        backup = path.with_name(f"{path.name}.bak")
        write_private(backup, old)
        lines.append(f"  the file as it was: {backup}")
    return lines
