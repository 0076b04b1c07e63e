"""A planned run with its images and device, for those who time some of its steps: fit and the rivals' benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.loader import MicroBatch, micro_batches, on_device
from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.train.objective import Denoising


@dataclass(frozen=True)
class Setting:
    """A planned run, its images and a device."""

    plan: RunPlan
    """Decided for the device, without what only reports."""
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
        return bool(self.plan.ds.checkpoint_interval)

    def unchecked(self) -> str:
        """The note of a row that recomputes nothing, where the configuration asks for it."""
        return "no activation checkpointing" if self.checkpoints() else ""
