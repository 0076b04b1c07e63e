"""Rows on DeepSpeed: this project's engines, and ZeRO-2 without a pipeline."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor

from ddpm_ds.observe.recording import Recording
from ddpm_ds.pipeline.build import build_engine, quiet_deepspeed
from ddpm_ds.pipeline.cuts import Schedule
from ddpm_ds.train.setting import Setting
from ddpm_ds.unet.model import UNet
from rivals.choice import bounds_of, replica_micro_batches
from rivals.rows import with_zero_stage


@contextlib.contextmanager
def layout_of(grid: Any | None) -> Iterator[None]:
    """Let DeepSpeed think that its processes are laid out as in ``grid``; None for replicas alone.

    DeepSpeed keeps the layout of the pipeline that was built last in one place for the whole process, and an engine
    without a pipeline would take its data-parallel group from there.
    """
    before, groups.mpu = groups.mpu, grid
    try:
        yield
    finally:
        groups.mpu = before


class OurPipeline:
    """This project's engine with the given DeepSpeed JSON, under one of its two schedules."""

    def __init__(self, setting: Setting, schedule: Schedule) -> None:
        plan = setting.plan
        self.name = f"ddpm_ds {'1F1B' if schedule == '1f1b' else schedule}, {plan.ds.precision}, "
        self.name += f"ZeRO-{plan.ds.zero_stage}"
        self.note = ""
        self.is_pipeline = plan.ds.layout.stages > 1
        self._replicas = plan.ds.layout.replicas
        with layout_of(None):
            self._engine = build_engine(
                plan.layers,
                bounds_of(plan, schedule),
                replace(plan.ds, schedule=schedule),
                setting.objective(),
                seed=plan.spec.train.seed,
                verbose=setting.verbose,
            )
        self._batches = None
        if self._engine.reads_data:
            self._batches = setting.batches(self._replicas, self._engine.grid.get_data_parallel_id())

    def step(self) -> Tensor:
        with layout_of(self._engine.mpu):
            return self._engine.train_batch(self._batches) / self._replicas


class TracedPipeline(OurPipeline):
    """This project's engine under the JSON's schedule, every step recorded as a timeline is."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, setting.plan.ds.schedule)
        self.name += ", traced"
        self._recording = Recording(self._engine, 0)

    def step(self) -> Tensor:
        self._recording.begin_step(self._recording.step + 1)
        return super().step()


class ZeroWithoutPipeline:
    """The whole U-Net on every process under ZeRO-2, which partitions gradients and optimizer state among them."""

    is_pipeline = False

    def __init__(self, setting: Setting) -> None:
        plan = setting.plan
        self.name = f"DeepSpeed ZeRO-2 without pipeline, {plan.ds.precision}"
        self.note = setting.unchecked()
        self._objective = setting.objective()
        self._device = setting.device
        self._replicas = dist.get_world_size()
        self._micro_batches = replica_micro_batches(plan)
        self._batches = setting.batches(self._replicas, dist.get_rank())
        options = with_zero_stage(plan.ds.for_deepspeed(), 2)
        config = {name: block for name, block in options.items() if name != "pipeline"}
        config["gradient_accumulation_steps"] = self._micro_batches
        with layout_of(None), quiet_deepspeed(setting.verbose):
            unet = UNet(plan.layers, plan.spec.train.seed)
            self._engine, *_ = deepspeed.initialize(model=unet, config=config)

    def step(self) -> Tensor:
        loss_sum = torch.zeros((), device=self._device)
        with layout_of(None):
            for micro_batch in itertools.islice(self._batches, self._micro_batches):
                prepared = self._objective.prepare(micro_batch)
                images = micro_batch.index.to(self._device)
                prediction = self._engine(*self._objective.inputs(prepared), images=images)  # (N, C, H, W)
                loss = self._objective.loss(prediction, prepared)
                self._engine.backward(loss)
                self._engine.step()
                loss_sum += loss.detach()
        return loss_sum / (self._micro_batches * self._replicas)
