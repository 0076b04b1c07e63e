"""Rendezvous of ranks and the store by which they meet: who joins, who is missing, and who may write."""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch.distributed as dist

from ddpm_ds.data.cache import DatasetCache, shard_name
from ddpm_ds.data.held_out import checksums_of
from ddpm_ds.ground.errors import HostError, LayoutError, PeerLostError, SpecError
from ddpm_ds.processes import rendezvous
from ddpm_ds.processes.ranks import RUN_SECRET, free_port
from ddpm_ds.processes.rendezvous import Rendezvous, SealedStore, connect, refuse_alone
from ddpm_ds.training import start
from tests.launching import PATIENCE_SECONDS

TIMEOUT = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of three on two hosts, which they share as far as addresses go; each thread has a host's name."""
    world = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0", RUN_SECRET: "ours"}
    for name, value in (world | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(rendezvous, "host_name", lambda: _names.host)


def listens_at(port: int) -> set[str]:
    found = psutil.Process(os.getpid()).net_connections("tcp")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


def test_a_store_of_one_host_listens_on_loopback_alone_and_a_second_one_shares_it() -> None:
    store = connect(0, 0, TIMEOUT)
    again, other = connect(0, store.port, TIMEOUT), connect(1, store.port, TIMEOUT)
    again.set("key", "value")
    assert other.get("key") == store.get("key") == b"value" and listens_at(store.port) == {"127.0.0.1"}


def test_a_store_of_several_hosts_listens_where_the_first_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    own = [one.address for found in psutil.net_if_addrs().values() for one in found if one.family == socket.AF_INET]
    for address in own:
        monkeypatch.setenv("MASTER_ADDR", address)
        assert listens_at(connect(0, 0, TIMEOUT).port) == {address}
    monkeypatch.setenv("MASTER_ADDR", "localhost")  # as Debian's hosts call themselves; others know another address
    assert not listens_at(connect(0, 0, TIMEOUT).port) & {"127.0.0.1", "::1"}


@pytest.fixture
def stores() -> Iterator[tuple[SealedStore, SealedStore, dist.Store]]:
    """Those of two ranks, and a stranger's."""
    served = connect(0, 0, TIMEOUT)
    yield SealedStore(served), SealedStore(connect(1, served.port, TIMEOUT)), connect(1, served.port, TIMEOUT)


@pytest.mark.parametrize("words", ["stop", "0" * 64 + "stop", "", "\u00e9" * 40])
def test_a_strangers_words_are_nobodys(stores: tuple[SealedStore, SealedStore, dist.Store], words: str) -> None:
    """A store answers each connection in turn, and a set or a push waits for no answer: a question after it does."""
    rank_0, rank_1, stranger = stores
    rank_0.set("alive/0", "41")
    rank_0.set("verdict", "")
    assert rank_0.get("verdict") == b""
    assert rank_1.multi_get(["alive/0", "verdict"]) == [b"41", b""]
    for key in ("alive/0", "verdict"):
        stranger.set(key, words)
        stranger.get(key)
    assert rank_1.multi_get(["alive/0", "verdict"]) == [b"", b""]
    assert rank_1.compare_set("verdict", "", "rank 1 hangs") == b"rank 1 hangs", "a rank's own word still counts"
    assert rank_0.compare_set("verdict", "", "rank 0 hangs") == b"rank 1 hangs", "the first one"
    stranger.set("moved", stranger.get("verdict").decode())
    stranger.get("moved")
    assert rank_0.get("moved") == b"", "a seal is of one key"


def test_a_value_that_the_store_would_not_take_is_refused_and_the_connection_lives(
    stores: tuple[SealedStore, SealedStore, dist.Store],
) -> None:
    rank_0, rank_1, _ = stores
    largest = "x" * (rendezvous.MOST_VALUE_BYTES - len(rank_0._sealed("key", "")))
    rank_0.set("key", largest)
    with pytest.raises(HostError, match=r"^key has 8,388,609 bytes, and PyTorch's store takes 8,388,608 at most$"):
        rank_0.set("key", f"{largest}x")
    assert len(rank_1.get("key")) == len(largest) and len(rank_0.get("key")) == len(largest)


def test_a_connection_that_breaks_is_not_that_of_a_clone(stores: tuple[SealedStore, SealedStore, dist.Store]) -> None:
    """The watchdog beats through a clone: a writer of checkpoints may break or occupy the store's own connection."""
    rank_0, rank_1, _ = stores
    beating = rank_1.clone()
    with pytest.raises(dist.DistError):
        rank_1._store.set("key", "x" * (rendezvous.MOST_VALUE_BYTES + 1))
        rank_1.get("key")
    beating.set("alive/1", "42")
    assert rank_0.get("alive/1") == beating.get("alive/1") == b"42"


Part = Callable[[Rendezvous], object]
_environment = threading.Lock()
_names = threading.local()


def take_part(rank: int, part: Part, seconds: float = 30.0) -> object:
    """Be a rank, on a host that it shares with another one; returns what its part returns or raises."""
    _names.host = f"worker-{rank // 2 + 1}"
    try:
        with _environment:
            os.environ["RANK"] = str(rank)
            together = Rendezvous(seconds)
        with together.reporting():
            return part(together)
    except Exception as error:
        return error


def meet(*parts: Part, seconds: float = 30.0) -> list[Any]:
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(take_part, range(len(parts)), parts, [seconds] * len(parts)))


