"""The weights' gradient by matrix products is autograd's; it is taken where it pays and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddpm_ds.unet import operations as module
from ddpm_ds.unet.operations import _by_products, _Convolution3x3


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias of an image that is no square, channels-last."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 16, 5, 7, generator=generator, dtype=dtype).to(memory_format=torch.channels_last)
    weight = torch.randn(24, 3, 3, 16, generator=generator, dtype=dtype).permute(0, 3, 1, 2)
    bias = torch.randn(24, generator=generator, dtype=dtype)
    return x, weight, bias


def test_gradients_are_those_of_autograd() -> None:
    ours, theirs = ([tensor.detach().requires_grad_() for tensor in tensors()] for _ in range(2))
    y: Tensor = _Convolution3x3.apply(*ours)
    expected = F.conv2d(theirs[0], theirs[1], theirs[2], padding=1)
    torch.testing.assert_close(y, expected)
    gradient = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    y.backward(gradient)
    expected.backward(gradient)
    for own, other in zip(ours, theirs, strict=True):
        assert own.grad is not None
        torch.testing.assert_close(own.grad, other.grad)
    assert ours[1].grad is not None and ours[1].grad.permute(0, 2, 3, 1).is_contiguous()


def test_an_image_without_gradient_gets_none() -> None:
    x, weight, bias = tensors()
    _Convolution3x3.apply(x, weight.requires_grad_(), bias).sum().backward()
    assert x.grad is None and weight.grad is not None


@pytest.mark.parametrize(
    "stride, padding, dtype, contiguous, width",
    [
        (2, 1, torch.float32, False, 16),
        (1, 0, torch.float32, False, 16),
        (1, 1, torch.bfloat16, False, 16),
        (1, 1, torch.float32, True, 16),
        (1, 1, torch.float32, False, 8),
    ],
)
def test_other_convolutions_are_left_to_pytorch(
    stride: int, padding: int, dtype: torch.dtype, contiguous: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BY_PRODUCTS", True)
    x, weight, _ = tensors(torch.float32)
    assert _by_products(x, weight.requires_grad_(), 1, 1)
    with torch.no_grad():
        assert not _by_products(x, weight, 1, 1)
    x = x.to(dtype)[:, :width].contiguous(memory_format=torch.contiguous_format if contiguous else torch.channels_last)
    weight = weight.detach().to(dtype)[:, :width].contiguous(memory_format=torch.channels_last).requires_grad_()
    assert not _by_products(x, weight, stride, padding)
