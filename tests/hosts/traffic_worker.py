"""A rank that trains several layouts on the hosts, and stops before and after the steps whose bytes are counted.

    traffic_worker.py CASES.json FOLDER

Rank 0 writes what the plan of case n says into ``FOLDER/n.said`` when all ranks are about to begin, waits for
``FOLDER/n.go``, and writes ``FOLDER/n.done`` when all have ended.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.pipeline.build import build_engine, use_host_accelerator
from ddpm_ds.pipeline.placement import launched_hosts
from ddpm_ds.predict.plan import RunPlan, hosts_line, plan_run
from ddpm_ds.train.objective import Denoising
from ddpm_ds.train.resolve import decide

STEPS = 3


def micro_batches(plan: RunPlan) -> list[MicroBatch]:
    """Those of a replica and a step; which images they are makes no difference to their bytes."""
    data, layout = plan.spec.data, plan.ds.layout
    shape = (layout.micro_batch_images, data.channels, data.image_size, data.image_size)
    number = torch.arange(layout.micro_batch_images)
    one = MicroBatch(torch.zeros(shape, dtype=torch.uint8), torch.zeros_like(number), number)
    return [one] * layout.micro_batches


def train(case: dict[str, Any], folder: Path, number: int) -> None:
    """One layout: a step that is not counted, and some that are."""
    world_size = dist.get_world_size()
    plan = plan_run(
        Path(case["spec"]),
        case["overrides"],
        Path(case["config"]),
        world_size=world_size,
        stages=2,
        hosts=launched_hosts(world_size),
    )
    objective = Denoising(plan.spec, torch.device("cpu"))
    engine = build_engine(
        plan.layers, plan.bounds, decide(plan, torch.device("cpu")).ds, objective, seed=plan.spec.train.seed
    )
    engine.train_batch(iter(micro_batches(plan)))
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "writing").write_text(hosts_line(plan) or "")
        (folder / "writing").rename(folder / f"{number}.said")
        while not (folder / f"{number}.go").exists():
            time.sleep(0.01)
    dist.barrier()
    for _ in range(STEPS):
        engine.train_batch(iter(micro_batches(plan)))
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / f"{number}.done").touch()
    engine.destroy()


if __name__ == "__main__":
    use_host_accelerator()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for place, values in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        train(values, Path(sys.argv[2]), place)
    dist.barrier()
    dist.destroy_process_group()
