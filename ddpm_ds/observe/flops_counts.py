"""What DeepSpeed's flops profiler counts wrongly, put right while it counts.

The profiler replaces functions such as ``F.conv2d`` by ones that add what a formula says to the module that is running,
and then call the original. Convolutions, matrix products and attention come out right; around them it miscounts.
``tests/observe/test_flops_counts.py`` holds both numbers of each function below, so that an upgrade of DeepSpeed fails
there and says what moved.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.profiling.flops_profiler import profiler
from torch import Tensor

Formula = Callable[..., tuple[int, int]]
"""Flops and multiply-accumulates of a call, from its arguments."""

CORRECTED = (
    "the operators + - * / between tensors, torch.sub and torch.div: left out; now one flop per element of the result",
    "sums and products of whole numbers, such as those that draw a dropout mask: counted; now left out",
    "the bias of a linear layer: left out, though that of a convolution is counted; now one flop per element",
    "softmax of torch, of a tensor and inside attention: left out; now one flop per element, as F.softmax",
    "einsum: no MACs; now half its flops. einops.einsum: counted twice, for what it calls is counted; now once",
    "a tensor's baddbmm: left out; now counted as torch.baddbmm is",
    "matrix products whose right side has more dimensions, or only one: as if it were one matrix; now by its shape",
    "interpolate to a size: as if there were one image of one channel; now by the elements of the result",
    "module_depth: without the innermost level, and a crash where it is deeper than the modules; now as documented",
    "lines that end in `of model`: this stage's numbers, or 0; now the whole U-Net's",
)
"""Of DeepSpeed's counts, what is put right; one line each."""

NOT_COUNTED = (
    "the loss, the noising of images, the optimizer and the EMA, which are in no layer",
    "sines and exponentials of the time embedding, and the drawing of dropout masks",
    "copies: casts (fp16 on a CPU computes in fp32 between two), concatenations, padding, packing for the next stage",
    "the backward pass: about twice the forward; what activation checkpointing computes again is no work of the model",
    "what goes around torch.nn.functional: torch.conv2d, torch.ops, compiled extensions; addbmm, mv, dot, tensordot",
    "attention counts its whole square of scores, whatever is masked; normalisation and SiLU are estimates",
)
"""What is in no count; one line each."""

_EINSUM, _EINOPS_EINSUM = profiler._einsum_flops_compute, profiler._einops_einsum_flops_compute
_ATTENTION, _UPSAMPLE = profiler._attn_flops_compute, profiler._upsample_flops_compute

OPERATORS = tuple(
    f"__{prefix}{operator}__" for operator in ("add", "sub", "mul", "truediv") for prefix in ("", "r", "i")
)


@contextlib.contextmanager
def corrected_counts() -> Iterator[None]:
    """Surround a FlopsProfiler's work from ``start_profile`` to ``stop_profile``.

    Assumes that ``start_profile`` looks up ``wrapFunc`` and the formulas as globals of its module when it is called,
    and that ``stop_profile`` puts a function back by the ``__str__`` of what replaced it.
    """
    with contextlib.ExitStack() as replaced:
        for name, value in _REPLACED.items():
            replaced.enter_context(_replace(profiler, name, value))
        for owner, name, formula in _ADDED:
            replaced.enter_context(_replace(owner, name, _counted(getattr(owner, name), formula)))
        yield


def _counted(function: Callable[..., Any], formula: Formula) -> Callable[..., Any]:
    """As DeepSpeed's ``wrapFunc``, but what a counted function calls is not counted again."""
    name = function.__str__
    profiler.old_functions[name] = function

    def counted(*args: Any, **kwargs: Any) -> Any:
        if not profiler.module_flop_count:
            return function(*args, **kwargs)
        flops, macs = formula(*args, **kwargs)
        for counts, number in ((profiler.module_flop_count, flops), (profiler.module_mac_count, macs)):
            counts[-1].append((name, number))
            counts.append([])
        try:
            return function(*args, **kwargs)
        finally:
            profiler.module_flop_count.pop()
            profiler.module_mac_count.pop()

    counted.__str__ = name  # type: ignore[method-assign]
    return counted


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[int, int]:
    macs = input.numel() * weight.shape[0]
    return 2 * macs + (0 if bias is None else macs // weight.shape[1]), macs


def _matmul(input: Tensor, other: Tensor, **_: Any) -> tuple[int, int]:
    rows = input.shape[-2] if input.ndim > 1 else 1
    columns = other.shape[-1] if other.ndim > 1 else 1
    macs = math.prod(torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])) * rows * input.shape[-1] * columns
    return 2 * macs, macs


def _einsum(equation: str, *operands: Any) -> tuple[int, int]:
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    macs = _EINSUM(equation, *given)[0] // 2  # numpy's count of both has 4 digits, and 1 too many
    return 2 * macs, macs


def _einops_einsum(*operands: Any) -> tuple[int, int]:
    macs = _EINOPS_EINSUM(*operands)[0] // 2
    return 2 * macs, macs


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[int, int]:
    flops, macs = _ATTENTION(query, key, value)
    return flops + math.prod(query.shape[:-1]) * key.shape[-2], macs


def _interpolate(input: Tensor, size: Any = None, *args: Any, **kwargs: Any) -> tuple[int, int]:
    if size is None:
        flops, macs = _UPSAMPLE(input, None, *args, **kwargs)
        return flops, macs
    sizes = size if isinstance(size, list | tuple) else [size] * (input.ndim - 2)
    return math.prod((*input.shape[:2], *sizes)), 0


def _softmax(input: Tensor, *_: Any, **__: Any) -> tuple[int, int]:
    return input.numel(), 0


def _elementwise(input: Any, other: Any, **_: Any) -> tuple[int, int]:
    if not torch.result_type(input, other).is_floating_point:
        return 0, 0
    shapes = [operand.shape for operand in (input, other) if isinstance(operand, Tensor)]
    return math.prod(torch.broadcast_shapes(*shapes)), 0


_REPLACED: dict[str, Callable[..., Any]] = {
    "wrapFunc": _counted,
    "_linear_flops_compute": _linear,
    "_matmul_flops_compute": _matmul,
    "_einsum_flops_compute": _einsum,
    "_einops_einsum_flops_compute": _einops_einsum,
    "_attn_flops_compute": _attention,
    "_upsample_flops_compute": _interpolate,
    "_mul_flops_compute": _elementwise,
    "_add_flops_compute": _elementwise,
}
"""In DeepSpeed's module of the profiler."""

_ADDED: tuple[tuple[Any, str, Formula], ...] = (
    *((Tensor, operator, _elementwise) for operator in OPERATORS),
    *((owner, name, _elementwise) for owner in (torch, Tensor) for name in ("sub", "div")),
    *((owner, "softmax", _softmax) for owner in (torch, Tensor)),
    (Tensor, "baddbmm", profiler._tensor_addmm_flops_compute),
)
"""Functions that DeepSpeed does not know."""


@contextlib.contextmanager
def _replace(owner: Any, name: str, value: Any) -> Iterator[None]:
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:  # inherited
            delattr(owner, name)
