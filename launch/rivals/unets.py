"""Rows of ``--one-device`` in a plain loop: our U-Net with some switches on, and other people's U-Nets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ddpm_ds.command_line import cache_folder
from ddpm_ds.config.choices import SCHEDULES
from ddpm_ds.config.spec_file import SPECS, load_spec
from ddpm_ds.device import DTYPES
from ddpm_ds.errors import DsConfigError
from ddpm_ds.evaluate.diffusers.unet import diffusers_config, to_diffusers
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.model import UNet, check_compiler, check_kernels, choose_kernels, compile_layers
from ddpm_ds.unet.operations import Kernels, arithmetic_dtype, use_kernels, use_memory_format
from rivals.choice import COMPILED, OTHER_UNETS
from rivals.rows import Loop, RandomDenoising, Setting

PACKAGES = {
    "diffusers": "diffusers",
    "diffusers-compiled": "diffusers",
    "diffusers-randn": "diffusers",
    "lucidrains": "denoising_diffusion_pytorch",
    "lucidrains-randn": "denoising_diffusion_pytorch",
}
"""Package that a row imports."""
DIM64, DIM64_IMAGES = SPECS / "cifar10_dim64.yaml", (3, 32)
"""Spec of another U-Net, and the channels and size of its images."""


def comparable_unet(setting: Setting) -> UNet:
    """Return our U-Net in fp32 on the CPU, with no weight zero: one that ends with zeros always predicts zero."""
    unet = UNet(setting.plan.layers, setting.plan.spec.train.seed)
    generator = torch.Generator().manual_seed(setting.plan.spec.train.seed)
    for parameter in unet.parameters():
        if not parameter.any():
            inputs = parameter[0].numel() if parameter.ndim > 1 else 100
            nn.init.normal_(parameter, std=inputs**-0.5, generator=generator)
    return unet


@dataclass(frozen=True)
class Switches:
    """Options that can be switched on in our U-Net and its optimizer."""

    channels_last: bool = False
    kernels: Kernels = "reference"
    """"fused" needs channels-last."""
    compiled: bool = False
    fused_adamw: bool = False

    def __str__(self) -> str:
        words = ["channels-last"] * self.channels_last
        words += [] if self.kernels == "reference" else ["fused masks" if self.kernels == "masks" else "fused kernels"]
        words += ["compiled"] * self.compiled + ["fused AdamW"] * self.fused_adamw
        return ", ".join(words) or "nothing switched on"


def switches_of(row: str, setting: Setting, missing: Collection[str]) -> Switches:
    """Return the options of one of our rows; ``missing`` is the result of :func:`missing_switches`."""
    if row == "bare":
        plan, ds = setting.plan, setting.plan.ds
        dtype, images = DTYPES[ds.precision][1], ds.layout.micro_batch_images
        kernels, _ = choose_kernels(ds.kernels, plan.layers, setting.device, dtype, images)
        return Switches(True, kernels, ds.compile, bool(ds.blocks["optimizer"]["params"].get("fused")))
    everything = row in ("all", "ours-dim64")
    fused = row == "fused-kernels" or (everything and "fused-kernels" not in missing)
    return Switches(
        channels_last=everything or row in ("channels-last", "fused-kernels"),
        kernels="fused" if fused else "reference",
        compiled=row == "compile" or (row == "all" and "compile" not in missing),
        fused_adamw=everything or row == "fused-adamw",
    )


def our_loop(setting: Setting, switches: Switches, note: str = "") -> Loop:
    """Return the loop of our U-Net, its weights in the run's precision, as the engine holds them, with fp32 masters."""
    precision = setting.plan.ds.precision
    unet = comparable_unet(setting).to(setting.device, DTYPES[precision][1])
    use_memory_format(unet.layers, torch.channels_last if switches.channels_last else torch.contiguous_format)
    use_kernels(unet.layers, switches.kernels)
    if switches.compiled:
        compile_layers(list(unet.layers), cache_folder() / "compiled")
    name = f"ours, {precision}, {switches}"
    return Loop(setting, unet, name, note, fused=switches.fused_adamw, scaled=precision == "fp16")


class AutocastLoop(Loop):
    """U-Net trained as its users do: fp32 weights, the forward under ``torch.autocast`` of the run's precision."""

    def __init__(
        self, setting: Setting, model: nn.Module, name: str, call: Callable[..., Tensor], *, randn: bool
    ) -> None:
        precision = setting.plan.ds.precision
        objective = RandomDenoising(setting.plan.spec, setting.device) if randn else None
        name += ", torch.randn" if randn else ""
        self._call = call
        self._autocast = torch.autocast(setting.device.type, DTYPES[precision][1], enabled=precision != "fp32")
        how = "fp32" if precision == "fp32" else f"autocast {precision}"
        scaled, name = precision == "fp16", f"{name}, {how}, AdamW"
        super().__init__(setting, model.to(setting.device), name, scaled=scaled, objective=objective)

    def predict(self, inputs: Sequence[Tensor], images: Tensor) -> Tensor:
        with self._autocast:
            return self._call(*inputs)


