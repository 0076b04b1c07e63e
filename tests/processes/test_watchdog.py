"""A rank that dies or hangs is named by the others, which end; one that is busy, frozen with us, or done is not."""

import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ddpm_ds.ground.errors import EXIT_PEER_LOST
from ddpm_ds.processes import watchdog
from ddpm_ds.processes.ranks import EXIT_FILE_VARIABLE, ExitFile, ExitRecord
from ddpm_ds.processes.rendezvous import SealedStore, connect
from ddpm_ds.processes.watchdog import DeviceWork, Judgement, Peer, Watchdog, waits_for_a_rank
from tests.forking import Forked
from tests.launching import PATIENCE_SECONDS, run_ranks, wait_for

NAMES = [f"rank {rank} (stage {rank // 2})" for rank in range(4)]

TIMEOUT = timedelta(seconds=60)
Watched = Callable[..., Watchdog]
Events = queue.SimpleQueue[tuple[int, object]]


@pytest.fixture
def events() -> Events:
    """Lines that the watchdogs of a test logged, and then their exit codes, by rank."""
    return queue.SimpleQueue()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "LAST_WORDS_SECONDS", 1.0)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, events: Events) -> Iterator[Watched]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    served, made = connect(0, 0, TIMEOUT), list[Watchdog]()

    def make(rank: int, size: int, **options: Any) -> Watchdog:
        store = served if rank == 0 else connect(rank, served.port, TIMEOUT)
        made.append(watchdog_of(rank, size, SealedStore(store), events, **options))
        return made[-1]

    yield make
    for each in reversed(made):  # rank 0 serves the others' store
        each.stop()


def watchdog_of(
    rank: int, size: int, store: dist.Store, events: Events, log: Callable[[str], None] | None = None, **seconds: Any
) -> Watchdog:
    """One that tells ``events`` instead of ending this process."""

    class Told(Watchdog):
        def _leave(self, value: object) -> None:
            events.put((rank, value))

        _log = staticmethod(log) if log else _leave

    return Told(rank, NAMES[:size], store, **seconds)


def take(events: Events, count: int) -> set[tuple[int, object]]:
    return {events.get(timeout=PATIENCE_SECONDS) for _ in range(count)}


def test_every_rank_names_a_silent_one_and_leaves_even_if_printing_blocks(watch: Watched, events: Events) -> None:
    watch(0, 3, dead_seconds=1.5)
    watch(1, 3, dead_seconds=1.5, log=lambda line: time.sleep(PATIENCE_SECONDS))
    line = f"{NAMES[2]} has not answered for 1.5 s: ending {NAMES[0]}; the run can be resumed"
    assert take(events, 3) == {(0, line), (0, EXIT_PEER_LOST), (1, EXIT_PEER_LOST)}


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Judgement | None]:
    """Returns a judge's finding about peers, at 100 s by its clock; to die takes 6 s, to hang 9 s."""

    def judge(peers: list[Peer], find: str) -> Judgement | None:
        watchdog = Watchdog(0, NAMES[:1], None, dead_seconds=6, hang_seconds=9)
        watchdog.names, watchdog._heartbeat.peers = NAMES, dict(enumerate(peers))
        monkeypatch.setattr(watchdog._heartbeat, "is_alive", lambda: True)
        watchdog._now = watchdog._heartbeat.answer_at = 100.0
        return getattr(watchdog, find)()

    return judge


@pytest.mark.parametrize(
    ("silences", "named"),
    [
        ((0.0, 0.2, 6.1, 5.7), []),
        ((0.0, 0.2, 6.5, 6.1), [2, 3]),
        ((0.0, 0.2, 6.1, 5.4), [2]),
        ((0.0, 0.2, 5.9, 5.9), []),
    ],
)
def test_ranks_that_fell_silent_together_are_named_together(
    silences: tuple[float, ...], named: list[int], judged: Callable[..., Judgement | None]
) -> None:
    found = judged([Peer(beat_at=100.0 - silence) for silence in silences], "_lost")
    assert (found.ranks if found else []) == named
    assert not found or found.reason.startswith(", ".join(NAMES[rank] for rank in named) + " ha")


@pytest.mark.parametrize(
    ("states", "named", "words"),
    [
        ("waiting running waiting", [1], "rank 1 (stage 0) hangs in a.py:1 (f)"),
        ("left waiting running", [2], "rank 2 (stage 1) hangs in a.py:2 (f)"),
        ("left waiting waiting", [1, 2], "rank 1 (stage 0) waits in a.py:1 (f), rank 2 (stage 1) waits"),
    ],
)
def test_who_goes_on_by_itself_is_to_blame_for_a_hang_and_who_waits_is_not(
    states: str, named: list[int], words: str, judged: Callable[..., Judgement | None]
) -> None:
    peers = [Peer(7, 3, state, f"a.py:{rank} (f)", step_at=90.0) for rank, state in enumerate(states.split())]
    found = judged(peers, "_hung")
    assert found and found.ranks == named and found.reason.startswith(f"no step for 9 s, {words}")


