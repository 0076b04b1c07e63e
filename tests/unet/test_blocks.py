from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddpm_ds.unet.blocks import sinusoid
from ddpm_ds.unet.operations import KeyedDropout, set_image_index
from tests.unet.variants import VARIANTS, batch, layers_of, random_unet


@pytest.mark.parametrize("name", VARIANTS)
def test_fp16_on_cpu_equals_fp32_within_the_rounding_of_fp16(name: str) -> None:
    layers = layers_of(name)
    half, full = random_unet(layers).half(), random_unet(layers).half().float()
    prediction, expected = half(*batch(name)), full(*batch(name))
    assert prediction.dtype is torch.float16
    assert (prediction - expected).norm() <= 4e-3 * expected.norm()

    # A loss scale, without which small gradients vanish in fp16.
    (prediction.float().square().mean() * 1024).backward()
    (expected.square().mean() * 1024).backward()
    for (parameter_name, ours), theirs in zip(half.layers.named_parameters(), full.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert ours.grad.dtype is torch.float16
        assert (ours.grad - theirs.grad).norm() <= 2e-2 * theirs.grad.norm() + 1e-3, parameter_name


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


@pytest.mark.parametrize("name", ["ddpm", "classes"])
def test_bf16_weights_compute_in_bf16(name: str) -> None:
    layers = layers_of(name)
    prediction = random_unet(layers).bfloat16()(*batch(name))
    expected = random_unet(layers)(*batch(name))
    assert prediction.dtype is torch.bfloat16
    assert (prediction - expected).norm() <= 4e-2 * expected.norm()


def test_prediction_of_an_image_does_not_depend_on_the_rest_of_its_batch() -> None:
    unet = random_unet(layers_of("dropout"))
    x_t, t = batch("dropout")
    images = torch.tensor([40, 41])
    together = unet(x_t, t, images=images)
    swapped = unet(x_t.flip(0), t.flip(0), images=images.flip(0))
    alone = unet(x_t[1:], t[1:], images=images[1:])

    torch.testing.assert_close(swapped, together.flip(0))
    torch.testing.assert_close(alone, together[1:])


def test_dropout_mask_is_keyed_by_image_layer_and_seed() -> None:
    x = torch.ones(2, 4, 16, 16)

    def dropped(images: list[int], layer: int = 3, seed: int = 0) -> torch.Tensor:
        dropout = KeyedDropout(0.25, seed, layer)
        set_image_index([dropout], torch.tensor(images))
        return dropout(x, dropout.draw((4, 16, 16)))

    first = dropped([5, 6])
    assert torch.equal(first, dropped([5, 6])), "a recomputation draws another mask"
    assert torch.equal(first[0], dropped([9, 5])[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, dropped([5, 6], layer=4))
    assert not torch.equal(first, dropped([5, 6], seed=1))
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert first.mean().item() == pytest.approx(1.0, abs=0.05)


def test_dropout_leaves_torchs_generator_alone_and_is_off_in_eval() -> None:
    x = torch.ones(2, 4, 16, 16)
    dropout = KeyedDropout(0.25, 0, 0)
    set_image_index([dropout], torch.tensor([0, 1]))
    before = torch.get_rng_state()
    dropout(x, dropout.draw((4, 16, 16)))
    assert torch.equal(torch.get_rng_state(), before)
    assert dropout.eval().draw((4, 16, 16)) is None
    assert torch.equal(dropout(x, None), x)


def test_dropout_without_the_images_positions_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match="set_image_index"):
        KeyedDropout(0.1, 0, 0).draw((1, 2, 2))


@pytest.mark.parametrize("channels", [1, 2, 3, 8])
@pytest.mark.parametrize("shift", [0, 1])
def test_sinusoid_is_finite_and_of_the_asked_width(channels: int, shift: int) -> None:
    waves = sinusoid(torch.tensor([0, 999]), channels, sine_first=True, shift=shift)
    assert waves.shape == (2, channels)
    assert waves.isfinite().all()


def test_sinusoid_runs_from_frequency_1_to_1e_4_with_shift_1() -> None:
    t = torch.tensor([100])
    sine_first = sinusoid(t, 8, sine_first=True, shift=1)[0]
    assert sine_first[0].item() == pytest.approx(torch.tensor(100.0).sin().item(), abs=1e-5)
    assert sine_first[3].item() == pytest.approx(torch.tensor(0.01).sin().item(), abs=1e-5)
    cosine_first = sinusoid(t, 8, sine_first=False, shift=1)[0]
    assert torch.equal(cosine_first, sine_first.roll(4))