def diffusers_loop(setting: Setting, *, compiled: bool, randn: bool) -> Loop:
    """Return the loop of ``UNet2DModel`` of our configuration, with our weights."""
    from diffusers import UNet2DModel

    plan = setting.plan
    data, unet = plan.spec.data, plan.spec.unet
    model: Any = UNet2DModel(**diffusers_config(unet, data.interface))
    model.load_state_dict(to_diffusers(comparable_unet(setting).layers.state_dict(), plan.layers))
    called = torch.compile(model) if compiled else model

    def call(x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        prediction: Tensor = called(x_t, t, class_labels=labels, return_dict=False)[0]
        return prediction

    name = f"diffusers UNet2DModel{', compiled' if compiled else ''}"
    return AutocastLoop(setting, model, name, call, randn=randn)


def lucidrains_loop(setting: Setting, *, randn: bool) -> Loop:
    """Return the loop of denoising-diffusion-pytorch's ``Unet`` as of 2023, with the widths of :data:`DIM64`."""
    with warnings.catch_warnings():  # it decorates with an autocast that PyTorch has renamed
        warnings.simplefilter("ignore", FutureWarning)
        from denoising_diffusion_pytorch import Unet

    data, widths = setting.plan.spec.data, load_spec(DIM64, []).unet
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.plan.spec.train.seed)
        model = Unet(dim=widths.channels, dim_mults=widths.multipliers, channels=data.channels)
    images = torch.zeros(1, *data.shape)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images, torch.zeros(1, dtype=torch.int64))
    loop = AutocastLoop(setting, model, "denoising-diffusion-pytorch Unet", model, randn=randn)
    loop.macs = counter.get_total_flops() // 2
    return loop


def dim64(setting: Setting) -> Setting:
    """Return the same images, objective and optimizer with the U-Net of launch/specs/cifar10_dim64.yaml."""
    plan, unet = setting.plan, load_spec(DIM64, []).unet
    spec = plan.spec.model_copy(update={"unet": unet})
    layers = unet_layers(unet, spec.data.interface)
    return replace(setting, plan=replace(plan, spec=spec, layers=layers))


def missing_switches(setting: Setting, names: Sequence[str] | None) -> dict[str, str]:
    """Return what this device can't do, or only in minutes, with the reason: "compile", "fused-kernels", "autocast".

    ``names`` are the rows that were asked for by name, if any; for those, minutes are spent.
    """
    device, precision, named = setting.device, setting.plan.ds.precision, set(names or ())
    dtype, missing = DTYPES[precision][1], {}
    if device.type == "cpu" and named.isdisjoint(COMPILED):
        missing["compile"] = "compiling takes minutes on a CPU; name the row in --rows"
    else:
        try:
            check_compiler(device)
        except DsConfigError as error:
            missing["compile"] = str(error)
    try:
        check_kernels("fused", device)
    except DsConfigError as error:
        missing["fused-kernels"] = str(error)
    if arithmetic_dtype(device.type, dtype) is not dtype and named.isdisjoint(PACKAGES):
        missing["autocast"] = (
            f"autocast computes in {precision}, in which convolutions on this CPU "
            f"({torch.backends.cpu.get_cpu_capability()}) can be many times slower; name the row in --rows"
        )
    return missing


def why_not_here(row: str, setting: Setting, missing: dict[str, str]) -> str | None:
    """Return why a row of ``--one-device`` can't run here, or was not named; None if it runs."""
    package, data = PACKAGES.get(row), setting.plan.spec.data
    if package is not None and find_spec(package) is None:
        return f"{package} is not installed; pip install 'ddpm_ds[bench]'"
    schedule = setting.plan.spec.diffusion.schedule
    if row.endswith("randn") and SCHEDULES[schedule].continuous:
        return f"its timesteps are whole numbers, and those of diffusion.schedule = {schedule} are not"
    if row in OTHER_UNETS and (data.channels, data.image_size) != DIM64_IMAGES:
        return "its images are 32x32x3; use --spec launch/specs/cifar10.yaml"
    if package == "diffusers":
        try:
            diffusers_config(setting.plan.spec.unet, data.interface)
        except ValueError as error:
            return str(error)
    needs = ["compile" if row in COMPILED else row] + ["autocast"] * (package is not None)
    return next((missing[need] for need in needs if need in missing), None)
