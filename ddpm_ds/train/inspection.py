"""Looking at what is being learned, every so many images: pictures and the held-out loss, of the averaged weights."""

from __future__ import annotations

import time

from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.spec import RunSpec
from ddpm_ds.train.ema import Ema
from ddpm_ds.train.held_out import HeldOutLoss
from ddpm_ds.train.previews import draw_previews
from ddpm_ds.train.recorder import Recorder
from ddpm_ds.train.watchdog import Watchdog


class Inspection:
    """Draws and measures when it is due; all methods are collective over all ranks.

    ``held_out`` is None where no images are held out.
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
        self.seconds = 0.0
        """Time it has taken so far."""

    def after_step(self, before: int, done: bool) -> None:
        """Look if a step from ``before`` images seen on passed a point of either cadence, or was the last one."""
        samples = self._due(self._spec.samples.every_images, before, done)
        measure = self._held_out is not None and self._due(self._spec.evaluation.every_images, before, done)
        if not (samples or measure):
            return
        engine, begin = self._engine, time.perf_counter()
        with self._ema.applied():
            if samples:
                images, seconds = draw_previews(self._spec, engine, self._watchdog), time.perf_counter() - begin
                self._recorder.samples(images, seconds, engine.images_seen, engine.global_steps)
            if measure and self._held_out is not None:
                begin_measuring = time.perf_counter()
                values = self._held_out.measure(self._watchdog)
                values["perf/evaluation_seconds"] = time.perf_counter() - begin_measuring
                self._recorder.evaluation(values, engine.global_steps)
        self.seconds += time.perf_counter() - begin

    def _due(self, every: int | None, before: int, done: bool) -> bool:
        return every is not None and (done or self._engine.images_seen // every > before // every)
