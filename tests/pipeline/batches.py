"""The images of a step, those of them that are a rank's, and the device they are on."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

import torch
from deepspeed.accelerator import get_accelerator

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.pipeline.engine import UnetPipelineEngine


def device() -> torch.device:
    """The device of this process, as DeepSpeed's accelerator has it."""
    return torch.device(get_accelerator().current_device_name())


def global_batch(spec: RunSpec, step: int) -> MicroBatch:
    """The images of one step, as a function of the step."""
    batch = spec.train.batch_images
    generator = torch.Generator().manual_seed(step)
    shape = (batch, *spec.data.shape)
    return MicroBatch(
        images=torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device()),
        labels=torch.randint(0, 10, (batch,), generator=generator).to(device()),
        index=torch.arange(step * batch, (step + 1) * batch, device=device()),
    )


def micro_batches(engine: UnetPipelineEngine, batch: MicroBatch) -> Iterator[MicroBatch]:
    """The micro-batches of the engine's replica: one of each replica, then the next of each."""
    size, replicas = engine.micro_batch_size, engine.grid.get_data_parallel_world_size()
    for first in range(engine.grid.get_data_parallel_id() * size, len(batch.index), replicas * size):
        yield batch.each(itemgetter(slice(first, first + size)))
