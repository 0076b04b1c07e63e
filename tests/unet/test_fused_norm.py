"""The fused GroupNorm + SiLU: what surrounds its kernels, and the cases of ``test_interpreted.py``, built on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ddpm_ds import unet
from ddpm_ds.config.spec import Interface, UnetSpec
from ddpm_ds.errors import DeviceLostError, DsConfigError
from ddpm_ds.unet import fused_norm, model
from ddpm_ds.unet.fused_norm import fused_norm_silu
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.model import (
    AskedKernels,
    KernelTimes,
    check_kernels,
    choose_kernels,
    copy_bandwidth_share,
    mask_seconds,
    mask_sizes,
    norm_seconds,
    norm_shapes,
    try_kernels,
)
from ddpm_ds.unet.operations import GroupNorm, KeyedDropout, use_kernels

EPSILON = 1e-3
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A shape, what surrounds the normalisation, and how the kernels share it out."""

    dtype: str = "fp32"
    shape: tuple[int, int, int, int] = (2, 12, 5, 3)
    groups: int = 3
    vectors: tuple[str, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0
    weights: str | None = None
    """The dtype of weight and bias; None is that of x."""
    tiles: bool = True
    """Whether images are cut into tiles; else they are held whole."""
    block: int = 128
    """Elements in registers at a time, few, so that small images have many tiles."""
    programs: int = 4
    silu: bool = True
    runs: int = 1
    """How often it is computed."""

    def tensors(self, device: str) -> tuple[list[Tensor], Tensor]:
        """x, weight, bias and the vectors, and a gradient of the output."""
        dtype = DTYPES[self.dtype]
        images, channels, *_ = self.shape
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        x = (self.mean + self.deviation * normal(*self.shape)).to(device, dtype, memory_format=torch.channels_last)
        both = normal(images, 2 * channels).to(device, dtype).chunk(2, dim=1)  # as an embedding's projection gives them
        vectors = {"add": normal(images, channels).to(device, dtype), "scale": both[0], "shift": both[1]}
        narrow = dtype if self.weights is None else DTYPES[self.weights]
        weight, bias = ((1 + normal(channels)).to(device, narrow) for _ in range(2))
        dy = normal(*self.shape).to(device, dtype, memory_format=torch.channels_last)
        return [x, weight, bias, *(vectors[name] for name in self.vectors)], dy


def plain(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, epsilon: float, *, silu: bool = True, **vectors: Tensor
) -> Tensor:
    """The formula, in PyTorch."""
    add, scale, shift = (vectors.get(name, torch.zeros(())) for name in ("add", "scale", "shift"))
    add, scale, shift = (vector[..., None, None] if vector.dim() else vector for vector in (add, scale, shift))
    modulated = F.group_norm(x + add, groups, weight, bias, epsilon) * (1 + scale) + shift
    return F.silu(modulated) if silu else modulated


Norm = Callable[..., Tensor]


def results(norm: Norm, case: Case, tensors: list[Tensor], dy: Tensor) -> dict[str, Tensor]:
    """The output and every gradient by name."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    x, weight, bias, *vectors = leaves
    named = dict(zip(case.vectors, vectors, strict=True))
    y = norm(x, weight, bias, case.groups, EPSILON, silu=case.silu, **named)
    gradients = torch.autograd.grad(y, leaves, dy)
    return {"y": y.detach(), **dict(zip(("x", "weight", "bias", *case.vectors), gradients, strict=True))}


def compared(case: Case, device: str, norm: Norm = fused_norm_silu) -> dict[str, Any]:
    """How far a way of computing comes from float64: the norm of the difference, relative to that of the tensor."""
    tensors, dy = case.tensors(device)
    got = results(norm, case, tensors, dy)
    exact = results(plain, case, [tensor.double() for tensor in tensors], dy.double())
    again = [results(norm, case, tensors, dy) for _ in range(case.runs - 1)]
    return {
        "errors": {name: ((got[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact},
        "repeats": all(torch.equal(got[name], other[name]) for other in again for name in got),
        "dtypes": [got[name].dtype == of.dtype for name, of in zip(got, [tensors[0], *tensors], strict=True)],
        "channels_last": [got[name].stride() == tensors[0].stride() for name in ("y", "x")],
    }


def report(case: Case) -> dict[str, Any]:
    fused_norm.BLOCK_ELEMENTS, fused_norm.PROGRAMS = case.block, case.programs
    fused_norm.tiles.cache_clear()
    whole = fused_norm.whole
    if case.tiles:
        fused_norm.whole = lambda *_: None  # type: ignore[assignment]
    try:
        return compared(case, "cpu")
    finally:
        fused_norm.whole = whole


def recomputed(*arguments: Any, **vectors: Any) -> Tensor:
    return checkpoint(fused_norm_silu, *arguments, use_reentrant=False, **vectors)


def same_as_eager() -> dict[str, bool]:
    """Whether compiled and recomputed results are the eager ones to the bit."""
    case = Case(vectors=("scale", "shift"), shape=(2, 12, 3, 3))
    tensors, dy = case.tensors("cpu")
    expected = results(fused_norm_silu, case, tensors, dy)
    ways = {
        "compiled": torch.compile(fused_norm_silu, fullgraph=True, backend="aot_eager"),
        "recomputed": recomputed,
    }
    found = {way: results(norm, case, tensors, dy) for way, norm in ways.items()}
    return {way: all(torch.equal(got[name], expected[name]) for name in expected) for way, got in found.items()}


ALL = ("add", "scale", "shift")
CASES = {
    "fp32-tiles": Case(),
    "fp32-whole": Case(tiles=False),
    "fp32-tiles-embedding": Case(vectors=ALL),
    "fp32-whole-embedding": Case(vectors=ALL, tiles=False),
    "fp16-tiles": Case("fp16", vectors=ALL, runs=2),
    "bf16-whole": Case("bf16", vectors=ALL, tiles=False, runs=2),
    "far-from-zero-tiles": Case(mean=100.0, vectors=ALL),
    "far-from-zero-whole": Case(mean=100.0, vectors=ALL, tiles=False),
    "fp16-beyond-the-range-of-squares": Case("fp16", mean=2000.0, deviation=500.0, shape=(1, 8, 4, 4), groups=2),
    "groups-of-one-channel": Case(shape=(2, 5, 4, 3), groups=5, vectors=("scale", "shift")),
    "one-group": Case(shape=(1, 20, 3, 3), groups=1, vectors=("scale", "shift"), tiles=False),
    "one-pixel": Case(shape=(3, 8, 1, 1), groups=2, vectors=ALL),
    "more-groups-than-a-program-holds": Case(shape=(1, 72, 2, 2), groups=18, tiles=False),
    "channels-in-blocks": Case(shape=(1, 192, 2, 1), groups=4, block=256, vectors=ALL),
    "a-last-tile-of-one-pixel": Case(shape=(1, 16, 3, 11), groups=4, programs=8),
    "tiles-of-several-blocks": Case(shape=(1, 16, 7, 9), groups=4, programs=2, vectors=ALL),
    "without-silu-tiles": Case(vectors=("add",), silu=False),
    "without-silu-whole": Case(vectors=("add",), tiles=False, silu=False),
    "fp16-with-fp32-weights": Case("fp16", weights="fp32", vectors=("add",)),
}


def tolerance(case: Case) -> float:
    """What a case may differ from float64 by, relative to the norm of the tensor.

    A value is made of sums of up to ``terms`` numbers and some 30 operations besides. In fp32 each of them rounds by at
    most half a unit of the last place, 2^-24, to either side: four standard deviations of that random walk. A mean far
    from zero is rounded as well, which moves every value of its group. The result is rounded to the dtype of x by half
    a unit of its last place, a whole one in bf16, which the interpreter cuts off.
    """
    images, channels, height, width = case.shape
    terms = height * width * max(images, channels // case.groups)
    stored = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-7}[case.dtype]
    return stored + 4 * 2.0**-24 * ((30 + terms) ** 0.5 + abs(case.mean) / case.deviation)


@pytest.mark.parametrize("side", [2, 64])
def test_kernels_get_the_very_memory_of_x_and_of_the_gradient_which_must_be_channels_last(
    monkeypatch: pytest.MonkeyPatch, side: int
) -> None:
    """No kernel runs: what they were given is looked at."""
    given: list[int] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **_: given.extend(arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor))

    class Kernels(SimpleNamespace):
        def __getattr__(self, name: str) -> Kernel:
            return Kernel()

    monkeypatch.setitem(sys.modules, "ddpm_ds.unet.fused_norm_kernels", kernels := Kernels())
    monkeypatch.setattr(unet, "fused_norm_kernels", kernels, raising=False)
    tensors, dy = Case(shape=(2, 32, side, side), groups=8, vectors=ALL).tensors("cpu")
    leaves = [tensor.requires_grad_() for tensor in tensors]
    x, weight, bias, add, scale, shift = leaves
    y = fused_norm_silu(x, weight, bias, 8, 1e-5, add=add, scale=scale, shift=shift)
    (dx,) = torch.autograd.grad(y, leaves[0], dy)
    large = fused_norm.whole(side**2, 32, 8, 4) is None
    assert large is (side == 64)
    assert {tensor.data_ptr() for tensor in (*leaves, y, dx, dy)} <= set(given)
    with pytest.raises(ValueError, match="channels-last"):
        fused_norm_silu(x.contiguous(), weight, bias, 8, 1e-5)


@pytest.mark.parametrize("channels, groups", [(128, 32), (192, 32), (384, 32), (12, 3), (100, 25), (1024, 1)])
@pytest.mark.parametrize("images, pixels", [(1, 1), (1, 65536), (8, 1024), (128, 1024), (3, 81)])
def test_tiles_cover_every_pixel_and_channel_once(images: int, pixels: int, channels: int, groups: int) -> None:
    cut = fused_norm.tiles(images, pixels, channels, groups)
    assert (cut.count - 1) * cut.pixels < pixels <= cut.count * cut.pixels
    assert (cut.channel_blocks - 1) * cut.columns < channels <= cut.channel_blocks * cut.columns
    assert cut.rows * cut.columns <= fused_norm.BLOCK_ELEMENTS
    held = fused_norm.whole(pixels, channels, groups, 2)
    if held is not None:
        assert held.rows >= pixels and held.width >= channels // groups and held.programs * held.groups >= groups


LAYERS, LAYERS_WITH_DROPOUT = (
    unet_layers(UnetSpec(channels=32, multipliers=(1, 2), dropout=dropout), Interface(channels=3, size=(16, 16)))
    for dropout in (0.0, 0.1)
)


def test_a_unet_has_two_normalisations_with_silu_and_perhaps_a_mask_in_each_block_and_one_at_its_end() -> None:
    blocks = sum("block" in layer.name for layer in LAYERS)
    assert norm_shapes(LAYERS).total() == 2 * blocks + 1
    sizes = mask_sizes(LAYERS_WITH_DROPOUT)
    assert sizes.total() == blocks and sizes.keys() == {32 * 16 * 16, 64 * 8 * 8} and not mask_sizes(LAYERS)


def test_on_a_cpu_the_reference_is_chosen_and_the_fused_kernels_are_refused() -> None:
    cpu = torch.device("cpu")
    choice, why = choose_kernels("auto", LAYERS, cpu, torch.float32, 1)
    assert choice == "reference" and why == "kernels: reference (the fused ones need CUDA and Triton)"
    assert choose_kernels("reference", LAYERS, cpu, torch.float32, 1)[0] == "reference"
    check_kernels("auto", cpu)
    with pytest.raises(DsConfigError, match=r'kernels = "fused" needs CUDA.*use "auto" or "reference"'):
        check_kernels("fused", cpu)
    assert try_kernels("auto", LAYERS, cpu, torch.float32, 8) == KernelTimes(failure="Triton is not installed")


ALIKE = KernelTimes(1.0, 1.0)


def chosen(asked: AskedKernels, *others: KernelTimes, mine: KernelTimes = ALIKE, layers: Any = ()) -> tuple[str, str]:
    """The choice where the first rank's trial is ``mine``, and others had these trials."""
    with patch.object(model, "try_kernels", lambda *_, **__: mine):
        return choose_kernels(asked, layers, torch.device("cuda"), torch.float16, 8, lambda trial: [trial, *others])


def test_the_speed_on_all_ranks_decides() -> None:
    assert chosen("auto", KernelTimes(3.0, 1.0)) == (
        "fused",
        "kernels: fused (2.00 times the speed of the reference over the normalisations of this U-Net, measured)",
    )
    assert chosen("auto", KernelTimes(1.0, 3.0))[0] == "reference"
    assert chosen("fused", KernelTimes(1.0, 3.0)) == ("fused", "kernels: fused (as asked)")
    assert chosen("reference", KernelTimes(failure="no compiler"))[0] == "reference"
    # PyTorch's normalisations may be faster; a dozen passes over memory for a mask are not.
    for trial, expected in ((KernelTimes(1.0, 2.0), "masks"), (KernelTimes(failure="no compiler"), "reference")):
        choice, why = chosen("auto", mine=trial, layers=LAYERS_WITH_DROPOUT)
        assert choice == expected and why.startswith(f"kernels: {expected}")
    modules = [GroupNorm(2, 4, 1e-5), KeyedDropout(0.5, 0, 0, (4, 1, 1))]
    use_kernels(modules, "masks")
    assert [module.kernels for module in modules] == ["masks", "masks"]


def test_kernels_that_fail_on_one_rank_are_used_on_none_and_those_that_break_a_gpu_end_the_run() -> None:
    fails, broken = (
        KernelTimes(failure="no compiler"),
        KernelTimes(failure="an illegal memory access", device_lost=True),
    )
    assert chosen("auto", KernelTimes(3.0, 1.0), fails) == (
        "reference",
        "kernels: reference (the fused ones fail on rank 2: no compiler)",
    )
    with pytest.raises(DsConfigError, match='kernels = "fused" fails on rank 1: no compiler; use "auto" or "refer'):
        chosen("fused", fails, fails)
    said = 'the fused kernels have broken the GPU of rank 2: an illegal memory access; set "kernels" to "reference"'
    for asked in ("auto", "fused"):
        with pytest.raises(DeviceLostError, match=said):
            chosen(asked, fails, broken)


@pytest.mark.parametrize(
    ("error", "broken", "trial"),
    [
        (None, False, KernelTimes(3.0, 3.0)),
        (RuntimeError("Triton Error [CUDA]: an illegal\nmemory access"), True, None),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True, None),
        (torch.OutOfMemoryError("CUDA out of memory"), False, None),
        (NotImplementedError(), False, KernelTimes(failure="NotImplementedError")),
    ],
    ids=str,
)
def test_a_failed_kernel_is_told_from_a_broken_gpu(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, broken: bool, trial: KernelTimes | None
) -> None:
    """Stand-ins fail on a CPU for what would fail on a GPU: a kernel, and the wait for the device after it."""

    def seconds(
        work: Any, device: torch.device, dtype: torch.dtype, images: int, kernels: str, captured: bool
    ) -> float:
        if kernels == "fused" and error is not None:
            raise error
        return 3.0

    def synchronize(device: torch.device) -> None:
        if broken:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(model, "runs_triton", lambda device: True)
    monkeypatch.setattr(model, "norm_seconds", seconds)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    expected = trial or KernelTimes(failure=" ".join(str(error).split()), device_lost=broken)
    assert try_kernels("auto", LAYERS, torch.device("cpu"), torch.float16, 8) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_it_equals_float64(name: str) -> None:
    report = compared(replace(CASES[name], runs=2), "cuda")
    assert max(report["errors"].values()) < tolerance(CASES[name])
    assert report["repeats"] and all(report["channels_last"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_on_a_gpu_it_equals_float64_at_the_sizes_of_a_unet_compiled(dtype: str) -> None:
    norm = torch.compile(fused_norm_silu, fullgraph=True)
    for shape in ((8, 384, 32, 32), (8, 256, 16, 16), (8, 512, 4, 4)):
        case = Case(dtype, shape=shape, groups=32, vectors=ALL, runs=2)
        report = compared(case, "cuda", norm)
        assert max(report["errors"].values()) < tolerance(case) and report["repeats"]


@pytest.mark.gpu
def test_on_a_gpu_a_choice_is_measured() -> None:
    device, shapes = torch.device("cuda"), norm_shapes(LAYERS_WITH_DROPOUT)
    for captured, way in ((False, "measured)"), (True, "measured in CUDA graphs)")):
        choice, why = choose_kernels("auto", LAYERS_WITH_DROPOUT, device, torch.float16, 8, captured=captured)
        assert choice in why and why.endswith(way)
    assert norm_seconds(shapes, device, torch.float16, 8, "fused") > 0
    assert mask_seconds(mask_sizes(LAYERS_WITH_DROPOUT), device, 8, "fused") > 0
    assert copy_bandwidth_share(next(iter(shapes)), device, torch.float16, 8) > 0
