"""Watchdog that notices a dead or hanging rank, names it, and ends this one, whose collective would wait for ever.

Every rank has two threads besides its main one. The heartbeat reports the rank's progress and place in the code to a
key-value store on rank 0. The judge has its own clock and never uses the store, which may not answer. Rank 0 judges all
ranks by their reports. The others only read rank 0's report and verdict, and name rank 0 when its report grows old.

    rank 1   main        step, step, step, all_reduce ... (waits for rank 2)
             heartbeat   beat 41, step 7 ─▶ store on rank 0 ◀─ beat 33, step 7   rank 2, then killed
    rank 0   judge       "rank 2 (stage 1) has not answered for 15 s" ─▶ verdict in the store
    rank 1   judge       reads the verdict ─▶ exit code 76

When a run hangs, one rank does not proceed and all others wait. The states of main thread and device show which:

    main thread in a call of torch.distributed or waiting for a message   waits for another rank
    its device has unfinished work                                        waits: under NCCL the message is in that work
    neither                                                               should proceed by itself, but does not

The device of the hanging rank becomes idle, while all others wait, for it or for each other. A device that hangs in a
computation looks like one that waits: then all ranks wait, and none is blamed.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self

import torch.distributed as dist

from ddpm_ds.ground.errors import KNOWN_TO_ALL_RANKS, PeerLostError, UserError, is_out_of_memory, print_to_stderr
from ddpm_ds.processes.ranks import DEAD_SECONDS, HANG_SECONDS, record_exit

BEAT_SECONDS, JUDGE_SECONDS = 0.5, 0.2
LAST_WORDS_SECONDS = 3.0
"""Time for which rank 0 keeps the store open at its end, so that the others can read why it leaves."""
PAUSE_SECONDS = 1800.0
"""Time for which all wait for a rank that checkpoints, validates or compiles."""
COMMUNICATION = ("torch.distributed", "deepspeed.comm")
"""Modules in which a main thread waits for another rank."""
ANSWER_SECONDS = 0.2
"""Time limit for a device's answer whether it has unfinished work."""
KEY, VERDICT = "alive/{}", "verdict"
CULPRIT_SECONDS, BLAMING_SECONDS = 2.5, 6.0
"""After a collective has failed: silence of a rank that counts as lost, and longest wait for this to be found."""
TOGETHER_BEATS = 3
"""Maximum beats between the last signs of ranks that are lost at once: their beat, ours, and delays."""


@dataclass
class Peer:
    """Newest message of a rank, and when it last changed, on the reader's clock."""

    beats: int = 0
    steps: int = 0
    state: str = "running"  # or waiting, paused, asking (its collective has failed: which rank is lost?), left
    place: str = "-"
    beat_at: float = 0.0
    step_at: float = 0.0

    def read(self, now: float, beats: int, steps: int, state: str, place: str) -> None:
        if beats != self.beats:
            self.beat_at = now
            if steps != self.steps or self.state == "paused":
                self.step_at = now
            self.beats, self.steps, self.state, self.place = beats, steps, state, place


class Judgement(NamedTuple):
    """Reason why the run can't continue, and the exit code; the first in the store ends all ranks."""

    ranks: list[int]
    reason: str
    code: int = PeerLostError.exit_code


