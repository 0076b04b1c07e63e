"""Search for the largest micro-batch that fits: which ones are tried, and how a trial ends."""

import contextlib
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import ddpm_ds.experiments.fit
from ddpm_ds.experiments.fit import (
    LIBRARY_BYTES,
    Task,
    TriedSize,
    expected,
    largest,
    out_of_memory,
    predicted,
    run_ranks,
    search,
    try_size,
)
from ddpm_ds.ground.errors import LayoutError, ProgramError, is_out_of_memory
from ddpm_ds.ground.units import MOST_BATCH
from ddpm_ds.planning.inputs import machine_like
from tests.launching import REPOSITORY, wait_for


@pytest.mark.parametrize("sizes", [range(1, 70), [7], [3, 4, 5, 50, 51], [6, 1000]], ids=str)
def test_the_largest_that_fits_is_found_whatever_the_memory_and_the_guess(sizes: Sequence[int]) -> None:
    for memory in range(sizes[-1] + 2):
        for guess in sizes:
            asked: list[int] = []

            def fits(size: int, memory: int = memory, asked: list[int] = asked) -> bool:
                assert all(size < other for other in asked if other > memory)  # none larger than one that died
                asked.append(size)
                return size <= memory

            assert largest(sizes, fits, guess) == max((size for size in sizes if size <= memory), default=None)
            assert asked[0] == guess and len(asked) == len(set(asked)) <= 2 * math.log2(sizes[-1]) + 3


DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
ZERO = REPOSITORY / "ds_configs" / "zero0_fp32.json"
FOLDED = REPOSITORY / "ds_configs" / "folded_zero2_fp16.json"
GIB = 2**30


def task(*overrides: str, stages: int = 1, replicas: int = 1, config: Path = ZERO, **values: Any) -> Task:
    here = machine_like("cpu", 8 * GIB, half=False, devices=stages * replicas)
    limits = {"accumulation": None, "machine": here, "budget_bytes": GIB, "steps": 1, "processes": stages * replicas}
    return Task(DIGITS, overrides, config, stages, replicas, **{**limits, **values})