def agree(together: Rendezvous) -> object:
    return together.agree("start", {})


def test_all_ranks_receive_the_facts_and_the_host_of_each() -> None:
    def says(together: Rendezvous) -> object:
        return together.agree("start", {"rank": together.rank}), together.hosts, together.name(2, 1)

    for facts, hosts, name in meet(says, says, says):
        assert facts == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert hosts == ("worker-1", "worker-1", "worker-2")
        assert name == "rank 2 (stage 1, host worker-2)"


@pytest.mark.parametrize("files", [95_000, 190_000])
def test_images_in_many_files_start_with_few_bytes(files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums of 24 or 48 TB would be 8 or 17 MB from each host, and the store takes 8 MiB at once."""
    sent = list[int]()
    send = SealedStore.set

    def counted(store: SealedStore, key: str, value: str) -> None:
        if key.startswith("images"):
            sent.append(len(value))
        send(store, key, value)

    def starts(together: Rendezvous) -> object:
        sums = {shard_name(number): f"{number + (lost and together.rank == 2):064x}" for number in range(files)}
        cache = cast(DatasetCache, SimpleNamespace(meta=SimpleNamespace(sha256=sums)))
        start._check(together, "prepared ", together.agree("images", checksums_of(cache, cache)), "copy them")
        return together.hosts

    monkeypatch.setattr(SealedStore, "set", counted)
    lost = False
    assert meet(starts, starts, starts) == [("worker-1", "worker-1", "worker-2")] * 3 and sum(sent) < 1000
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    lost = True
    words = r"^host worker-2 \(rank 2\) differs from .* prepared images.npy is \w{12}, not \w{12}; copy them$"
    assert all(isinstance(error, HostError) and re.match(words, str(error)) for error in meet(starts, starts, starts))


def test_equal_facts_of_many_hosts_are_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 128 hosts of 8 ranks a spec of 10 kB would be 1.3 MB for each rank, 1.3 GB from rank 0."""
    answers, send = list[str](), SealedStore.set

    def seen(store: SealedStore, key: str, value: str) -> None:
        answers.extend([value] if key == "start" else [])
        send(store, key, value)

    monkeypatch.setattr(SealedStore, "set", seen)
    meet(*[lambda together: together.agree("start", {"spec": "long"})] * 3)
    (answer,) = answers
    assert answer.count("long") == answer.count("worker-1") == answer.count("worker-2") == 1


def test_what_one_rank_can_not_do_ends_all_with_its_words() -> None:
    def fails(together: Rendezvous) -> object:
        raise SpecError("data.path = photos is no folder")

    before = threading.enumerate()
    ended = meet(agree, agree, fails)
    left = [thread for thread in threading.enumerate() if thread.name == "rendezvous" and thread not in before]
    assert not left, "a beat while the interpreter exits would abort the process"
    assert [type(error) for error in ended] == [HostError, HostError, SpecError]
    assert str(ended[0]) == str(ended[1]) == "rank 2 (host worker-2): data.path = photos is no folder"


def test_ranks_with_different_secrets_end_with_a_line_about_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_rank_2(together: Rendezvous) -> object:
        together.store._secret = b"another"
        return agree(together)

    ended = meet(agree, agree, as_rank_2)
    assert all(isinstance(error, HostError) and "values of DDPM_DS_RUN_SECRET" in str(error) for error in ended)


def test_an_error_before_a_rank_has_met_the_others_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    came = threading.Semaphore(0)

    def waits(together: Rendezvous) -> object:
        came.release()
        return agree(together)

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(take_part, rank, waits) for rank in range(2)]
        assert came.acquire(timeout=PATIENCE_SECONDS) and came.acquire(timeout=PATIENCE_SECONDS)
        _names.host = "worker-2"
        with _environment:
            monkeypatch.setenv("RANK", "2")
            refuse_alone(SpecError("no such file", "no such key"))
        told = "rank 2 (host worker-2): no such file\nrank 2 (host worker-2): no such key"
        assert {str(rank.result()) for rank in waiting} == {told}


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "BEAT_SECONDS", 0.1)
    ended = meet(agree, agree, seconds=0.5)
    assert all(isinstance(error, PeerLostError) for error in ended)
    assert any("rank 2 did not come within 0.5 s" in str(error) for error in ended)


