"""launch/train.py with a fault; what only the last rank meets, the others wait for.

FAULT="noise FIRST LAST FACTOR": the noise of the images FIRST to LAST is multiplied by FACTOR, on all ranks
FAULT=checkpoint: a file of the checkpoint that the last rank reads is shorter than when it was verified
FAULT=loader: its images can't be read any more
FAULT=disk: from its first micro-batch on no file may grow beyond a few bytes, as on a full disk
FAULT=reports: each report of the run has an error of the program
FAULT=drawing: no first weight can be drawn
FAULT=signals: every stop signal comes at each of ENDINGS, on all ranks
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ddpm_ds.checkpoint.folder import CompleteCheckpoint
from ddpm_ds.cli import train as command
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.observe import observer, timeline
from ddpm_ds.planning import verdict
from ddpm_ds.processes import ranks
from ddpm_ds.processes.signals import STOP_SIGNALS
from ddpm_ds.tracking import progress, recorder
from ddpm_ds.tracking.tracker import Tracker
from ddpm_ds.training import objective
from ddpm_ds.training.objective import Denoising, Noised
from ddpm_ds.training.saving import Saver
from ddpm_ds.unet import operations

REPORTS = [
    (timeline, "timeline_metrics"),
    (observer, "read_pauses"),
    (verdict, "conclude"),
    (recorder, "write_animation"),
    (progress, "summary"),
]
ENDINGS: list[tuple[Any, str]] = [
    (Saver, "check_saved"),
    (observer, "read_pauses"),
    (verdict, "conclude"),
    (Tracker, "finish"),
    (progress, "summary"),
    (dist, "destroy_process_group"),
    (ranks, "record_exit"),
]
"""What a rank does from the last save on; then Python ends."""
MICRO_BATCHES = 5
"""Read before the images are gone."""
MOST_BYTES = 2**14  # more than the ranks print, less than they save
IS_LAST = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
load, micro_batches, prepare = Saver.load, objective.micro_batches, Denoising.prepare


def load_truncated(self: Saver, whole: CompleteCheckpoint) -> None:
    damaged = whole.path.with_name(f".damaged-{whole.path.name}")
    shutil.copytree(whole.path, damaged)
    for file in damaged.glob("*.safetensors"):
        os.truncate(file, file.stat().st_size // 2)
    load(self, dataclasses.replace(whole, path=damaged))


def micro_batches_until_lost(*arguments: Any, **options: Any) -> Iterator[Any]:
    yield from itertools.islice(micro_batches(*arguments, **options), MICRO_BATCHES)
    raise OSError("the images are gone")


def micro_batches_on_a_full_disk(*arguments: Any, **options: Any) -> Iterator[Any]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))
    yield from micro_batches(*arguments, **options)


def failing(name: str) -> Callable[..., NoReturn]:
    def fail(*arguments: Any, **options: Any) -> NoReturn:
        raise ZeroDivisionError(f"of {name}")

    return fail


def send_signals(where: str) -> None:
    print(f"signals at {where}", flush=True)
    for number in STOP_SIGNALS:
        os.kill(os.getpid(), number)


def signalled(owner: Any, name: str) -> Callable[..., Any]:
    original = getattr(owner, name)

    def signalled(*arguments: Any, **options: Any) -> Any:
        send_signals(name)
        return original(*arguments, **options)

    return signalled


if __name__ == "__main__":
    fault, *numbers = os.environ["FAULT"].split()
    if fault == "noise":
        first, last, factor = map(float, numbers)

        def planted(self: Denoising, micro_batch: MicroBatch) -> Noised:
            prepared = prepare(self, micro_batch)
            bad = (micro_batch.index >= first) & (micro_batch.index <= last)
            return prepared._replace(eps=torch.where(bad[:, None, None, None], prepared.eps * factor, prepared.eps))

        Denoising.prepare = planted  # type: ignore[method-assign]
    elif fault == "reports":
        for owner, name in REPORTS:
            setattr(owner, name, failing(name))
    elif fault == "drawing":
        operations.draw_weights = failing("drawing")
    elif fault == "signals":
        for owner, name in ENDINGS:
            setattr(owner, name, signalled(owner, name))
        atexit.register(send_signals, "exit")
    elif IS_LAST and fault == "checkpoint":
        Saver.load = load_truncated  # type: ignore[method-assign, assignment]
    elif IS_LAST:
        objective.micro_batches = {"loader": micro_batches_until_lost, "disk": micro_batches_on_a_full_disk}[fault]
    if fault in ("noise", "disk"):  # all ranks end with one line, which a launcher shows once
        ranks.OTHERS_WAIT_SECONDS = 0.0
    sys.exit(ranks.recorded(command.main, stoppable=True))
