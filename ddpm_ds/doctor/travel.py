"""The variables that have to be the same on every host, and the ``.deepspeed_env`` that takes them there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddpm_ds.hosts.environment import read_environment, write_environment

TRAVELS = re.compile(
    r"DS_ACCELERATOR|CUDA_DEVICE_MAX_CONNECTIONS|(OMP|GOMP|MKL|OPENBLAS)_\w+|(NCCL|GLOO|MLFLOW|TORCH|UCX)_\w+"
)
OF_ONE_PROCESS = re.compile(r"MLFLOW_RUN_ID|TORCHELASTIC_\w+|TORCH_HOME")
"""Of a single run or host."""
SECRET = re.compile(r"\w*(PASSWORD|TOKEN|SECRET|CREDENTIAL|API_KEY|ACCESS_KEY)\w*|AWS_\w+")
SIGNED_ADDRESS = re.compile(r"\w+://[^/@\s]*:[^/@\s]*@")
"""An address with a password in it."""
OF_DEEPSPEED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""Beginnings of the variables that DeepSpeed's launcher takes along by itself; NCCL with its CUDA accelerator."""


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that ask to travel, without secrets."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if TRAVELS.fullmatch(name) and not OF_ONE_PROCESS.fullmatch(name) and not is_secret(name, value)
    }


def secrets(environment: Mapping[str, str]) -> list[str]:
    """Names of variables that training may need and that are not to be written into a file."""
    wanted = re.compile(r"(MLFLOW|AWS)_\w+")
    return sorted(name for name, value in environment.items() if wanted.fullmatch(name) and is_secret(name, value))


def is_secret(name: str, value: str) -> bool:
    """Whether a variable is, by its name, or holds, in an address, a password."""
    return bool(SECRET.fullmatch(name) or SIGNED_ADDRESS.match(value))


def exported(environment: Mapping[str, str], file: Mapping[str, str], folder: str) -> dict[str, str]:
    """What DeepSpeed's pdsh launcher gives to the processes on every host: the file's variables over those that it
    takes along, and the working folder first in ``PYTHONPATH``. Secrets are left out: nothing asked here needs them.
    """
    taken = {name: value for name, value in environment.items() if name.startswith(OF_DEEPSPEED)}
    python_path = ":".join([folder, *filter(None, [environment.get("PYTHONPATH")])])
    everything = taken | {"PYTHONPATH": python_path} | dict(file)
    return {name: value for name, value in everything.items() if not is_secret(name, value)}


def chosen_by_hosts(on_cuda: bool, interfaces: Iterable[str]) -> dict[str, str]:
    """What the hosts themselves tell: the CPU accelerator where they have no CUDA devices, and gloo's interface where
    all use one name for it."""
    values = {} if on_cuda else {"DS_ACCELERATOR": "cpu"}
    names = set(interfaces)
    return values | ({"GLOO_SOCKET_IFNAME": names.pop()} if len(names) == 1 and "" not in names else {})


@dataclass(frozen=True)
class Written:
    """What has become of an environment file."""

    values: dict[str, str]
    changed: dict[str, str]
    """Values that the file had before, of variables that have another now."""
    backup: Path | None
    """The file as it was."""


def write_merged(path: Path, values: Mapping[str, str], defaults: Mapping[str, str]) -> Written:
    """Write ``values`` over those that the file has, and these over ``defaults``; where the file changes, it stays
    beside itself as it was.

    Raises:
        SpecError: the file can't be understood, or a value can't be written into it.
        OSError: it can't be written.
    """
    before = read_environment(path) if path.exists() else {}
    after = dict(defaults) | before | dict(values)
    old = path.read_bytes() if path.exists() else None
    write_environment(path, after)
    backup = None
    if old is not None and old != path.read_bytes():
        backup = _free_name(path)
        backup.write_bytes(old)
    return Written(after, {name: text for name, text in before.items() if after[name] != text}, backup)


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.bak{number or ''}") for number in range(10**6))
    return next(name for name in names if not name.exists())
