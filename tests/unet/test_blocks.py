"""The modules of the layers: data types, independence of the images in a batch, the sinusoidal embedding."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddpm_ds.unet.blocks import sinusoid
from tests.unet.variants import VARIANTS, batch, layers_of, narrowing, random_unet, rounding


@pytest.mark.parametrize("name", VARIANTS)
def test_fp16_on_cpu_equals_fp32_within_the_rounding_of_fp16(name: str) -> None:
    layers = layers_of(name)
    half, full = random_unet(layers).half(), random_unet(layers).half().float()
    prediction, expected = half(*batch(name)), full(*batch(name))
    assert prediction.dtype is torch.float16
    assert (prediction - expected).norm() <= narrowing(len(layers), torch.float16) * expected.norm()

    # A loss scale, without which small gradients vanish in fp16.
    (prediction.float().square().mean() * 1024).backward()
    (expected.square().mean() * 1024).backward()
    tolerance = narrowing(2 * 2 * len(layers), torch.float16)  # forwards and backwards, the residual branch as well
    for (parameter_name, ours), theirs in zip(half.layers.named_parameters(), full.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert ours.grad.dtype is torch.float16
        assert (ours.grad - theirs.grad).norm() <= tolerance * (theirs.grad.norm() + 0.1), parameter_name


def test_on_cpu_nothing_but_copies_and_joins_is_computed_in_fp16() -> None:
    class Dtypes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.half: set[str] = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            outputs = out if isinstance(out, tuple | list) else (out,)
            if any(isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float16 for tensor in outputs):
                self.half.add(func.overloadpacket.__name__)
            return out

    unet = random_unet(layers_of("heads")).half()
    with Dtypes() as dtypes:
        unet(*batch("heads"))
    assert dtypes.half <= {"_to_copy", "cat", "detach"}


def test_bf16_weights_compute_in_bf16() -> None:
    layers = layers_of("classes")
    prediction, expected = random_unet(layers).bfloat16()(*batch("classes")), random_unet(layers)(*batch("classes"))
    assert prediction.dtype is torch.bfloat16
    assert (prediction - expected).norm() <= narrowing(len(layers), torch.bfloat16) * expected.norm()


def test_prediction_of_an_image_does_not_depend_on_the_rest_of_its_batch() -> None:
    layers = layers_of("dropout")
    unet = random_unet(layers)
    x_t, t = batch("dropout")
    images = torch.tensor([40, 41])
    together = unet(x_t, t, images=images)
    flipped, second = unet(x_t.flip(0), t.flip(0), images=images.flip(0)), unet(x_t[1:], t[1:], images=images[1:])
    assert (
        max((flipped.flip(0) - together).norm(), (second - together[1:]).norm()) <= rounding(layers) * together.norm()
    )


@pytest.mark.parametrize("channels", [1, 2, 3, 8])
@pytest.mark.parametrize("shift", [0, 1])
def test_sinusoid_is_finite_and_of_the_asked_width(channels: int, shift: int) -> None:
    waves = sinusoid(torch.tensor([0, 999]), channels, sine_first=True, shift=shift)
    assert waves.shape == (2, channels) and waves.isfinite().all()


def test_sinusoid_runs_from_frequency_1_to_1e_4_with_shift_1() -> None:
    t = torch.tensor([100])
    sine_first = sinusoid(t, 8, sine_first=True, shift=1)[0]
    ends = torch.tensor([100.0, 0.01]).sin().tolist()
    assert [sine_first[0].item(), sine_first[3].item()] == pytest.approx(ends, abs=1e-5)  # 100 roundings of an fp32 1
    assert torch.equal(sinusoid(t, 8, sine_first=False, shift=1)[0], sine_first.roll(4))
