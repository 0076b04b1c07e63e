"""The operations that layers are made of: the data type of the arithmetic, the convolution, keyed dropout."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddpm_ds.unet import operations
from ddpm_ds.unet.operations import (
    Convolution,
    KeyedDropout,
    _by_products,
    _Convolution3x3,
    arithmetic_dtype,
    draw_masks,
    set_image_index,
    widening,
)

pytestmark = pytest.mark.capability
BOTH = (torch.float16, torch.bfloat16)


def test_fp16_is_widened_on_every_cpu_and_bf16_below_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    assert (BOTH[:1] if has_avx512 else BOTH) == operations.WIDENED_ON_CPU
    for widened in (BOTH[:1], BOTH):
        monkeypatch.setattr(operations, "WIDENED_ON_CPU", widened)
        for dtype in (*BOTH, torch.float32):
            assert arithmetic_dtype("cpu", dtype) is (torch.float32 if dtype in widened else dtype)
            assert arithmetic_dtype("cuda", dtype) is dtype
            assert (widening("cpu", dtype) is not None) == (dtype in widened)
            assert widening("cuda", dtype) is None
    assert widening("cpu", torch.bfloat16) == "bf16 on a CPU: stored in bf16, computed in fp32"


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias of an image that is no square, channels-last."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 16, 5, 7, generator=generator, dtype=dtype).to(memory_format=torch.channels_last)
    weight = torch.randn(24, 3, 3, 16, generator=generator, dtype=dtype).permute(0, 3, 1, 2)
    bias = torch.randn(24, generator=generator, dtype=dtype)
    return x, weight, bias


@pytest.mark.parametrize("padding", [(1, 1), (0, 1)], ids=str)
def test_gradients_of_a_convolution_by_products_are_those_of_autograd(padding: tuple[int, int]) -> None:
    ours, theirs = ([tensor.detach().requires_grad_() for tensor in tensors()] for _ in range(2))
    y: Tensor = _Convolution3x3.apply(*ours, padding)
    expected = F.conv2d(theirs[0], theirs[1], theirs[2], padding=padding)
    torch.testing.assert_close(y, expected)
    gradient = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    y.backward(gradient)
    expected.backward(gradient)
    for own, other in zip(ours, theirs, strict=True):
        assert own.grad is not None
        torch.testing.assert_close(own.grad, other.grad)
    assert ours[1].grad is not None and ours[1].grad.permute(0, 2, 3, 1).is_contiguous()

    x, weight, bias = tensors()
    _Convolution3x3.apply(x, weight.requires_grad_(), bias, padding).sum().backward()
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
    monkeypatch.setattr(operations, "BY_PRODUCTS", True)
    x, weight, bias = tensors(torch.float32)
    assert _by_products(x, weight.requires_grad_(), 1, (1, 1))
    ours = partial(Convolution(16, 16).product, bias=bias)
    with torch.no_grad():
        assert ours(x, weight.permute(0, 2, 3, 1)).grad_fn is None
    detached = ours(x.requires_grad_(), weight.detach().permute(0, 2, 3, 1))
    assert type(detached.grad_fn).__name__ == "ConvolutionBackward0", "its weight gradient waits, or nobody asks for it"
    x = x.detach()
    x = x.to(dtype)[:, :width].contiguous(memory_format=torch.contiguous_format if contiguous else torch.channels_last)
    weight = weight.detach().to(dtype)[:, :width].contiguous(memory_format=torch.channels_last).requires_grad_()
    assert not _by_products(x, weight, stride, (padding, padding))


def test_dropout_mask_is_keyed_by_image_layer_and_seed_and_off_in_eval() -> None:
    x, shape = torch.ones(2, 4, 16, 16), (4, 16, 16)

    def dropped(images: list[int], layer: int = 3, seed: int = 0) -> torch.Tensor:
        dropouts = [KeyedDropout(0.25, seed, layer, shape), KeyedDropout(0.5, seed, layer + 7, shape)]
        set_image_index(dropouts, torch.tensor(images))
        return dropouts[0](x, draw_masks(dropouts)[0])

    before = torch.get_rng_state()
    first = dropped([5, 6])
    assert torch.equal(first, dropped([5, 6])), "a recomputation draws another mask"
    assert torch.equal(first[0], dropped([9, 5])[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, dropped([5, 6], layer=4))
    assert not torch.equal(first, dropped([5, 6], seed=1))
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert first.mean().item() == pytest.approx(1.0, abs=5 * (0.25 / 0.75 / x.numel()) ** 0.5)
    assert torch.equal(torch.get_rng_state(), before)
    dropout = KeyedDropout(0.25, 0, 0, shape)
    with pytest.raises(RuntimeError, match="set_image_index"):
        draw_masks([dropout])
    dropouts = [KeyedDropout(0.0, 0, 0, shape), dropout, KeyedDropout(0.25, 0, 0, (1, 2, 3)).eval()]
    set_image_index(dropouts, torch.arange(2))
    none, mask, other = draw_masks(dropouts)
    assert none is None and mask is not None and other is None
    assert mask.shape == x.shape and mask.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(dropout(x, None), x)
