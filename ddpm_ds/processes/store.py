"""Key-value stores of a run on rank 0: where they listen, and how ranks' values are authenticated.

PyTorch's store takes commands from anyone who connects. So it listens on loopback if the run has one host, else at the
address by which the other hosts reach it. Ranks seal their values with the run's secret, if the environment has one,
and ignore values without a valid seal. docs/security.md names the remaining risks.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ddpm_ds.processes.ranks import RUN_SECRET, on_several_hosts

BACKLOG = 2048


def connect(rank: int, port: int, timeout: timedelta) -> dist.TCPStore:
    """Return the store at a port of rank 0's host, served by rank 0; port 0 means a free port.

    At other ports, torchrun's store is used if it serves one.

    Raises:
        dist.DistError: the port is taken, or the store can't be reached.
    """
    host, by_agent = os.environ["MASTER_ADDR"], os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    served = rank == 0 and not (port and by_agent)
    listener = _listener(host, port) if served else None
    return dist.TCPStore(
        host,
        port if listener is None else listener.getsockname()[1],
        is_master=served,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listener(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at an address of ``host``.

    None if no address is this machine's own, as for a service that forwards connections, or if the port is taken,
    perhaps by this process, which PyTorch will find. A name that means loopback on its own host, as Debian sets it up,
    means another address elsewhere.
    """
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        number = str(address[0]).partition("%")[0]
        if number != host and ipaddress.ip_address(number).is_loopback and on_several_hosts():
            continue
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                return None
            continue
        return listener
    return None


class SealedStore(dist.Store):
    """Store in which every value has a seal computed from the run's secret, the key and the value.

    A value with a wrong seal, or without one, is read as empty.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self._secret = store, os.environ.get(RUN_SECRET, "").encode()

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        return self._opened(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._opened(key, value) for key, value in zip(keys, self._store.multi_get(list(keys)), strict=True)]

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a value if the current one is ``expected`` ("" also: none or an invalid one); return the new value."""
        there = self._store.get(key) if self._store.check([key]) else b""
        if there and there != self._sealed(key, "").encode() and not self._opened(key, there):
            self._store.set(key, self._sealed(key, ""))
            there = self._store.get(key)
        if self._opened(key, there) == expected.encode():
            self._store.compare_set(key, there.decode(), self._sealed(key, value))
        return self.get(key)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def queue_push(self, key: str, value: bytes | str) -> None:
        self._store.queue_push(key, self._sealed(key, value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._opened(key, self._store.queue_pop(key, block))

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(key)

    def _sealed(self, key: str, value: bytes | str) -> str:
        text = value if isinstance(value, str) else value.decode()
        return f"{self._seal(key, text.encode())}{text}"

    def _opened(self, key: str, sealed: bytes) -> bytes:
        seal, value = sealed[: 2 * hashlib.sha256().digest_size], sealed[2 * hashlib.sha256().digest_size :]
        return value if hmac.compare_digest(seal, self._seal(key, value).encode()) else b""

    def _seal(self, key: str, value: bytes) -> str:
        return hmac.new(self._secret, key.encode() + b"\0" + value, hashlib.sha256).hexdigest()
