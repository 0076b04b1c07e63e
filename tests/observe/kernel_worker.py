"""One rank that trains tiny cases while their kernels are profiled.

python tests/observe/kernel_worker.py CASES.json REPORT_FOLDER
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpm_ds.observe.kernels import KernelProfile
from tests.launching import tiny_spec
from tests.pipeline.batches import global_batch, micro_batches
from tests.pipeline.ladder_worker import Case, report_cases


class Kept:
    """A report that remembers, on every rank."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.values: list[tuple[dict[str, float], int]] = []
        self.files: list[tuple[str, str]] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def observed(self, values: Mapping[str, float], step: int) -> None:
        self.values.append((dict(values), step))

    def artifact(self, path: Path, folder: str = "") -> None:
        self.files.append((path.name, folder))


SPEC = tiny_spec(unet={"dropout": 0.0})
"""Keyed dropout is most of a tiny U-Net's operators."""


def run(entry: dict[str, Any]) -> dict[str, Any]:
    """Train the entry's steps in their order, as a loop does that is rewound; what was reported, and seconds.

    An entry that does not finish is a run that ends amid its steps.
    """
    case = Case(**entry["case"])
    engine, kept, wait = case.engine(SPEC), Kept(), dist.Work.wait
    executes = dict(engine.execute)
    first, last = entry["profile"]
    profile = KernelProfile(engine, range(first, last + 1), Path(sys.argv[-1]) / entry["name"], kept)
    large = torch.zeros(32, 64, 32, 32)
    seconds = []
    for step in entry["steps"]:
        profile.begin_step(step)
        begin = time.perf_counter()
        engine.train_batch(micro_batches(engine, global_batch(SPEC, step)))
        with profile.span("EMA"):
            large.lerp_(large, 0.5)
        seconds.append(time.perf_counter() - begin)
        with profile.span("inspection"):
            torch.nn.functional.conv2d(large, torch.zeros(64, 64, 3, 3))
    if entry["finishes"]:
        profile.finish()
    restored = executes == engine.execute and dist.Work.wait is wait
    engine.destroy()
    return {
        "said": kept.said,
        "values": kept.values,
        "files": kept.files,
        "seconds": seconds,
        "restored": restored,
    }


if __name__ == "__main__":
    report_cases(run)
