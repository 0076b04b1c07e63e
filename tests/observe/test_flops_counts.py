"""Each miscount of DeepSpeed's that is put right, beside what stock DeepSpeed says: a change of either fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import einops
import pytest
import torch
import torch.nn.functional as F
from deepspeed.profiling.flops_profiler import FlopsProfiler
from torch import Tensor, nn

from ddpm_ds.observe.flops import corrected_counts

X = torch.ones(2, 3, 4)
Y = torch.ones(2, 4, 5)
WHOLE = torch.ones(2, 3, 4, dtype=torch.int32)
IMAGE = torch.ones(2, 3, 4, 4)
PRODUCT = 2 * 3 * 4 * 5
"""Multiply-accumulates of X @ Y."""


class Calls(nn.Module):
    """A module that does nothing but one call."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self) -> Any:
        return self.function()


def count(function: Callable[[], Any]) -> tuple[int, int]:
    """Flops and MACs of a call by the profiler as it is."""
    module = Calls(function)
    profiler = FlopsProfiler(module)
    profiler.start_profile()
    module()
    profiler.stop_profile()
    counted = profiler.get_total_flops(), profiler.get_total_macs()
    profiler.end_profile()
    return counted


CALLS: dict[str, tuple[Callable[[], Any], tuple[int, int], tuple[int, int]]] = {
    "+": (lambda: X + X, (0, 0), (24, 0)),
    "number - tensor": (lambda: 1 - X, (0, 0), (24, 0)),
    "broadcast *": (lambda: X * X[:, :, :1], (0, 0), (24, 0)),
    "/=": (lambda: X.clone().__itruediv__(2), (0, 0), (24, 0)),
    "torch.div": (lambda: torch.div(X, X), (0, 0), (24, 0)),
    "whole numbers": (lambda: torch.add(WHOLE, WHOLE), (24, 0), (0, 0)),
    "torch.add": (lambda: torch.add(X, X), (24, 0), (24, 0)),
    "linear": (lambda: F.linear(X, torch.ones(5, 4), torch.ones(5)), (240, 120), (270, 120)),
    "F.softmax": (lambda: F.softmax(X, dim=-1), (24, 0), (24, 0)),
    "Tensor.softmax": (lambda: X.softmax(-1), (0, 0), (24, 0)),
    "torch.softmax": (lambda: torch.softmax(X, -1), (0, 0), (24, 0)),
    "attention": (
        lambda: F.scaled_dot_product_attention(X, X, X),
        (2 * 2 * 2 * 3 * 3 * 4, 2 * 2 * 3 * 3 * 4),
        (2 * 2 * 2 * 3 * 3 * 4 + 2 * 3 * 3, 2 * 2 * 3 * 3 * 4),
    ),
    "torch.einsum": (lambda: torch.einsum("bij,bjk->bik", X, Y), (2 * PRODUCT + 1, 0), (2 * PRODUCT, PRODUCT)),
    "einops.einsum": (
        lambda: einops.einsum(X, Y, "b i j, b j k -> b i k"),
        (4 * PRODUCT + 2, 0),
        (2 * PRODUCT, PRODUCT),
    ),
    "bmm": (lambda: torch.bmm(X, Y), (2 * PRODUCT, PRODUCT), (2 * PRODUCT, PRODUCT)),
    "torch.baddbmm": (lambda: torch.baddbmm(X[:, :, :1], X, Y), (246, PRODUCT), (246, PRODUCT)),
    "Tensor.baddbmm": (lambda: X[:, :, :1].baddbmm(X, Y), (0, 0), (246, PRODUCT)),
    "matrix @ batch": (lambda: X[0] @ Y, (PRODUCT, PRODUCT // 2), (2 * PRODUCT, PRODUCT)),
    "matrix @ vector": (lambda: X[0] @ torch.ones(4), (2 * 48, 48), (2 * 12, 12)),
    "interpolate to a size": (lambda: F.interpolate(IMAGE, size=8), (8, 0), (2 * 3 * 8 * 8, 0)),
    "interpolate by a factor": (lambda: F.interpolate(IMAGE, scale_factor=2.0), (384, 0), (384, 0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_miscount_is_put_right(name: str) -> None:
    function, stock, corrected = CALLS[name]
    assert count(function) == stock
    with corrected_counts():
        assert count(function) == corrected
    assert count(function) == stock


def test_nothing_stays_replaced_even_after_an_error() -> None:
    def state() -> list[object]:
        owners = (F, torch, einops, Tensor)
        names = ("linear", "conv2d", "softmax", "interpolate", "einsum", "sub", "div", "baddbmm", "__add__", "__rmul__")
        return [getattr(owner, name, None) for owner in owners for name in names]

    count(lambda: X @ Y)  # DeepSpeed leaves the methods it restores in the class itself
    before, own = state(), set(vars(Tensor))

    def fail() -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"), corrected_counts():
        profiler = FlopsProfiler(module := Calls(fail))
        try:
            profiler.start_profile()
            module()
        finally:
            profiler.end_profile()
    assert state() == before and set(vars(Tensor)) == own
