"""Heartbeat of each rank, which reports its progress and position in the code outside of the collectives.

A thread in every rank talks to a key-value store on rank 0 twice a second. It only reports; ``watchdog.py`` judges.
Rank 0 reads what all ranks report, and judges them; the others read rank 0's report alone, and its verdict. So a store
is asked for a few values per rank, not for every rank's value by every rank, and a rank 0 that no longer collects is
named by all others, since its own report grows old.

When a run hangs, one rank does not proceed and all others wait. The states of main thread and device tell which:

    main thread in a call of torch.distributed or waiting for a message   waits for another rank
    its device has unfinished work                                        waits: under NCCL the message is in that work,
                                                                          and the main thread is wherever it needs the
                                                                          device
    neither                                                               should proceed by itself, but does not

Work that a rank has given its device can't depend on later work, or the program would deadlock without any fault. So
the device of the hanging rank finishes its work and becomes idle, while all others wait, for it or for each other. A
device that hangs in a computation looks like one that waits: then all ranks wait, and none is blamed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from ddpm_ds.errors import EXIT_PEER_LOST
from ddpm_ds.pipeline.exchange import broadcast_object
from ddpm_ds.processes.rendezvous import SealedStore, connect

BEAT_SECONDS = 0.5
STORE_TIMEOUT = timedelta(seconds=60)
LAST_WORDS_SECONDS = 3.0
"""Time for which rank 0 keeps the store open at its end, so that the others can read that it leaves, and why."""

COMMUNICATION = ("torch.distributed", "deepspeed.comm")
"""Modules in which a main thread waits for another rank."""
ANSWER_SECONDS = 0.2
"""Time limit for a device to tell whether it has unfinished work."""

VERDICT = "verdict"
FIRST_MESSAGE = json.dumps([0, 0, "running", "-"])
"""Beats, steps, state and place of a rank that has not been heard yet."""


def make_store(rank: int, world_size: int) -> SealedStore | None:
    """Return a key-value store besides the process group's, served by rank 0 on a free port; None for a single rank.

    Collective over all ranks, whose process group must exist.
    """
    if world_size == 1:
        return None
    if rank != 0:
        return SealedStore(connect(rank, broadcast_object(None, int), STORE_TIMEOUT))
    served = connect(rank, 0, STORE_TIMEOUT)
    store = SealedStore(served)
    for peer in range(world_size):
        store.set(_key(peer), FIRST_MESSAGE)  # reading a key that is missing would block
    store.set(VERDICT, "")
    broadcast_object(served.port, int)
    return store


@dataclass
class Peer:
    """Newest message of a rank, and when it last changed, on the reader's clock."""

    beats: int = 0
    steps: int = 0
    """Number of steps; a pause counts as continuing steps."""
    state: str = "running"
    """State of the rank: running, waiting, paused, asking (its collective has failed, and rank 0 should say which rank
    is lost) or left.
    """
    place: str = "-"
    """Position of its main thread in the code."""
    beat_at: float = 0.0
    step_at: float = 0.0

    def read(self, now: float, beats: int, steps: int, state: str, place: str) -> None:
        """Store a message that was just read from the store."""
        if beats != self.beats:
            self.beat_at = now
            if steps != self.steps or self.state == "paused":
                self.step_at = now
            self.beats, self.steps, self.state, self.place = beats, steps, state, place


@dataclass(frozen=True)
class Judgement:
    """Reason why the run can't continue; the first one written to the store counts for all ranks."""

    ranks: list[int]
    reason: str
    code: int = EXIT_PEER_LOST
    """Exit code of all ranks."""


class DeviceWork:
    """Query whether a device has unfinished work, by ``is_done`` in a separate thread.

    A busy driver may block the query, but the heartbeat must not wait: no answer counts as unfinished work.
    """

    def __init__(self, is_done: Callable[[], bool]) -> None:
        self._is_done = is_done
        self._done = False
        self._asking: threading.Thread | None = None

    @classmethod
    def of(cls, device: torch.device) -> DeviceWork | None:
        """Return the query of a CUDA device's current stream; None for a CPU, which works in the main thread."""
        return cls(torch.cuda.current_stream(device).query) if device.type == "cuda" else None

    def is_unfinished(self) -> bool:
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask, name="device", daemon=True)
            self._asking.start()
        self._asking.join(ANSWER_SECONDS)
        return self._asking.is_alive() or not self._done

    def _ask(self) -> None:
        try:
            self._done = self._is_done()
        except RuntimeError:  # the device has failed and does nothing more
            self._done = True


