"""The fused GroupNorm + SiLU: what surrounds its kernels, and the cases of ``test_interpreted.py``, built on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ddpm_ds import unet
from ddpm_ds.ground.errors import DsConfigError
from ddpm_ds.unet import fused_norm, model
from ddpm_ds.unet.fused_norm import fused_norm_silu
from ddpm_ds.unet.model import AskedKernels, choose_kernels

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
    ways = {"compiled": torch.compile(fused_norm_silu, fullgraph=True, backend="aot_eager"), "recomputed": recomputed}
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
    assert (cut.tiles - 1) * cut.pixels < pixels <= cut.tiles * cut.pixels
    assert (cut.channel_blocks - 1) * cut.columns < channels <= cut.channel_blocks * cut.columns
    assert cut.rows * cut.columns <= fused_norm.BLOCK_ELEMENTS
    fitting = fused_norm.whole(pixels, channels, groups, 2)
    if fitting is not None:
        assert fitting.rows >= pixels and fitting.width >= channels // groups
        assert fitting.programs * fitting.groups >= groups


@pytest.mark.parametrize("asked", ["auto", "fused", "reference"])
@pytest.mark.parametrize(
    ("device", "triton", "compiler", "missing"),
    [
        ("cpu", True, True, "CUDA, and this run is on the CPU"),
        ("cuda", False, True, "Triton, which is not installed"),
        ("cuda", True, False, "a C compiler, which this host lacks"),
        ("cuda", True, True, ""),
    ],
)
def test_fused_kernels_are_taken_in_graphs_and_refused_where_they_cannot_run(
    monkeypatch: pytest.MonkeyPatch, asked: AskedKernels, device: str, triton: bool, compiler: bool, missing: str
) -> None:
    monkeypatch.setattr(model, "runs_triton", lambda device: triton)
    monkeypatch.setattr(model, "_compiler", lambda *programs: compiler)
    if asked == "fused" and missing:
        with pytest.raises(DsConfigError, match=f'kernels = "fused" needs {missing}; use "auto" or "reference"'):
            choose_kernels(asked, torch.device(device))
        return
    taken = [choose_kernels(asked, torch.device(device), captured=captured) for captured in (True, False)]
    auto = ["reference", "reference"] if missing else ["fused", "masks"]
    assert taken == (auto if asked == "auto" else [asked, asked])


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