def play(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let ranks do this instead of training; ``rank`` is their number and ``words`` their arguments."""
    begin = "import os, subprocess, sys, time, json; rank, words = int(os.environ['RANK']), sys.argv[1:]\n"
    monkeypatch.setattr(ddpm_ds.experiments.fit, "RANK", (sys.executable, "-c", begin + program))


def not_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_the_others_of_a_killed_rank_are_ended_with_what_they_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddpm_ds.experiments.fit, "GRACE_SECONDS", 0.2)
    program = """
while rank == 1 and not os.path.exists(words[0]):
    time.sleep(0.01)
if rank == 1:
    os.kill(os.getpid(), 9)
helper = subprocess.Popen(["sleep", "600"])
with open(words[0] + ".tmp", "w") as file:
    file.write(str(helper.pid))
os.rename(words[0] + ".tmp", words[0])
time.sleep(600)
"""
    play(monkeypatch, program)
    codes = run_ranks([str(tmp_path / "helper")], 2, tmp_path / "log")
    assert codes == [None, -signal.SIGKILL]
    assert out_of_memory(codes, "") == "rank 1 was killed (SIGKILL)"
    helper = int((tmp_path / "helper").read_text())
    wait_for(lambda: not_running(helper))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_trial_as_ctrl_c_does_with_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    play(monkeypatch, f"print(os.getpid(), flush=True); os.kill(os.getppid(), {number}); time.sleep(600)")
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        run_ranks([], 1, tmp_path / "log")
    assert not_running(int((tmp_path / "log").read_text())) and signal.getsignal(number) == before


KILLED, ABORTED = -signal.SIGKILL, -signal.SIGABRT
RAN_OUT = "rank 1 ran out of memory"


@pytest.mark.parametrize(
    ("codes", "output", "why"),
    [
        ([0, 0], "", ""),
        ([76, 1], f"ddpm_ds: error: {RAN_OUT}; ddpm-ds fit finds", RAN_OUT),
        ([None, KILLED], "", "rank 1 was killed (SIGKILL)"),
        ([0, ABORTED], "terminate called after throwing an instance of 'std::bad_alloc'", RAN_OUT),
        ([1, 76], "Traceback:\nZeroDivisionError: a bug\n", ("Traceback:\nZeroDivisionError: a bug", 1)),
        ([2, None], "starting\nddpm_ds: error: no such device\n", ("no such device", 2)),
        ([76, 76], "no step for 9 s, rank 0 hangs in step()", ("no step for 9 s, rank 0 hangs in step()", 76)),
        ([ABORTED], "a bug", ("a bug", 128 + signal.SIGABRT)),
    ],
)
def test_ranks_that_run_out_of_memory_are_no_error_and_any_other_end_has_its_last_lines_and_its_code(
    codes: Sequence[int], output: str, why: str | tuple[str, int]
) -> None:
    try:
        assert out_of_memory(codes, output) == why
    except ProgramError as error:
        assert (str(error), error.exit_code) == why


def test_a_trial_fits_if_its_fullest_rank_is_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
images = int(next(word for word in words if "micro_batch_size" in word).partition("=")[2])
folder = words[words.index("--run-dir") + 1]
assert words[words.index("--steps") + 1] == "3" and "ds.pipeline.stages=2" in words
if rank == 0:
    os.mkdir(folder)
    found = {"step_seconds": [9.0, 2.0, 1.0], "rank_peak_bytes": [1, images * 2**27], "checkpoint_interval": 1}
    with open(folder + "/rehearsal.json", "w") as file:
        json.dump(found, file)
"""
    play(monkeypatch, program)
    eight, sixteen = (try_size(task(stages=2, steps=3), tmp_path, size) for size in (8, 16))
    assert eight == TriedSize(8, 8, 64, "", [9.0, 2.0, 1.0], [1, GIB], 1)
    assert eight.images_per_second == 32
    assert sixteen.why == "rank 1 took 2.00 GiB" and not sixteen.fits and sixteen.peak_bytes == 2 * GIB


def fits_up_to(memory: int) -> Callable[[int], TriedSize]:

    def attempt(size: int) -> TriedSize:
        return TriedSize(size, 64 // size, 64, "rank 0 ran out of memory" * (size > memory), [1.0], [size])

    return attempt


def test_a_search_finds_the_largest_and_tries_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    found = search(task(), fits_up_to(40))  # of 64 images a step
    assert [one.micro_batch_images for one in found if one.fits][-1] == 32
    assert [one.micro_batch_images for one in found if not one.fits] == [64]
    assert capsys.readouterr().out.count("images/s") == sum(one.fits for one in found)


def test_a_search_begins_with_what_the_planner_expects_to_fit() -> None:
    growing = task("unet.channels=64", accumulation=1, budget_bytes=LIBRARY_BYTES + GIB)
    large = expected(growing, growing.sizes())
    assert large > 1 and predicted(growing, large, GIB) <= GIB < predicted(growing, large + 1, GIB)
    assert expected(replace(growing, budget_bytes=1), growing.sizes()) == 1


def test_the_batch_stays_so_a_replicas_share_is_a_number_of_micro_batches() -> None:
    for replicas, config, sizes in ((2, ZERO, [1, 2, 3, 4, 6, 8, 12, 24]), (1, FOLDED, [1, 2, 3, 4, 6, 8, 12])):
        of = task("train.batch_images=48", "train.accumulation=3", config=config, stages=2, replicas=replicas)
        assert of.sizes() == sizes
        for size in sizes:
            filled = of.config(size)
            made = filled["train_micro_batch_size_per_gpu"] * filled["gradient_accumulation_steps"] * replicas
            assert (made, filled["pipeline"]["stages"]) == (48, 2)


def test_with_accumulation_any_micro_batch_is_possible_and_the_batch_grows() -> None:
    of = task("train.batch_images=48", "train.accumulation=6", accumulation=4, replicas=2)
    assert of.sizes() == range(1, MOST_BATCH // 8 + 1)
    plan = of.draft(7)
    assert plan.ds.layout.batch_images == plan.spec.train.batch_images == 2 * 4 * 7
    assert (plan.ds.layout.micro_batch_images, plan.ds.layout.micro_batches) == (7, 4)


def test_a_layout_without_any_micro_batch_is_one_line() -> None:
    with pytest.raises(LayoutError, match=r"train.batch_images = 64 can't be shared by 3 replicas[^\n]*$"):
        task(replicas=3).sizes()
    with pytest.raises(LayoutError, match=r"needs 4 micro-batches or more[^\n]*$"):
        task(config=FOLDED, accumulation=3, stages=2).sizes()


def test_libraries_that_run_out_of_memory_say_so_in_words_of_their_own() -> None:
    for words in ("CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"):
        assert is_out_of_memory(RuntimeError(f"cuDNN error: {words}"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
