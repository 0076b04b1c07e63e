"""Rows of a benchmark: their common parts, and plain PyTorch loops: draw, forward, backward, clip, AdamW."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.data.prepare import prepare
from ddpm_ds.device import share_threads
from ddpm_ds.pipeline.build import quiet_deepspeed, use_host_accelerator
from ddpm_ds.planning import RunPlan, decided
from ddpm_ds.train.objective import Denoising, Noised, replica_batches
from ddpm_ds.train.start import check_store
from ddpm_ds.unet.model import UNet
from ddpm_ds.unet.operations import KeyedDropout
from rivals.choice import replica_micro_batches

SCALES = 32
"""Number of loss scales that are tried, each half of the one before, before gradients count as infinite or NaN."""


class Row(Protocol):
    """Way of training; each row starts from the same weights and sees the same images in the same order."""

    name: str
    note: str
    """Remark for comparing the row; may be empty."""
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
    """Plan decided for the device, without keys that only concern reports."""
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
        check_store(store, plan.spec)
        return cls(decided(replace(plan, ds=plan.ds.without_reports()), device), store, device, verbose, load_before)

    def objective(self) -> Denoising:
        store = self.store
        return Denoising(self.plan.spec, self.device, store.meta.statistics, store.constants, store.empty_text)

    def batches(self, replicas: int, replica: int) -> Iterator[MicroBatch]:
        """Yield the endless micro-batches of one of ``replicas``, from the first image on, on the device."""
        spec, layout = self.plan.spec, self.plan.ds.layout
        text = spec.unet.text is not None
        return replica_batches(spec, layout, self.store, self.device, replicas=replicas, replica=replica, text=text)

    def unchecked(self) -> str:
        """Return the note of a row that recomputes nothing, if the configuration asks for it."""
        return "no activation checkpointing" if self.plan.ds.layout.checkpoint_interval else ""


@dataclass(frozen=True)
class Probe:
    """Prediction, loss and gradient norm of a row on one micro-batch with dropout switched off."""

    prediction: Tensor
    """(N, C, H, W) fp32, on the CPU"""
    loss: float
    gradient_norm: float
    """Norm over all parameters, before clipping."""


class Optimizer:
    """Optimizer: loss scale, fp32 masters of 16-bit weights, clipping, AdamW, learning rate."""

    def __init__(
        self, setting: Setting, parameters: Iterable[nn.Parameter], *, fused: bool = False, scaled: bool = False
    ) -> None:
        spec, config = setting.plan.spec.optimizer, setting.plan.ds.blocks
        self._parameters = list(parameters)
        narrow = self._parameters[0].dtype is not torch.float32
        self.masters = [nn.Parameter(one.detach().float()) for one in self._parameters] if narrow else []
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self._trained = self.masters or self._parameters
        self._clip_norm = float(config.get("gradient_clipping", 1.0))  # 1.0 is DeepSpeed's default too
        self._adamw = torch.optim.AdamW(
            self._trained,
            lr=spec.learning_rate,
            betas=spec.betas,
            eps=spec.epsilon,
            weight_decay=spec.weight_decay,
            fused=True if fused else None,  # False would keep PyTorch from choosing foreach
        )
        self._scheduler = None
        if scheduler := config.get("scheduler"):
            with quiet_deepspeed(verbose=False):  # DeepSpeed's own learning rates
                self._scheduler = getattr(lr_schedules, scheduler["type"])(self._adamw, **scheduler["params"])
        fp16 = config.get("fp16", {}) if scaled else {}
        fixed = float(fp16.get("loss_scale", 0))
        self.scaler = torch.amp.GradScaler(
            setting.device.type,
            init_scale=fixed or 2.0 ** fp16.get("initial_scale_power", 16),
            growth_interval=2**31 - 1 if fixed else fp16.get("loss_scale_window", 1000),
            enabled=scaled,
        )

    @torch.no_grad()
    def step(self, norm_group: dist.ProcessGroup | None = None) -> None:
        """Unscale, clip by the global norm and step; the gradients of the weights are gone afterwards.

        Processes of ``norm_group`` share one model's parameters.
        """
        if self.masters:
            narrow = [one.grad for one in self._parameters if one.grad is not None]
            torch._foreach_copy_([one.grad for one in self.masters if one.grad is not None], narrow)
        self.scaler.unscale_(self._adamw)
        if self._clip_norm:
            norm = torch.nn.utils.get_total_norm([one.grad for one in self._trained if one.grad is not None])
            if norm_group is not None:
                squared = norm.square()
                dist.all_reduce(squared, group=norm_group)
                norm = squared.sqrt()
            torch.nn.utils.clip_grads_with_norm_(self._trained, self._clip_norm, norm)
        self.scaler.step(self._adamw)
        self.scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()
        if self.masters:
            torch._foreach_copy_(tuple(self._parameters), tuple(self.masters))
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def gradient_norm(self, loss: Tensor, scale: float) -> float:
        """Return the norm of ``loss``'s gradient and change nothing; not finite if ``scale`` makes it overflow."""
        (loss * scale).backward()
        gradients = [one.grad.float() for one in self._parameters if one.grad is not None]
        self.drop_gradients()
        return float(torch.nn.utils.get_total_norm(gradients)) / scale


