"""Rehearsal of a run: a few of its steps and one of its pictures, to learn their time and memory."""

import json
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddpm_ds.device import wait_for_device
from ddpm_ds.files import REHEARSAL, write_file
from ddpm_ds.observe.observer import Observer
from ddpm_ds.pipeline.engine import CAUTIOUS_STEPS, UnetPipelineEngine
from ddpm_ds.pipeline.exchange import all_gather_objects
from ddpm_ds.pipeline.messages import runs_behind
from ddpm_ds.train.meters import peak_memory_bytes, peak_reserved_bytes


class Rehearsal(Observer):
    """Observer that ends a run after ``steps`` timed steps, and writes their seconds and all ranks' peak memory.

    Before the first timed step the optimizer has updated the weights, for which it allocates its moments, and the
    pipeline has sent its first messages, which it does in another way.
    """

    def __init__(self, engine: UnetPipelineEngine, run_dir: Path, steps: int, checkpoint_interval: int) -> None:
        self._engine, self._file, self._steps = engine, run_dir / REHEARSAL, steps
        self._checkpoint_interval = checkpoint_interval
        self._warm_up = CAUTIOUS_STEPS if runs_behind(engine.device) else 1
        self._began, self._seconds = 0.0, list[float]()

    def begin_step(self, step: int) -> None:
        wait_for_device(self._engine.device)
        self._began = time.perf_counter()

    def ended(self) -> bool:
        """Count the step that has ended, and return whether it was the last; the same on all ranks."""
        wait_for_device(self._engine.device)
        if not self._warm_up:
            self._seconds.append(time.perf_counter() - self._began)
        elif self._engine.was_step_applied():
            self._warm_up -= 1
        return len(self._seconds) >= self._steps

    def finish(self) -> None:
        device = self._engine.device
        peak = peak_reserved_bytes(device) or peak_memory_bytes(device)
        seconds, peaks = zip(*all_gather_objects([self._seconds, peak], Any), strict=True)
        if dist.get_rank() == 0:
            found = {
                "step_seconds": [max(step) for step in zip(*seconds, strict=True)],  # of the slowest rank
                "rank_peak_bytes": peaks,
                "checkpoint_interval": self._checkpoint_interval,
            }
            write_file(self._file, f"{json.dumps(found)}\n".encode())
