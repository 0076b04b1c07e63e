"""One rank of two: train cases with a flops profile, a timeline and a kernel profile; the folded one without, too.

    python tests/observe/observed_worker.py CASES.json REPORT_FOLDER

A case has the ladder's ``case``; ``course``, the steps in the order in which the loop begins them; and the loader's
``loader_seconds`` for a micro-batch. The case ``broken`` ends amid its profiled steps. Files go to folders below
``REPORT_FOLDER/NAME``, what observers report to ``REPORT_FOLDER/rank{r}.json``.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpm_ds.config.ds_model import FlopsProfiler
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.observe.flops import FlopsProfile
from ddpm_ds.observe.kernels import KernelProfile
from ddpm_ds.observe.observer import Observer, Observers
from ddpm_ds.observe.timeline import Timeline
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.messages import Channel
from ddpm_ds.unet.layers import unet_layers
from tests.launching import tiny_spec
from tests.pipeline.batches import global_batch, micro_batches
from tests.pipeline.ladder_worker import Case, report_cases

SPEC = tiny_spec(unet={"multipliers": [1], "attention_resolutions": [], "dropout": 0.0})
"""One level, with attention in the middle, and without dropout: each operator is an event that a profile takes long to
read."""
LAYERS = unet_layers(SPEC.unet, SPEC.data.interface)
FLOPS_STEP, TRACED, PROFILED = 1, range(2, 4), range(5, 7)
SETTINGS = FlopsProfiler(enabled=True, profile_step=FLOPS_STEP, top_modules=2)


class Told:
    """A report that remembers what observers told it."""

    def __init__(self) -> None:
        self.logged: list[str] = []
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.artifacts: list[str] = []

    def log(self, line: str) -> None:
        self.logged.append(line)

    def observed(self, values: Mapping[str, float], step: int) -> None:
        self.metrics.append((step, dict(values)))

    def artifact(self, path: Path, folder: str = "") -> None:
        self.artifacts.append(f"{folder}/{path.name}")


def is_wrapped(engine: UnetPipelineEngine) -> bool:
    """Whether anything of the engine is not its own."""
    own = all(getattr(execute, "__self__", None) is engine for execute in engine.execute.values())
    return not own or engine.receive is not Channel.receive


def slow(batches: Iterator[MicroBatch], seconds: float) -> Iterator[MicroBatch]:
    for batch in batches:
        time.sleep(seconds)
        yield batch


def train(engine: UnetPipelineEngine, entry: dict[str, Any], observer: Observer) -> dict[str, Any]:
    """Train as the loop does: losses, and in which steps the engine was wrapped."""
    losses, wrapped, large = [], [], torch.zeros(8, 64, 32, 32)
    for step in entry["course"]:
        observer.begin_step(step)
        wrapped.append(is_wrapped(engine))
        batches = slow(micro_batches(engine, global_batch(SPEC, step)), entry["loader_seconds"])
        losses.append(engine.train_batch(batches if engine.reads_data else None).item())
        with observer.span("sampling"):
            torch.nn.functional.conv2d(large, torch.zeros(64, 64, 3, 3))
    return {"losses": losses, "wrapped": wrapped}


def run(entry: dict[str, Any]) -> dict[str, Any]:
    case, told, folder = Case(**entry["case"]), Told(), Path(sys.argv[-1]) / entry["name"]
    macs = sum(layer.macs for layer in LAYERS)
    expected = None
    if entry["name"] == "folded":
        plain = case.engine(SPEC)
        expected = train(plain, {**entry, "loader_seconds": 0.0}, Observer())
        plain.destroy()
    engine, wait = case.engine(SPEC), dist.Work.wait
    observers = Observers(
        [
            FlopsProfile(engine, LAYERS, SETTINGS, folder / "flops", told, steps=8),
            Timeline(engine, TRACED, folder / "trace", told, case.precision, macs),
            KernelProfile(engine, PROFILED, folder / "kernels", told),
        ]
    )
    found = train(engine, entry, observers)
    if entry["name"] != "broken":
        observers.finish()
        found["restored"] = (
            not is_wrapped(engine) and dist.Work.wait is wait and "swap" not in vars(engine.module.space)
        )
    engine.destroy()
    return {**found, **vars(told), "expected": expected}


if __name__ == "__main__":
    report_cases(run)
