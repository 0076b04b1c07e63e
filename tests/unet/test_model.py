from __future__ import annotations

import math

import torch

from ddpm_ds.unet.model import UNet, build_layer
from tests.unet.variants import batch, layers_of, random_unet


def test_weights_are_a_function_of_seed_and_index_alone() -> None:
    layers = layers_of("classes")
    unet = UNet(layers, 5)
    torch.manual_seed(123)
    for index in reversed(range(len(layers))):
        alone = build_layer(layers[index], index, 5).state_dict()
        assert all(torch.equal(tensor, unet.layers[index].state_dict()[name]) for name, tensor in alone.items())


def test_weights_differ_between_seeds_and_between_layers_of_one_shape() -> None:
    layers = layers_of("ddpm")
    first, second = (index for index, layer in enumerate(layers) if layer.name.startswith("down.3.block"))
    drawn = [
        build_layer(layers[index], index, seed).state_dict()["conv1.weight"]
        for index, seed in ((first, 0), (second, 0), (first, 1), (first, 2**31 - 1))
    ]
    assert not any(torch.equal(drawn[0], other) for other in drawn[1:])


def test_building_leaves_torchs_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    UNet(layers_of("classes"), 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_start_as_in_ddpm() -> None:
    layers = layers_of("ddpm")
    unet = UNet(layers, 0)
    for name, parameter in unet.layers.named_parameters():
        norm = ".norm" in name
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif norm:
            assert (parameter == 1).all(), name
        elif ".conv2." in name or ".projection." in name or name == f"{len(layers) - 1}.conv.weight":
            assert (parameter == 0).all(), name
        else:
            parts = 3 if ".qkv." in name else 1
            field = parameter[0, :, :, 0].numel() if parameter.ndim == 4 else 1
            bound = math.sqrt(6 / (parameter.shape[-1] * field + parameter.shape[0] * field / parts))
            assert 0.9 * bound < parameter.abs().max().item() <= bound, name
    assert (unet(*batch("ddpm")) == 0).all()


def test_label_changes_the_prediction_and_no_label_is_the_row_after_the_last_class() -> None:
    unet = random_unet(layers_of("classes"))
    x_t, t, _ = batch("classes")
    none = unet(x_t, t, torch.tensor([10, 10]))
    assert torch.equal(unet(x_t, t), none)
    mixed = unet(x_t, t, torch.tensor([3, 10]))
    assert not torch.allclose(mixed[0], none[0])
    torch.testing.assert_close(mixed[1], none[1])
