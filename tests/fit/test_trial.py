"""Trials whose steps are played, so that what becomes of their processes is seen in no time."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpm_ds.errors import LayoutError, UserError
from ddpm_ds.fit import trial
from ddpm_ds.fit.trial import Answer, judge, run_trial, search, without_answer
from tests.fit.test_task import task

MIB = 2**20
IMAGE = 32 * MIB
"""What an image takes in these trials."""

Measured = tuple[list[float], int, int]


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes be forks of this one, in which steps are played."""
    monkeypatch.setattr(trial, "_context", lambda device: multiprocessing.get_context("fork"))


def held() -> int:
    return int(psutil.Process().memory_info().rss)


def play(monkeypatch: pytest.MonkeyPatch, measure: Callable[..., Measured]) -> None:
    """Let processes do this instead of training; PyTorch is not imported."""
    stand_in = types.ModuleType("ddpm_ds.fit.measure")
    stand_in.measure = measure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ddpm_ds.fit.measure", stand_in)
    monkeypatch.setattr("ddpm_ds.fit.measure", stand_in, raising=False)


def filling(plan: Any, device: str, budget_bytes: int | None, steps: int, *others: Any) -> Measured:
    """Holds some memory for each image, for a while: new pages, where a heap would give those that it has kept."""
    with mmap.mmap(
        -1, plan.ds.layout.micro_batch_images * IMAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as memory:
        for _ in range(len(memory) // MIB):
            memory.write(b"1" * MIB)
        time.sleep(0.2)
        peak = held()
    return [0.5] * steps, peak, 0


def test_what_holds_too_much_is_ended_and_the_limit_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, filling)
    budget = held() + 5 * IMAGE + IMAGE // 2
    trials, needs = search(task(accumulation=2, budget_bytes=budget), tmp_path)
    assert [one.micro_batch_images for one in trials] == [1, 2, 4, 8, 6, 5]
    assert [one.fits for one in trials] == [True, True, True, False, False, True]
    assert all("rank 0 took over" in one.why for one in trials if not one.fits)
    assert needs is None
    assert len(capfd.readouterr().out.splitlines()) == 6


def test_when_nothing_fits_it_is_found_out_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, filling)
    limits: dict[str, Any] = {"budget_bytes": held() + IMAGE // 2, "most_bytes": held() + 8 * IMAGE}
    _, needs = search(task(accumulation=2, **limits), tmp_path)
    assert needs == pytest.approx(held() + IMAGE, abs=IMAGE / 2)


def test_a_killed_process_does_not_fit_and_a_bug_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: Exception) -> Callable[..., Measured]:
        def measure(plan: Any, *others: Any) -> Measured:
            raise error

        return measure

    def kill_this(plan: Any, *others: Any) -> Measured:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    others = set(psutil.Process().children())  # of tests before
    play(monkeypatch, raising(MemoryError()))
    assert run_trial(task(), 1, 2**40, tmp_path / "1").why == "rank 0 ran out of memory"
    play(monkeypatch, kill_this)
    assert run_trial(task(), 1, 2**40, tmp_path / "2").why == "rank 0 was killed (SIGKILL)"
    play(monkeypatch, raising(ZeroDivisionError("a bug")))
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError: a bug"):
        run_trial(task(), 1, 2**40, tmp_path / "3")
    play(monkeypatch, raising(LayoutError("2 processes on 1 device")))
    with pytest.raises(UserError, match=r"^2 processes on 1 device$"):
        search(task(sizes=(1, 2), budget_bytes=2**40), tmp_path / "refused")
    assert set(psutil.Process().children()) <= others


def test_a_process_that_takes_no_step_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stuck(plan: Any, device: str, budget_bytes: int | None, steps: int, *others: Any) -> Measured:
        if plan.ds.layout.micro_batch_images > 3:
            helper = subprocess.Popen(["sleep", "600"])
            (tmp_path / "helper").write_text(str(helper.pid))
            time.sleep(600)
        return [0.5] * steps, 0, 0

    play(monkeypatch, stuck)
    trials, _ = search(task(accumulation=2, budget_bytes=2**40, hang_seconds=1.5), tmp_path)
    assert [(one.micro_batch_images, one.fits) for one in trials] == [(1, True), (2, True), (4, False), (3, True)]
    assert "micro-batch 4      failed: no step for 1.5 s\n" in capfd.readouterr().out
    assert not_running(int((tmp_path / "helper").read_text()))


def not_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


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
    line = "micro-batch 1 of layout 1x1 failed: no step for 1.5 s; --hang-seconds waits longer"
    with pytest.raises(UserError, match=f"^{line}$"):
        search(task(accumulation=2, budget_bytes=2**40, most_bytes=2**41, hang_seconds=1.5), tmp_path)
    assert (tmp_path / "steps").exists()


def test_a_process_whose_peer_has_run_out_of_memory_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "GRACE_SECONDS", 0.2)

    def waiting(plan: Any, *others: Any) -> Measured:
        if os.environ["RANK"] == "1":
            raise MemoryError
        time.sleep(600)
        raise AssertionError

    play(monkeypatch, waiting)
    tried = run_trial(task(stages=2), 4, None, tmp_path / "trial")
    assert not tried.fits and tried.why == "rank 1 ran out of memory"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_trial_as_ctrl_c_does_with_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def signalling(plan: Any, *others: Any) -> Measured:
        (tmp_path / "child").write_text(str(os.getpid()))
        os.kill(os.getppid(), number)
        time.sleep(600)
        raise AssertionError

    play(monkeypatch, signalling)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        run_trial(task(), 1, None, tmp_path / "trial")
    assert not_running(int((tmp_path / "child").read_text())) and signal.getsignal(number) == before


def done(peak: int, *seconds: float) -> Answer:
    return Answer("done", seconds=list(seconds), peak_bytes=peak)


def test_a_trial_is_as_slow_as_its_slowest_rank_and_as_large_as_its_fullest() -> None:
    sizes, answers = (4, 2, 8), [done(3 * MIB, 1.0, 2.0, 5.0), done(5 * MIB, 4.0, 1.0, 1.0)]
    tried = judge(answers, sizes, 5 * MIB)
    assert tried.fits and tried.step_seconds == [4.0, 2.0, 5.0]
    assert tried.images_per_second == pytest.approx(8 / 4.0)
    assert tried.rank_peak_bytes == [3 * MIB, 5 * MIB] and tried.peak_bytes == 5 * MIB
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
    tried = judge(answers, (4, 2, 8), None)
    assert (tried.fits, tried.why, tried.hung) == (False, why, hung)


def test_other_failures_are_no_answer_to_whether_it_fits() -> None:
    with pytest.raises(RuntimeError, match="rank 1: Traceback"):
        judge([LOST, Answer("failed", "Traceback ...")], (4, 2, 8), None)
    with pytest.raises(UserError, match=r"^no such device$"):
        judge([Answer("refused", "no such device"), LOST], (4, 2, 8), None)


def test_a_process_that_is_killed_ran_out_of_memory_and_one_that_crashed_did_not(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert without_answer(-signal.SIGKILL, log).kind == "memory"
    log.write_text("terminate called after throwing an instance of 'std::bad_alloc'")
    assert without_answer(-signal.SIGABRT, log).kind == "memory"
    log.write_text("a bug")
    answer = without_answer(-signal.SIGABRT, log)
    assert answer.kind == "failed" and "a bug" in answer.words
