"""The loss on images that are never trained on, at nine noise levels, through the pipeline."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ddpm_ds import keyed
from ddpm_ds.data.order import Indices
from ddpm_ds.data.store import Store
from ddpm_ds.diffusion.process import Diffusion
from ddpm_ds.keyed import Stream
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.forward import ForwardPipeline
from ddpm_ds.spec import HELD_OUT_QUANTILES, RunSpec
from ddpm_ds.train.watchdog import Watchdog
from ddpm_ds.unet.carry import Carry

NOISE_SEED = 0
"""Not the run's seed: runs are compared on the same noise."""


class HeldOutLoss:
    """Measures an engine on the ``positions`` of a store, on centres where crops are trained on; only first stages
    read images."""

    def __init__(self, spec: RunSpec, engine: UnetPipelineEngine, store: Store, positions: Indices) -> None:
        self._engine, self._classes = engine, spec.unet.classes
        self._store, self._positions = store.centre(spec.data.image_size), positions
        self._diffusion = Diffusion(spec.diffusion, NOISE_SEED, engine.device)
        self._timesteps = [
            max(round(spec.diffusion.timesteps * quantile / 100) - 1, 0) for quantile in HELD_OUT_QUANTILES
        ]
        self._images = min(engine.micro_batch_size, len(positions))
        self._noised: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def measure(self, watchdog: Watchdog) -> dict[str, float]:
        """``eval/loss_t10`` to ``eval/loss_t90`` and their mean ``eval/loss``: the loss of training, no flips.

        (quantile, part of the images) are shared out to the replicas. Collective over all ranks; all first stages
        get the numbers.
        """
        engine, replicas = self._engine, self._engine.dp_world_size
        parts = math.ceil(len(self._positions) / self._images)
        mine = range(engine.grid.get_data_parallel_id(), len(HELD_OUT_QUANTILES) * parts, replicas)
        sums = torch.zeros(len(HELD_OUT_QUANTILES), dtype=torch.float64, device=engine.device)

        def give(number: int) -> Carry:
            quantile, part = divmod(mine[number], parts)
            return self._inputs(number, self._timesteps[quantile], part)

        def take(number: int, prediction: Tensor) -> None:
            x0, eps, t, counts = self._noised.pop(number)
            sums[mine[number] // parts] += (self._diffusion.losses(prediction, x0, eps, t) * counts).sum()

        pipeline = ForwardPipeline(engine, self._images)
        pipeline.run(len(mine), give, take, depth=len(mine), progress=watchdog.progress)
        if not engine.is_first_stage():
            return {}
        dist.all_reduce(sums, group=engine.grid.get_data_parallel_group())
        losses = (sums / len(self._positions)).tolist()
        values = {f"eval/loss_t{quantile}": loss for quantile, loss in zip(HELD_OUT_QUANTILES, losses, strict=True)}
        return {"eval/loss": sum(losses) / len(losses), **values}

    def _inputs(self, number: int, timestep: int, part: int) -> Carry:
        """x_t, t and labels of one part; the last one is filled up with images that don't count."""
        device, size = self._engine.device, self._images
        index = torch.arange(part * size, (part + 1) * size)
        counts = (index < len(self._positions)).double().to(device)
        index = index.clamp(max=len(self._positions) - 1)
        stored = self._positions[index.numpy()]
        index = index.to(device)
        x0 = self._diffusion.prepare(torch.from_numpy(self._store.images[stored]).to(device), index, flips=False)
        t = torch.full_like(index, timestep)
        eps = keyed.normal(NOISE_SEED, Stream.HELD_OUT + timestep, index, x0[0].numel()).view_as(x0)
        eps = eps.contiguous(memory_format=torch.channels_last)
        self._noised[number] = x0, eps, t, counts
        x_t = self._diffusion.noised(x0, t, eps)
        if self._classes is None:
            return x_t, t
        return x_t, t, torch.from_numpy(self._store.labels[stored]).to(device)
