"""The variables that have to be the same on every host, and the ``.deepspeed_env`` that takes them there.

What a host says about itself. Standard library only where it can be: a host lacks what is to be found out.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ddpm_ds
from ddpm_ds.processes.hosts import read_environment, write_environment

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


PACKAGES = ("torch", "deepspeed", "mlflow", "pydantic", "numpy", "safetensors", "einops")
CHECKSUM_DIGITS = 12
COMMIT_DIGITS = 10


@dataclass(frozen=True)
class Document:
    """A run spec or a DeepSpeed JSON as a host reads it."""

    values: dict[str, str] = field(default_factory=dict)
    """Values by dotted key, as JSON."""
    error: str = ""
    """Why it can't be read there."""


@dataclass(frozen=True)
class Disk:
    """The file system that a folder is on, or will be once it is made."""

    free_bytes: int
    writable: bool
    exists: bool
    """Whether the folder is already there."""


@dataclass(frozen=True)
class HostFacts:
    """One host, as a process that was started there sees it."""

    name: str
    python: str
    versions: dict[str, str]
    """Of ``PACKAGES``; one that is missing is left out."""
    commit: str
    """The start of the commit, with + where files are changed; empty where the project is no clone."""
    sources: dict[str, str]
    """Checksum of each file of the package, by its path."""
    spec: Document
    ds_config: Document | None
    disks: dict[str, Disk]
    """By what the folder is for."""
    images_missing: str
    """The spec's image folder, where it is not there."""
    cores: int
    devices: tuple[str, ...]
    """Kind and memory of each CUDA device."""
    environment: dict[str, str]
    """The variables that ask to travel."""
    interfaces: tuple[str, ...]
    addresses: tuple[str, ...]
    """As ``hostname -I`` tells them."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> HostFacts:
        """The facts that another process wrote as JSON.

        Raises:
            TypeError, KeyError: a process with another version of this package wrote them.
        """
        config = values["ds_config"]
        return cls(
            **{
                **values,
                "spec": Document(**values["spec"]),
                "ds_config": None if config is None else Document(**config),
                "disks": {name: Disk(**disk) for name, disk in values["disks"].items()},
                **{name: tuple(values[name]) for name in ("devices", "interfaces", "addresses")},
            }
        )


@dataclass(frozen=True)
class Question:
    """What the facts are asked about: files and folders of the run, relative to the working folder."""

    spec: str
    overrides: tuple[str, ...]
    ds_config: str | None
    run_dir: str


def gather(question: Question, environment: Mapping[str, str]) -> HostFacts:
    """The facts about this host; ``environment`` are the variables of this process that ask to travel."""
    spec, store, images = _spec(question.spec, question.overrides)
    disks = {"run": disk(Path(question.run_dir))}
    if store is not None:
        disks["data"] = disk(store)
    return HostFacts(
        name=platform.node(),
        python=platform.python_version(),
        versions=_versions(),
        commit=_commit(),
        sources=checksums(Path(ddpm_ds.__file__).parent),
        spec=spec,
        ds_config=None if question.ds_config is None else _json(question.ds_config),
        disks=disks,
        images_missing="" if images is None or images.is_dir() else str(images),
        cores=len(os.sched_getaffinity(0)),
        devices=_devices(),
        environment=dict(environment),
        interfaces=_interfaces(),
        addresses=tuple(_run("hostname", "-I").split()),
    )


def flat(values: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as one level of dotted keys; values as JSON."""
    if isinstance(values, dict) and values:
        pairs = (flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in values.items())
        return {key: text for part in pairs for key, text in part.items()}
    return {prefix: json.dumps(values, sort_keys=True)}


def checksums(package: Path) -> dict[str, str]:
    """The start of the SHA-256 of every source file of a package, by its path from the folder that holds it."""
    return {
        str(path.relative_to(package.parent)): hashlib.sha256(path.read_bytes()).hexdigest()[:CHECKSUM_DIGITS]
        for path in sorted(package.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above that is there, as an absolute path."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def disk(folder: Path) -> Disk:
    """What a folder, or the one that it will be made in, has to offer."""
    found = existing(folder)
    return Disk(shutil.disk_usage(found).free, os.access(found, os.W_OK), folder.is_dir())


def _spec(path: str, overrides: Sequence[str]) -> tuple[Document, Path | None, Path | None]:
    """The spec, its store's folder and its folder of images."""
    try:
        from ddpm_ds.config.spec_file import load_spec

        spec = load_spec(path, overrides)
    except Exception as error:  # of ours, or of a pydantic that is missing, too old or broken
        return Document(error=str(error) or type(error).__name__), None, None
    return Document(flat(spec.model_dump(mode="json"))), spec.data.store_root, spec.data.path


def _json(path: str) -> Document:
    try:
        return Document(flat(json.loads(Path(path).read_text(encoding="utf-8"))))
    except OSError as error:
        return Document(error=f"{path}: {error.strerror}")
    except ValueError as error:
        return Document(error=f"{path}: not JSON: {error}")


def _versions() -> dict[str, str]:
    versions = {"ddpm_ds": ddpm_ds.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str:
    git = ("git", "--no-optional-locks", "-C", str(Path(ddpm_ds.__file__).parent))
    commit = _run(*git, "rev-parse", "HEAD").strip()
    changed = _run(*git, "status", "--porcelain", "--untracked-files=no") if commit else ""
    return commit[:COMMIT_DIGITS] + ("+" if changed else "")


def _devices() -> tuple[str, ...]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        kinds = [
            f"{pynvml.nvmlDeviceGetName(handle)} {pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30:.0f} GiB"
            for handle in handles
        ]
    except Exception:  # no driver, or no binding of it: no device that PyTorch could use either
        return ()
    return tuple(kinds)


def _interfaces() -> tuple[str, ...]:
    try:
        import psutil
    except ImportError:
        return ()
    return tuple(psutil.net_if_addrs())


def _run(*command: str) -> str:
    """What a command prints; nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
