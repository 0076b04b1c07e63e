"""Trials: steps of one layout with one micro-batch, in processes that may run out of memory. Imports no torch.

Each trial starts a process for every rank and watches them all, so the search continues whatever becomes of them. On a
CPU they are forks of one process that has only imported modules. CUDA does not survive a fork, so on a GPU each process
starts afresh.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import secrets
import signal
import statistics
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import psutil

from ddpm_ds.command_line import gib
from ddpm_ds.errors import UserError, is_out_of_memory
from ddpm_ds.fit.task import Task, largest_fitting
from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.processes.ranks import RUN_SECRET, free_port
from ddpm_ds.processes.signals import heard_signals

POLL_SECONDS = 0.02
GRACE_SECONDS = 3.0
"""Seconds that the other ranks may continue after one has failed, since they may have answers of their own."""
KILL_SECONDS = 10.0
"""Maximum seconds to wait for a killed process to end; one that is stuck in a driver is left behind."""
LOG_CHARACTERS = 3000
"""Maximum number of characters that are shown from the end of a log."""


@dataclass(frozen=True)
class Answer:
    """Result of one process of a trial."""

    kind: Literal["done", "memory", "refused", "failed", "hung", "lost"]
    """``memory``: ran out of memory, or was killed; ``refused``: raised a UserError; ``hung``: took no step for too
    long; ``lost``: was ended because another process had failed.
    """
    words: str = ""
    """Reason for any other kind than ``done``."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of each timed step."""
    peak_bytes: int = 0
    checkpoint_interval: int = 0


@dataclass(frozen=True)
class TriedSize:
    """Result of a trial: all processes of a layout with one micro-batch."""

    micro_batch_images: int
    micro_batches: int
    batch_images: int
    fits: bool
    why: str
    """Reason why the micro-batch does not fit; empty if it does."""
    step_seconds: list[float]
    """Seconds of each timed step in its slowest process."""
    rank_peak_bytes: list[int]
    checkpoint_interval: int
    hung: bool = False
    """Whether it took no step for too long. This says nothing about memory, but larger sizes are not tried either."""

    @property
    def median_seconds(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.step_seconds)

    @property
    def images_per_second(self) -> float:
        """Images per second by the median step."""
        return self.batch_images / self.median_seconds

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the fullest process."""
        return max(self.rank_peak_bytes)


def search(task: Task, folder: Path) -> tuple[list[TriedSize], int | None]:
    """Run all trials; return them and, if not even the smallest micro-batch fits, the bytes it needs, if known.

    A trial that hangs counts as one that does not fit; the smallest one raises an error. No process is left running.

    Raises:
        UserError: training would refuse the run on this device, or the smallest micro-batch hangs.
        RuntimeError: a bug; the message has the output.
        KeyboardInterrupt: a signal asked the search to end.
    """
    trials: list[TriedSize] = []

    def fits(size: int) -> bool:
        trials.append(run_trial(task, size, task.budget_bytes, folder / f"trial-{len(trials)}"))
        print(line(trials[-1]), flush=True)
        return trials[-1].fits

    if largest_fitting(task.candidates, fits) is not None:
        return trials, None
    if trials[0].hung:
        which = f"micro-batch {task.candidates[0]} of layout {task.layout}"
        raise UserError(f"{which} {trials[0].why}; --hang-seconds waits longer")
    if task.most_bytes is None:
        return trials, None
    whole = run_trial(task, task.candidates[0], task.most_bytes, folder / "whole")
    return trials, max(whole.peak_bytes, trials[0].peak_bytes) if whole.fits else None


def line(trial: TriedSize) -> str:
    """Return the line printed when a trial is done."""
    size = f"  micro-batch {trial.micro_batch_images:<6}"
    if not trial.fits:
        return f"{size} {trial.why}" if trial.hung else f"{size} does not fit: {trial.why}"
    return f"{size} {trial.images_per_second:10,.4g} images/s, {gib(trial.peak_bytes)} in the fullest process"


def run_trial(task: Task, size: int, budget_bytes: int | None, folder: Path) -> TriedSize:
    """Run one trial in a new ``folder``.

    Raises:
        UserError, RuntimeError: it failed for a reason other than memory; see :func:`judge`.
        KeyboardInterrupt: a signal asked the search to end.
    """
    folder.mkdir(parents=True)
    plan = task.plan(size, folder)
    limit = budget_bytes if task.device == "cpu" else None  # on a GPU the allocator enforces the budget
    layout, ranks = plan.ds.layout, list[Rank]()
    world = {name: str(task.layout.processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), RUN_SECRET: secrets.token_hex()}
    until = math.inf
    with heard_signals() as heard:  # a signal must not interrupt the start of a process
        try:
            for number in range(task.layout.processes):
                own = {"RANK": str(number), "LOCAL_RANK": str(number)}
                ranks.append(Rank(task, plan, budget_bytes, world | own, folder / f"rank-{number}.log"))
            while None in (answers := [rank.look(task.hang_seconds, limit) for rank in ranks]):
                if heard:
                    raise KeyboardInterrupt
                if until == math.inf and any(answer and answer.kind != "done" for answer in answers):
                    until = time.monotonic() + GRACE_SECONDS
                for rank in ranks if time.monotonic() > until else ():
                    rank.answer = rank.answer or rank.end("lost", "ended, since another rank had failed")
                time.sleep(POLL_SECONDS)
        finally:
            for rank in ranks:
                rank.kill()
    told = [answer for answer in answers if answer]
    return judge(told, (size, layout.micro_batches, layout.batch_images), limit)


class Rank:
    """Process of one rank in a trial, as its watcher sees it; ``variables`` are added to its environment."""

    def __init__(
        self, task: Task, plan: RunPlan, budget_bytes: int | None, variables: dict[str, str], log: Path
    ) -> None:
        self.answer: Answer | None = None
        self._log, (self._pipe, theirs) = log, multiprocessing.Pipe(duplex=False)
        told = plan, task.device, budget_bytes, task.steps, task.hang_seconds
        self._process = _context(task.device).Process(target=take_part, args=(variables, log, theirs, *told))
        self._process.start()
        theirs.close()
        self._step_at = time.monotonic()

    def look(self, hang_seconds: float, limit: int | None) -> Answer | None:
        """Return the process's answer, if there is one; end it if it hangs or holds more than ``limit`` bytes."""
        if self.answer is not None:
            return self.answer
        ended = self._process.exitcode is not None  # read before the pipe, so that its last message is not missed
        with contextlib.suppress(EOFError, ConnectionError):  # it has ended without an answer
            while self.answer is None and self._pipe.poll():
                self._step_at, self.answer = time.monotonic(), self._pipe.recv()
        if self.answer is None and ended:
            self.answer = without_answer(self._process.exitcode or 0, self._log)
        elif self.answer is None and time.monotonic() - self._step_at > hang_seconds:
            self.answer = self.end("hung", f"no step for {hang_seconds:g} s")
        elif self.answer is None and limit is not None and self._held() > limit:
            self.answer = self.end("memory", f"took over {gib(limit)}")
        return self.answer

    def end(self, kind: Literal["memory", "hung", "lost"], words: str) -> Answer:
        """Kill the process, and return an answer in its place."""
        held = self._held()
        self.kill()
        return Answer(kind, words, peak_bytes=held)

    def kill(self) -> None:
        """Kill the process and all that it has started, such as compilers."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self._process.kill()
        self._process.join(KILL_SECONDS)

    def _held(self) -> int:
        with contextlib.suppress(psutil.Error):  # it has just ended
            process = psutil.Process(self._process.pid)
            return int(process.memory_info().rss) + _library_bytes(process.ppid())
        return 0


def _context(device: str) -> Any:
    """Return the multiprocessing context that starts the processes of trials."""
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ddpm_ds.fit.measure"])
    return context


def _library_bytes(parent: int) -> int:
    """Return the bytes of libraries that a forked process shares with its parent, and would otherwise hold itself."""
    return int(getattr(psutil.Process(parent).memory_info(), "shared", 0))


def take_part(
    variables: dict[str, str],
    log: Path,
    pipe: Connection[Any, Any],
    plan: RunPlan,
    device: str,
    budget_bytes: int | None,
    steps: int,
    hang_seconds: float,
) -> None:
    """Run one rank of a trial and end the process; send None after each step, and finally the answer."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    with contextlib.suppress(OSError):  # makes the kernel kill this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    from ddpm_ds.fit import measure

    try:
        seconds, peak_bytes, interval = measure.measure(
            plan, device, budget_bytes, steps, hang_seconds, lambda: pipe.send(None)
        )
        more = _library_bytes(os.getppid()) if device == "cpu" else 0
        answer = Answer("done", "", seconds, peak_bytes + more, interval)
    except UserError as error:
        answer = Answer("refused", str(error))
    except Exception as error:
        if is_out_of_memory(error):
            answer = Answer("memory", "ran out of memory")
        else:
            answer = Answer("failed", traceback.format_exc())
    pipe.send(answer)
    os._exit(0)  # an orderly exit might wait for other ranks


