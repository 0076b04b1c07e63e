"""The process that may die of memory: started for one trial by each rank of a layout. Light to import."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import traceback
from pathlib import Path

import psutil

from ddpm_ds.errors import UserError
from ddpm_ds.fit.answer import Answer
from ddpm_ds.fit.task import Task

STEPS = "steps"
"""File beside the answer that is touched after each step."""
SPARE_BYTES = 2**30
SPARE_BYTES_PER_CORE = 2**24
"""Writable memory beside the budget that is asked for and never touched: stacks and pools of threads."""


def answer_trial(
    task: Task, size: int, budget_bytes: int | None, own: Path, log: Path, port: int, library_bytes: int
) -> None:
    """Take part in a trial and leave the answer in ``own``; the process ends here.

    ``log`` gets what is printed; the ranks meet at ``port``; ``library_bytes`` are added to the peak: files that the
    parent has mapped and touched, which a process that had loaded them itself would hold, and a fork does not.
    """
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["MASTER_PORT"] = str(port)
    with contextlib.suppress(OSError):  # the kernel's first victim
        Path("/proc/self/oom_score_adj").write_text("1000")
    if task.device == "cpu" and budget_bytes is not None:
        limit_memory(budget_bytes)
    answer = _answer(task, size, budget_bytes, own)
    if answer.kind == "done":
        answer = dataclasses.replace(answer, peak_bytes=answer.peak_bytes + library_bytes)
    answer.write(own)
    os._exit(0)  # without what leaving in order would wait for


def _answer(task: Task, size: int, budget_bytes: int | None, own: Path) -> Answer:
    from ddpm_ds.fit import measure

    try:
        plan = task.plan(size, own.parent)
        progress = own.with_name(STEPS).touch
        return measure.measure(plan, task.device, budget_bytes, task.steps, task.hang_seconds, progress)
    except UserError as error:
        return Answer("refused", str(error))
    except Exception as error:
        if measure.is_out_of_memory(error):
            return Answer("memory", "ran out of memory")
        return Answer("failed", traceback.format_exc())


def limit_memory(budget_bytes: int) -> None:
    """Let this process ask for no more than a budget beyond what it has.

    A last resort: whoever watches the process ends it as soon as it holds more than the budget, but may come late.
    """
    with contextlib.suppress(AttributeError, OSError):  # neither is everywhere
        has = getattr(psutil.Process().memory_info(), "data", 0)
        limit = has + budget_bytes + SPARE_BYTES + (os.cpu_count() or 1) * SPARE_BYTES_PER_CORE
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
