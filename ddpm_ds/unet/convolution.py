"""The convolution, and on processors with AVX2 but not AVX-512 its weights' gradient by matrix products.

There oneDNN takes up to twice as long for the weights' gradient of a channels-last 3x3 convolution as nine products of
the output's gradient with the shifted input do: docs/performance.md.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input

BY_PRODUCTS = torch.backends.cpu.get_cpu_capability() == "AVX2"
FEWEST_CHANNELS = 16
"""Below, a product is too narrow to pay."""


def convolution(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
    """x (N, C, H, W) with weight (O, C, k, k): (N, O, H', W') in the memory format that both have."""
    if _by_products(x, weight, stride, padding):
        return _Convolution3x3.apply(x, weight, bias)
    return F.conv2d(x, weight, bias, stride, padding)


def _by_products(x: Tensor, weight: Tensor, stride: int, padding: int) -> bool:
    return (
        x.device.type == "cpu"
        and BY_PRODUCTS
        and x.dtype is torch.float32
        and weight.requires_grad
        and torch.is_grad_enabled()
        and (stride, padding) == (1, 1)
        and weight.shape[2:] == (3, 3)
        and min(weight.shape[:2]) >= FEWEST_CHANNELS
        and x.is_contiguous(memory_format=torch.channels_last)
        and weight.is_contiguous(memory_format=torch.channels_last)
    )


class _Convolution3x3(torch.autograd.Function):
    """At stride 1, keeping the size of the image, all tensors channels-last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, bias, padding=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = conv2d_input(x.shape, weight, gradient, padding=1)
        return x_gradient, _weight_backward(gradient, x).permute(0, 3, 1, 2), gradient.sum((0, 2, 3))


@torch.library.custom_op("ddpm_ds::convolution_weight_backward", mutates_args=())
def _weight_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """Gradient of the weights, (O, 3, 3, C), from that of the output (N, O, H, W) and x (N, C, H, W)."""
    height, width = x.shape[2:]
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))  # (N, H + 2, W + 2, C)
    pixels = gradient.permute(0, 2, 3, 1).flatten(0, 2).t()  # (O, N H W)
    products = x.new_empty(len(pixels), 3, 3, x.shape[1])
    for row in range(3):
        for column in range(3):
            shifted = padded[:, row : row + height, column : column + width].flatten(0, 2)  # (N H W, C)
            products[:, row, column] = pixels @ shifted
    return products


@_weight_backward.register_fake
def _(gradient: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(gradient.shape[1], 3, 3, x.shape[1])
