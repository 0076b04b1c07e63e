"""The search of each layout, in processes that DeepSpeed's launcher starts and nothing outlives. No torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpm_ds.command_line import gib
from ddpm_ds.errors import EXIT_PREEMPTED, UserError
from ddpm_ds.fit.answer import TriedSize
from ddpm_ds.fit.report import Found
from ddpm_ds.fit.task import Task, TrialLayout
from ddpm_ds.fit.trial import LOG_CHARACTERS, RESULT
from ddpm_ds.processes.ranks import free_port
from ddpm_ds.processes.supervisor import supervise

PROGRAM = "ddpm_ds.fit.trial"
"""The module that the launcher starts."""
GRACE_SECONDS = 5.0


def search(tasks: Sequence[Task], folder: Path) -> tuple[list[Found], dict[TrialLayout, int]]:
    """What each layout's start found, and what the smallest micro-batch of those needs that found nothing."""
    found, needs = [], {}
    for task in tasks:
        print(f"{task.layout.words()}", flush=True)
        own = folder / str(task.layout)
        own.mkdir()
        result = start(task, own)
        trials = sorted((TriedSize(**trial) for trial in result["trials"]), key=lambda trial: trial.micro_batch_images)
        if trials[0].fits:
            found.append(Found(task.layout, tuple(trials), is_limit=trials[-1].fits))
        elif result["needs_bytes"] is not None:
            needs[task.layout] = result["needs_bytes"]
            print(f"  micro-batch {trials[0].micro_batch_images} needs {gib(needs[task.layout])}", flush=True)
    return found, needs


def start(task: Task, folder: Path) -> dict[str, Any]:
    """Start DeepSpeed's launcher with the processes of a layout; returns what they found. Leaves nothing running.

    Raises:
        UserError: training would refuse the run on this device.
        RuntimeError: a bug; with what was printed.
        KeyboardInterrupt: a signal asked for an end.
    """
    task.write(folder)
    options = ["--quiet", "--hostfile", os.devnull, "--num_gpus", str(task.layout.processes)]
    options += ["--master_port", str(free_port()), "--module", PROGRAM, "--run-dir", str(folder)]
    sys.stdout.flush()
    code = supervise(options, max_restarts=0, grace_seconds=GRACE_SECONDS, log=lambda line: None)
    if code == EXIT_PREEMPTED or code > 128:
        raise KeyboardInterrupt
    if code or not (folder / RESULT).exists():
        logs = [path.read_text(errors="replace")[-LOG_CHARACTERS:] for path in sorted(folder.glob("*/*/log"))]
        raise RuntimeError(f"the trials of {task.layout} ended with exit code {code}\n" + "\n".join(logs))
    result: dict[str, Any] = json.loads((folder / RESULT).read_text())
    if result["refused"]:
        raise UserError(result["failure"])
    if result["failure"]:
        raise RuntimeError(f"a trial of {task.layout} failed\n{result['failure']}")
    return result
