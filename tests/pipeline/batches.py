"""Images of a step, a rank's micro-batches of them, and their device."""

from collections.abc import Iterator
from operator import itemgetter

import torch
from deepspeed.accelerator import get_accelerator

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.data.statistics import Statistics
from ddpm_ds.diffusion.condition import Encoded
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.training.objective import Denoising
from ddpm_ds.unet.layers import SIZES


def device() -> torch.device:
    """The device of this process, as DeepSpeed's accelerator has it."""
    return torch.device(get_accelerator().current_device_name())


STATISTICS = {
    "images": Statistics(mean=(5.0, -1.0), std=(2.0, 0.5), low=(0.0, -2.0), high=(9.0, 0.0)),
    "condition": Statistics(mean=(0.5,) * 3, std=(0.3,) * 3, low=(0.0,) * 3, high=(1.0, 2.0, 0.5)),
}
"""Statistics of the fields of :func:`global_batch`."""


def objective_of(spec: RunSpec) -> Denoising:
    """The objective of a spec, with constants and an empty caption if it has any."""
    constants = None
    if spec.data.condition is not None and spec.data.condition.constants:
        shape = (spec.data.condition.constant_channels, *spec.data.stored_size)
        constants = torch.rand(shape, generator=torch.Generator().manual_seed(7)).numpy()
    empty, text = None, spec.unet.text
    if text is not None:
        generator = torch.Generator().manual_seed(8)
        tokens = torch.randn(1, text.tokens, text.context_channels, generator=generator)
        empty = Encoded(tokens, torch.randn(1, text.pooled_channels or 0, generator=generator))
    return Denoising(spec, device(), STATISTICS, constants, empty)


BUCKETS = ((8, 8), (4, 16), (8, 6))
"""Heights and widths of images in buckets of aspect, of unequal areas, so that messages differ."""
GROUP = 4
"""Consecutive images of a bucket."""


def bucket_at(index: int) -> int:
    """The bucket of an image index."""
    return index // GROUP * 2 % len(BUCKETS)


def in_bucket(batch: MicroBatch) -> MicroBatch:
    """A micro-batch of 8x8 pixels, made smaller to the size of its bucket: the first pixels of each image."""
    height, width = BUCKETS[bucket_at(int(batch.index[0]))]
    pixels = batch.images.flatten(2)[:, :, : height * width]
    return batch._replace(images=pixels.unflatten(2, (height, width)))


def images_of(spec: RunSpec, batch: MicroBatch) -> list[MicroBatch]:
    """Each image of a step alone, of the size of its bucket."""
    images = [batch.each(itemgetter(slice(first, first + 1))) for first in range(len(batch.index))]
    return images if spec.data.buckets is None else [in_bucket(image) for image in images]


def global_batch(spec: RunSpec, step: int) -> MicroBatch:
    """The images of one step with all that belongs to them, as a function of the step."""
    batch, data, condition = spec.train.batch_images, spec.data, spec.data.condition
    generator = torch.Generator().manual_seed(step)
    shape = (batch, *data.shape)
    fields = torch.float16 if data.values == "float16" else torch.float32
    images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    whole = MicroBatch(
        images=torch.randn(shape, generator=generator).to(fields) if data.are_fields else images,
        labels=torch.randint(0, 10, (batch,), generator=generator),
        index=torch.arange(step * batch, (step + 1) * batch),
    )
    if data.autoencoder is not None:
        whole = whole._replace(images=torch.randn(shape, generator=generator).half())
        if data.condition_is_stored:
            given = torch.randn(batch, data.interface.condition_channels, *data.size, generator=generator)
            whole = whole._replace(condition=given.half())
    elif condition is not None and condition.kind == "stored":
        coarse = (batch, condition.channels, *(side // 2 for side in data.size))
        whole = whole._replace(condition=torch.rand(coarse, generator=generator))
    if condition is not None and condition.vector_size:
        whole = whole._replace(vector=torch.randn(batch, condition.vector_size, generator=generator))
    if data.mask is not None:
        mask = torch.rand(batch, 1, *data.size, generator=generator) < 0.7
        mask[1] = False  # nothing counts in an image of each step
        grey = torch.randint(1, 256, mask.shape, generator=generator) if data.autoencoder is not None else 1
        whole = whole._replace(mask=(mask * grey).to(torch.uint8))
    if any(source.loss_weight != 1 for source in data.sources):
        whole = whole._replace(weight=torch.rand(batch, generator=generator))
    if (text := spec.unet.text) is not None:
        tokens = torch.randn(batch, text.tokens, text.context_channels, generator=generator)
        whole = whole._replace(
            text=tokens.half(),
            pooled=torch.randn(batch, text.pooled_channels or 0, generator=generator).half(),
            sizes=torch.randint(0, 1024, (batch, SIZES), generator=generator).float(),
        )
    return whole.each(lambda tensor: tensor.to(device()))


def micro_batches(engine: UnetPipelineEngine, batch: MicroBatch) -> Iterator[MicroBatch]:
    """The micro-batches of the engine's replica, one of each replica, then the next of each, with what the rank reads:
    a condition on the first stage, a mask on the last, text wherever it is used.
    """
    size, replicas = engine.micro_batch_size, engine.replicas
    if not engine.is_first_stage():
        batch = batch._replace(condition=None, vector=None, pooled=None, sizes=None)
    if engine.stage_id != engine.loss_stage:
        batch = batch._replace(mask=None)
    if engine.stage_id not in (0, engine.loss_stage):
        batch = batch._replace(images=batch.images.new_empty(len(batch.index), 0))
    if not engine.readers:
        batch = batch._replace(text=None)
    for first in range(engine.replica * size, len(batch.index), replicas * size):
        part = batch.each(itemgetter(slice(first, first + size)))
        sized = len(engine.module.sized_layers) > 1 and part.images.numel()
        yield in_bucket(part) if sized else part
