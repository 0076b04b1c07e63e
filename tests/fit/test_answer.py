"""What the answers of ranks mean together."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ddpm_ds.fit.answer import Answer, TrialError, judge
from ddpm_ds.fit.trial import _without_answer

SIZES = (4, 2, 8)
MIB = 2**20


def done(peak: int, *seconds: float) -> Answer:
    return Answer("done", seconds=list(seconds), peak_bytes=peak)


def test_a_trial_is_as_slow_as_its_slowest_rank_and_as_large_as_its_fullest() -> None:
    trial = judge([done(3 * MIB, 1.0, 2.0, 5.0), done(5 * MIB, 4.0, 1.0, 1.0)], SIZES, 5 * MIB)
    assert trial.fits and trial.step_seconds == [4.0, 2.0, 5.0]
    assert trial.images_per_second == pytest.approx(8 / 4.0)
    assert trial.rank_peak_bytes == [3 * MIB, 5 * MIB] and trial.peak_bytes == 5 * MIB


def test_a_rank_over_the_budget_does_not_fit_although_it_trained() -> None:
    trial = judge([done(3 * MIB, 1.0), done(6 * MIB, 1.0)], SIZES, 5 * MIB)
    assert not trial.fits and trial.why == "rank 1 took 6.0 MiB"
    assert judge([done(3 * MIB, 1.0), done(6 * MIB, 1.0)], SIZES, None).fits


@pytest.mark.parametrize("other", [done(MIB, 1.0), Answer("failed", "Connection closed"), Answer("lost", "ended")])
def test_when_one_rank_runs_out_of_memory_what_becomes_of_others_is_its_doing(other: Answer) -> None:
    short = Answer("memory", "ran out of memory", peak_bytes=MIB)
    for answers in ([other, short], [short, other]):
        trial = judge(answers, SIZES, None)
        assert not trial.fits and trial.why == f"rank {answers.index(short)} ran out of memory"


def test_a_rank_that_hangs_does_not_fit_and_whoever_lost_it_is_not_asked() -> None:
    hung = Answer("hung", "no step for 600 s", peak_bytes=MIB)
    trial = judge([Answer("lost", "ended"), hung], SIZES, None)
    assert (trial.fits, trial.hung, trial.why) == (False, True, "failed: no step for 600 s")
    assert not judge([hung, Answer("memory", "ran out of memory")], SIZES, None).hung


def test_other_failures_are_no_answer_to_whether_it_fits() -> None:
    with pytest.raises(TrialError, match="rank 1: Traceback") as failed:
        judge([Answer("lost", "ended"), Answer("failed", "Traceback ...")], SIZES, None)
    assert not failed.value.refused
    with pytest.raises(TrialError, match=r"^no such device$") as refused:
        judge([Answer("refused", "no such device"), Answer("lost", "ended")], SIZES, None)
    assert refused.value.refused


def test_a_child_that_is_killed_ran_out_of_memory_and_one_that_crashed_did_not(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert _without_answer(-signal.SIGKILL, log).kind == "memory"
    log.write_text("terminate called after throwing an instance of 'std::bad_alloc'")
    assert _without_answer(-signal.SIGABRT, log).kind == "memory"
    log.write_text("a bug")
    for code in (-signal.SIGABRT, -signal.SIGSEGV, 1):
        answer = _without_answer(code, log)
        assert answer.kind == "failed" and "a bug" in answer.words


def test_an_answer_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    assert Answer.read(path) is None
    written = Answer("done", seconds=[0.1], peak_bytes=3, checkpoint_interval=1)
    written.write(path)
    assert Answer.read(path) == written
