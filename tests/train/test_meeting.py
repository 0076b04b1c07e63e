"""Ranks meet before they have a process group: threads stand for ranks, processes for those that leave."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ddpm_ds.errors import HostError, LayoutError, PeerLostError, SpecError
from ddpm_ds.train import agreement, meeting, node_metrics
from ddpm_ds.train.meeting import Meeting, refuse_alone
from ddpm_ds.train.plan import RunPlan, plan_run
from tests.launching import REPOSITORY, free_port

Part = Callable[[Meeting], object]


class Rank(threading.Thread):
    """A rank that meets the others on a host of its own name."""

    def __init__(self, rank: int, part: Part, seconds: float) -> None:
        super().__init__(daemon=True)
        self._rank, self._part, self._seconds = rank, part, seconds
        self.ended: object = None

    def run(self) -> None:
        try:
            together = _joined(self._rank, self._seconds)
            with together.telling():
                self.ended = self._part(together)
        except Exception as error:
            self.ended = error


_environment = threading.Lock()
_names = threading.local()


def _joined(rank: int, seconds: float) -> Meeting:
    _names.host = f"worker-{rank // 2 + 1}"
    with _environment:
        os.environ["RANK"] = str(rank)
        return Meeting(seconds)


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(meeting, "host_name", lambda: _names.host)
    monkeypatch.setattr(node_metrics, "host_name", lambda: _names.host)


def meet(*parts: Part, seconds: float = 30.0) -> list[Any]:
    """What each rank's part returns or raises, when all have ended."""
    ranks = [Rank(rank, part, seconds) for rank, part in enumerate(parts)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=60)
        assert not rank.is_alive()
    return [rank.ended for rank in ranks]


def test_all_hear_what_each_has_said_and_on_which_host() -> None:
    def says(together: Meeting) -> object:
        return together.agree("start", {"rank": together.rank}), together.hosts, together.name(2, 1)

    for facts, hosts, name in meet(says, says, says):
        assert facts == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert hosts == ("worker-1", "worker-1", "worker-2")
        assert name == "rank 2 (stage 1, host worker-2)"


def test_what_one_rank_can_not_do_ends_all_with_its_words() -> None:
    def fails(together: Meeting) -> object:
        raise SpecError("data.path = photos is no folder")

    ended = meet(lambda m: m.agree("start", {}), lambda m: m.agree("start", {}), fails)
    assert [type(error) for error in ended] == [HostError, HostError, SpecError]
    assert str(ended[0]) == str(ended[1]) == "rank 2 (host worker-2): data.path = photos is no folder"


def test_an_error_before_a_rank_has_met_the_others_is_told_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [Rank(0, lambda m: m.agree("start", {}), 30.0), Rank(1, lambda m: m.agree("start", {}), 30.0)]
    for rank in waiting:
        rank.start()
    _names.host = "worker-2"
    with _environment:
        monkeypatch.setenv("RANK", "2")
        refuse_alone(SpecError("no such file"))
    for rank in waiting:
        rank.join(timeout=30)
        assert str(rank.ended) == "rank 2 (host worker-2): no such file"


def test_a_rank_that_never_comes_is_named() -> None:
    ended = meet(lambda m: m.agree("start", {}), lambda m: m.agree("start", {}), seconds=0.5)
    assert all(isinstance(error, PeerLostError) for error in ended)
    assert any("rank 2 did not come within 0.5 s" in str(error) for error in ended)


def test_a_rank_that_falls_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(meeting, "BEAT_SECONDS", 0.1)

    def dies(together: Meeting) -> object:
        together.agree("start", {})
        together.close()  # its beats end
        return None

    def goes_on(together: Meeting) -> object:
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
        Meeting(0.3)


def test_a_port_of_another_job_is_named() -> None:
    _names.host = "worker-1"
    with socket.socket() as other:
        other.bind(("", int(os.environ["MASTER_PORT"])))
        other.listen()
        with pytest.raises(LayoutError, match="is taken, by another run"):
            Meeting(5.0)


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


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"torch": "2.11.0"}, "version of torch is 2.11.0, not 2.14.1; install the same"),
        ({}, "version of torch is unset, not 2.14.1; install the same"),
    ],
)
def test_a_version_that_differs(said: dict[str, str], expected: str) -> None:
    _names.host = "worker-1"
    os.environ["WORLD_SIZE"] = "1"
    alone = Meeting(1.0)
    alone.hosts = ("worker-1", "worker-2")
    with pytest.raises(HostError, match=expected):
        agreement._check(alone, "version of ", [{"torch": "2.14.1"}, said], "install the same versions")
