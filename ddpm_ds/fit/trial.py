"""What DeepSpeed's launcher starts once for a layout, in every process: the search, whose trials are children.

All ranks search alike. For each trial every rank starts a child, watches it and leaves its answer in a folder that all
share; from the answers of all, each draws the same conclusion. So a child may die of memory and the search goes on. On
a CPU a child is a fork of a rank that has imported everything and computed nothing; CUDA does not survive a fork, so
there a child starts afresh.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from ddpm_ds.command_line import gib
from ddpm_ds.fit.answer import Answer, TrialError, TriedSize, judge
from ddpm_ds.fit.child import STEPS, answer_trial
from ddpm_ds.fit.task import Task, largest_fitting
from ddpm_ds.processes.ranks import free_port, recorded, set_environment

POLL_SECONDS = 0.02
GRACE_SECONDS = 3.0
"""How long a child goes on when that of another rank has failed: it may have an answer of its own."""
KILL_SECONDS = 10.0
"""How long a process that was killed is waited for: one that is stuck in a driver stays."""
RESULT = "result.json"
LOG_CHARACTERS = 3000


class Trials:
    """The trials of one start, as one rank has part in them."""

    def __init__(self, task: Task, folder: Path, rank: int) -> None:
        self._task, self._folder, self._rank = task, folder, rank
        self._ranks = range(task.layout.processes)
        self._context = (
            multiprocessing.get_context("fork") if task.device == "cpu" else multiprocessing.get_context("spawn")
        )
        self._library_bytes = getattr(psutil.Process().memory_info(), "shared", 0) if task.device == "cpu" else 0
        self._count = 0
        self.done: list[TriedSize] = []

    def fits(self, size: int) -> bool:
        """Whether a micro-batch fits; kept in ``done``.

        Raises:
            TrialError: that can't be told.
        """
        trial = self.run(size, self._task.budget_bytes)
        self.done.append(trial)
        if self._rank == 0:
            print(line(trial), flush=True)
        return trial.fits

    def run(self, size: int, budget_bytes: int | None) -> TriedSize:
        """One trial; every rank calls this."""
        self._count += 1
        folder = self._folder / f"trial-{self._count}"
        folders = [folder / f"rank-{rank}" for rank in self._ranks]
        folders[self._rank].mkdir(parents=True)
        port = self._port(folder)
        own, log = folders[self._rank] / "own.json", folders[self._rank] / "log"
        child = self._context.Process(
            target=answer_trial, args=(self._task, size, budget_bytes, own, log, port, self._library_bytes)
        )
        child.start()
        paths = [one / "answer.json" for one in folders]
        others = [path for rank, path in enumerate(paths) if rank != self._rank]
        ended = self._watch(child, budget_bytes, own.with_name(STEPS), others)
        answer = ended or Answer.read(own) or _without_answer(child.exitcode or 0, log)
        answer.write(paths[self._rank])
        answers = [_wait_for(path) for path in paths]
        share = self._task.plan(size, folders[self._rank]).ds.layout
        return judge(answers, (size, share.micro_batches, share.batch_images), self._on_cpu(budget_bytes))

    def _on_cpu(self, budget_bytes: int | None) -> int | None:
        return budget_bytes if self._task.device == "cpu" else None

    def _port(self, folder: Path) -> int:
        """Where the children meet; rank 0 finds it."""
        path = folder / "port"
        if self._rank == 0:
            part = folder / "port.part"
            part.write_text(str(free_port()))
            os.replace(part, path)
        while not path.exists():
            time.sleep(POLL_SECONDS)
        return int(path.read_text())

    def _watch(
        self, child: BaseProcess, budget_bytes: int | None, steps: Path, others: Sequence[Path]
    ) -> Answer | None:
        """Wait for the child, or end it: when it holds too much, takes no step, or another rank's has failed."""
        budget, patience, process = self._on_cpu(budget_bytes), float("inf"), psutil.Process(child.pid)
        step, step_at, limit = _touched(steps), time.monotonic(), self._task.hang_seconds
        while True:
            child.join(POLL_SECONDS)
            if child.exitcode is not None:
                return None
            held = self._resident(process)
            if (last := _touched(steps)) != step:
                step, step_at = last, time.monotonic()
            if time.monotonic() - step_at > limit:
                return _end(child, Answer("hung", f"no step for {limit:g} s", peak_bytes=held))
            if budget is not None and held > budget:
                return _end(child, Answer("memory", f"took over {gib(budget)}", peak_bytes=held))
            if patience == float("inf") and any(
                answer is not None and answer.kind != "done" for answer in map(Answer.read, others)
            ):
                patience = time.monotonic() + GRACE_SECONDS
            if time.monotonic() > patience:
                return _end(child, Answer("lost", "ended, since another rank had failed", peak_bytes=held))

    def _resident(self, process: psutil.Process) -> int:
        try:
            return int(process.memory_info().rss) + self._library_bytes
        except psutil.Error:  # it has just ended
            return 0


def _end(child: BaseProcess, answer: Answer) -> Answer:
    """Kill a child and whatever it has started, such as compilers."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(child.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
    child.kill()
    child.join(KILL_SECONDS)
    return answer


def _touched(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _without_answer(code: int, log: Path) -> Answer:
    """What the end of a child means that has said nothing."""
    said = log.read_text(errors="replace")[-LOG_CHARACTERS:] if log.exists() else ""
    if code == -signal.SIGKILL:
        return Answer("memory", "was killed (SIGKILL)")
    if code == -signal.SIGABRT and "bad_alloc" in said:
        return Answer("memory", "ran out of memory")
    return Answer("failed", f"ended with {code} and said\n{said}")


def _wait_for(path: Path) -> Answer:
    while (answer := Answer.read(path)) is None:
        time.sleep(POLL_SECONDS)
    return answer


def line(trial: TriedSize) -> str:
    """A trial, as it is told when it is done."""
    size = f"  micro-batch {trial.micro_batch_images:<6}"
    if not trial.fits:
        return f"{size} {trial.why}" if trial.hung else f"{size} does not fit: {trial.why}"
    peak = gib(trial.peak_bytes)
    return f"{size} {trial.images_per_second:10,.4g} images/s, {peak} in the fullest process"


def search(task: Task, folder: Path, rank: int) -> dict[str, object]:
    """Search, and return what :func:`ddpm_ds.fit.report.Found` is read from.

    A trial that hangs is taken for one that does not fit; the smallest one ends the search.
    """
    trials = Trials(task, folder, rank)
    needs, failure, refused = None, None, False
    try:
        none_fits = largest_fitting(task.candidates, trials.fits) is None
        if none_fits and trials.done[0].hung:
            which = f"micro-batch {task.candidates[0]} of layout {task.layout}"
            failure, refused = f"{which} {trials.done[0].why}; --hang-seconds waits longer", True
        elif none_fits and task.most_bytes is not None:
            whole = trials.run(task.candidates[0], task.most_bytes)
            needs = max(whole.peak_bytes, trials.done[0].peak_bytes) if whole.fits else None
    except TrialError as error:
        failure, refused = str(error), error.refused
    return {
        "trials": [asdict(trial) for trial in trials.done],
        "needs_bytes": needs,
        "failure": failure,
        "refused": refused,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    folder = parser.parse_args(arguments).run_dir
    task, rank = Task.read(folder), int(os.environ["RANK"])
    os.environ["LOCAL_WORLD_SIZE"] = str(task.layout.processes)
    set_environment()
    if task.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        import ddpm_ds.fit.measure  # noqa: F401  # once, for all children
    result = search(task, folder, rank)
    if rank == 0:
        (folder / RESULT).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(recorded(main))
