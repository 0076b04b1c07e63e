from __future__ import annotations

import pytest
import torch

from ddpm_ds.unet.diffusers import from_diffusers, to_diffusers
from ddpm_ds.unet.model import UNet
from tests.unet.variants import VARIANTS, layers_of, random_unet


@pytest.mark.parametrize("name", VARIANTS)
def test_translation_there_and_back_gives_the_same_state(name: str) -> None:
    layers = layers_of(name)
    state = random_unet(layers).layers.state_dict()
    back = from_diffusers(to_diffusers(state, layers), layers)

    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_decoder_levels_are_counted_from_the_deepest_and_qkv_is_split() -> None:
    layers = layers_of("ddpm")
    index = {layer.name: number for number, layer in enumerate(layers)}
    state = UNet(layers, 0).layers.state_dict()
    theirs = to_diffusers(state, layers)

    deepest = state[f"{index['up.3.block.2']}.conv1.weight"]
    assert torch.equal(theirs["up_blocks.0.resnets.2.conv1.weight"].permute(0, 2, 3, 1), deepest)
    qkv = state[f"{index['down.1.attention.0']}.qkv.bias"]
    assert torch.equal(theirs["down_blocks.1.attentions.0.to_k.bias"], qkv.chunk(3)[1])


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_names_of_another_unet_are_refused_by_name(change: str) -> None:
    layers = layers_of("bare")
    theirs = to_diffusers(UNet(layers, 0).layers.state_dict(), layers)
    if change == "missing":
        name = "conv_in.bias"
        del theirs[name]
    else:
        name = "add_embedding.linear.weight"
        theirs[name] = torch.zeros(1)
    with pytest.raises(ValueError, match=name):
        from_diffusers(theirs, layers)