def test_a_rank_that_falls_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SILENCE_SECONDS", 3.0)
    monkeypatch.setattr(rendezvous, "BEAT_SECONDS", 0.1)

    def dies(together: Rendezvous) -> object:
        together.agree("start", {})
        together.close()  # its beats end
        return None

    def goes_on(together: Rendezvous) -> object:
        together.agree("start", {})
        return together.agree("images", {})

    ended = meet(goes_on, goes_on, dies)
    assert any("lost while starting: rank 2" in str(error) for error in ended[:2])


@pytest.mark.parametrize("somebody", [False, True])
def test_a_master_address_at_which_nobody_answers_is_waited_for_as_long_as_was_asked(
    somebody: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger may accept the connection and be silent."""
    _names.host = "worker-2"
    monkeypatch.setenv("RANK", "2")
    with contextlib.ExitStack() as cleanup:
        if somebody:
            stranger = cleanup.enter_context(socket.create_server(("127.0.0.1", 0)))
            monkeypatch.setenv("MASTER_PORT", str(stranger.getsockname()[1]))
        unreached = r"rank 2 \(host worker-2\) can't reach rank 0 at 127.0.0.1:\d+ within 0\.3 s"
        with pytest.raises(PeerLostError, match=unreached):
            Rendezvous(0.3)


def test_a_port_of_another_job_is_named() -> None:
    _names.host = "worker-1"
    with socket.socket() as other:
        other.bind(("", int(os.environ["MASTER_PORT"])))
        other.listen()
        with pytest.raises(LayoutError, match="is taken, by another run"):
            Rendezvous(5.0)


def test_what_differs_is_named_with_both_values() -> None:
    specs = [{"train": {"seed": seed}} for seed in (3, 3, 7)]
    asked = [partial(start.check_alike, documents={"digits.yaml": one}, bounds=(0, 9), device="cpu") for one in specs]
    ended = meet(*asked)
    for error in ended:
        assert isinstance(error, HostError)
        assert "host worker-2 (rank 2) differs from host worker-1 (rank 0)" in str(error)
        assert "train.seed is 7, not 3; give all hosts the same file" in str(error)


def test_a_rank_that_meets_a_run_that_has_begun_says_that_the_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Rendezvous(PATIENCE_SECONDS)
    monkeypatch.setenv("RANK", "1")
    Rendezvous(PATIENCE_SECONDS).close()
    first.close()
    with pytest.raises(LayoutError, match="is taken, by another run"):
        Rendezvous(PATIENCE_SECONDS)
