"""TODO"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.loader import MicroBatch, micro_batches, on_device
from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.train.objective import Denoising


@dataclass(frozen=True)
class Setting:
    """What all rows share."""

    plan: RunPlan
    config: dict[str, Any]
    """The DeepSpeed JSON, filled, without what only reports."""
    store: DatasetCache
    device: torch.device
    verbose: bool

    def objective(self) -> Denoising:
        return Denoising(self.plan.spec, self.device)

    def batches(self, replicas: int, replica: int) -> Iterator[MicroBatch]:
        """The endless micro-batches of one of ``replicas``, from the first image on, on the device."""
        layout = self.plan.ds.layout
        batches = micro_batches(
            self.store,
            seed=self.plan.spec.train.seed,
            batch_images=layout.batch_images,
            micro_batch_images=layout.micro_batch_images,
            replicas=replicas,
            replica=replica,
            workers=self.plan.spec.data.workers,
            pin_memory=self.device.type == "cuda",
        )
        return on_device(batches, self.device)

    def checkpoints(self) -> bool:
        """Whether the configuration asks for activation checkpointing."""
        return bool(self.config["pipeline"]["activation_checkpoint_interval"])

    def unchecked(self) -> str:
        """The note of a row that recomputes nothing, where the configuration asks for it."""
        return "no activation checkpointing" if self.checkpoints() else ""


def deepspeed_options(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what times, counts or prints: each row is timed from outside, and the stock engine's
    timers crash it."""
    reports = ("flops_profiler", "wall_clock_breakdown", "steps_per_print")
    return {name: block for name, block in config.items() if name not in reports}