def test_a_device_has_unfinished_work_unless_it_says_that_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, asked = threading.Event(), []

    def blocked() -> bool:
        asked.append(True)
        return answered.wait()

    def failed() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert not DeviceWork(lambda: True).is_unfinished() and DeviceWork(lambda: False).is_unfinished()
    assert not DeviceWork(failed).is_unfinished()
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.01)
    work = DeviceWork(blocked)
    assert work.is_unfinished() and work.is_unfinished() and len(asked) == 1
    answered.set()
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", PATIENCE_SECONDS)
    assert not work.is_unfinished()
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    assert DeviceWork(lambda: True).is_unfinished(), "an error would end the heartbeat, and the run after it"


def test_whoever_waits_for_a_message_waits_for_a_rank_and_whoever_waits_for_a_thread_does_not() -> None:
    store, end = dist.HashStore(), threading.Event()
    with ThreadPoolExecutor(4) as pool:
        groups: list[Any] = list(
            pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=PATIENCE_SECONDS)), range(2))
        )
        message, at = groups[0].recv([torch.empty(1)], 1, 0), {}

        def receive() -> None:
            at["receive"] = threading.get_ident()
            message.wait()

        def read() -> None:
            at["read"] = threading.get_ident()
            end.wait()

        waiting = [pool.submit(receive), pool.submit(read)]

        def waits(function: str) -> bool:
            return function in at and waits_for_a_rank(sys._current_frames()[at[function]])

        wait_for(lambda: waits("receive") and "read" in at)
        assert not waits("read")
        end.set()
        groups[1].send([torch.ones(1)], 0, 0).wait()
        assert [one.result(PATIENCE_SECONDS) for one in waiting] == [None, None]


def test_what_ranks_find_ends_all_with_one_line_and_code(
    watch: Watched, events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits = ExitFile()
    monkeypatch.setenv(EXIT_FILE_VARIABLE, exits.name)
    _, *both = (watch(rank, 3) for rank in range(3))
    line = "ddpm_ds: error: a file is damaged"
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda each: each.fail(line, 2), both))
    said = take(events, 4)
    assert events.empty() and {(0, 2), (1, 2), (2, 2)} < said and [word for _, word in said].count(line) == 1
    assert exits.read().failure == 2


def test_who_left_as_intended_is_not_missed(watch: Watched, events: Events) -> None:
    watchdogs = [watch(rank, 3, dead_seconds=1.0) for rank in range(3)]
    watchdogs[2].stop()
    watchdogs[0].stop()
    watchdogs[0]._heartbeat._store = None  # the store goes with the process that serves it
    time.sleep(1.8)
    assert events.empty()


def test_no_step_for_long_is_a_hang_unless_a_rank_says_that_it_takes_long(watch: Watched, events: Events) -> None:
    first, _ = watch(0, 2, hang_seconds=3.0), watch(1, 2, hang_seconds=3.0)
    with first.pause():
        time.sleep(3.4)
    for _ in range(8):  # one that goes on is enough: the other waits for it
        first.progress()
        time.sleep(0.5)
    assert events.empty()
    said = {word for _, word in take(events, 4)}
    assert EXIT_PEER_LOST in said
    assert any("no step for 3 s, rank 0 (stage 0) hangs in" in str(word) for word in said)


def test_a_pause_without_end_is_a_hang_with_its_place(
    watch: Watched, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "PAUSE_SECONDS", 1.0)
    first, _ = watch(0, 2, hang_seconds=2.0), watch(1, 2, hang_seconds=2.0)
    with first.pause():  # as of a file system that does not answer
        said = {word for _, word in take(events, 4)}
    assert EXIT_PEER_LOST in said
    assert any("no step for 2 s, rank 0 (stage 0) hangs in" in str(word) for word in said)


@pytest.mark.parametrize("asks", [0, 1])
def test_a_collective_that_raised_is_explained_to_all_by_the_missing_rank(
    asks: int, watch: Watched, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "CULPRIT_SECONDS", 1.0)
    both = watch(0, 3), watch(1, 3)
    with pytest.raises(RuntimeError, match="closed"), both[asks].blamed():
        raise RuntimeError("closed")
    lines = {
        (rank, f"{NAMES[2]} has not answered for 1 s: ending {NAMES[rank]}; the run can be resumed") for rank in (0, 1)
    }
    assert take(events, 4) == lines | {(0, EXIT_PEER_LOST), (1, EXIT_PEER_LOST)}  # long before 15 s are over


def test_a_rank_that_runs_out_of_memory_blames_nobody_who_is_silent(watch: Watched, events: Events) -> None:
    first, _ = watch(0, 3), watch(1, 3)
    with pytest.raises(RuntimeError, match="out of memory"), first.blamed():
        raise RuntimeError("CUDA out of memory")
    assert take(events, 2) == {
        (1, f"{NAMES[0]} has failed (RuntimeError): ending {NAMES[1]}; the run can be resumed"),
        (1, EXIT_PEER_LOST),
    }


