"""The rendezvous of ranks, for which threads stand, and what they compare there."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from ddpm_ds.errors import HostError, LayoutError, PeerLostError, SpecError
from ddpm_ds.planning.run_plan import RunPlan, plan_run
from ddpm_ds.processes import rendezvous
from ddpm_ds.processes.ranks import free_port
from ddpm_ds.processes.rendezvous import Rendezvous, refuse_alone
from ddpm_ds.processes.store import SealedStore
from ddpm_ds.train import agreement
from tests.launching import PATIENCE_SECONDS, REPOSITORY

Part = Callable[[Rendezvous], object]
_environment = threading.Lock()
_names = threading.local()


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(rendezvous, "host_name", lambda: _names.host)


def take_part(rank: int, part: Part, seconds: float = 30.0) -> object:
    """Be a rank, on a host that it shares with another one; returns what its part returns or raises."""
    _names.host = f"worker-{rank // 2 + 1}"
    try:
        with _environment:
            os.environ["RANK"] = str(rank)
            together = Rendezvous(seconds)
        with together.telling():
            return part(together)
    except Exception as error:
        return error


def meet(*parts: Part, seconds: float = 30.0) -> list[Any]:
    """Each rank's result or error, when all have ended."""
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(take_part, range(len(parts)), parts, [seconds] * len(parts)))


def agree(together: Rendezvous) -> object:
    return together.agree("start", {})


def test_all_hear_what_each_has_said_and_on_which_host() -> None:
    def says(together: Rendezvous) -> object:
        return together.agree("start", {"rank": together.rank}), together.hosts, together.name(2, 1)

    for facts, hosts, name in meet(says, says, says):
        assert facts == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert hosts == ("worker-1", "worker-1", "worker-2")
        assert name == "rank 2 (stage 1, host worker-2)"


def test_what_one_rank_can_not_do_ends_all_with_its_words() -> None:
    def fails(together: Rendezvous) -> object:
        raise SpecError("data.path = photos is no folder")

    before = threading.enumerate()
    ended = meet(agree, agree, fails)
    left = [thread for thread in threading.enumerate() if thread.name == "rendezvous" and thread not in before]
    assert not left, "a beat while the interpreter exits would abort the process"
    assert [type(error) for error in ended] == [HostError, HostError, SpecError]
    assert str(ended[0]) == str(ended[1]) == "rank 2 (host worker-2): data.path = photos is no folder"


def test_ranks_with_different_secrets_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_rank_2(together: Rendezvous) -> object:
        assert isinstance(together._store, SealedStore)
        together._store._secret = b"another"
        return agree(together)

    ended = meet(agree, agree, as_rank_2)
    assert all(isinstance(error, HostError) and "values of DDPM_DS_RUN_SECRET" in str(error) for error in ended)


def test_an_error_before_a_rank_has_met_the_others_is_told_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(rendezvous, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "BEAT_SECONDS", 0.1)

    def dies(together: Rendezvous) -> object:
        together.agree("start", {})
        together.close()  # its beats end
        return None

    def goes_on(together: Rendezvous) -> object:
        together.agree("start", {})
        return together.agree("images", {})

    ended = meet(goes_on, goes_on, dies)
    assert any("rank 2 has gone while starting" in str(error) for error in ended[:2])


def test_nobody_at_the_master_address() -> None:
    _names.host = "worker-2"
    os.environ["RANK"] = "2"
    with pytest.raises(
        PeerLostError, match=r"rank 2 \(host worker-2\) can't reach rank 0 at 127.0.0.1:\d+ within 0.3 s"
    ):
        Rendezvous(0.3)


def test_a_port_of_another_job_is_named() -> None:
    _names.host = "worker-1"
    with socket.socket() as other:
        other.bind(("", int(os.environ["MASTER_PORT"])))
        other.listen()
        with pytest.raises(LayoutError, match="is taken, by another run"):
            Rendezvous(5.0)


def _plan(*changes: str) -> RunPlan:
    spec = REPOSITORY / "launch" / "specs" / "digits.yaml"
    return plan_run(spec, changes, REPOSITORY / "ds_configs" / "zero2_fp16.json", world_size=3, stages=3)


def test_what_differs_is_named_with_both_values() -> None:
    plans = [_plan(), _plan(), _plan("train.seed=7")]
    ended = meet(*[partial(agreement.check_alike, plan=plan, device="cpu") for plan in plans])
    for error in ended:
        assert isinstance(error, HostError)
        assert "host worker-2 (rank 2) differs from host worker-1 (rank 0)" in str(error)
        assert f"train.seed is 7, not {plans[0].spec.train.seed}; give all hosts the same file" in str(error)
