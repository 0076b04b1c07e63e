"""Weight gradients that wait: the same as a backward's, in any grouping, each given to its weight once."""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ddpm_ds.unet import weight_gradients
from ddpm_ds.unet.layers import Layer, unet_layers
from ddpm_ds.unet.model import UNet, compile_layers
from ddpm_ds.unet.operations import set_image_index
from ddpm_ds.unet.weight_gradients import WaitingGradients, Weighted, weighted_parts
from tests.launching import tiny_spec, tiny_text_spec
from tests.unet.variants import accumulate

SPEC = tiny_spec()
LAYERS = unet_layers(SPEC.unet, SPEC.data.interface)
TEXT = {"context_channels": 6, "tokens": 5, "blocks": [0, 1], "middle_blocks": 2, "heads": [2, 4]}
TEXT_LAYERS = unet_layers(tiny_text_spec(unet={"text": TEXT}).unet, SPEC.data.interface)
"""Have projections without bias, some of an input that needs no gradient."""
MICRO_BATCHES, IMAGES = 5, 3
SPLIT = {(0, number) for number in range(4)}
"""Micro-batches whose weight gradients wait; those of the last do not."""
ROUNDINGS = {torch.float32: 64, torch.bfloat16: 8, torch.float16: 8}
"""Roundings of an element of a gradient: of its sum over pixels and images in fp32, of each micro-batch's and of the
sum over them in half precision; as a random walk, the square root of some thousands and of some tens."""


def unet(dtype: torch.dtype, layers: Sequence[Layer] = LAYERS, waiting: WaitingGradients | None = None) -> UNet:
    """A U-Net whose every gradient is alive, and may wait."""
    made, generator = UNet(layers, 0), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    for part in parts_of(made):
        part.waiting = waiting
    return made.to(dtype)


def parts_of(net: UNet) -> list[Weighted]:
    return [part for layer in net.layers for part in weighted_parts(layer)]


def backwards(net: UNet, waiting: WaitingGradients | None, *, recompute: bool | None = None) -> None:
    """Forward and backward of every micro-batch; ``recompute`` checkpoints the U-Net, reentrant or not."""
    shape = (MICRO_BATCHES, IMAGES, *SPEC.data.shape)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(shape, generator=generator)
    for number, x in enumerate(images):
        if waiting is not None:
            waiting.begin(0, number)
        set_image_index(net.layers, torch.arange(IMAGES))
        inputs = (x.requires_grad_(), torch.arange(IMAGES) + number)
        forward = partial(net, context=torch.randn(IMAGES, 5, 6, generator=generator))
        if recompute is None:
            y = forward(*inputs)
        else:
            y = checkpoint(forward, *inputs, use_reentrant=recompute, preserve_rng_state=False)
        y.float().square().mean().backward()


def gradients(net: UNet) -> dict[str, Tensor]:
    found = {}
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.float()
    return found


@cache
def whole_gradients(dtype: torch.dtype, layers: tuple[Layer, ...]) -> dict[str, Tensor]:
    """Gradients of whole backwards."""
    backwards(whole := unet(dtype, layers), None)
    return gradients(whole)


@pytest.mark.parametrize(
    ("dtype", "recompute", "enough", "tapped", "layers"),
    [
        (torch.float32, None, 512, False, LAYERS),
        # fewer than a micro-batch has at full resolution, more than two have at half
        (torch.float32, None, 100, False, LAYERS),
        pytest.param(torch.float32, True, 512, False, LAYERS, marks=pytest.mark.long),
        (torch.float32, False, 512, False, LAYERS),
        (torch.float16, None, 100, False, LAYERS),
        pytest.param(torch.bfloat16, None, 512, False, LAYERS, marks=pytest.mark.long),
        (torch.float32, None, 512, True, LAYERS),
        pytest.param(torch.float32, True, 512, True, LAYERS, marks=pytest.mark.long),
        (torch.float16, False, 512, True, LAYERS),
        (torch.float32, True, 100, False, TEXT_LAYERS),
        (torch.bfloat16, None, 512, False, TEXT_LAYERS),
        (torch.float16, None, 512, True, TEXT_LAYERS),
    ],
)
def test_every_gradient_is_that_of_whole_backwards_in_any_grouping_also_beside_a_whole_one(
    dtype: torch.dtype,
    recompute: bool | None,
    enough: int,
    tapped: bool,
    layers: tuple[Layer, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(weight_gradients.ENOUGH_PIXELS, "cpu", enough)
    waiting = WaitingGradients(SPLIT)
    split = unet(dtype, layers, waiting)
    if tapped:  # as compiled layers are
        monkeypatch.setattr(torch, "compile", lambda compute, **_: compute)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")
        compile_layers([*split.layers], Path("unused"))
    large = parts_of(split)
    given = dict.fromkeys(large, 0)
    for part in large:
        part.weight.register_post_accumulate_grad_hook(lambda _, part=part: given.update({part: given[part] + 1}))
    backwards(split, waiting, recompute=recompute)
    assert set(given.values()) == {1}, "by the whole backward"
    waiting.compute(large, [2, 0], accumulate)
    waiting.compute(large, [1], accumulate)
    with pytest.raises(RuntimeError, match=r"of micro-batches \[3\] were never computed"):
        waiting.check_empty()
    waiting.compute(large, [3], accumulate)
    waiting.check_empty()
    assert set(given.values()) == {4}, "a hook of a weight runs once a pass"
    with pytest.raises(KeyError):  # once more
        waiting.compute(large, [3], accumulate)
    limit = ROUNDINGS[dtype] * torch.finfo(dtype).eps
    found = gradients(split)
    for name, expected in whole_gradients(dtype, layers).items():
        assert (found[name] - expected).norm() <= limit * expected.norm(), name


def test_a_pass_before_its_backward_and_a_weight_that_is_used_twice_are_errors() -> None:
    waiting = WaitingGradients(SPLIT)
    large = parts_of(unet(torch.float32, waiting=waiting))
    with pytest.raises(KeyError):
        waiting.compute(large, [0], accumulate)
    waiting.put(large[:2], torch.zeros(1), torch.zeros(1))
    with pytest.raises(RuntimeError, match="is used twice in a micro-batch"):
        waiting.put(large[1:], torch.zeros(1), torch.zeros(1))


def test_without_gradients_nothing_waits() -> None:
    waiting = WaitingGradients(SPLIT)
    net = unet(torch.float32, waiting=waiting)
    set_image_index(net.layers, torch.zeros(1).long())
    with torch.no_grad():
        net(torch.zeros(1, *SPEC.data.shape), torch.zeros(1).long())
    waiting.check_empty()
