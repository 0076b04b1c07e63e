"""Hosts of a run: DeepSpeed's hostfile, ssh to the hosts, their software, and ``.deepspeed_env``.

DeepSpeed pastes the values of ``.deepspeed_env`` between double quotes into a line of the remote shell, so a value with
a character that a shell changes is refused.
"""

import contextlib
import getpass
import hashlib
import ipaddress
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import psutil

from ddpm_ds.ground.errors import SpecError
from ddpm_ds.ground.files import MOST_CONFIG_BYTES, read_text
from ddpm_ds.ground.secret import shown
from ddpm_ds.ground.units import MOST_PROCESSES
from ddpm_ds.ground.version import __version__

PDSH_ARGUMENTS, PDSH_MORE_ARGUMENTS = "PDSH_SSH_ARGS", "PDSH_SSH_ARGS_APPEND"
"""Variables with ssh options for pdsh: the first replaces its usual options, the second comes before them."""
USUAL_ARGUMENTS = "-a -x"  # forward neither agent nor X11
DEFAULT_HOSTFILE = Path("/job/hostfile")  # of DeepSpeed's launcher
ENVIRONMENT_FILE, ENVIRONMENT_FILE_VARIABLE = ".deepspeed_env", "DS_ENV_FILE"
"""DeepSpeed's file of variables that are sent to all hosts, and the variable that names another file."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable that names gloo's interface. By default gloo takes the host name's, and fails if that is loopback."""
OF_DEEPSPEED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""Prefixes of variables that DeepSpeed's launcher puts on command lines; NCCL only with its CUDA accelerator. It also
prints the value of every variable with NCCL in its name, on every host."""
PACKAGES = ("torch", "deepspeed", "mlflow", "pydantic", "numpy", "safetensors", "einops")
"""Packages whose versions ranks compare when they meet, and ``ddpm-ds doctor`` before they do."""

_ENTRY = re.compile(r"(\S+)\s+slots=(\d{1,9})(?!\S)")
_LINE = re.compile(r"([A-Za-z_]\w*)=((?:(?!\s\#)[^'\"\\$`])*)", re.ASCII)


def user_name() -> str:
    """Return the login name, or the user's number where there is no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in Python 3.11 and 3.13
        return str(os.getuid())


def ssh(host: str, words: Sequence[str], *, connect_seconds: int = 10) -> list[str]:
    """Return the command line that runs ``words``, each unchanged, on ``host``; raises as :func:`ssh_to`."""
    asks_nothing = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_seconds}"]
    return ["ssh", *asks_nothing, *ssh_to(host)[1:], shlex.join(words)]


def answer_of(words: Sequence[str], seconds: int) -> tuple[list[str], str]:
    """Return the lines that a command or its login shell prints, and why it failed; "" if it did not."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return [], f"no answer in {seconds} s"
    except OSError as error:
        return [], str(error)
    why = [f"exit code {done.returncode}", *filter(str.strip, done.stderr.splitlines())][-1].strip()
    return done.stdout.strip().splitlines(), why if done.returncode else ""


def address_of(host: str) -> str:
    """Return a host's first address by DeepSpeed's command, over ssh with pdsh's options; raises SpecError."""
    lines, why = answer_of(words := ssh(host, ["hostname", "-I"]), 60)
    if why or not lines:
        raise SpecError(f"{host} can't be asked for its address ({why}); this must work: {shlex.join(words)}")
    return lines[-1].split()[0]


def ssh_to(host: str) -> list[str]:
    """Return the beginning of an ssh command line: ssh, pdsh's options for it, and the host; raises SpecError."""
    user, _, name = host.rpartition("@")
    if host.startswith("-") or name.startswith("-"):
        raise SpecError(f"host {host!r} would be an option of ssh; correct the hostfile")
    options: list[str] = []
    for variable, usual in ((PDSH_MORE_ARGUMENTS, ""), (PDSH_ARGUMENTS, USUAL_ARGUMENTS)):
        text = os.environ.get(variable, usual)
        try:
            options += shlex.split(text)
        except ValueError as error:
            raise SpecError(f"{variable}={text!r} can't be read ({error}); close its quotes") from None
    named = any("%h" in option for option in options)
    options = [option.replace("%h", name).replace("%u", user or user_name()) for option in options]
    as_user = ["-l", user] if user else []
    return ["ssh", *as_user, *options, *([] if named else [name])]


def _lines_of(path: Path, what: str, fix: str) -> list[tuple[str, str]]:
    """Return the lines of a file that are not empty, each after its place for messages; raises SpecError."""
    try:
        lines = map(str.strip, read_text(path, MOST_CONFIG_BYTES).splitlines())
    except OSError as error:
        raise SpecError(f"{what} can't be read ({error.strerror}); {fix}") from None
    return [(f"{what}, line {number}", line) for number, line in enumerate(lines, start=1) if line]


