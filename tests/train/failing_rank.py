"""launch/train.py in which the last rank alone meets a fault, while the others go on and wait for it.

FAULT=checkpoint: a file of the checkpoint that it reads is shorter than when it was verified
FAULT=loader: its images can't be read any more
FAULT=disk: from its first micro-batch on no file may grow beyond a few bytes, as on a full disk
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from ddpm_ds.checkpoint.union import CompleteCheckpoint
from ddpm_ds.cli import train as command
from ddpm_ds.processes.ranks import recorded
from ddpm_ds.train import objective
from ddpm_ds.train import saving as state

MICRO_BATCHES = 5
"""Read before the images are gone."""
MOST_BYTES = 2**14  # more than the ranks print, less than they save
deliver, micro_batches = state.deliver, objective.micro_batches


def deliver_truncated(whole: CompleteCheckpoint, *arguments: Any, **options: Any) -> Any:
    """Instead of :func:`ddpm_ds.checkpoint.delivery.deliver`."""
    damaged = whole.path.with_name(f".damaged-{whole.path.name}")
    shutil.copytree(whole.path, damaged)
    for file in damaged.glob("*.safetensors"):
        os.truncate(file, file.stat().st_size // 2)
    return deliver(dataclasses.replace(whole, path=damaged), *arguments, **options)


def micro_batches_until_lost(*arguments: Any, **options: Any) -> Iterator[Any]:
    """Instead of :func:`ddpm_ds.data.loader.micro_batches`."""
    yield from itertools.islice(micro_batches(*arguments, **options), MICRO_BATCHES)
    raise OSError("the images are gone")


def micro_batches_on_a_full_disk(*arguments: Any, **options: Any) -> Iterator[Any]:
    """Instead of :func:`ddpm_ds.data.loader.micro_batches`."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))
    yield from micro_batches(*arguments, **options)


FAULTS = {"loader": micro_batches_until_lost, "disk": micro_batches_on_a_full_disk}

if __name__ == "__main__":
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        if os.environ["FAULT"] == "checkpoint":
            state.deliver = deliver_truncated
        else:
            objective.micro_batches = FAULTS[os.environ["FAULT"]]
    sys.exit(recorded(command.main))
