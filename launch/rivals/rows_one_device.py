"""Rows of ``--one-device`` that are ours: a plain loop by switches, and the pipeline engine with one stage."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpm_ds.command_line import cache_folder
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.device import DTYPES
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.train.setting import Setting
from ddpm_ds.unet.kernel_choice import choose_kernels
from ddpm_ds.unet.model import UNet, compile_layers
from ddpm_ds.unet.operations import use_kernels, use_memory_format
from rivals.loops import SCALES, Loop, UnetProbe, without_dropout
from rivals.one_device_choice import Switches
from rivals.rows_deepspeed import OurPipeline, layout_of


@dataclass(frozen=True)
class Start:
    """What all rows of one U-Net begin with."""

    setting: Setting
    unet: UNet
    """In fp32 on the CPU; copied, never trained."""

    @classmethod
    def of(cls, setting: Setting) -> Start:
        """Weights as training begins with, but none of them zero: a U-Net that ends with zeros predicts zero,
        whatever happens before."""
        unet = UNet(setting.plan.layers, setting.plan.spec.train.seed)
        generator = torch.Generator().manual_seed(setting.plan.spec.train.seed)
        for parameter in unet.parameters():
            if not parameter.any():
                inputs = parameter[0].numel() if parameter.ndim > 1 else 100
                nn.init.normal_(parameter, std=inputs**-0.5, generator=generator)
        return cls(setting, unet)


class OurLoop(Loop):
    """Our U-Net with its weights in the run's precision, as the engine holds them, and fp32 masters."""

    def __init__(self, start: Start, switches: Switches, note: str = "") -> None:
        setting, precision = start.setting, start.setting.plan.ds.precision
        unet = copy.deepcopy(start.unet).to(setting.device, DTYPES[precision][1])
        use_memory_format(unet.layers, "channels_last" if switches.channels_last else "contiguous")
        use_kernels(
            unet.layers, "fused" if switches.fused_kernels else "masks" if switches.fused_masks else "reference"
        )
        if switches.compiled:
            compile_layers(list(unet.layers), cache_folder() / "compiled")
        self._device = setting.device
        name = f"ours, {precision}, {switches}"
        super().__init__(setting, unet, name, note, fused_adamw=switches.fused_adamw)

    def predict(self, inputs: Sequence[Tensor], images: Tensor) -> Tensor:
        prediction: Tensor = self.model(*inputs, images=images.to(self._device, non_blocking=True))
        return prediction


class OneStageEngine(OurPipeline):
    """Our 1F1B engine with one stage, which begins with the same weights."""

    forward_backward = None

    def __init__(self, start: Start) -> None:
        super().__init__(start.setting, "1f1b")
        self.name += ", 1 stage"
        self.note = self._engine.why_kernels
        self.parameters, self.macs = start.setting.plan.parameters, start.setting.plan.macs
        self._objective = start.setting.objective()
        weights = start.unet.layers.state_dict()
        with torch.no_grad():
            for piece in insides.owned_pieces(self._engine):
                values = weights[piece.name].flatten()[piece.first : piece.first + piece.length]
                piece.of(piece.master).copy_(values)
        insides.refresh_weights(self._engine)

    def probe(self, micro_batch: MicroBatch) -> UnetProbe:
        """The same of the engine; its gradients are those of a step, so its weights move once."""
        engine = self._engine
        with layout_of(engine.mpu), without_dropout(engine.module):
            with torch.no_grad():
                inputs = engine.in_wire_dtype(self._objective.inputs(self._objective.prepare(micro_batch)))
                prediction: Tensor = engine.module(inputs)
            for _ in range(SCALES):  # an engine that overflows halves its loss scale and leaves the weights alone
                loss = engine.train_batch(iter([micro_batch]))
                norm = engine.gradient_norm()
                if math.isfinite(norm) or not engine.fp16_enabled():
                    break
        engine.images_seen = 0
        return UnetProbe(prediction.float().cpu(), float(loss), norm)


def engine_switches(setting: Setting) -> Switches:
    """What the engine switches on under this configuration, on this device."""
    plan, ds = setting.plan, setting.plan.ds
    dtype, images = DTYPES[plan.ds.precision][1], plan.ds.layout.micro_batch_images
    kernels, _ = choose_kernels(ds.kernels, plan.layers, setting.device, dtype, images)
    return Switches(
        channels_last=True,
        fused_kernels=kernels == "fused",
        fused_masks=kernels == "masks",
        compiled=ds.compile,
        fused_adamw=bool(ds.blocks["optimizer"]["params"].get("fused")),
    )
