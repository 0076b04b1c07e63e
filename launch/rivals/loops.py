"""A plain training loop on one device, for any U-Net: draw, forward, backward, clip, AdamW."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.train.setting import Setting
from ddpm_ds.unet.operations import KeyedDropout
from rivals.rows_pytorch import AdamW

SCALES = 32
"""How many loss scales are tried, each half of the one before, before gradients count as not finite."""


@dataclass(frozen=True)
class UnetProbe:
    """What a row makes of one micro-batch with dropout switched off."""

    prediction: Tensor
    """(N, C, H, W) fp32, on the CPU"""
    loss: float
    gradient_norm: float
    """Over all parameters, before clipping."""


class Update:
    """From gradients to weights: loss scale, fp32 masters of 16-bit weights, clipping, AdamW, learning rate."""

    def __init__(self, setting: Setting, parameters: Sequence[nn.Parameter], *, fused: bool) -> None:
        self._parameters = list(parameters)
        self._masters: list[nn.Parameter] = []
        if self._parameters[0].dtype is not torch.float32:
            self._masters = [nn.Parameter(parameter.detach().float()) for parameter in self._parameters]
        self._gradients = [torch.empty_like(master) for master in self._masters]
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient
        fp16 = setting.plan.ds.blocks.get("fp16", {}) if setting.plan.ds.precision == "fp16" else None
        fixed = float(fp16.get("loss_scale", 0)) if fp16 else 0.0
        self._scaler = torch.amp.GradScaler(
            setting.device.type,
            init_scale=fixed or 2.0 ** (fp16 or {}).get("initial_scale_power", 16),
            growth_interval=2**31 - 1 if fixed else (fp16 or {}).get("loss_scale_window", 1000),
            enabled=fp16 is not None,
        )
        self._optimizer = AdamW(setting, self._masters or self._parameters, fused=fused, scaler=self._scaler)

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()

    @torch.no_grad()
    def step(self) -> None:
        """One step; the gradients of the weights are gone afterwards."""
        if self._masters:
            narrow = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            torch._foreach_copy_(self._gradients, narrow)
        self._optimizer.step()
        if self._masters:
            torch._foreach_copy_(tuple(self._parameters), tuple(self._masters))
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def first_scales(self) -> list[float]:
        """The loss scale, and smaller ones to try where it overflows; 1 outside of fp16."""
        first = self._scaler.get_scale()
        return [first / 2**halved for halved in range(SCALES if self._scaler.is_enabled() else 1)]

    def gradient_norm(self, loss: Tensor, scale: float) -> float:
        """Of ``loss``, without changing anything; not finite where ``scale`` makes it overflow."""
        (loss * scale).backward()
        gradients = [parameter.grad.float() for parameter in self._parameters if parameter.grad is not None]
        self.drop_gradients()
        return float(torch.nn.utils.get_total_norm(gradients)) / scale


class Loop:
    """A row: a U-Net in a loop of its own. What is special to a U-Net is :meth:`predict`."""

    is_pipeline = False

    def __init__(self, setting: Setting, model: nn.Module, name: str, note: str, *, fused_adamw: bool = False) -> None:
        self.name, self.note = name, note
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.macs = setting.plan.macs
        """Multiply-accumulates of one image's forward."""
        self.model = model
        self._objective = setting.objective()
        self._batches = setting.batches(1, 0)
        self._update = Update(setting, list(model.parameters()), fused=fused_adamw)

    def predict(self, inputs: Sequence[Tensor], images: Tensor) -> Tensor:
        """(N, C, H, W) of (x_t, t) or (x_t, t, labels); ``images`` (N,) are positions, as loaded."""
        raise NotImplementedError

    def step(self) -> Tensor:
        """One optimizer step on the next batch, without waiting for the device; its loss, a scalar."""
        loss = self._backward()
        self._update.step()
        return loss

    def forward_backward(self) -> Tensor:
        """The same without the optimizer."""
        loss = self._backward()
        self._update.drop_gradients()
        return loss

    def probe(self, micro_batch: MicroBatch) -> UnetProbe:
        """What the weights, which stay as they are, make of ``micro_batch``."""
        with without_dropout(self.model):
            for scale in self._update.first_scales():
                prediction, loss = self._forward(micro_batch)
                norm = self._update.gradient_norm(loss, scale)
                if math.isfinite(norm):
                    break
        return UnetProbe(prediction.detach().float().cpu(), float(loss.detach()), norm)

    def _backward(self) -> Tensor:
        _, loss = self._forward(next(self._batches))
        self._update.backward(loss)
        return loss.detach()

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        prepared = self._objective.prepare(micro_batch)
        prediction = self.predict(self._objective.inputs(prepared), micro_batch.index)
        return prediction, self._objective.loss(prediction, prepared)


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, ours and PyTorch's: no two U-Nets draw the same masks."""
    ours = [part for part in model.modules() if isinstance(part, KeyedDropout)]
    theirs = [part for part in model.modules() if isinstance(part, nn.Dropout)]
    rates, shares = [part.rate for part in ours], [part.p for part in theirs]
    for part in ours:
        part.rate = 0.0
    for other in theirs:
        other.p = 0.0
    try:
        yield
    finally:
        for part, rate in zip(ours, rates, strict=True):
            part.rate = rate
        for other, share in zip(theirs, shares, strict=True):
            other.p = share
