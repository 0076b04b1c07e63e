"""Sampling and validation while training: pictures, and the loss on images that are never trained on.

Both use the averaged weights and run through the pipeline: replicas share the images, stages share the U-Net.
"""

import re
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ddpm_ds.config.choices import OBJECTIVES
from ddpm_ds.config.spec import HELD_OUT_QUANTILES, DataSpec, RunSpec
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.loader import Indices, MicroBatch
from ddpm_ds.data.text import TextEncoders, widened
from ddpm_ds.diffusion.levels import levels_of
from ddpm_ds.diffusion.process import mean_error
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.forward import ForwardPipeline
from ddpm_ds.processes.watchdog import Watchdog
from ddpm_ds.tracking.recorder import Recorder
from ddpm_ds.train.ema import Ema
from ddpm_ds.train.meters import is_due
from ddpm_ds.train.objective import Denoising, Noised, encoded, fields_read
from ddpm_ds.train.previews import Previews
from ddpm_ds.unet.blocks import Carry

NOISE_SEED = 0
"""Seed of the noise, independent of the run's seed: runs are compared on the same noise."""


class _Part(NamedTuple):
    """Held-out images that are one micro-batch."""

    store: DatasetCache
    """Cache in which they are, of one size of images."""
    size: int
    """Number of this size in the engine."""
    positions: Indices
    """Their positions there, (n,)."""
    places: Indices
    """Their places among all held-out images, (n,)."""
    counts: npt.NDArray[np.float64]
    """1 for each, or 0 for images that fill it up, (n,)."""


class HeldOutLoss:
    """Loss of an engine on the ``positions`` of a data-set cache, on the centres of images that are cropped in
    training, and of buckets of aspect at the size of each; only first stages read images and what belongs to them, and
    text the ranks whose layers read it, which ``encoders`` encode if it is stored as the numbers of its tokens.
    """

    def __init__(
        self,
        spec: RunSpec,
        engine: UnetPipelineEngine,
        store: DatasetCache,
        positions: Indices,
        encoders: TextEncoders | None = None,
    ) -> None:
        self._engine, self._count, self._encoders = engine, len(positions), encoders
        self._objective = Denoising(spec, engine.device, store.meta.statistics, store.constants, seed=NOISE_SEED)
        levels, diffuses = levels_of(spec.diffusion), OBJECTIVES[spec.diffusion.objective].diffuses
        self._quantiles = {
            quantile: levels.quantile(quantile) for quantile in HELD_OUT_QUANTILES[:: 1 if diffuses else 9]
        }
        """Timestep or noise level, and stream of the noise, of each percentile; all are one in a regression."""
        self._fields = sorted(fields_read(spec, first=True, last=True, text=False))
        self._text_fields = sorted(fields_read(spec, first=False, last=False, text=True))
        self._channels = channel_names(spec.data)
        self._images = min(engine.micro_batch_size, len(positions))
        self._parts = list(self._micro_batches(spec, store, positions))
        self._noised: dict[int, tuple[Noised, Tensor]] = {}

    def measure(self, watchdog: Watchdog) -> dict[str, float]:
        """Return ``eval/loss``, which is the mean of ``validation/loss_t10`` to ``loss_t90``, and these; a regression
        has the first alone. Fields and latents also have ``validation/loss_channel_NAME`` of each channel.

        They are the distance that training minimises, without flips, dropped conditions, weights and perturbed inputs,
        so that runs which differ in those can be compared. Masked pixels don't count.

        The replicas share the work, by quantile and part of the images. Collective over all ranks; all first stages get
        the numbers, the others an empty dictionary.
        """
        engine, replicas = self._engine, self._engine.dp_world_size
        parts = len(self._parts)
        quantiles = list(self._quantiles)
        mine = range(engine.grid.get_data_parallel_id(), len(quantiles) * parts, replicas)
        sums = torch.zeros(len(quantiles) + len(self._channels), dtype=torch.float64, device=engine.device)

        def give(number: int) -> Carry:
            quantile, part = divmod(mine[number], parts)
            return self._inputs(number, self._quantiles[quantiles[quantile]], self._parts[part])

        def take(number: int, prediction: Tensor) -> None:
            prepared, counts = self._noised.pop(number)
            errors = self._objective.errors(prediction, prepared)
            sums[mine[number] // parts] += (mean_error(errors, prepared.mask) * counts).sum()
            if self._channels:
                of_channels = mean_error(errors, prepared.mask, by_channel=True)  # (N, C)
                sums[len(quantiles) :] += (of_channels * counts[:, None]).sum(dim=0) / len(quantiles)

        def context(number: int) -> Tensor | None:
            return self._context(self._parts[mine[number] % parts])

        sizes = [self._parts[number % parts].size for number in mine]
        pipeline = ForwardPipeline(engine, self._images)
        pipeline.run(len(mine), give, take, context=context, sizes=sizes, depth=len(mine), progress=watchdog.progress)
        if not engine.is_first_stage():
            return {}
        dist.all_reduce(sums, group=engine.grid.get_data_parallel_group())
        found = (sums / self._count).tolist()
        losses, of_channels = found[: len(quantiles)], found[len(quantiles) :]
        values = {f"validation/loss_t{quantile}": loss for quantile, loss in zip(quantiles, losses, strict=True)}
        values = values if len(quantiles) > 1 else {}
        values |= {
            f"validation/loss_channel_{name}": loss for name, loss in zip(self._channels, of_channels, strict=True)
        }
        return {"eval/loss": sum(losses) / len(losses), **values}

    def _micro_batches(self, spec: RunSpec, store: DatasetCache, positions: Indices) -> Iterator[_Part]:
        """Yield the micro-batches, each of one size; the last one of a size is filled up with images that don't
        count.
        """
        start = 0
        for cache, stored in zip(store.caches, store.by_bucket(positions), strict=True):
            size = 0 if spec.data.buckets is None else self._engine.module.size_number(cache.size)
            for first in range(0, len(stored), self._images):
                places = np.arange(first, first + self._images)
                counts, places = (places < len(stored)).astype(np.float64), places.clip(max=len(stored) - 1)
                yield _Part(cache, size, stored[places], start + places, counts)
            start += len(stored)

    def _inputs(self, number: int, level: tuple[float, int], part: _Part) -> Carry:
        """Return the inputs of the U-Net for one part."""
        time, stream = level
        batch = self._read(part, self._fields)
        prepared = self._objective.held_out(batch, time, stream)
        self._noised[number] = prepared, torch.from_numpy(part.counts).to(self._engine.device)
        return self._objective.inputs(prepared)

    def _context(self, part: _Part) -> Tensor | None:
        """Return the encoded first captions of one part."""
        batch = self._read(part, self._text_fields)
        assert batch.text is not None, "its layers read text"
        return widened(batch.text, batch.text_scale).to(self._engine.device)

    def _read(self, part: _Part, names: Sequence[str]) -> MicroBatch:
        """Return the fields of these names of one part."""
        found = {name: torch.from_numpy(part.store.fields[name].read(part.positions)) for name in names}
        images = found.pop("images", torch.empty(len(part.positions), 0))
        labels = torch.from_numpy(part.store.labels[part.positions])
        batch = MicroBatch(images, labels, torch.from_numpy(part.places), **found)
        return batch if self._encoders is None else encoded(batch, self._encoders)


def channel_names(data: DataSpec) -> list[str]:
    """Return the names under which the held-out loss of each channel is tracked, numbers unless each channel is a
    variable of its own; none for pictures, whose channels are colours.
    """
    if data.channels <= 3 and not data.are_fields:
        return []
    names = data.variables if len(data.variables) == data.channels else map(str, range(data.channels))
    return [re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) for name in names]  # MLflow refuses other characters


