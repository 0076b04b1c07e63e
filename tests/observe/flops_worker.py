"""One rank: train cases on a pipeline for a few steps, and profile the flops of the second one.

    deepspeed --num_gpus 2 tests/observe/flops_worker.py CASES.json REPORT_FOLDER

CASES.json holds a list of the arguments of the ladder's cases. What case i leaves is in ``REPORT_FOLDER/{i}``: the
profile's files, and ``report.json`` with what rank 0 was told of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddpm_ds.observe.flops import FlopsProfile
from ddpm_ds.pipeline.build import use_host_accelerator
from ddpm_ds.processes.process_group import process_group
from ddpm_ds.unet.layers import unet_layers
from tests.launching import tiny_spec, write_json
from tests.pipeline.ladder_worker import Case
from tests.predict.held_worker import micro_batches

STEPS = 3
SETTINGS = {"enabled": True, "profile_step": 2, "module_depth": -1, "top_modules": 2, "detailed": True}


class Told:
    """A report that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.artifacts: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def observed(self, values: Mapping[str, float], step: int) -> None:
        self.metrics.append((step, dict(values)))

    def artifact(self, path: Path, folder: str = "") -> None:
        self.artifacts.append(f"{folder}/{path.name}")


def profile(case: Case, folder: Path) -> None:
    spec = tiny_spec()
    layers = unet_layers(spec.unet, image_channels=spec.data.channels, image_size=spec.data.image_size)
    engine = case.engine(spec)
    report = Told()
    observer = FlopsProfile(engine, layers, SETTINGS, folder, report, steps=STEPS)
    batches: Any = micro_batches(spec, engine.micro_batch_size) if engine.reads_data else None
    for step in range(1, STEPS + 1):
        observer.begin_step(step)
        engine.train_batch(batches)
    observer.finish()
    if dist.get_rank() == 0:
        write_json(folder / "report.json", vars(report))


def main(cases: Path, reports: Path) -> None:
    use_host_accelerator()
    with process_group():
        for number, values in enumerate(json.loads(cases.read_text())):
            profile(Case(**values), reports / str(number))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[-2:]))
