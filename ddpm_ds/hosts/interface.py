"""The network interface that leads to an address."""

from __future__ import annotations

import os
import socket

import psutil

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable that names the interface on which gloo listens. Without it gloo takes the one of the host's own name, which
on many systems is loopback, and fails after minutes."""


def interface_towards(address: str) -> str | None:
    """The local interface by which packets to a host (name or address) leave; the host's own where that is this one.

    None where the name is unknown or no route leads there.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # of a datagram socket: chooses a route, sends nothing
            own = probe.getsockname()[0].partition("%")[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == own for found in addresses):
            return name
    return None


def use_interface_towards(address: str) -> None:
    """Let gloo listen where ``address`` is reached, unless the environment has chosen an interface."""
    if GLOO_INTERFACE not in os.environ and (name := interface_towards(address)) is not None:
        os.environ[GLOO_INTERFACE] = name
