"""What every rank has to know at a log point: the loss of the last stage, the waits and memory of all."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.train.meters import Interval, peak_memory_bytes, peak_reserved_bytes


@dataclass(frozen=True)
class Gathered:
    """An interval as all ranks see it."""

    interval: Interval
    """Loss over all replicas, images of the whole batch, the longest data wait and the slowest clock of all ranks."""
    stage_peak_memory_bytes: tuple[tuple[int, ...], ...]
    """Per stage and replica."""
    peak_reserved_bytes: int
    """The most that the allocator of one device has reserved; 0 on CPUs."""


def gather(interval: Interval, engine: UnetPipelineEngine) -> Gathered:
    """Combine the ranks' intervals; collective over all ranks, each gets the same answer.

    Only the stage with the last layer knows a loss; its replicas saw equal numbers of images.
    """
    mine = torch.tensor(
        [
            engine.stage_id,
            peak_memory_bytes(engine.device),
            interval.loss,
            interval.non_finite_steps,
            interval.data_wait_seconds,
            interval.seconds,
            peak_reserved_bytes(engine.device),
        ],
        dtype=torch.float64,
        device=engine.device,
    )
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    rows = torch.stack(everyone).tolist()
    last = [row for row in rows if row[0] == engine.loss_stage]
    combined = dataclasses.replace(
        interval,
        loss=sum(row[2] for row in last) / len(last),
        non_finite_steps=int(max(row[3] for row in last)),
        data_wait_seconds=max(row[4] for row in rows),
        seconds=max(row[5] for row in rows),
    )
    peaks = tuple(tuple(int(row[1]) for row in rows if row[0] == stage) for stage in range(engine.num_stages))
    return Gathered(combined, peaks, int(max(row[6] for row in rows)))
