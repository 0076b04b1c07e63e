"""Sampling and validation while training: pictures, and the loss on images that are never trained on.

Both use the averaged weights and run through the pipeline: replicas share the images, stages share the U-Net.
"""

import time

import torch.distributed as dist
from torch import Tensor

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.forward import ForwardPipeline
from ddpm_ds.processes.watchdog import Watchdog
from ddpm_ds.tracking.recorder import Recorder
from ddpm_ds.train.ema import Ema
from ddpm_ds.train.held_out_loss import HeldOutLoss
from ddpm_ds.train.meters import is_due
from ddpm_ds.train.previews import Previews
from ddpm_ds.unet.blocks import Carry


def measured(held_out: HeldOutLoss, engine: UnetPipelineEngine, watchdog: Watchdog) -> dict[str, float]:
    """Return the held-out loss of an engine, whose replicas share the calls, by the names of
    :meth:`HeldOutLoss.values`.

    Collective over all ranks; all first stages get the numbers, the others an empty dictionary. Only first stages read
    images and what belongs to them, and text the ranks whose layers read it.
    """
    mine = range(engine.grid.get_data_parallel_id(), held_out.calls, engine.dp_world_size)
    sums, module = held_out.zeros(), engine.module
    sized = len(module.sized_layers) > 1

    def give(number: int) -> Carry:
        return held_out.inputs(mine[number])

    def take(number: int, prediction: Tensor) -> None:
        held_out.add(sums, mine[number], prediction)

    ForwardPipeline(engine, held_out.images).run(
        len(mine),
        give,
        take,
        context=lambda number: held_out.context(mine[number]),
        sizes=[module.size_number(held_out.size(number)) for number in mine] if sized else (),
        depth=len(mine),
        progress=watchdog.progress,
    )
    if not engine.is_first_stage():
        return {}
    dist.all_reduce(sums, group=engine.grid.get_data_parallel_group())
    return held_out.values(sums)


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
                    values = measured(self._held_out, self._engine, self._watchdog)
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