class DeviceWork:
    """Query for unfinished work of a device, in a thread; a busy driver, which blocks it, counts as unfinished work."""

    def __init__(self, is_done: Callable[[], bool]) -> None:
        self._is_done, self._done = is_done, False
        self._asking = threading.Thread()

    def is_unfinished(self) -> bool:
        def ask() -> None:
            try:
                self._done = self._is_done()
            except RuntimeError:  # the device has failed and does nothing more
                self._done = True

        if not self._asking.is_alive():
            self._asking = threading.Thread(target=ask, name="device", daemon=True)
            try:
                self._asking.start()
            except RuntimeError:  # the limit of threads is reached
                return True
        self._asking.join(ANSWER_SECONDS)
        return self._asking.is_alive() or not self._done


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
        self._beats = self.steps = self.pauses = 0  # steps and pauses of this rank's main thread
        self.asks = False  # this rank's collective has failed, and rank 0 should look for a lost rank
        self.peers = {peer: Peer() for peer in (range(world_size) if rank == 0 else (0,))}
        self.answer_at = 0.0  # when the store last answered
        self.closed = False  # the store has gone although rank 0 had not left
        self.proposal: Judgement | None = None  # this rank's own
        self.verdict: Judgement | None = None  # counts for all ranks

    def leave(self) -> None:
        """Report that this rank leaves, and end the thread."""
        self._leaving.set()
        if self.is_alive():
            self.join(timeout=LAST_WORDS_SECONDS + BEAT_SECONDS)

    def run(self) -> None:
        steps_before, stuck_beats = -1, 0
        while not self._leaving.is_set():
            stuck, steps_before = self.steps == steps_before, self.steps
            stuck_beats = stuck_beats + 1 if stuck else 0
            pauses = self.pauses and stuck_beats * BEAT_SECONDS < PAUSE_SECONDS
            state, place = "asking" if self.asks else "paused" if pauses else "running", "-"
            frame = sys._current_frames().get(threading.main_thread().ident or 0) if stuck else None
            if state == "running" and frame is not None:
                waits = waits_for_a_rank(frame) or (self._work is not None and self._work.is_unfinished())
                while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in sys.stdlib_module_names:
                    frame = frame.f_back
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
                state = "waiting" if waits else "running"
            if not self._exchange(state, place):
                return
            self._leaving.wait(BEAT_SECONDS)
        until = time.monotonic() + LAST_WORDS_SECONDS
        while self._exchange("left", "-") and self._rank == 0 and time.monotonic() < until:
            if all(peer.state == "left" for peer in self.peers.values()):
                return
            time.sleep(BEAT_SECONDS / 2)

    def _exchange(self, state: str, place: str) -> bool:
        """Write this rank's message and read its peers'; return False if the store is gone."""
        assert self._store is not None
        self._beats += 1
        try:
            self._store.set(KEY.format(self._rank), json.dumps([self._beats, self.steps, state, place]))
            if self.proposal:
                self._store.compare_set(VERDICT, "", json.dumps(self.proposal))
            values = self._store.multi_get([*map(KEY.format, self.peers), VERDICT])
        except Exception:  # the store may raise anything once its server has ended
            self.closed = self.peers[0].state != "left"
            return False
        self.answer_at = self._clock()
        for peer, message in zip(self.peers.values(), values[:-1], strict=True):
            if message:  # empty before a rank's first, and if this run has not sealed it
                peer.read(self.answer_at, *json.loads(message))
        if values[-1]:
            self.verdict = Judgement(*json.loads(values[-1]))
        return True


def waits_for_a_rank(frame: FrameType) -> bool:
    """Return whether the thread with this innermost Python frame waits in a collective or for a message."""
    if "wait" in frame.f_code.co_names:  # the call of a message's wait(), which is no Python code
        return True
    return any(at.f_globals.get("__name__", "").startswith(COMMUNICATION) for at, _ in traceback.walk_stack(frame))


