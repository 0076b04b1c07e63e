"""Run the fused normalisation on cases in Triton's interpreter and say how far from float64 each comes.

    TRITON_INTERPRET=1 python -m tests.unet.fused_norm_worker CASES.json REPORT.json

The interpreter must be chosen before Triton is imported, so this is a program of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ddpm_ds.unet import fused_norm
from ddpm_ds.unet.fused_norm import fused_norm_silu

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


def main(cases: str, out: str) -> None:
    torch.set_num_threads(1)
    reports = [report(Case(**case)) for case in json.loads(Path(cases).read_text())]
    Path(out).write_text(json.dumps({"cases": reports, "same": same_as_eager()}))


def written(cases: list[Case]) -> str:
    """Cases as the program reads them."""
    return json.dumps([asdict(case) for case in cases])


if __name__ == "__main__":
    main(*sys.argv[1:])
