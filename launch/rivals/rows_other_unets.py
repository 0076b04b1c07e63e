"""Rows of ``--one-device`` that are other people's U-Nets, trained as their users do: fp32 weights under autocast."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ddpm_ds.config.spec import UnetSpec
from ddpm_ds.config.spec_file import SPECS, load_spec
from ddpm_ds.device import DTYPES
from ddpm_ds.train.setting import Setting
from ddpm_ds.unet.diffusers import diffusers_config, to_diffusers
from ddpm_ds.unet.layers import unet_layers
from rivals.loops import Loop
from rivals.rows_one_device import Start


class AutocastLoop(Loop):
    """A U-Net with fp32 weights whose forward runs under ``torch.autocast`` of the run's precision."""

    def __init__(self, setting: Setting, model: nn.Module, name: str, note: str = "") -> None:
        precision = setting.plan.ds.precision
        self._autocast = (setting.device.type, DTYPES[precision][1], precision != "fp32")
        how = "fp32" if precision == "fp32" else f"autocast {precision}"
        super().__init__(setting, model.to(setting.device), f"{name}, {how}, AdamW", note)

    def predict(self, inputs: Sequence[Tensor], images: Tensor) -> Tensor:
        kind, dtype, enabled = self._autocast
        with torch.autocast(kind, dtype, enabled=enabled):
            return self._predict(*inputs)

    def _predict(self, *inputs: Tensor) -> Tensor:
        prediction: Tensor = self.model(*inputs)
        return prediction


class DiffusersLoop(AutocastLoop):
    """``UNet2DModel`` of our configuration, with our weights."""

    def __init__(self, start: Start, *, compiled: bool) -> None:
        from diffusers import UNet2DModel

        plan = start.setting.plan
        data, unet = plan.spec.data, plan.spec.unet
        model: Any = UNet2DModel(**diffusers_config(unet, image_channels=data.channels, image_size=data.image_size))
        model.load_state_dict(to_diffusers(start.unet.layers.state_dict(), plan.layers))
        super().__init__(start.setting, model, f"diffusers UNet2DModel{', compiled' if compiled else ''}")
        self._call = torch.compile(self.model) if compiled else self.model

    def _predict(self, *inputs: Tensor) -> Tensor:
        x_t, t, *labels = inputs
        prediction: Tensor = self._call(x_t, t, class_labels=labels[0] if labels else None, return_dict=False)[0]
        return prediction


class LucidrainsLoop(AutocastLoop):
    """``Unet`` of denoising-diffusion-pytorch at its setting of 2023, the widths of launch/specs/cifar10_dim64.yaml."""

    def __init__(self, setting: Setting) -> None:
        with warnings.catch_warnings():  # it decorates with an autocast that PyTorch has renamed
            warnings.simplefilter("ignore", FutureWarning)
            from denoising_diffusion_pytorch import Unet

        data, widths = setting.plan.spec.data, dim64_unet()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setting.plan.spec.train.seed)
            model = Unet(dim=widths.channels, dim_mults=widths.multipliers, channels=data.channels)
        images = torch.zeros(1, data.channels, data.image_size, data.image_size)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(images, torch.zeros(1, dtype=torch.int64))
        super().__init__(setting, model, "denoising-diffusion-pytorch Unet")
        self.macs = counter.get_total_flops() // 2


def dim64_unet() -> UnetSpec:
    """The U-Net of launch/specs/cifar10_dim64.yaml."""
    return load_spec(SPECS / "cifar10_dim64.yaml", []).unet


def dim64(setting: Setting) -> Setting:
    """The same images, objective and optimizer with the U-Net of launch/specs/cifar10_dim64.yaml."""
    plan = setting.plan
    unet = dim64_unet()
    spec = plan.spec.model_copy(update={"unet": unet})
    layers = unet_layers(unet, image_channels=spec.data.channels, image_size=spec.data.image_size)
    return replace(setting, plan=replace(plan, spec=spec, layers=layers))
