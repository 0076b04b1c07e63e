"""Samples while training, drawn through the pipeline: replicas share the images, stages share the U-Net."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ddpm_ds.diffusion.drawing import Drawing
from ddpm_ds.diffusion.samplers import Sampler
from ddpm_ds.keyed import SAMPLE_SEED
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.forward import ForwardPipeline
from ddpm_ds.spec import RunSpec
from ddpm_ds.train.watchdog import Watchdog


def draw_previews(spec: RunSpec, engine: UnetPipelineEngine, watchdog: Watchdog) -> Tensor | None:
    """The first ``samples.count`` images of the sampler, uint8 (count, C, H, W) on rank 0's CPU; None elsewhere.

    They are those of ``ddpm-ds sample`` with its own seed. Collective over all ranks.
    """
    sampler, count, replicas = Sampler(spec.sampler, spec.diffusion), spec.samples.count, engine.dp_world_size
    # as many micro-batches as keep all stages at work, each no larger than those of training
    images = max(1, min(engine.micro_batch_size, math.ceil(count / (replicas * engine.num_stages))))
    rounds = math.ceil(count / (replicas * images))
    replica = engine.grid.get_data_parallel_id()
    drawings = []
    if engine.is_first_stage():
        firsts = [(number * replicas + replica) * images for number in range(rounds)]
        drawings = [_drawing(spec, sampler, first, images, engine.device) for first in firsts]
    ForwardPipeline(engine, images * (2 if spec.sampler.guides else 1)).run(
        rounds * len(sampler.timesteps),
        lambda number: drawings[number % rounds].inputs(),
        lambda number, prediction: drawings[number % rounds].take(prediction),
        depth=rounds,
        progress=watchdog.progress,
    )
    if not engine.is_first_stage():
        return None
    mine = torch.stack([drawing.images() for drawing in drawings])  # (rounds, images, C, H, W)
    everyone = [torch.empty_like(mine) for _ in range(replicas)]
    dist.all_gather(everyone, mine, group=engine.grid.get_data_parallel_group())
    drawn = torch.stack(everyone, dim=1).flatten(0, 2)[:count].cpu()  # in the order of their index
    return drawn if dist.get_rank() == 0 else None


def _drawing(spec: RunSpec, sampler: Sampler, first: int, images: int, device: torch.device) -> Drawing:
    index = torch.arange(first, first + images, device=device)
    classes = spec.unet.classes
    return Drawing(
        sampler,
        seed=SAMPLE_SEED,
        index=index,
        shape=(spec.data.channels, spec.data.image_size, spec.data.image_size),
        labels=None if classes is None else index % classes,
        guidance=spec.sampler.guidance,
        no_label=classes,
    )
