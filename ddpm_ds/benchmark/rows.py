"""What a row of the benchmark is: a way of training the same U-Net on the same images with the same noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ddpm_ds.data.device import on_device
from ddpm_ds.data.loader import MicroBatch, micro_batches
from ddpm_ds.data.store import Store
from ddpm_ds.ds_config import BUCKET_ELEMENTS
from ddpm_ds.train.objective import Denoising
from ddpm_ds.train.plan import RunPlan


class Row(Protocol):
    """One way of training; each row starts from the same weights and sees the same images in the same order."""

    name: str
    note: str
    """What a reader must know to compare it, or nothing."""
    is_pipeline: bool
    """Whether processes wait for each other within a step: whether it has a bubble."""

    def step(self) -> Tensor:
        """One optimizer step on the next batch; every process calls it, and none need wait for its device.

        Returns this process's part of the batch's mean loss, a scalar: the parts of all processes sum to it.
        """


@dataclass(frozen=True)
class Setting:
    """What all rows share."""

    plan: RunPlan
    config: dict[str, Any]
    """The DeepSpeed JSON, filled, without what only reports."""
    store: Store
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


def with_zero_stage(options: dict[str, Any], stage: int) -> dict[str, Any]:
    """The same under another ZeRO stage; buckets are given, since DeepSpeed's own would take gigabytes."""
    buckets = {"reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS} if stage else {}
    return {**options, "zero_optimization": {**buckets, **options.get("zero_optimization", {}), "stage": stage}}
