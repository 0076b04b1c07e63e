"""Sampling and validation while training: pictures, and the loss on images that are never trained on.

Both use the averaged weights and run through the pipeline: replicas share the images, stages share the U-Net.
"""

from __future__ import annotations

import itertools
import math
import time

import torch
import torch.distributed as dist
from torch import Tensor

from ddpm_ds import keyed
from ddpm_ds.config.spec import HELD_OUT_QUANTILES, RunSpec
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.latents import ToPixels, autoencoder_of, to_pixels
from ddpm_ds.data.loader import Indices
from ddpm_ds.diffusion.process import Diffusion
from ddpm_ds.diffusion.samplers import Drawing, Sampler
from ddpm_ds.keyed import SAMPLE_SEED
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.forward import ForwardPipeline
from ddpm_ds.processes.watchdog import Watchdog
from ddpm_ds.tracking.recorder import Recorder
from ddpm_ds.train.ema import Ema
from ddpm_ds.train.meters import is_due
from ddpm_ds.unet.blocks import Carry

NOISE_SEED = 0
"""Seed of the noise, independent of the run's seed: runs are compared on the same noise."""


class HeldOutLoss:
    """Loss of an engine on the ``positions`` of a data-set cache, on the centres of images that are cropped in
    training; only first stages read images.
    """

    def __init__(self, spec: RunSpec, engine: UnetPipelineEngine, store: DatasetCache, positions: Indices) -> None:
        self._engine, self._classes = engine, spec.unet.classes
        self._store, self._positions = store.centre(spec.data.size), positions
        self._diffusion = Diffusion(spec.diffusion, NOISE_SEED, engine.device)
        self._held_out_at = [self._diffusion.levels.quantile(quantile) for quantile in HELD_OUT_QUANTILES]
        self._images = min(engine.micro_batch_size, len(positions))
        self._noised: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def measure(self, watchdog: Watchdog) -> dict[str, float]:
        """Return ``eval/loss``, which is the mean of ``validation/loss_t10`` to ``loss_t90``, and these.

        They are the distance that training minimises, without flips, weights and perturbed inputs, so that runs which
        differ in those can be compared.

        The replicas share the work, by quantile and part of the images. Collective over all ranks; all first stages get
        the numbers, the others an empty dictionary.
        """
        engine, replicas = self._engine, self._engine.dp_world_size
        parts = math.ceil(len(self._positions) / self._images)
        mine = range(engine.grid.get_data_parallel_id(), len(HELD_OUT_QUANTILES) * parts, replicas)
        sums = torch.zeros(len(HELD_OUT_QUANTILES), dtype=torch.float64, device=engine.device)

        def give(number: int) -> Carry:
            quantile, part = divmod(mine[number], parts)
            return self._inputs(number, self._held_out_at[quantile], part)

        def take(number: int, prediction: Tensor) -> None:
            x0, eps, t, counts = self._noised.pop(number)
            sums[mine[number] // parts] += (self._diffusion.distances(prediction, x0, eps, t) * counts).sum()

        pipeline = ForwardPipeline(engine, self._images)
        pipeline.run(len(mine), give, take, depth=len(mine), progress=watchdog.progress)
        if not engine.is_first_stage():
            return {}
        dist.all_reduce(sums, group=engine.grid.get_data_parallel_group())
        losses = (sums / len(self._positions)).tolist()
        by_quantile = zip(HELD_OUT_QUANTILES, losses, strict=True)
        values = {f"validation/loss_t{quantile}": loss for quantile, loss in by_quantile}
        return {"eval/loss": sum(losses) / len(losses), **values}

    def _inputs(self, number: int, level: tuple[float, int], part: int) -> Carry:
        """Return x_t, t and labels of one part; the last one is filled up with images that don't count."""
        device, size, (time, stream) = self._engine.device, self._images, level
        index = torch.arange(part * size, (part + 1) * size)
        counts = (index < len(self._positions)).double().to(device)
        index = index.clamp(max=len(self._positions) - 1)
        stored = self._positions[index.numpy()]
        index = index.to(device)
        x0 = self._diffusion.prepare(torch.from_numpy(self._store.images[stored]).to(device), None, flips=False)
        t = torch.full_like(index, time, dtype=self._diffusion.levels.dtype)
        eps = keyed.normal(NOISE_SEED, stream, index, x0[0].numel()).view_as(x0)
        eps = eps.contiguous(memory_format=torch.channels_last)
        self._noised[number] = x0, eps, t, counts
        x_t = self._diffusion.noised(x0, t, eps)
        if self._classes is None:
            return x_t, t
        return x_t, t, torch.from_numpy(self._store.labels[stored]).to(device)


def draw_previews(spec: RunSpec, engine: UnetPipelineEngine, watchdog: Watchdog, to_pixels: ToPixels) -> Tensor | None:
    """Draw the first ``samples.count`` images of the sampler, uint8 (count, C, H, W) on rank 0's CPU; None elsewhere.

    They are those of ``ddpm-ds sample`` with its own seed. Collective over all ranks.
    """
    sampler, count, replicas = Sampler(spec.sampler, spec.diffusion), spec.samples.count, engine.dp_world_size
    # as many micro-batches as keep all stages at work, each no larger than those of training
    images = max(1, min(engine.micro_batch_size, math.ceil(count / (replicas * engine.num_stages))))
    rounds = math.ceil(count / (replicas * images))
    replica = engine.grid.get_data_parallel_id()
    data, classes = spec.data, spec.unet.classes
    drawings = []
    for number in range(rounds) if engine.is_first_stage() else ():
        index = torch.arange(images, device=engine.device) + (number * replicas + replica) * images
        drawing = Drawing(
            sampler,
            seed=SAMPLE_SEED,
            index=index,
            shape=data.shape,
            labels=None if classes is None else index % classes,
            no_label=classes,
        )
        drawings.append(drawing)
    # guided evaluations carry twice the images, and messages have one shape for a whole run of the pipeline
    for guided, visits in itertools.groupby(sampler.guided):
        ForwardPipeline(engine, images * (2 if guided and spec.sampler.guides else 1)).run(
            rounds * len(list(visits)),
            lambda number: drawings[number % rounds].inputs(),
            lambda number, prediction: drawings[number % rounds].take(prediction),
            depth=rounds,
            progress=watchdog.progress,
        )
    if not engine.is_first_stage():
        return None
    with watchdog.pause():  # an autoencoder may take long
        mine = to_pixels(torch.cat([drawing.images() for drawing in drawings]))  # (rounds x images, C, H, W)
    mine = mine.contiguous().unflatten(0, (rounds, images))  # NCCL refuses images that are channels-last in five dims
    everyone = [torch.empty_like(mine) for _ in range(replicas)]
    dist.all_gather(everyone, mine, group=engine.grid.get_data_parallel_group())
    drawn = torch.stack(everyone, dim=1).flatten(0, 2)[:count].cpu()  # in the order of their index
    return drawn if dist.get_rank() == 0 else None


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
        watchdog: Watchdog,
        recorder: Recorder,
    ) -> None:
        self._spec, self._engine, self._ema = spec, engine, ema
        self._held_out, self._watchdog, self._recorder = held_out, watchdog, recorder
        self._to_pixels = to_pixels(autoencoder_of(spec.data), engine.device)

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
            images = draw_previews(self._spec, self._engine, self._watchdog, self._to_pixels)
        seconds = time.perf_counter() - begin
        self._recorder.samples(images, seconds, self._engine.images_seen, self._engine.global_steps)
