"""Program that DeepSpeed's launcher starts once for a layout, in every process: the search, whose trials are children.

All ranks search alike. For each trial every rank starts a child, watches it and writes its answer into a shared folder;
from the answers of all, each draws the same conclusion. So a child may run out of memory and the search continues. On a
CPU a child is a fork of a rank that has imported everything and computed nothing; CUDA does not survive a fork, so
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
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from ddpm_ds.command_line import gib
from ddpm_ds.files import replace_file
from ddpm_ds.fit.child import Answer, TrialError, TriedSize, answer_trial, judge
from ddpm_ds.fit.task import LOG_CHARACTERS, RESULT, TASK, Task, largest_fitting
from ddpm_ds.processes.ranks import free_port, recorded, set_environment

POLL_SECONDS = 0.02
GRACE_SECONDS = 3.0
"""Seconds that a child may continue when that of another rank has failed: it may have an answer of its own."""
KILL_SECONDS = 10.0
"""Seconds to wait for a killed process to end; one that is stuck in a driver stays."""


class Trials:
    """Trials of one layout, as one rank takes part in them."""

    def __init__(self, task: Task, folder: Path, rank: int) -> None:
        self._task, self._folder, self._rank = task, folder, rank
        on_cpu = task.device == "cpu"
        self._context: Any = multiprocessing.get_context("fork" if on_cpu else "spawn")
        self._library_bytes = getattr(psutil.Process().memory_info(), "shared", 0) if on_cpu else 0
        self._count = 0
        self.done: list[TriedSize] = []

    def fits(self, size: int) -> bool:
        """Return whether a micro-batch fits; the trial is kept in ``done``.

        Raises:
            TrialError: the trial failed for another reason than memory.
        """
        trial = self.run(size, self._task.budget_bytes)
        self.done.append(trial)
        if self._rank == 0:
            print(line(trial), flush=True)
        return trial.fits

    def run(self, size: int, budget_bytes: int | None) -> TriedSize:
        """Run one trial; every rank calls this."""
        self._count += 1
        folder = self._folder / f"trial-{self._count}"
        folders = [folder / f"rank-{rank}" for rank in range(self._task.layout.processes)]
        own, answers = folders[self._rank], [one / "answer.json" for one in folders]
        own.mkdir(parents=True)
        if self._rank == 0:
            replace_file(folder / "port", str(free_port()).encode())
        port, (ours, theirs) = wait_for(folder / "port"), self._context.Pipe(duplex=False)
        child = self._context.Process(
            target=answer_trial, args=(self._task, size, budget_bytes, own, port, self._library_bytes, theirs)
        )
        child.start()
        theirs.close()
        limit = budget_bytes if self._task.device == "cpu" else None  # a GPU refuses by itself
        others = [path for rank, path in enumerate(answers) if rank != self._rank]
        answer = self._watch(child, ours, own / "log", limit, others)
        replace_file(answers[self._rank], json.dumps(asdict(answer)).encode())
        layout = self._task.plan(size, own).ds.layout
        found = [Answer(**wait_for(path)) for path in answers]
        return judge(found, (size, layout.micro_batches, layout.batch_images), limit)

    def _watch(
        self, child: BaseProcess, pipe: Connection[Any, Any], log: Path, limit: int | None, others: Sequence[Path]
    ) -> Answer:
        """Wait for the child's answer, or end it: when it holds too much, takes no step, or another rank's failed."""
        process, step_at, patience = psutil.Process(child.pid), time.monotonic(), float("inf")
        while True:
            ended = child.exitcode is not None  # before the last look at what it has sent
            child.join(POLL_SECONDS)
            with contextlib.suppress(EOFError, ConnectionError):  # it has ended without an answer
                while pipe.poll():
                    if (answer := pipe.recv()) is not None:
                        child.join(KILL_SECONDS)
                        return answer
                    step_at = time.monotonic()
            if ended:
                return without_answer(child.exitcode or 0, log)
            held = self._resident(process)
            now, patient = time.monotonic(), self._task.hang_seconds
            if now - step_at > patient:
                return _end(child, Answer("hung", f"no step for {patient:g} s", peak_bytes=held))
            if limit is not None and held > limit:
                return _end(child, Answer("memory", f"took over {gib(limit)}", peak_bytes=held))
            if patience == float("inf") and any(path.exists() and wait_for(path)["kind"] != "done" for path in others):
                patience = now + GRACE_SECONDS
            if now > patience:
                return _end(child, Answer("lost", "ended, since another rank had failed", peak_bytes=held))

    def _resident(self, process: psutil.Process) -> int:
        try:
            return int(process.memory_info().rss) + self._library_bytes
        except psutil.Error:  # it has just ended
            return 0


def _end(child: BaseProcess, answer: Answer) -> Answer:
    """Kill a child and all processes that it has started, such as compilers."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(child.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
    child.kill()
    child.join(KILL_SECONDS)
    return answer


def without_answer(code: int, log: Path) -> Answer:
    """Return the answer for a child that ended without sending one."""
    printed = log.read_text(errors="replace")[-LOG_CHARACTERS:] if log.exists() else ""
    if code == -signal.SIGKILL:
        return Answer("memory", "was killed (SIGKILL)")
    if code == -signal.SIGABRT and "bad_alloc" in printed:
        return Answer("memory", "ran out of memory")
    return Answer("failed", f"ended with {code} and printed\n{printed}")


def wait_for(path: Path) -> Any:
    """Return what another rank has written, once it has."""
    while not path.exists():
        time.sleep(POLL_SECONDS)
    return json.loads(path.read_text())


def line(trial: TriedSize) -> str:
    """Return the line printed when a trial is done."""
    size = f"  micro-batch {trial.micro_batch_images:<6}"
    if not trial.fits:
        return f"{size} {trial.why}" if trial.hung else f"{size} does not fit: {trial.why}"
    return f"{size} {trial.images_per_second:10,.4g} images/s, {gib(trial.peak_bytes)} in the fullest process"


def search(task: Task, folder: Path, rank: int) -> dict[str, object]:
    """Search, and return the results for :meth:`ddpm_ds.fit.task.Task.start`.

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
    found = [asdict(trial) for trial in trials.done]
    return {"trials": found, "needs_bytes": needs, "failure": failure, "refused": refused}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    folder = parser.parse_args(arguments).run_dir
    task, rank = Task.model_validate_json((folder / TASK).read_text()), int(os.environ["RANK"])
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
