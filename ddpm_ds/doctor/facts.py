"""What a host says about itself. Standard library only where it can be: a host lacks what is to be found out."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ddpm_ds

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
class Facts:
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
    def read(cls, values: Mapping[str, Any]) -> Facts:
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


def gather(question: Question, environment: Mapping[str, str]) -> Facts:
    """The facts about this host; ``environment`` are the variables of this process that ask to travel."""
    spec, store, images = _spec(question.spec, question.overrides)
    disks = {"run": disk(Path(question.run_dir))}
    if store is not None:
        disks["data"] = disk(store)
    return Facts(
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
        from ddpm_ds.spec_file import load_spec

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