def test_a_rank_0_that_no_longer_collects_is_named_though_its_store_answers(watch: Watched, events: Events) -> None:
    first, _ = watch(0, 2), watch(1, 2, dead_seconds=1.5)
    first._heartbeat._exchange = lambda state, place: True  # type: ignore[method-assign]
    line = f"{NAMES[0]} has not answered for 1.5 s: ending {NAMES[1]}; the run can be resumed"
    assert {(1, line), (1, EXIT_PEER_LOST)} <= take(events, 2)


def test_the_values_of_a_beat_grow_with_the_ranks_and_not_with_their_square() -> None:
    """At 4,096 ranks and two beats a second: 32,768 values, in 16,384 requests, instead of 33.6 million."""
    size, store = 4096, dist.HashStore()
    for key in (*map(watchdog.KEY.format, range(size)), watchdog.VERDICT):
        store.set(key, "")
    counting = Mock(wraps=store)
    beats = [watchdog.Heartbeat(rank, size, counting, clock=lambda: 0.0) for rank in range(size)]
    assert all(beat._exchange("running", "-") for beat in beats)
    read = sum(len(call.args[0]) for call in counting.multi_get.call_args_list)
    assert counting.set.call_count + read == size + (size - 1) * 2 + (size + 1)
    assert all(beat.peers[0].beats == 1 for beat in beats) and beats[0]._exchange("running", "-")
    assert [peer.beats for peer in beats[0].peers.values()] == [2] + [1] * (size - 1)


def test_the_heart_beats_through_a_connection_of_its_own(watch: Watched) -> None:
    one = watch(0, 2, dead_seconds=60)
    assert one._heartbeat._store is not one.store, "the writer of checkpoints may break or occupy that one"


def test_a_single_rank_watches_nobody_and_ends_when_it_hangs(watch: Watched, events: Events) -> None:
    alone = watch(0, 1, dead_seconds=0)
    with pytest.raises(RuntimeError, match="of its own"), alone.blamed():
        raise RuntimeError("of its own")
    alone.fail("is raised by the one rank", 2)
    assert events.empty()
    alone = watch(0, 1, dead_seconds=0, hang_seconds=0.5)
    (_, line), (_, code) = events.get(timeout=PATIENCE_SECONDS), events.get(timeout=PATIENCE_SECONDS)
    assert re.match(rf"no step for 0.5 s, {re.escape(NAMES[0])} hangs in test_watchdog.py:\d+ \(", str(line)), line
    assert code == EXIT_PEER_LOST


RANK_0 = """
import os, time
from datetime import timedelta
from ddpm_ds.processes.rendezvous import SealedStore, connect
from ddpm_ds.processes.watchdog import Watchdog
os.environ["MASTER_ADDR"] = "127.0.0.1"
served = connect(0, 0, timedelta(seconds=60))
watchdog = Watchdog(0, ["rank 0", "rank 1", "rank 2"], SealedStore(served), dead_seconds=2.0)
print(served.port, flush=True)
time.sleep(60)
"""


def test_rank_0_is_missed_when_it_is_frozen_and_when_it_is_gone(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits = ExitFile()
    monkeypatch.setenv(EXIT_FILE_VARIABLE, exits.name)
    script, said = tmp_path / "rank_0.py", tmp_path / "said"
    script.write_text(RANK_0)
    server = Forked.script([str(script)], env=os.environ, stdout=said, stderr=tmp_path / "warnings")
    try:
        wait_for(lambda: said.exists() and said.read_text().endswith("\n"), running=lambda: server.poll() is None)
        port = int(said.read_text())
        stores = [SealedStore(dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT)) for _ in range(2)]
        first, _ = (watchdog_of(rank + 1, 3, store, events, dead_seconds=60) for rank, store in enumerate(stores))
        server.send_signal(signal.SIGSTOP)
        time.sleep(3)
        server.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        assert server.poll() is None and events.empty()  # its own absence is nobody's fault

        first._dead_seconds = 1.5
        server.send_signal(signal.SIGSTOP)
        line = f"{NAMES[0]} has not answered for 1.5 s: ending {NAMES[1]}; the run can be resumed"
        assert take(events, 2) == {(1, line), (1, EXIT_PEER_LOST)}

        server.kill()
        line = f"{NAMES[0]} has gone: ending {NAMES[2]}; the run can be resumed"
        assert take(events, 2) == {(2, line), (2, EXIT_PEER_LOST)}
        assert exits.read() == ExitRecord(EXIT_PEER_LOST, ())
    finally:
        server.kill()
        server.wait()


@pytest.mark.launch
def test_real_ranks_end_naming_the_one_that_hangs(tmp_path: Path) -> None:
    exits = ExitFile()
    done = run_ranks(4, Path(__file__).with_name("watched_rank.py"), **{EXIT_FILE_VARIABLE: exits.name})
    words = "no step for 2 s, rank 1 (stage 1) hangs in watched_rank.py:"
    assert done.returncode != 0
    assert words in done.stderr and done.stderr.count(" hangs in ") == done.stderr.count(words), done.stderr
    assert exits.read().failure == EXIT_PEER_LOST
