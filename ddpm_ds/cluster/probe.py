"""The program that answers for a host: one JSON line for each question on standard input, until that ends.

    python -m ddpm_ds.cluster.probe

A question is an object with ``ask``, the name of a method of :class:`Probe`, and its arguments. Answers are lines that
begin with ``MARK``, because a login shell may print lines of its own. Packages whose absence is a finding are imported
only where an ImportError is caught.
"""

import contextlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddpm_ds.files import MOST_CONFIG_BYTES, read_json
from ddpm_ds.processes.hosts import route_towards, sources, versions
from ddpm_ds.secret import is_secret

MARK = "ddpm-ds-doctor "
TRAVELS = re.compile(
    r"DS_ACCELERATOR|CUDA_DEVICE_MAX_CONNECTIONS|(OMP|GOMP|MKL|OPENBLAS)_\w+|(NCCL|GLOO|MLFLOW|TORCH|UCX)_\w+"
)
OF_ONE_PROCESS = re.compile(r"MLFLOW_RUN_ID|TORCHELASTIC_\w+|TORCH_HOME")
"""Variables of a single run or host."""


@dataclass(frozen=True)
class Document:
    """A run spec or a DeepSpeed JSON as a host reads it."""

    values: dict[str, str] = field(default_factory=dict)
    """Values by dotted key, as JSON."""
    error: str = ""
    """Reason why the host can't read it, else empty."""


@dataclass(frozen=True)
class Disk:
    """Free space and permission to write in a folder, or in the nearest one above it that exists."""

    free_bytes: int
    writable: bool
    exists: bool
    """Whether the folder itself exists."""


@dataclass(frozen=True)
class HostFacts:
    """Findings of a process that was started on a host."""

    python: str
    versions: dict[str, str]
    """What :func:`~ddpm_ds.processes.hosts.versions` returns."""
    sources: dict[str, str]
    """Checksum of each file of the package, by its path."""
    spec: Document
    ds_config: Document | None
    disks: dict[str, Disk]
    """Disks for runs ("run") and for prepared images ("data")."""
    images_missing: str
    """The spec's ``data.path`` if it does not exist on this host, else empty."""
    cores: int
    devices: tuple[str, ...]
    """Kind and memory of each CUDA device."""
    environment: dict[str, str]
    """The variables that every rank needs."""
    interfaces: tuple[str, ...]
    addresses: tuple[str, ...]
    """Addresses as ``hostname -I`` prints them."""


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every rank needs, without secrets."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if TRAVELS.fullmatch(name) and not OF_ONE_PROCESS.fullmatch(name) and not is_secret(name, value)
    }


def tell(value: Any) -> None:
    """Send something that JSON can hold to the asking side."""
    print(MARK + json.dumps(value), flush=True)


