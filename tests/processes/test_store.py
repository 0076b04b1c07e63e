"""The stores of a run: where they listen, and what a stranger who connects can do to the ranks' words."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from ddpm_ds.processes.ranks import RUN_SECRET
from ddpm_ds.processes.store import SealedStore, connect

TIMEOUT = timedelta(seconds=20)
STRANGE = ("stop", "0" * 64 + "stop", "", "\u00e9" * 40)


@pytest.fixture(autouse=True)
def one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv(RUN_SECRET, "ours")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def listens_at(port: int) -> set[str]:
    """Addresses at which this process listens on a port."""
    found = psutil.Process(os.getpid()).net_connections("tcp")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


def test_a_store_of_one_host_listens_on_loopback_alone_and_a_second_one_shares_it() -> None:
    store = connect(0, 0, TIMEOUT)
    assert listens_at(store.port) == {"127.0.0.1"}
    again, other = connect(0, store.port, TIMEOUT), connect(1, store.port, TIMEOUT)
    again.set("key", "value")
    assert other.get("key") == store.get("key") == b"value" and listens_at(store.port) == {"127.0.0.1"}


def test_a_store_of_several_hosts_listens_where_the_first_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    own = [one.address for all_of in psutil.net_if_addrs().values() for one in all_of if one.family == socket.AF_INET]
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


@pytest.mark.parametrize("words", STRANGE)
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
    stranger.queue_push("queue", words)
    assert stranger.queue_len("queue") == 1
    rank_1.queue_push("queue", "metrics")
    assert rank_1.queue_len("queue") == 2
    assert [rank_0.queue_pop("queue", block=False) for _ in range(rank_0.queue_len("queue"))] == [b"", b"metrics"]


def test_another_runs_secret_opens_nothing(
    stores: tuple[SealedStore, SealedStore, dist.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_SECRET, "theirs")
    SealedStore(stores[2]).set("verdict", "stop")
    assert stores[0].get("verdict") == b""
