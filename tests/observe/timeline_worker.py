"""One rank: train with and without a timeline, and say what was seen of it.

    deepspeed --num_gpus 2 tests/observe/timeline_worker.py CASES.json REPORT_FOLDER

A case is ``{"stages", "schedule", "zero", "precision", "course", "steps", "loader_seconds"}``: the numbers of the steps
in the order in which the loop begins them, [first, last] of the traced ones, and how long the loader takes for a
micro-batch. Case n writes its trace into ``REPORT_FOLDER/n``. Rank r writes ``REPORT_FOLDER/rank{r}.json``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.observe.observer import Observer
from ddpm_ds.observe.timeline import Timeline
from ddpm_ds.pipeline.build import use_host_accelerator
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.messages import Channel
from ddpm_ds.processes.process_group import process_group
from ddpm_ds.unet.layers import unet_layers
from tests.launching import tiny_spec
from tests.pipeline.ladder_worker import Case

SPEC = tiny_spec()
LAYERS = unet_layers(SPEC.unet, image_channels=SPEC.data.channels, image_size=SPEC.data.image_size)
MACS = sum(layer.macs for layer in LAYERS)


class Told:
    """What an observer has reported."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.values: list[tuple[int, dict[str, float]]] = []
        self.artifacts: list[tuple[str, str]] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def observed(self, values: Mapping[str, float], step: int) -> None:
        self.values.append((step, dict(values)))

    def artifact(self, path: Path, folder: str = "") -> None:
        self.artifacts.append((path.name, folder))


def build(case: Case) -> UnetPipelineEngine:
    """A new engine, the same each time."""
    return case.engine(SPEC)


def loader(images: int, seconds: float) -> Iterator[MicroBatch]:
    """The same micro-batches each time, each after so many seconds."""
    shape = (images, SPEC.data.channels, SPEC.data.image_size, SPEC.data.image_size)
    number = 0
    while True:
        time.sleep(seconds)
        generator = torch.Generator().manual_seed(number)
        pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        labels = torch.randint(0, 10, (images,), generator=generator)
        yield MicroBatch(pixels, labels, torch.arange(number * images, (number + 1) * images))
        number += 1


def is_wrapped(engine: UnetPipelineEngine) -> bool:
    """Whether anything of the engine is not its own."""
    own = all(getattr(execute, "__self__", None) is engine for execute in engine.execute.values())
    return not own or engine.receive is not Channel.receive


def course(engine: UnetPipelineEngine, steps: list[int], observer: Observer, seconds: float) -> dict[str, Any]:
    """Train as the loop does: losses, and whether the engine was wrapped in each step."""
    batches = loader(engine.micro_batch_size, seconds) if engine.reads_data else None
    losses, wrapped = [], []
    for step in steps:
        observer.begin_step(step)
        wrapped.append(is_wrapped(engine))
        losses.append(engine.train_batch(batches).item())
        with observer.span("EMA"):
            time.sleep(0.001)
        with observer.span("inspection"):
            pass
    observer.finish()
    return {"losses": losses, "wrapped": wrapped, "wrapped_afterwards": is_wrapped(engine)}


def run_case(number: int, values: dict[str, Any], folder: Path) -> dict[str, Any]:
    case = Case(values["stages"], 2 // values["stages"], values["zero"], values["precision"], 0)
    case = Case(**{**vars(case), "schedule": values["schedule"]})
    engine = build(case)
    plain = course(engine, values["course"], Observer(), 0.0)
    engine.destroy()
    engine, told = build(case), Told()
    first, last = values["steps"]
    steps = range(first, last + 1)
    timeline = Timeline(engine, steps, folder / str(number), told, precision=values["precision"], macs_per_image=MACS)
    traced = course(engine, values["course"], timeline, values["loader_seconds"])
    engine.destroy()
    return {"plain": plain, "traced": traced} | vars(told)


def main(cases: Path, reports: Path) -> None:
    use_host_accelerator()
    with process_group():
        report = [run_case(number, case, reports) for number, case in enumerate(json.loads(cases.read_text()))]
        (reports / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[-2:]))
