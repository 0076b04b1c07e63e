"""What this device can do: found out before anything large is built."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from ddpm_ds.device import DTYPES
from ddpm_ds.errors import DsConfigError
from ddpm_ds.train.setting import Setting
from ddpm_ds.unet.diffusers import diffusers_config
from ddpm_ds.unet.kernel_choice import check_kernels
from ddpm_ds.unet.model import check_compiler
from rivals.one_device_choice import COMPILED, OTHER_UNETS

INSTALL = "pip install 'ddpm_ds[bench]'"
PACKAGES = {
    "diffusers": "diffusers",
    "diffusers-compiled": "diffusers",
    "lucidrains": "denoising_diffusion_pytorch",
}
"""What a row imports."""
SLOW_COMPILER = "compiling takes minutes on a CPU; name the row in --rows"
LONGEST_STEP_SECONDS = 20.0
"""A row whose step is estimated to take longer is left out."""
ENOUGH_SECONDS = 0.5
"""That much time goes into a convolution that is timed."""
DIM64_IMAGES = (3, 32)
"""Channels and size of the images of launch/specs/cifar10_dim64.yaml."""


@dataclass(frozen=True)
class Abilities:
    """Why a switch can't be switched on here; None where it can."""

    why_not_compiled: str | None
    why_not_fused: str | None


def abilities(device: torch.device, *, compiled: bool) -> Abilities:
    """What the device has; ``compiled`` says whether rows that are compiled were asked for."""
    return Abilities(
        why_not_compiled=_why_not(lambda: check_compiler(device)) if compiled else SLOW_COMPILER,
        why_not_fused=_why_not(lambda: check_kernels("fused", device)),
    )


def why_not_here(row: str, setting: Setting, able: Abilities) -> str | None:
    """Why ``row`` can't run on this device; None where it can."""
    package = PACKAGES.get(row)
    if package is not None and find_spec(package) is None:
        return f"{package} is not installed; {INSTALL}"
    data = setting.plan.spec.data
    if row in OTHER_UNETS and (data.channels, data.image_size) != DIM64_IMAGES:
        return "its images are 32x32x3; use --spec launch/specs/cifar10.yaml"
    if package == "diffusers":
        try:
            diffusers_config(setting.plan.spec.unet, image_channels=data.channels, image_size=data.image_size)
        except ValueError as error:
            return str(error)
    if row in COMPILED and able.why_not_compiled is not None:
        return able.why_not_compiled
    if row == "fused-kernels" and able.why_not_fused is not None:
        return able.why_not_fused
    return _too_slow(setting) if package is not None else None


def versions_of(rows: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that these rows import."""
    modules = {PACKAGES[row] for row in rows if row in PACKAGES}
    return {module: version(module) for module in sorted(modules)}


def _too_slow(setting: Setting) -> str | None:
    """Why autocast, which computes in the run's precision whatever that costs, is not waited for."""
    dtype = DTYPES[setting.plan.ds.precision][1]
    if setting.device.type != "cpu" or dtype is torch.float32:
        return None
    rate = convolution_rate(dtype)
    seconds = 3 * setting.plan.macs * setting.plan.ds.layout.micro_batch_images / rate
    if seconds <= LONGEST_STEP_SECONDS:
        return None
    precision, wide = setting.plan.ds.precision, convolution_rate(torch.float32)
    return (
        f"autocast computes in {precision}, in which a convolution runs at {2 * rate / 1e9:.2g} GFLOP/s on this CPU "
        f"({torch.backends.cpu.get_cpu_capability()}), in fp32 at {2 * wide / 1e9:.2g}: a step would take about "
        f"{seconds:.0f} s"
    )


@cache
def convolution_rate(dtype: torch.dtype) -> float:
    """Multiply-accumulates per second of a small convolution's forward and backward on the CPU, the fastest of some."""
    images, channels, size = 4, 64, 16
    x = torch.randn(images, channels, size, size).to(dtype).requires_grad_()
    weight = torch.randn(channels, channels, 3, 3).to(dtype).requires_grad_()
    fastest, end = float("inf"), time.perf_counter() + ENOUGH_SECONDS
    while fastest == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        F.conv2d(x, weight, padding=1).sum().backward()
        fastest = min(fastest, time.perf_counter() - begin)
    return 3 * images * channels * channels * 9 * size * size / fastest


def _why_not(check: Callable[[], None]) -> str | None:
    try:
        check()
    except DsConfigError as error:
        return str(error)
    return None
