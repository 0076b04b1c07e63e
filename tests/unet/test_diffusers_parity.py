"""Rung a of the ladder of trust: our U-Net is diffusers' UNet2DModel on the same weights."""

from __future__ import annotations

import pytest
import torch

from ddpm_ds.config.spec import UnetSpec
from ddpm_ds.unet.diffusers import diffusers_config, from_diffusers, to_diffusers
from ddpm_ds.unet.layers import unet_layers
from tests.unet.variants import IMAGE, VARIANTS, batch, layers_of, random_unet

diffusers = pytest.importorskip("diffusers", reason="diffusers, an optional extra, is not installed")


@pytest.mark.parametrize("name", VARIANTS)
def test_prediction_and_gradients_equal_those_of_diffusers(name: str) -> None:
    layers = layers_of(name)
    ours = random_unet(layers).eval()  # dropout differs by design
    theirs = diffusers.UNet2DModel(**diffusers_config(VARIANTS[name], **IMAGE))
    theirs.eval().load_state_dict(to_diffusers(ours.layers.state_dict(), layers), strict=True)
    x_t, t, *labels = batch(name)

    prediction = ours(x_t, t, *labels)
    expected = theirs(x_t, t, *labels).sample
    torch.testing.assert_close(prediction, expected, rtol=0, atol=1e-5 * expected.abs().max().item())

    prediction.square().mean().backward()
    expected.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected_gradients = from_diffusers(gradients, layers)
    for parameter_name, parameter in ours.layers.named_parameters():
        wanted = expected_gradients[parameter_name]
        assert parameter.grad is not None
        assert (parameter.grad - wanted).norm() <= 5e-5 * wanted.norm() + 1e-7, parameter_name


def test_cifar10_unet_of_ddpm_has_its_published_parameters_and_tensors() -> None:
    spec = UnetSpec(channels=128, multipliers=(1, 2, 2, 2), attention_resolutions=(16,))
    image = {"image_channels": 3, "image_size": 32}
    layers = unet_layers(spec, **image)
    with torch.device("meta"):
        theirs = diffusers.UNet2DModel(**diffusers_config(spec, **image))
    state = from_diffusers(theirs.state_dict(), layers)

    assert sum(layer.parameters for layer in layers) == 35_746_307
    assert sum(tensor.numel() for tensor in state.values()) == 35_746_307
    assert len(to_diffusers(state, layers)) == 328