class Probe:
    """Answers to all questions, a method for each, which takes and returns JSON values."""

    def __init__(self) -> None:
        self.undo = contextlib.ExitStack()
        """Frees the port and removes the file of :meth:`open`."""

    def facts(self, spec: str, overrides: Sequence[str], ds_config: str | None, run_dir: str) -> dict[str, Any]:
        """Return everything about this host that needs no other; paths are relative to the working folder."""
        document, data_folder, images = _read_spec(spec, overrides)
        disks = {"run": _disk(Path(run_dir))}
        if data_folder is not None:
            disks["data"] = _disk(data_folder)
        found = HostFacts(
            python=platform.python_version(),
            versions=versions(),
            sources=sources(),
            spec=document,
            ds_config=None if ds_config is None else _read_json(ds_config),
            disks=disks,
            images_missing="" if images is None or os.path.exists(images) else str(images),
            cores=len(os.sched_getaffinity(0)),
            devices=_devices(),
            environment=travelling(os.environ),
            interfaces=tuple(name for _, name in socket.if_nameindex()),
            addresses=_addresses(),
        )
        return asdict(found)

    def open(self, address: str, port: int, run_dir: str) -> dict[str, str]:
        """Prepare the first host for the others' :meth:`reach`, until this process ends.

        Listens at the port, and puts a file into the run's folder or the nearest one above it. Returns fields of
        ``HostReport``, and the file as ``token``.
        """
        found = _route(address) | {"token": ""}
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self.undo.enter_context(socket.create_server(("", port), family=family, backlog=1024))
        except OSError as error:
            found["port_error"] = os.strerror(error.errno or 0)
        with contextlib.suppress(OSError):
            token = tempfile.NamedTemporaryFile(prefix=".ddpm-ds-doctor-", dir=_existing(Path(run_dir)))  # noqa: SIM115
            found["token"] = self.undo.enter_context(token).name
        return found

    def reach(self, address: str, port: int | None, token: str, seconds: float) -> dict[str, Any]:
        """Try to reach the first host: its address, its port unless that is None, and its file in the run's folder.

        Returns fields of ``HostReport``.
        """
        found: dict[str, Any] = dict(_route(address))
        if token:
            found["run_dir_shared"] = _appears(Path(token))
        if address and port is not None:
            try:
                socket.create_connection((address, port), timeout=seconds).close()
            except TimeoutError:
                found["port_error"] = f"no answer in {seconds:g} s"
            except OSError as error:
                found["port_error"] = error.strerror or str(error)
        return found


def _route(address: str) -> dict[str, str]:
    """Return the interface that leads to an address, and this host's own address on it."""
    if not address:
        return {"route_error": "the first host's address is unknown"}
    try:
        interface, own = route_towards(address)
    except OSError as error:
        return {"route_error": error.strerror or str(error)}
    return {"interface": interface or "", "address": own}


def _appears(path: Path, seconds: float = 3.0) -> bool:
    """Return whether another host's file is visible here; file systems on a network may take some time."""
    until = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes NFS ask its server again
    return True


def _flat(values: Any, prefix: str = "") -> dict[str, str]:
    """Return nested mappings as one level of dotted keys, with values as JSON."""
    if isinstance(values, dict) and values:
        pairs = (_flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in values.items())
        return {key: text for part in pairs for key, text in part.items()}
    return {prefix: json.dumps(values, sort_keys=True)}


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists, as an absolute path."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.isdir(path))


def _disk(folder: Path) -> Disk:
    found = _existing(folder)
    return Disk(shutil.disk_usage(found).free, os.access(found, os.W_OK), os.path.isdir(folder))


def _read_spec(path: str, overrides: Sequence[str]) -> tuple[Document, Path | None, Path | None]:
    """Return the spec, the folder of its prepared images and the path of its images."""
    try:
        from ddpm_ds.config.spec_file import load_spec

        spec = load_spec(path, overrides)
    except Exception as error:  # of ours, or of a pydantic that is missing, too old or broken
        return Document(error=str(error) or type(error).__name__), None, None
    return Document(_flat(spec.model_dump(mode="json"))), spec.data.store_root, spec.data.path


def _read_json(path: str) -> Document:
    try:
        return Document(_flat(read_json(Path(path), MOST_CONFIG_BYTES)))
    except OSError as error:
        return Document(error=f"{path}: {error.strerror}")
    except ValueError as error:
        return Document(error=f"{path}: not JSON: {error}")


def _devices() -> tuple[str, ...]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            f"{pynvml.nvmlDeviceGetName(handle)} {pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30:.0f} GiB"
            for handle in handles
        )
    except Exception:  # no driver, or no binding of it: no device that PyTorch could use either
        return ()


def _addresses() -> tuple[str, ...]:
    try:
        return tuple(subprocess.check_output(["hostname", "-I"], text=True, timeout=10).split())
    except (OSError, subprocess.SubprocessError):
        return ()


def main() -> None:
    """Answer every line of standard input."""
    probe = Probe()
    with probe.undo:
        for line in sys.stdin:
            question = json.loads(line)
            tell(getattr(probe, question.pop("ask"))(**question))


if __name__ == "__main__":
    main()
