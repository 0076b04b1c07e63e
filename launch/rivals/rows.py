"""Common parts of rows: the images, the objective and the filled configuration that each of them trains with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.data.prepare import prepare
from ddpm_ds.pipeline.build import use_host_accelerator
from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.train.objective import Denoising, replica_batches
from ddpm_ds.train.resolve import decide, share_threads
from ddpm_ds.train.session import check_store


class Row(Protocol):
    """One way of training; each row starts from the same weights and sees the same images in the same order."""

    name: str
    note: str
    """Remark for comparing the row, or empty."""
    is_pipeline: bool
    """Whether processes wait for each other within a step: whether it has a bubble."""

    def step(self) -> Tensor:
        """Take one optimizer step on the next batch; every process calls it, and none need wait for its device.

        Returns this process's part of the batch's mean loss, a scalar: the parts of all processes sum to it.
        """


@dataclass(frozen=True)
class Setting:
    """Setting that all rows share."""

    plan: RunPlan
    """Decided for the device, without what only reports."""
    store: DatasetCache
    device: torch.device
    verbose: bool = False
    load_before: float = 0.0
    """Processes that wanted a core in the minute before (Unix load average), this one's start-up included."""

    @classmethod
    def prepare(cls, plan: RunPlan, device: torch.device, *, verbose: bool) -> Setting:
        """Prepare images, threads and configuration of this process, before any process group exists.

        Raises:
            UserError: something given is wrong.
        """
        load_before = os.getloadavg()[0]
        use_host_accelerator()
        share_threads(device)
        store = prepare(plan.spec.data, progress=int(os.environ["LOCAL_RANK"]) == 0)
        check_store(store, plan)
        return cls(decide(replace(plan, ds=plan.ds.without_reports()), device), store, device, verbose, load_before)

    def objective(self) -> Denoising:
        return Denoising(self.plan.spec, self.device)

    def batches(self, replicas: int, replica: int) -> Iterator[MicroBatch]:
        """Yield the endless micro-batches of one of ``replicas``, from the first image on, on the device."""
        return replica_batches(self.plan, self.store, self.device, replicas=replicas, replica=replica)

    @property
    def checkpoint_interval(self) -> int:
        """Layers between kept activations; 0 where none are recomputed."""
        return int(self.plan.ds.checkpoint_interval)

    def recomputing(self) -> str:
        """Return the table's text on activation checkpointing."""
        interval = self.checkpoint_interval
        return f"activation checkpointing {f'every {interval} layers' if interval else 'off'}"

    def unchecked(self) -> str:
        """Return the note of a row that recomputes nothing, where the configuration asks for it."""
        return "no activation checkpointing" if self.checkpoint_interval else ""
