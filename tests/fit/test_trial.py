"""Trials of one rank whose steps are played, so that what becomes of its children is seen in no time."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from ddpm_ds.errors import LayoutError
from ddpm_ds.fit.child import Answer, TrialError, judge
from ddpm_ds.fit.trial import Trials, search, without_answer
from tests.fit.test_task import task
from tests.launching import write_json

MIB = 2**20
IMAGE = 32 * MIB
"""What an image takes in these trials."""


def held() -> int:
    return int(psutil.Process().memory_info().rss)


def play(monkeypatch: pytest.MonkeyPatch, measure: Callable[..., Answer | None]) -> None:
    """Let children do this instead of training; PyTorch is not imported."""
    stand_in = types.ModuleType("ddpm_ds.fit.measure")
    stand_in.measure = measure  # type: ignore[attr-defined]
    stand_in.is_out_of_memory = lambda error: isinstance(error, MemoryError)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ddpm_ds.fit.measure", stand_in)
    monkeypatch.setattr("ddpm_ds.fit.measure", stand_in, raising=False)


def filling(plan: Any, device: str, budget_bytes: int | None, steps: int, *others: Any) -> Answer:
    """Holds some memory for each image, for a while: new pages, where a heap would give those that it has kept."""
    with mmap.mmap(
        -1, plan.ds.layout.micro_batch_images * IMAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as memory:
        for _ in range(len(memory) // MIB):
            memory.write(b"1" * MIB)
        time.sleep(0.2)
        peak = held()
    return Answer("done", seconds=[0.5] * steps, peak_bytes=peak)


def test_what_holds_too_much_is_ended_and_the_limit_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, filling)
    budget = held() + 5 * IMAGE + IMAGE // 2
    result = search(task(accumulation=2, budget_bytes=budget), tmp_path, 0)
    trials: Any = result["trials"]
    assert [trial["micro_batch_images"] for trial in trials] == [1, 2, 4, 8, 6, 5]
    assert [trial["fits"] for trial in trials] == [True, True, True, False, False, True]
    assert all("rank 0 took over" in trial["why"] for trial in trials if not trial["fits"])
    assert result["failure"] is None and result["needs_bytes"] is None
    assert len(capfd.readouterr().out.splitlines()) == 6


def test_when_nothing_fits_it_is_found_out_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, filling)
    limits: dict[str, Any] = {"budget_bytes": held() + IMAGE // 2, "most_bytes": held() + 8 * IMAGE}
    result = search(task(accumulation=2, **limits), tmp_path, 0)
    needs: Any = result["needs_bytes"]
    assert needs == pytest.approx(held() + IMAGE, abs=IMAGE / 2)


def test_a_killed_child_does_not_fit_and_a_bug_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: Exception) -> Callable[..., Answer]:
        def measure(plan: Any, *others: Any) -> Answer:
            raise error

        return measure

    others = set(psutil.Process().children())  # of tests before
    trials = Trials(task(), tmp_path, 0)
    play(monkeypatch, raising(MemoryError()))
    assert trials.run(1, 2**40).why == "rank 0 ran out of memory"
    play(monkeypatch, lambda *told: os.kill(os.getpid(), signal.SIGKILL))
    assert trials.run(1, 2**40).why == "rank 0 was killed (SIGKILL)"
    play(monkeypatch, raising(ZeroDivisionError("a bug")))
    with pytest.raises(TrialError, match=r"ZeroDivisionError: a bug"):
        trials.run(1, 2**40)
    play(monkeypatch, raising(LayoutError("2 processes on 1 device")))
    result = search(task(sizes=(1, 2), budget_bytes=2**40), tmp_path / "refused", 0)
    assert (result["failure"], result["refused"], result["trials"]) == ("2 processes on 1 device", True, [])
    assert set(psutil.Process().children()) <= others


def test_a_child_that_takes_no_step_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stuck(plan: Any, device: str, budget_bytes: int | None, steps: int, *others: Any) -> Answer:
        if plan.ds.layout.micro_batch_images > 3:
            helper = subprocess.Popen(["sleep", "600"])
            (tmp_path / "helper").write_text(str(helper.pid))
            time.sleep(600)
        return Answer("done", seconds=[0.5] * steps)

    play(monkeypatch, stuck)
    result = search(task(accumulation=2, budget_bytes=2**40, hang_seconds=1.5), tmp_path, 0)
    trials: Any = result["trials"]
    assert [(trial["micro_batch_images"], trial["fits"]) for trial in trials] == [
        *((1, True), (2, True), (4, False), (3, True))
    ]
    assert result["failure"] is None
    assert "micro-batch 4      failed: no step for 1.5 s\n" in capfd.readouterr().out
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int((tmp_path / "helper").read_text())).status() == psutil.STATUS_ZOMBIE


def test_steps_that_go_on_are_no_hang_and_the_smallest_micro_batch_that_hangs_ends_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(plan: Any, device: str, budget: int | None, steps: int, hang: float, progress: Callable[[], None]) -> Any:
        for _ in range(4):
            time.sleep(hang / 3)
            progress()
        (tmp_path / "steps").touch()
        time.sleep(600)

    play(monkeypatch, slow)
    of = task(accumulation=2, budget_bytes=2**40, most_bytes=2**41, hang_seconds=1.5)
    result = search(of, tmp_path, 0)
    assert (tmp_path / "steps").exists()
    assert (result["refused"], len(cast(Any, result["trials"]))) == (True, 1)
    line = "micro-batch 1 of layout 1x1 failed: no step for 1.5 s; --hang-seconds waits longer"
    assert result["failure"] == line


def test_a_child_whose_peer_has_run_out_of_memory_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpm_ds.fit.trial.GRACE_SECONDS", 0.2)

    def waiting(plan: Any, *others: Any) -> Answer:
        time.sleep(60)
        raise AssertionError

    play(monkeypatch, waiting)
    peer = tmp_path / "trial-1" / "rank-1"
    peer.mkdir(parents=True)
    write_json(peer / "answer.json", asdict(Answer("memory", "ran out of memory")))
    begin = time.monotonic()
    trial = Trials(task(stages=2), tmp_path, 0).run(4, None)
    assert time.monotonic() - begin < 30
    assert not trial.fits and trial.why == "rank 1 ran out of memory"


def done(peak: int, *seconds: float) -> Answer:
    return Answer("done", seconds=list(seconds), peak_bytes=peak)


def test_a_trial_is_as_slow_as_its_slowest_rank_and_as_large_as_its_fullest() -> None:
    sizes, answers = (4, 2, 8), [done(3 * MIB, 1.0, 2.0, 5.0), done(5 * MIB, 4.0, 1.0, 1.0)]
    trial = judge(answers, sizes, 5 * MIB)
    assert trial.fits and trial.step_seconds == [4.0, 2.0, 5.0]
    assert trial.images_per_second == pytest.approx(8 / 4.0)
    assert trial.rank_peak_bytes == [3 * MIB, 5 * MIB] and trial.peak_bytes == 5 * MIB
    over = judge(answers, sizes, 4 * MIB)
    assert not over.fits and over.why == "rank 1 took 5.0 MiB"
    assert judge(answers, sizes, None).fits


SHORT, HUNG, LOST = Answer("memory", "memory words"), Answer("hung", "hung words"), Answer("lost")


@pytest.mark.parametrize(
    ("answers", "why", "hung"),
    [
        ([done(MIB, 1.0), SHORT], "rank 1 memory words", False),
        ([SHORT, Answer("failed", "Connection closed")], "rank 0 memory words", False),
        ([LOST, SHORT], "rank 1 memory words", False),
        ([LOST, HUNG], "failed: hung words", True),
        ([HUNG, SHORT], "rank 1 memory words", False),
    ],
)
def test_what_becomes_of_others_is_the_doing_of_the_rank_that_ran_out_of_memory_or_hung(
    answers: list[Answer], why: str, hung: bool
) -> None:
    trial = judge(answers, (4, 2, 8), None)
    assert (trial.fits, trial.why, trial.hung) == (False, why, hung)


def test_other_failures_are_no_answer_to_whether_it_fits() -> None:
    with pytest.raises(TrialError, match="rank 1: Traceback") as failed:
        judge([LOST, Answer("failed", "Traceback ...")], (4, 2, 8), None)
    assert not failed.value.refused
    with pytest.raises(TrialError, match=r"^no such device$") as refused:
        judge([Answer("refused", "no such device"), LOST], (4, 2, 8), None)
    assert refused.value.refused


def test_a_child_that_is_killed_ran_out_of_memory_and_one_that_crashed_did_not(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert without_answer(-signal.SIGKILL, log).kind == "memory"
    log.write_text("terminate called after throwing an instance of 'std::bad_alloc'")
    assert without_answer(-signal.SIGABRT, log).kind == "memory"
    log.write_text("a bug")
    answer = without_answer(-signal.SIGABRT, log)
    assert answer.kind == "failed" and "a bug" in answer.words