class Heartbeat(threading.Thread):
    """Thread that talks to the store. ``clock`` gives the times in ``peers`` and ``answer_at``."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: dist.Store | None,
        clock: Callable[[], float],
        work: DeviceWork | None = None,
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._rank, self._store, self._clock, self._work = rank, store, clock, work
        self._leaving = threading.Event()
        self.steps = self.pauses = 0
        """Counted by this rank's main thread."""
        self.asks = False
        """This rank's collective has failed, and rank 0 should look for a lost rank."""
        self.peers = {peer: Peer() for peer in (range(world_size) if rank == 0 else (0,))}
        """Newest messages that this rank reads, by rank."""
        self._beats = 0
        self.answer_at = 0.0
        """Time at which the store last answered."""
        self.closed = False
        """The store has gone although rank 0 had not said that it leaves."""
        self.proposal: Judgement | None = None
        """This rank's own judgement."""
        self.verdict: Judgement | None = None
        """The one that counts for all ranks."""

    def leave(self) -> None:
        """Tell the others that this rank leaves, and end the thread."""
        self._leaving.set()
        if self.is_alive():
            self.join(timeout=LAST_WORDS_SECONDS + BEAT_SECONDS)

    def run(self) -> None:
        steps_before = -1
        while not self._leaving.is_set():
            stuck, steps_before = self.steps == steps_before, self.steps
            state = ("asking", "-") if self.asks else ("paused", "-") if self.pauses else self._look(stuck)
            if not self._exchange(*state):
                return
            self._leaving.wait(BEAT_SECONDS)
        until = time.monotonic() + LAST_WORDS_SECONDS
        while self._exchange("left", "-") and self._rank == 0 and time.monotonic() < until:
            if all(peer.state == "left" for peer in self.peers.values()):
                return
            time.sleep(BEAT_SECONDS / 2)

    def _look(self, stuck: bool) -> tuple[str, str]:
        """Return whether this rank proceeds by itself or waits, and the place of its main thread if it is stuck."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0) if stuck else None
        if frame is None:
            return "running", "-"
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
        waits = waits_for_a_rank(frame) or (self._work is not None and self._work.is_unfinished())
        return "waiting" if waits else "running", place

    def _exchange(self, state: str, place: str) -> bool:
        """Write this rank's message and read those of its peers; return False if the store is gone."""
        assert self._store is not None
        self._beats += 1
        try:
            self._store.set(_key(self._rank), json.dumps([self._beats, self.steps, state, place]))
            if self.proposal:
                self._store.compare_set(VERDICT, "", json.dumps(asdict(self.proposal)))
            values = self._store.multi_get([*map(_key, self.peers), VERDICT])
        except Exception:  # the store may raise anything once its server has ended
            self.closed = self.peers[0].state != "left"
            return False
        self.answer_at = self._clock()
        for peer, message in zip(self.peers.values(), values[:-1], strict=True):
            if message:  # empty if it was not sealed by this run
                peer.read(self.answer_at, *json.loads(message))
        if values[-1]:
            self.verdict = Judgement(**json.loads(values[-1]))
        return True


def _key(rank: int) -> str:
    return f"alive/{rank}"


def waits_for_a_rank(frame: FrameType) -> bool:
    """Return whether the thread with this innermost Python frame waits in a collective or for a message.

    The ``wait`` of a message is not Python code, so its caller is the innermost frame; threads and processes are waited
    for in Python functions.
    """
    if "wait" in frame.f_code.co_names:
        return True
    outer: FrameType | None = frame
    while outer:
        if outer.f_globals.get("__name__", "").startswith(COMMUNICATION):
            return True
        outer = outer.f_back
    return False