def without_answer(code: int, log: Path) -> Answer:
    """Return the answer for a process that ended without sending one."""
    printed = log.read_text(errors="replace")[-LOG_CHARACTERS:] if log.exists() else ""
    if code == -signal.SIGKILL:
        return Answer("memory", "was killed (SIGKILL)")
    if code == -signal.SIGABRT and "bad_alloc" in printed:
        return Answer("memory", "ran out of memory")
    return Answer("failed", f"ended with {code} and printed\n{printed}")


def judge(answers: Sequence[Answer], sizes: tuple[int, int, int], budget_bytes: int | None) -> TriedSize:
    """Combine the answers of all ranks; ``sizes`` are images per micro-batch, micro-batches, and images per batch.

    ``budget_bytes`` is the maximum that a process may hold; None if the device sets the limit.

    Raises:
        UserError: a process was refused.
        RuntimeError: a process failed.
    """
    peaks = [answer.peak_bytes for answer in answers]
    first = {answer.kind: rank for rank, answer in reversed(list(enumerate(answers)))}
    if "memory" in first:  # failures of other ranks may follow from this one
        why = f"rank {first['memory']} {answers[first['memory']].words}"
        return TriedSize(*sizes, False, why, [], peaks, 0)
    if "refused" in first:
        raise UserError(answers[first["refused"]].words)
    if "hung" in first:
        return TriedSize(*sizes, False, f"failed: {answers[first['hung']].words}", [], peaks, 0, hung=True)
    if set(first) != {"done"}:
        words = [f"rank {rank}: {one.words or one.kind}" for rank, one in enumerate(answers)]
        raise RuntimeError("\n".join([f"the trial of micro-batch {sizes[0]} failed", *words]))
    over = budget_bytes is not None and max(peaks) > budget_bytes
    return TriedSize(
        *sizes,
        fits=not over,
        why=f"rank {peaks.index(max(peaks))} took {gib(max(peaks))}" if over else "",
        step_seconds=[max(step) for step in zip(*(answer.seconds for answer in answers), strict=True)],
        rank_peak_bytes=peaks,
        checkpoint_interval=answers[0].checkpoint_interval,
    )