class Watchdog:
    """Watchdog over all ranks from construction to ``stop``, or as a context; of a single rank it notices a hang.

    A UserError that leaves the context ends all ranks with its line, printed once, and its exit code.

    Args:
        names: all ranks' names for users, such as "rank 2 (stage 1)".
        store: of the ranks' rendezvous; None watches nothing.
        dead_seconds: silence after which a rank counts as dead.
        hang_seconds: time without ``progress`` of any rank after which the run counts as hanging.
        work: query for work of this rank's device; None for a CPU.
    """

    _log: Callable[[str], None] = staticmethod(print_to_stderr)  # may block
    _leave: Callable[[int], object] = staticmethod(os._exit)  # a thread in a collective can't be interrupted

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        store: dist.Store | None,
        *,
        dead_seconds: float = DEAD_SECONDS,
        hang_seconds: float = HANG_SECONDS,
        work: DeviceWork | None = None,
    ) -> None:
        self._rank, self.names, self.store = rank, names, store
        self._dead_seconds, self._hang_seconds = dead_seconds, hang_seconds
        self._now = 0.0
        self._stopped = threading.Event()
        own = None if store is None else store.clone()  # other threads can't keep it waiting, or close it
        self._heartbeat = Heartbeat(rank, len(names), own, lambda: self._now, work)
        self._judging = threading.Thread(target=self._judge, name="judge", daemon=True)
        if store is not None:
            for key in (*map(KEY.format, range(len(names))), VERDICT) if rank == 0 else ():
                store.set(key, "")  # reading a key that is missing blocks
            self._heartbeat.start()
            self._judging.start()

    def progress(self) -> None:
        """Report progress of the main thread, once a step and around long operations."""
        self._heartbeat.steps += 1

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Surround a long operation on this rank, during which no rank counts as hanging for ``PAUSE_SECONDS``."""
        self.progress()
        self._heartbeat.pauses += 1
        try:
            yield
        finally:
            self.progress()
            self._heartbeat.pauses -= 1

    def fail(self, line: str, code: int) -> None:
        """Print ``line``, a reason that perhaps only this rank knows, and end all ranks with exit code ``code``.

        If several ranks fail at once, one of them gives the reason. Returns only for a single rank.
        """
        heartbeat = self._heartbeat
        if len(self.names) > 1 and heartbeat.is_alive():
            heartbeat.proposal = Judgement([self._rank], line, code)
            self._judging.join(2 * LAST_WORDS_SECONDS)  # it ends this process by the verdict in the store
            if self._judging.is_alive():
                self._end(heartbeat.proposal)

    def stop(self, failure: str | None = None) -> None:
        """Stop watching and report that this rank exits; a ``failure`` ends the other ranks too."""
        if failure:
            self._heartbeat.proposal = Judgement([self._rank], f"{self.names[self._rank]} has failed ({failure})")
        self._stopped.set()
        self._heartbeat.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UserError):
            self.fail(f"ddpm_ds: error: {error}", error.exit_code)
        known = error is None or isinstance(error, KNOWN_TO_ALL_RANKS)
        self.stop(failure=None if known else type(error).__name__)

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Surround collective work; if it fails because a rank is lost, all ranks end and name the lost one."""
        try:
            yield
        except (UserError, *KNOWN_TO_ALL_RANKS):
            raise
        except BaseException as error:
            if len(self.names) > 1 and isinstance(error, RuntimeError) and not is_out_of_memory(error):
                self._heartbeat.asks = True
                self._judging.join(BLAMING_SECONDS)  # it ends this process if a rank is lost
            self.stop(failure=type(error).__name__)
            raise

    def _judge(self) -> None:
        """Judge by a clock that stops while this process is suspended or starved."""
        last = time.monotonic()
        while not self._stopped.wait(JUDGE_SECONDS):
            now = time.monotonic()
            self._now, last = self._now + min(now - last, 2 * BEAT_SECONDS), now
            if finding := self._lost() or self._hung():
                return self._end(finding)

    def _lost(self) -> Judgement | None:
        heartbeat = self._heartbeat
        if len(self.names) == 1:
            return None
        if heartbeat.closed and not heartbeat.verdict:
            return Judgement([0], f"{self.names[0]} has gone")
        if heartbeat.verdict or not heartbeat.is_alive():  # None where rank 0 has left as intended
            return heartbeat.verdict
        if self._now - heartbeat.answer_at > self._dead_seconds:
            return Judgement([0], f"{self.names[0]} has not answered for {self._dead_seconds:g} s")
        asked = heartbeat.asks or any(peer.state == "asking" for peer in heartbeat.peers.values())
        seconds = min(self._dead_seconds, CULPRIT_SECONDS) if asked else self._dead_seconds
        silences = {rank: heartbeat.answer_at - peer.beat_at for rank, peer in self._at_work().items()}
        ranks = [rank for rank, silence in silences.items() if silence > seconds]
        awaited_from = max(silences.values(), default=0.0) - TOGETHER_BEATS * BEAT_SECONDS
        if not ranks or any(awaited_from < silence <= seconds for silence in silences.values()):
            return None  # wait for others that may be lost at once
        who = ", ".join(self.names[rank] for rank in ranks)
        return Judgement(ranks, f"{who} {'has' if len(ranks) == 1 else 'have'} not answered for {seconds:g} s")

    def _hung(self) -> Judgement | None:
        """Judge a hanging run, on rank 0: a hanging rank soon makes all others wait, so it is the one that does not."""
        at_work = self._at_work()
        last_step_at = max((peer.step_at for peer in at_work.values()), default=self._now)
        if self._rank or self._now - last_step_at <= self._hang_seconds or not self._heartbeat.is_alive():
            return None
        blamed = {rank: peer for rank, peer in at_work.items() if peer.state not in ("waiting", "asking")}
        found, does = (blamed, "hangs") if blamed else (at_work, "waits")
        who = ", ".join(f"{self.names[rank]} {does} in {peer.place}" for rank, peer in found.items())
        return Judgement(list(found), f"no step for {self._hang_seconds:g} s, {who}")

    def _at_work(self) -> dict[int, Peer]:
        return {rank: peer for rank, peer in self._heartbeat.peers.items() if peer.state != "left"}

    def _end(self, finding: Judgement) -> None:
        self._heartbeat.proposal = finding
        lost = finding.code == PeerLostError.exit_code
        line = f"{finding.reason}: ending {self.names[self._rank]}; the run can be resumed" if lost else finding.reason
        if lost or finding.ranks == [self._rank]:
            printing = threading.Thread(target=self._log, args=(line,), daemon=True)  # logging may block on a lost lock
            printing.start()
            printing.join(timeout=LAST_WORDS_SECONDS)
        record_exit(finding.code)
        self.stop()
        self._leave(finding.code)
