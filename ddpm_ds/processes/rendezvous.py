"""Rendezvous of all ranks before they have a process group, and the key-value store on rank 0 where they meet.

Building a process group would wait for ever for a rank that has exited or trains something else. So each rank first
writes its facts to a key-value store on rank 0. Rank 0 answers with the facts of all, or with the reason why the run
can't start. Then all continue, or all exit for the same reason.

    rank 0   store at MASTER_ADDR:MASTER_PORT; agree("start", facts) ─▶ agree("data", ...) ─▶ process group, same port
    rank 2   agree("start", facts): refused by rank 3 (host b): data.path = photos is no folder ...  ─▶ exit code 2

PyTorch's store takes commands from anyone who connects. So it listens on loopback if the run has one host, else at the
address by which other hosts reach it. Ranks seal their values with the run's secret, if the environment has one, and
ignore values without a valid seal. docs/security.md names the remaining risks.
"""

import contextlib
import errno
import hashlib
import hmac
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ddpm_ds.ground.errors import HostError, LayoutError, PeerLostError, UserError
from ddpm_ds.processes.hosts import is_loopback
from ddpm_ds.processes.ranks import RUN_SECRET, host_name, on_several_hosts

BACKLOG = 2048
BEAT_SECONDS, SILENCE_SECONDS = 2.0, 60.0
"""Time between beats, and silence after which a rank counts as lost; imports may keep a process busy for long."""
POLL_SECONDS, MOST_LOOKS = 0.01, 5000
"""Time between looks at the store, and most looks per second by all waiting ranks together."""
MOST_VALUE_BYTES = 2**23
"""Maximum size of a value in PyTorch's store."""
REFUSING_SECONDS = 10.0
"""Time for which a rank that can't take part tries to report it."""
CHECK = "ddpm-ds doctor --hostfile FILE checks it"
REFUSAL, OVER = "refusal", "over"
"""Keys: the reason why a rank can't take part; the end of the rendezvous, after which a new rank is another run's."""


def connect(rank: int, port: int, timeout: timedelta) -> dist.TCPStore:
    """Return the store at a port of rank 0's host, which rank 0 or torchrun serves; port 0 means a free one.

    Raises dist.DistError if the port is taken, or the store can't be reached.
    """
    host, by_agent = os.environ["MASTER_ADDR"], os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    served = rank == 0 and not (port and by_agent)
    listener = _listener(host, port) if served else None
    number, descriptor = (port, None) if listener is None else (listener.getsockname()[1], listener.detach())
    store = partial(dist.TCPStore, is_master=served, timeout=timeout, wait_for_workers=False, multi_tenant=True)
    return store(host, number, master_listen_fd=descriptor)