class RandomDenoising(Denoising):
    """Objective whose draws are PyTorch's, as in other people's loops."""

    def prepare(self, micro_batch: MicroBatch) -> Noised:
        images, labels, index = (tensor.to(self._device, non_blocking=True) for tensor in micro_batch[:3])
        if self._spec.data.horizontal_flips:
            flips = torch.rand(len(images), device=self._device) < 0.5
            images = torch.where(flips[:, None, None, None], images.flip(-1), images)
        x0 = images.float().div_(127.5).sub_(1.0)
        t = torch.randint(self._spec.diffusion.timesteps, (len(images),), device=self._device)
        return Noised(x0, t, torch.randn_like(x0), None if self._spec.unet.classes is None else labels, index)


class Loop:
    """Row that trains a U-Net in its own loop, over the micro-batches of this process's replica."""

    is_pipeline = False

    def __init__(
        self,
        setting: Setting,
        model: nn.Module,
        name: str,
        note: str = "",
        *,
        fused: bool = False,
        scaled: bool = False,
        objective: Denoising | None = None,
    ) -> None:
        self.name, self.note, self.model = name, note, model
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.macs = setting.plan.macs
        """Multiply-accumulates of one image's forward."""
        self.optimizer = Optimizer(setting, model.parameters(), fused=fused, scaled=scaled)
        self._replicas, self._micro_batches = setting.plan.ds.layout.world_size, replica_micro_batches(setting.plan)
        self._batches = setting.batches(self._replicas, dist.get_rank() if self._replicas > 1 else 0)
        self._device, self._probed = setting.device, setting.objective()
        self._trained = objective or self._probed  # random draws can't be compared

    def predict(self, inputs: Sequence[Tensor], images: Tensor) -> Tensor:
        """Return (N, C, H, W) of (x_t, t) or (x_t, t, labels); ``images`` (N,) are positions, as loaded."""
        prediction: Tensor = self.model(*inputs, images=images.to(self._device, non_blocking=True))
        return prediction

    def step(self) -> Tensor:
        loss = self._backward()
        self.optimizer.step()
        return loss

    def forward_backward(self) -> Tensor:
        """Take a step without the optimizer."""
        loss = self._backward()
        self.optimizer.drop_gradients()
        return loss

    def probe(self, micro_batch: MicroBatch) -> Probe:
        """Return prediction, loss and gradient norm of ``micro_batch``; the weights stay as they are."""
        scaler = self.optimizer.scaler
        with without_dropout(self.model):
            for halved in range(SCALES if scaler.is_enabled() else 1):
                prediction, loss = self._forward(micro_batch, self._probed)
                norm = self.optimizer.gradient_norm(loss, scaler.get_scale() / 2**halved)
                if math.isfinite(norm):
                    break
        return Probe(prediction.detach().float().cpu(), float(loss.detach()), norm)

    def _backward(self) -> Tensor:
        losses = []
        parallel = self.model if isinstance(self.model, DistributedDataParallel) else None
        for number, micro_batch in enumerate(itertools.islice(self._batches, self._micro_batches), 1):
            last = number == self._micro_batches  # in which DistributedDataParallel averages gradients
            with contextlib.nullcontext() if parallel is None or last else parallel.no_sync():
                _, loss = self._forward(micro_batch, self._trained)
                self.optimizer.scaler.scale(loss / self._micro_batches).backward()
            losses.append(loss.detach())
        return sum(losses, torch.zeros((), device=self._device)) / (self._micro_batches * self._replicas)

    def _forward(self, micro_batch: MicroBatch, objective: Denoising) -> tuple[Tensor, Tensor]:
        prepared = objective.prepare(micro_batch)
        prediction = self.predict(objective.inputs(prepared), micro_batch.index)
        return prediction, objective.loss(prediction, prepared)


def plain_loop(setting: Setting, *, parallel: bool) -> Loop:
    """Return the loop of our U-Net in fp32, as it is, or under DistributedDataParallel on every process."""
    unet: nn.Module = UNet(setting.plan.layers, setting.plan.spec.train.seed).to(setting.device)
    unet, name = (DistributedDataParallel(unet), "PyTorch DDP") if parallel else (unet, "plain PyTorch loop")
    return Loop(setting, unet, f"{name}, fp32", setting.unchecked())


def without_dropout(model: nn.Module) -> contextlib.ExitStack:
    """Return a context in which dropout is off, ours and PyTorch's: no two U-Nets draw the same masks."""
    stack = contextlib.ExitStack()
    for part in model.modules():
        if isinstance(part, (KeyedDropout, nn.Dropout)):
            name = "p" if isinstance(part, nn.Dropout) else "rate"
            stack.enter_context(mock.patch.object(part, name, 0.0))
    return stack
