"""A rank that trains several layouts and counts the bytes that its host sends: traffic_worker.py CASES.json.

The first rank of each host prints a line of JSON for each case: what the plan says, and the bytes of a step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from ddpm_ds.cli.plan import hosts_line
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.pipeline.build import build_engine, use_host_accelerator
from ddpm_ds.pipeline.placement import launched_hosts
from ddpm_ds.planning import RunPlan, decided, plan_run
from ddpm_ds.train.objective import Denoising

STEPS = 1
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def micro_batches(plan: RunPlan) -> list[MicroBatch]:
    """The micro-batches of a replica and a step; which images they are makes no difference to their bytes."""
    data, layout = plan.spec.data, plan.ds.layout
    shape = (layout.micro_batch_images, *data.shape)
    number = torch.arange(layout.micro_batch_images)
    one = MicroBatch(torch.zeros(shape, dtype=torch.uint8), torch.zeros_like(number), number)
    return [one] * layout.micro_batches


def train(case: dict[str, Any]) -> None:
    """Train one layout: a step that is not counted, and some that are."""
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
        plan.layers, plan.bounds, decided(plan, torch.device("cpu")).ds, objective, seed=plan.spec.train.seed
    )
    engine.train_batch(iter(micro_batches(plan)))
    dist.barrier()
    before = int(SENT.read_text())
    dist.barrier()
    for _ in range(STEPS):
        engine.train_batch(iter(micro_batches(plan)))
    dist.barrier()
    if os.environ["LOCAL_RANK"] == "0":
        print("counted " + json.dumps([hosts_line(plan), (int(SENT.read_text()) - before) / STEPS]), flush=True)
    dist.barrier()
    engine.destroy()


if __name__ == "__main__":
    use_host_accelerator()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for values in json.loads(Path(sys.argv[1]).read_text()):
        train(values)
    dist.barrier()
    dist.destroy_process_group()