def _listener(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at this machine's address of ``host``; None without one, or if the port is taken."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if address[0] != host and is_loopback(str(address[0])) and on_several_hosts():
            continue  # elsewhere the host's name means another address
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
    """Store that seals each value and its key with the run's secret; a value without a valid seal is read as empty."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self._secret = store, os.environ.get(RUN_SECRET, "").encode()

    def set(self, key: str, value: str) -> None:
        """Set a value; raises HostError if it is too large for PyTorch's store, which would close the connection."""
        sealed = self._sealed(key, value)
        if (size := len(sealed.encode())) > MOST_VALUE_BYTES:
            raise HostError(f"{key} has {size:,} bytes, and PyTorch's store takes {MOST_VALUE_BYTES:,} at most")
        self._store.set(key, sealed)

    def clone(self) -> "SealedStore":
        """Return this store with a connection of its own, which no other thread keeps waiting, or closes."""
        return SealedStore(self._store.clone())

    def get(self, key: str) -> bytes:
        return self._opened(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._opened(key, value) for key, value in zip(keys, self._store.multi_get(list(keys)), strict=True)]

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a value if the current one is ``expected`` ("" is none or an invalid one); return the new one."""
        there = self._store.get(key) if self._store.check([key]) else b""
        if there and there != self._sealed(key, "").encode() and not self._opened(key, there):
            self._store.set(key, self._sealed(key, ""))
            there = self._store.get(key)
        if self._opened(key, there) == expected.encode():
            self._store.compare_set(key, there.decode(), self._sealed(key, value))
        return self.get(key)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def _sealed(self, key: str, value: str) -> str:
        message = f"{key}\0{value}".encode()
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest() + value

    def _opened(self, key: str, sealed: bytes) -> bytes:
        value = sealed[2 * hashlib.sha256().digest_size :]
        genuine = self._sealed(key, value.decode(errors="replace")).encode()
        return value if hmac.compare_digest(sealed, genuine) else b""


class Rendezvous:
    """Rendezvous of a start's ranks, until their process group exists; ``store`` stays open afterwards.

    Raises LayoutError if another job has the port, PeerLostError if rank 0 can't be reached.
    """

    def __init__(self, start_seconds: float) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.hosts: tuple[str, ...] = (host_name(),) * self.world_size
        """Host name of every rank; this host's before the first :meth:`agree`."""
        self._start_seconds = start_seconds
        self._poll_seconds = max(POLL_SECONDS, self.world_size / MOST_LOOKS)
        self.store = _store(self.rank, start_seconds) if self.world_size > 1 else SealedStore(dist.HashStore())
        self._closed = threading.Event()

        def beat() -> None:
            with contextlib.suppress(dist.DistError):  # rank 0 has gone
                for count in itertools.count() if self.world_size > 1 else ():
                    self.store.set(f"beat/{self.rank}", str(count))
                    if self._closed.wait(BEAT_SECONDS):
                        return

        self._beating = threading.Thread(target=beat, name="rendezvous", daemon=True)
        self._beating.start()

    def name(self, rank: int, stage: int | None = None, part: int | None = None) -> str:
        """Return a rank's name for users: ``rank 3 (stage 1, tensor part 1, host b)``, without an only host."""
        host = self.hosts[rank] if len(set(self.hosts)) > 1 else None
        facts = {"stage": stage, "tensor part": part, "host": host}
        known = ", ".join(f"{what} {value}" for what, value in facts.items() if value is not None)
        return f"rank {rank} ({known})" if known else f"rank {rank}"

    def host_of(self, rank: int) -> str:
        """Return a rank's host as the subject of a sentence: ``host b (rank 2)``."""
        return f"host {self.hosts[rank]} (rank {rank})"

    def agree(self, topic: str, facts: Mapping[str, object]) -> list[dict[str, Any]]:
        """Share ``facts`` (JSON values) about a topic with all ranks, once; return the facts of all, by rank.

        Raises HostError if another rank can't take part, PeerLostError if one did not join, or is lost.
        """
        try:
            self.store.set(f"{topic}/{self.rank}", f"{host_name()}\n{json.dumps(facts)}")
            if self.rank == 0:
                self._collect(topic)
            self._wait([topic], awaited=[0])
            text = self.store.get(topic)
        except dist.DistError as error:
            raise PeerLostError(f"{self.name(0)} has gone while the run was starting") from error
        if not text:
            raise self._different_secrets([0])
        answer = json.loads(text)
        if "why" in answer:
            raise (PeerLostError if answer["lost"] else HostError)(*answer["why"].splitlines())
        self.hosts = tuple(answer["hosts"][place] for place, _ in answer["places"])
        return [answer["written"][place] for _, place in answer["places"]]

    def _collect(self, topic: str) -> None:
        """Write the answer: each host and each different text once, and for each rank their places."""
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        try:
            self._wait(keys, awaited=range(self.world_size))
            texts = [text.decode() for text in self.store.multi_get(keys)]
            if strangers := [rank for rank, text in enumerate(texts) if not text]:
                raise self._different_secrets(strangers)
        except (HostError, PeerLostError) as error:
            self.store.set(topic, json.dumps({"why": str(error), "lost": isinstance(error, PeerLostError)}))
            time.sleep(4 * self._poll_seconds)  # the others read the reason before the store ends with this rank
            return
        pairs = [text.partition("\n")[::2] for text in texts]
        hosts, written = (list(dict.fromkeys(ones)) for ones in zip(*pairs, strict=True))
        places = [(hosts.index(host), written.index(text)) for host, text in pairs]
        answer = {"hosts": hosts, "written": [*map(json.loads, written)], "places": places}
        self.store.set(topic, json.dumps(answer))

    def _different_secrets(self, ranks: list[int]) -> HostError:
        who = f"{_ranks(ranks)} and {self.name(self.rank)}"
        return HostError(f"{who} have different values of {RUN_SECRET}; set one on all hosts, or none")

    def refuse(self, error: UserError) -> None:
        """Write the reason why this rank can't take part; rank 0 gives the others time to read it."""
        with contextlib.suppress(dist.DistError):
            faults = [f"rank {self.rank} (host {host_name()}): {fault}" for fault in str(error).splitlines()]
            self.store.compare_set(REFUSAL, "", json.dumps(faults))
            self.store.set(f"left/{self.rank}", "")
            others, until = [f"left/{rank}" for rank in range(self.world_size)], time.monotonic() + REFUSING_SECONDS
            while self.rank == 0 and not self.store.check(others) and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
        self.close()

    def close(self) -> None:
        """End the rendezvous, when the process group exists or this rank is about to exit."""
        self._closed.set()
        with contextlib.suppress(dist.DistError):
            if self.rank == 0:
                self.store.set(OVER, "")
        self._beating.join(BEAT_SECONDS)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report a UserError of this block to the other ranks."""
        try:
            yield
        except UserError as error:
            if not self._closed.is_set():
                self.refuse(error)
            raise

    def _wait(self, keys: list[str], awaited: Sequence[int]) -> None:
        """Wait for the keys of the ``awaited`` ranks, and look for lost ranks once a beat."""
        store, started = self.store, time.monotonic()
        looked_at = started
        received = dict.fromkeys(awaited, (b"", started))  # each rank's newest beat, and when it was first seen
        while not store.check(keys):
            if store.check([REFUSAL]) and (text := store.get(REFUSAL)):
                raise HostError(*json.loads(text))
            time.sleep(self._poll_seconds)
            if (now := time.monotonic()) - looked_at < BEAT_SECONDS:
                continue
            looked_at = now
            missing = [rank for rank, key in zip(awaited, keys, strict=True) if not store.check([key])]
            for rank in missing:
                beat = store.get(f"beat/{rank}") if store.check([f"beat/{rank}"]) else b""
                received[rank] = received[rank] if beat == received[rank][0] else (beat, now)
            absent = [rank for rank in missing if not received[rank][0]]
            if absent and now - started > self._start_seconds:
                where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}; {CHECK}"
                late = f"{_ranks(absent)} did not come within {self._start_seconds:g} s"
                raise PeerLostError(f"{late}: not started, or unable to reach {where}")
            if silent := [rank for rank in missing if received[rank][0] and now - received[rank][1] > SILENCE_SECONDS]:
                raise PeerLostError(f"lost while starting: {_ranks(silent)}")


def refuse_alone(error: UserError) -> None:
    """Report an error of a rank that has not joined the rendezvous to the other ranks."""
    with contextlib.suppress(UserError, PeerLostError):
        Rendezvous(REFUSING_SECONDS).refuse(error)


def _store(rank: int, seconds: float) -> SealedStore:
    """Return the store at the master's port; raises as :class:`Rendezvous`."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    met = Future[dist.Store]()

    def meet() -> None:
        try:
            met.set_result(connect(rank, port, timedelta(seconds=seconds)))
        except BaseException as error:
            met.set_exception(error)

    # In a thread, since PyTorch waits for ever for a program that accepts the connection and is silent.
    threading.Thread(target=meet, daemon=True).start()
    try:
        store = met.result(seconds + BEAT_SECONDS)
    except (dist.DistError, TimeoutError) as error:
        if "EADDRINUSE" in str(error):
            raise port_taken() from None
        late = f"rank {rank} (host {host_name()}) can't reach rank 0 at {host}:{port} within {seconds:g} s"
        raise PeerLostError(f"{late}; is that host up, and the port open? {CHECK}") from None
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    found = SealedStore(dist.PrefixStore(f"ddpm_ds/rendezvous/{start}", store))
    if found.check([OVER]):
        raise port_taken()
    return found


def port_taken() -> LayoutError:
    return LayoutError(
        f"port {os.environ['MASTER_PORT']} is taken, by another run perhaps; give this one its own: "
        "ddpm-ds run --port PORT, or deepspeed --master_port PORT launch/train.py ..."
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
