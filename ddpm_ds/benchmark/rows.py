"""The rows of the benchmark: ways of training the same U-Net on the same images with the same noise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from deepspeed.runtime import lr_schedules
from torch import Tensor

from ddpm_ds.data.loader import MicroBatch, micro_batches
from ddpm_ds.data.store import Store
from ddpm_ds.pipeline.build import build_engine, quiet_deepspeed
from ddpm_ds.train.objective import Denoising
from ddpm_ds.train.plan import RunPlan
from ddpm_ds.unet.model import UNet


class Row(Protocol):
    """One way of training; each row starts from the same weights and sees the same images in the same order."""

    name: str

    def step(self) -> Tensor:
        """One optimizer step on the next batch. Returns its mean loss, a scalar; need not wait for the device."""


class PlainLoop:
    """PyTorch without DeepSpeed, in fp32: zero_grad, forward, backward, clip, AdamW.

    The first row, to which the others are compared. It takes the configuration's micro-batches, and its learning
    rates from DeepSpeed's own scheduler.
    """

    def __init__(self, plan: RunPlan, store: Store, device: torch.device) -> None:
        spec, config = plan.spec, plan.ds.config
        self.name = "plain PyTorch loop, fp32"
        self._device = device
        self._objective = Denoising(spec, device)
        self._batches = _batches(plan, store, device)
        self._micro_batches = plan.ds.layout.micro_batches
        self._clip_norm = float(config.get("gradient_clipping", 1.0))  # 1.0 is DeepSpeed's default too
        self._unet = UNet(plan.layers, spec.train.seed).to(device)
        self._optimizer = torch.optim.AdamW(
            self._unet.parameters(),
            lr=spec.optimizer.learning_rate,
            betas=spec.optimizer.betas,
            eps=spec.optimizer.epsilon,
            weight_decay=spec.optimizer.weight_decay,
        )
        self._scheduler: Any = None
        if scheduler := config.get("scheduler"):
            with quiet_deepspeed(verbose=False):
                self._scheduler = getattr(lr_schedules, scheduler["type"])(self._optimizer, **scheduler["params"])

    def step(self) -> Tensor:
        loss_sum = torch.zeros((), device=self._device)
        self._optimizer.zero_grad()
        for micro_batch in itertools.islice(self._batches, self._micro_batches):
            prepared = self._objective.prepare(micro_batch)
            images = micro_batch.index.to(self._device)
            prediction = self._unet(*self._objective.inputs(prepared), images=images)  # (N, C, H, W)
            loss = self._objective.loss(prediction, prepared)
            (loss / self._micro_batches).backward()
            loss_sum += loss.detach()
        if self._clip_norm:
            torch.nn.utils.clip_grad_norm_(self._unet.parameters(), self._clip_norm)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        return loss_sum / self._micro_batches


class PipelineEngine:
    """This project's 1F1B engine with the given DeepSpeed JSON; ``config`` is that JSON, filled."""

    def __init__(
        self, plan: RunPlan, store: Store, device: torch.device, config: dict[str, Any], *, verbose: bool
    ) -> None:
        self.name = f"pipeline engine, {plan.ds.precision}, ZeRO-{plan.ds.zero_stage}"
        objective = Denoising(plan.spec, device)
        self._batches = _batches(plan, store, device)
        self._engine = build_engine(
            plan.layers, plan.bounds, config, objective, seed=plan.spec.train.seed, verbose=verbose
        )

    def step(self) -> Tensor:
        return self._engine.train_batch(self._batches)


def _batches(plan: RunPlan, store: Store, device: torch.device) -> Iterator[MicroBatch]:
    """A row's own iterator over the run's micro-batches, from the first image on; one process, so one replica."""
    layout = plan.ds.layout
    return micro_batches(
        store,
        seed=plan.spec.train.seed,
        batch_images=layout.batch_images,
        micro_batch_images=layout.micro_batch_images,
        replicas=1,
        replica=0,
        workers=plan.spec.data.workers,
        pin_memory=device.type == "cuda",
    )
