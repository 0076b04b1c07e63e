"""What the ranks tell each other about themselves beside the collectives: alive, how far, and where in the code.

A thread in every rank talks to a key-value store on rank 0, twice a second. It judges nothing; see ``watchdog.py``.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

BEAT_SECONDS = 0.5
LAST_WORDS_SECONDS = 3.0
"""How long rank 0 keeps the store up at its end, for the others to read that it leaves, and why."""

COMMUNICATION = ("torch.distributed", "deepspeed.comm", "ddpm_ds.pipeline.boundary")
"""A main thread inside these modules waits for another rank."""

VERDICT = "verdict"


def make_store(rank: int, world_size: int, *, timeout_seconds: float = 60.0) -> dist.TCPStore | None:
    """A key-value store beside the process group's, served by rank 0 on a free port; None for a single rank.

    A collective over all ranks, whose process group must exist.
    """
    if world_size == 1:
        return None
    host, timeout = os.environ["MASTER_ADDR"], datetime.timedelta(seconds=timeout_seconds)
    port: list[int | None] = [None]
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        for peer in range(world_size):
            store.set(_key(peer), Peer().text)  # reading a key that is missing would block
        store.set(VERDICT, "")
        port = [store.port]
    dist.broadcast_object_list(port, src=0)
    if rank != 0:
        assert port[0] is not None
        store = dist.TCPStore(host, port[0], is_master=False, timeout=timeout, wait_for_workers=False)
    return store


@dataclass
class Peer:
    """What a rank has last written, and when that changed, on the reader's clock."""

    text: str = "0 0 running -"
    """Beats, steps, state (running, waiting, paused or left) and the place in the code."""
    beat_at: float = 0.0
    step_at: float = 0.0
    """A pause counts as one step after another."""

    def read(self, text: str, now: float) -> None:
        """Take what was just read from the store."""
        if text != self.text:
            self.beat_at = now
            if text.split()[1] != self.text.split()[1] or self.state == "paused":
                self.step_at = now
            self.text = text

    @property
    def state(self) -> str:
        return self.text.split()[2]

    @property
    def place(self) -> str:
        return self.text.split(maxsplit=3)[3]


@dataclass(frozen=True)
class Verdict:
    """Why the run can't go on; the first that is written to the store counts for all ranks."""

    ranks: tuple[int, ...]
    reason: str

    def encode(self) -> str:
        return f"{','.join(map(str, self.ranks))} {self.reason}"

    @classmethod
    def decode(cls, text: str) -> Verdict:
        ranks, reason = text.split(maxsplit=1)
        return cls(tuple(map(int, ranks.split(","))), reason)


class Heartbeat(threading.Thread):
    """The thread that talks to the store. ``clock`` is what the times in ``peers`` and ``answer_at`` are read from."""

    def __init__(self, rank: int, world_size: int, store: dist.Store | None, clock: Callable[[], float]) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._rank, self._store, self._clock = rank, store, clock
        self._leaving = threading.Event()
        self.steps = self.pauses = 0
        """Of this rank; set by its main thread."""
        self.peers = [Peer() for _ in range(world_size)]
        self.answer_at = 0.0
        """When the store last answered."""
        self.closed = False
        """The store has gone although rank 0 had not said that it leaves."""
        self.proposal: Verdict | None = None
        """This rank's own."""
        self.verdict: Verdict | None = None
        """That of all ranks."""

    def leave(self) -> None:
        """Tell the others that this rank leaves, and end the thread."""
        self._leaving.set()
        if self.is_alive():
            self.join(timeout=LAST_WORDS_SECONDS + BEAT_SECONDS)

    def run(self) -> None:
        steps_before = -1
        while not self._leaving.is_set():
            stuck, steps_before = self.steps == steps_before, self.steps
            if not self._exchange(*(("paused", "-") if self.pauses else _where(stuck))):
                return
            self._leaving.wait(BEAT_SECONDS)
        until = time.monotonic() + LAST_WORDS_SECONDS
        while self._exchange("left", "-") and self._rank == 0 and time.monotonic() < until:
            if all(peer.state == "left" for peer in self.peers):
                return
            time.sleep(BEAT_SECONDS / 2)

    def _exchange(self, state: str, place: str) -> bool:
        """Write about this rank, read about all; False when there is no store any more."""
        assert self._store is not None
        beats = int(self.peers[self._rank].text.split()[0]) + 1
        try:
            self._store.set(_key(self._rank), f"{beats} {self.steps} {state} {place}")
            if self.proposal:
                self._store.compare_set(VERDICT, "", self.proposal.encode())
            values = self._store.multi_get([*map(_key, range(len(self.peers))), VERDICT])
        except Exception:  # whatever a store raises when its server has gone
            self.closed = self.peers[0].state != "left"
            return False
        *texts, verdict = (value.decode() for value in values)
        now = self.answer_at = self._clock()
        for peer, text in zip(self.peers, texts, strict=True):
            peer.read(text, now)
        if verdict:
            self.verdict = Verdict.decode(verdict)
        return True


def _key(rank: int) -> str:
    return f"alive/{rank}"


def _where(stuck: bool) -> tuple[str, str]:
    """What the main thread does: it runs, or waits in communication; and the place, when it is stuck."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0) if stuck else None
    if frame is None:
        return "running", "-"
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
    while frame:
        if frame.f_globals.get("__name__", "").startswith(COMMUNICATION):
            return "waiting", place
        frame = frame.f_back
    return "running", place
