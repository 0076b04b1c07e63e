"""One rank of several short runs with a planted fault each, traced and judged.

    python tests/experiments/fault_worker.py CASES.json FOLDER

A case is ``{"name", "config", "loader_seconds", "link_seconds"}``: the JSON,
how long the loader takes for a micro-batch, and a message to arrive. It becomes the folder of a run, ``FOLDER/name``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.diagnose.verdict import conclude
from ddpm_ds.observe.observer import Observers, PauseClock
from ddpm_ds.observe.timeline import Timeline
from ddpm_ds.pipeline.build import build_engine, use_host_accelerator
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.messages import Channel
from ddpm_ds.predict.plan import RunPlan, plan_run, stage_table
from ddpm_ds.processes.process_group import process_group
from ddpm_ds.tracking.recorder import Recorder
from ddpm_ds.train.objective import Denoising

STEPS = range(2, 4)
"""Traced; the first one warms up."""


def plan_of(case: dict[str, Any], folder: Path) -> RunPlan:
    config = folder / f"{case['name']}.json"
    if dist.get_rank() == 0:
        config.write_text(json.dumps(case["config"]))
    dist.barrier()
    return plan_run(folder / "spec.yaml", [], config, world_size=2, stages=None)


def write_run(plan: RunPlan, config: dict[str, Any], run_dir: Path) -> None:
    """The files of a run's folder that say what it is."""
    run_dir.mkdir()
    (run_dir / "spec.yaml").write_text(yaml.safe_dump(plan.spec.model_dump(mode="json")))
    (run_dir / "ds_config.json").write_text(json.dumps(config))
    (run_dir / "stages.txt").write_text(stage_table(plan) + "\n")


def loader(engine: UnetPipelineEngine, plan: RunPlan, seconds: float) -> Iterator[MicroBatch]:
    """Images of noise, each micro-batch after so many seconds."""
    images, data = engine.micro_batch_size, plan.spec.data
    number = 0
    while True:
        time.sleep(seconds)
        pixels = torch.randint(0, 256, (images, data.channels, data.image_size, data.image_size), dtype=torch.uint8)
        labels = torch.zeros(images, dtype=torch.int64)
        yield MicroBatch(pixels, labels, torch.arange(number * images, (number + 1) * images))
        number += 1


def run_case(case: dict[str, Any], folder: Path) -> None:
    plan, run_dir = plan_of(case, folder), folder / case["name"]
    objective = Denoising(plan.spec, torch.device("cpu"))
    engine = build_engine(plan.layers, plan.bounds, plan.ds, objective, seed=plan.spec.train.seed)
    if seconds := case.get("link_seconds"):
        receive = engine.receive

        def slow(channel: Channel) -> Any:
            time.sleep(seconds)
            return receive(channel)

        engine.receive = slow
    rank_0 = dist.get_rank() == 0
    if rank_0:
        write_run(plan, plan.ds.as_json(), run_dir)
    timeline = Timeline(
        engine, STEPS, run_dir / "trace", Recorder(), precision=plan.ds.precision, macs_per_image=plan.macs
    )
    observer = Observers((timeline, PauseClock(run_dir if rank_0 else None)))
    batches = loader(engine, plan, case.get("loader_seconds", 0.0)) if engine.reads_data else None
    for step in range(1, STEPS[-1] + 1):
        observer.begin_step(step)
        engine.train_batch(batches)
    observer.finish()
    if rank_0:
        assert conclude(run_dir, print) is not None
    dist.barrier()
    engine.destroy()


def main(cases: Path, folder: Path) -> None:
    use_host_accelerator()
    with process_group():
        for case in json.loads(cases.read_text()):
            run_case(case, folder)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[-2:]))