def read_hostfile(path: Path) -> dict[str, int]:
    """Return the hosts of a hostfile and their slots, in order; # begins a comment. Raises SpecError."""
    hosts: dict[str, int] = {}
    for place, line in _lines_of(path, f"hostfile {path}", "give --hostfile a file that can"):
        if line.startswith("#"):
            continue
        entry = _ENTRY.match(line)
        host, slots = (entry[1], int(entry[2])) if entry else ("", 0)
        total = slots + sum(hosts.values())
        faults = {
            "is not HOST slots=N; write it as: worker-1 slots=4": entry is None,
            f"names {host} a second time; keep one line for each host": host in hosts,
            f"makes more than {MOST_PROCESSES:,} processes; use fewer slots": total > MOST_PROCESSES,
            f"gives no process to {host}; delete the line, or give it slots=1 or more": slots == 0,
        }
        if fault := next((fault for fault, found in faults.items() if found), ""):
            raise SpecError(f"{place}: {line!r} {fault}")
        hosts[host] = slots
    if not hosts:
        raise SpecError(f"hostfile {path} names no host; add a line such as: worker-1 slots=4")
    return hosts


def this_host(names: Iterable[str]) -> str | None:
    """Return the first of ``names`` that is this machine's host name, address or ssh alias, perhaps after USER@.

    Raises SpecError as :func:`ssh_to`.
    """
    named, own = {name: name.rpartition("@")[2] for name in names}, socket.gethostname()
    for wanted in (own, own.partition(".")[0]):
        if found := next((name for name, host in named.items() if host == wanted), None):
            return found
    for name, host in named.items():
        settings, _ = answer_of(["ssh", "-G", *ssh_to(name)[1:]], 10)  # prints its settings without connecting
        address = dict(line.partition(" ")[::2] for line in settings).get("hostname", host)
        with contextlib.suppress(OSError, UnicodeError):
            for family, kind, protocol, _, own_address in socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                    probe.bind(own_address)  # possible only on that machine
                    return name
    return None


def read_environment(path: Path) -> dict[str, str]:
    """Return the variables in a file of lines NAME=VALUE; empty lines are ignored. Raises SpecError."""
    values = {}
    for place, line in _lines_of(path, str(path), "fix or delete it"):
        if found := _LINE.fullmatch(line):
            values[found[1]] = found[2]
            continue
        name, equals, value = line.partition("=")
        text = f"{name}={shown(name, value)}" if equals else shown(line, line)
        plain = "without export, quotes, $, backslash, backquote or comment"
        raise SpecError(f"{place}: {text!r} is not NAME=VALUE; write it as: GLOO_SOCKET_IFNAME=eth0, {plain}")
    return values


def find_environment() -> dict[str, str]:
    """Return the variables of the file in the home folder, overridden by the working folder's; raises SpecError."""
    name = os.environ.get(ENVIRONMENT_FILE_VARIABLE, ENVIRONMENT_FILE)
    values: dict[str, str] = {}
    for path in (Path(os.path.expanduser("~"), name), Path(name)):
        if os.path.isfile(path):  # False if the home folder can't be read, as in containers
            values |= read_environment(path)
    return values


def is_loopback(number: str) -> bool:
    """Return whether an address reaches only its own host."""
    return ipaddress.ip_address(number.partition("%")[0]).is_loopback


def use_interface_towards(address: str, *, local: bool = True) -> str:
    """Let gloo use the interface that reaches ``address``, unless the environment has chosen one.

    Return this host's own address there, "" if there is none. Unless the run is ``local``, a name that means a loopback
    address, as Debian gives each host for its own name, is passed over: other hosts could not connect.
    """
    with contextlib.suppress(OSError):  # an unknown name, or no route
        for family, kind, _, _, target in socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM):
            if not local and target[0] != address and is_loopback(str(target[0])):
                continue
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # a datagram socket only chooses a route and sends nothing
                own = str(probe.getsockname()[0]).partition("%")[0]
            for name, addresses in psutil.net_if_addrs().items():
                if any(found.address.partition("%")[0] == own for found in addresses):
                    os.environ.setdefault(GLOO_INTERFACE, name)
            return own
    return ""


def facts(documents: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
    """Return the facts that must be equal on all hosts, by the prefix of their names in messages.

    ``documents`` has the contents of the spec and the DeepSpeed JSON, by file name. Missing packages are left out.
    """
    found: dict[str, object] = {"python": ".".join(map(str, sys.version_info[:2])), "ddpm_ds": __version__}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    folder, checksum = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            checksum.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    named = {f"{name}: ": dict(values) for name, values in documents.items()}
    return {"version of ": found, "": {"ddpm_ds/*.py": checksum.hexdigest()}, **named}


REMEDIES = {
    "version of ": "install the same versions on all hosts",
    "": "bring all hosts to one commit, with the same changes",
}
"""Fixes for hosts that differ, by the prefix in :func:`facts`; other facts are contents of files."""