class Validation:
    """Draws samples and measures the held-out loss when they are due; all methods are collective over all ranks.

    ``held_out`` is None if no images are held out.
    """

    def __init__(
        self,
        spec: RunSpec,
        engine: UnetPipelineEngine,
        ema: Ema,
        held_out: HeldOutLoss | None,
        previews: Previews,
        watchdog: Watchdog,
        recorder: Recorder,
    ) -> None:
        self._spec, self._engine, self._ema = spec, engine, ema
        self._held_out, self._watchdog, self._recorder = held_out, watchdog, recorder
        self._previews = previews

    def due(self, before: int, done: bool) -> bool:
        """Return whether samples or the held-out loss are due after the step from ``before`` images on."""
        return any(self._due(before, done))

    def _due(self, before: int, done: bool) -> tuple[bool, bool]:
        """Return whether samples are due, and whether the held-out loss is."""
        spec, seen = self._spec, self._engine.images_seen
        losses = self._held_out is not None and is_due(spec.evaluation.every_images, before, seen, done)
        return is_due(spec.samples.every_images, before, seen, done), losses

    def after_step(self, before: int, done: bool) -> None:
        """Draw the samples and measure the loss that are due after the step from ``before`` images on."""
        begin = time.perf_counter()
        samples, losses = self._due(before, done)
        with self._ema.applied():
            if samples:
                self._draw(begin)
            if losses and self._held_out is not None:
                begin_measuring = time.perf_counter()
                with self._recorder.doing("measuring the held-out loss"):
                    values = self._held_out.measure(self._watchdog)
                values["usage/evaluation_seconds"] = time.perf_counter() - begin_measuring
                self._recorder.evaluation(values, self._engine.global_steps)

    def before_first_step(self) -> None:
        """Draw the samples of the initial weights, unless samples are off or the run is resumed.

        It costs as much as any other samples, and changes no number of the run: every draw is keyed by its image.
        """
        if self._spec.samples.every_images is not None and not self._engine.global_steps:
            begin = time.perf_counter()
            with self._ema.applied():
                self._draw(begin)

    def _draw(self, begin: float) -> None:
        with self._recorder.doing("drawing samples"):
            drawn = self._previews.draw()
        seconds = time.perf_counter() - begin
        self._recorder.samples(drawn, seconds, self._engine.images_seen, self._engine.global_steps)
