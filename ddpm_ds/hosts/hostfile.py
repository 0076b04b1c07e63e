"""DeepSpeed's hostfile: one line ``HOST slots=N`` for each machine, in the order of their ranks."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable
from pathlib import Path

from ddpm_ds.errors import SpecError
from ddpm_ds.hosts.ssh import ssh_settings

DEFAULT_HOSTFILE = Path("/job/hostfile")
"""Where DeepSpeed's launcher looks when it is given none."""
_ENTRY = re.compile(r"(\S+)\s+slots=(\d+)(?!\S)")


def read_hostfile(path: Path) -> dict[str, int]:
    """Hosts and their slots, in order. Blank lines and lines that begin with # mean nothing.

    Raises:
        SpecError: the file can't be read, has no host or one twice, or a line is something else.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"hostfile {path} can't be read ({error}); give --hostfile a file that can") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        where = f"hostfile {path}, line {number}: {line!r}"
        entry = _ENTRY.match(line)
        if entry is None:
            raise SpecError(f"{where} is not HOST slots=N; write it as: worker-1 slots=4")
        host, slots = entry[1], int(entry[2])
        if host in hosts:
            raise SpecError(f"{where} names {host} a second time; keep one line for each host")
        if slots == 0:
            raise SpecError(f"{where} gives no process to {host}; delete the line, or give it slots=1 or more")
        hosts[host] = slots
    if not hosts:
        raise SpecError(f"hostfile {path} names no host; add a line such as: worker-1 slots=4")
    return hosts


def this_host(names: Iterable[str]) -> str | None:
    """The first of ``names`` that means this machine: its host name, its address, or ssh's alias of one of these.

    ``user@`` before a name is passed over.

    Raises:
        SpecError: ssh would take a name for an option.
    """
    named = {name: name.rpartition("@")[2] for name in names}
    own = socket.gethostname()
    for wanted in (own, own.partition(".")[0]):
        for name, host in named.items():
            if host == wanted:
                return name
    of_ssh = (ssh_settings(name).get("hostname", host) for name, host in named.items())
    return next((name for name, host in zip(named, of_ssh, strict=True) if _is_address_of_this_host(host)), None)


def _is_address_of_this_host(host: str) -> bool:
    """Whether a socket can be bound to an address of ``host``, as only its own machine can."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False
