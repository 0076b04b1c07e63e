"""Rows without DeepSpeed and without a pipeline: one process, or a replica on each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpm_ds.pipeline.build import quiet_deepspeed
from ddpm_ds.train.setting import Setting
from ddpm_ds.unet.model import UNet
from rivals.choice import replica_micro_batches


class AdamW:
    """The optimizer of rows without DeepSpeed, with the learning rates of DeepSpeed's own scheduler."""

    def __init__(
        self,
        setting: Setting,
        parameters: Iterable[nn.Parameter],
        *,
        fused: bool = False,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        optimizer, config = setting.plan.spec.optimizer, setting.plan.ds.blocks
        self.parameters = list(parameters)
        self.clip_norm = float(config.get("gradient_clipping", 1.0))  # 1.0 is DeepSpeed's default too
        self._optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            fused=True if fused else None,  # False would keep PyTorch from choosing foreach
        )
        self._scaler = torch.amp.GradScaler(enabled=False) if scaler is None else scaler
        self._scheduler = None
        if scheduler := config.get("scheduler"):
            with quiet_deepspeed(verbose=False):
                self._scheduler = getattr(lr_schedules, scheduler["type"])(self._optimizer, **scheduler["params"])

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self, norm_group: dist.ProcessGroup | None = None) -> None:
        """Unscale, clip by the global norm and step; processes of ``norm_group`` share one model's parameters."""
        self._scaler.unscale_(self._optimizer)
        if self.clip_norm:
            norm = torch.nn.utils.get_total_norm([part.grad for part in self.parameters if part.grad is not None])
            if norm_group is not None:
                squared = norm.square()
                dist.all_reduce(squared, group=norm_group)
                norm = squared.sqrt()
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()


class PlainLoop:
    """One process, in fp32: zero_grad, forward, backward, clip, AdamW, over the configuration's micro-batches."""

    name = "plain PyTorch loop, fp32"
    is_pipeline = False

    def __init__(self, setting: Setting) -> None:
        self.note = setting.unchecked()
        self._replicas = dist.get_world_size()
        self._objective = setting.objective()
        self._batches = setting.batches(self._replicas, dist.get_rank())
        self._micro_batches = replica_micro_batches(setting.plan)
        self._device = setting.device
        self._model = self._wrapped(UNet(setting.plan.layers, setting.plan.spec.train.seed).to(setting.device))
        self._optimizer = AdamW(setting, self._model.parameters())

    def step(self) -> Tensor:
        loss_sum = torch.zeros((), device=self._device)
        self._optimizer.zero_grad()
        for number, micro_batch in enumerate(itertools.islice(self._batches, self._micro_batches)):
            prepared = self._objective.prepare(micro_batch)
            images = micro_batch.index.to(self._device)
            with self._accumulation(last=number == self._micro_batches - 1):
                prediction = self._model(*self._objective.inputs(prepared), images=images)  # (N, C, H, W)
                loss = self._objective.loss(prediction, prepared)
                (loss / self._micro_batches).backward()
            loss_sum += loss.detach()
        self._optimizer.step()
        return loss_sum / (self._micro_batches * self._replicas)

    def _wrapped(self, unet: UNet) -> nn.Module:
        return unet

    def _accumulation(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around a micro-batch's forward and backward."""
        return contextlib.nullcontext()


class DataParallel(PlainLoop):
    """The plain loop on every process, gradients averaged by DistributedDataParallel in the last backward of a step."""

    name = "PyTorch DDP, fp32"

    def _wrapped(self, unet: UNet) -> nn.Module:
        self._parallel = DistributedDataParallel(unet)
        return self._parallel

    def _accumulation(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self._parallel.no_sync()
