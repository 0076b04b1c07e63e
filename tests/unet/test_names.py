"""Parameters by diffusers' names, and those that patterns choose to train."""

import re

import pytest

from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.ground.errors import SpecError
from ddpm_ds.unet.layers import Layer, TransformerBlockLayer, unet_layers
from ddpm_ds.unet.model import build_layer
from ddpm_ds.unet.names import tensor_names, trained_layers
from tests.launching import REPOSITORY
from tests.unet.variants import layers_of

SDXL = REPOSITORY / "launch" / "specs" / "sdxl.yaml"


@pytest.fixture(scope="module")
def sdxl() -> tuple[Layer, ...]:
    spec = load_spec(SDXL, ["data.path=pictures"])
    return unet_layers(spec.unet, spec.data.interface)


def test_attn_trains_both_attentions_of_sdxls_70_transformer_layers_and_nothing_else(sdxl: tuple[Layer, ...]) -> None:
    layers = trained_layers(sdxl, ["attn"], {})
    blocks = [layer for layer in layers if layer.trained]
    assert len(blocks) == 70 and all(isinstance(layer, TransformerBlockLayer) for layer in blocks)
    names = ["qkv.weight", "projection1.weight", "projection1.bias", "q.weight", "kv.weight"]
    names += ["projection2.weight", "projection2.bias"]
    assert all({one.name for one, _ in layer.trained_elements} == {*names} for layer in blocks)
    assert layers == trained_layers(sdxl, ["attn1", r"attn2\.\w+"], {}), "regular expressions, found anywhere"
    first = layers.index(blocks[0])
    assert [layer.reached for layer in layers] == [index >= first for index in range(len(layers))]
    assert not any(layer.work * 3 > layer.macs + 1 for layer in layers[:first]), "forwards alone"


def test_modules_require_gradients_of_what_is_trained_and_rates_are_products() -> None:
    layers = layers_of("ddpm")
    found = trained_layers(layers, ["resnets.0", "conv_in"], {"conv": 2.0, "conv_in": 0.25})
    for index, (layer, names) in enumerate(zip(found, _by_layer(layers), strict=True)):
        module = build_layer(layer, index, 0, device="meta", drawn=False)
        for (name, parameter), theirs, rate in zip(module.named_parameters(), names, layer.rates, strict=True):
            trained = all(re.search("resnets.0|conv_in", one) for one in theirs)
            assert parameter.requires_grad is trained is (rate > 0), name
            if trained:
                assert rate == (0.5 if "conv_in" in theirs[0] else 2.0 if "conv" in theirs[0] else 1.0)
    assert trained_layers(layers, [], {}) == layers


def _by_layer(layers: tuple[Layer, ...]) -> list[list[tuple[str, ...]]]:
    named = dict(tensor_names(layers))
    return [[named[f"{index}.{one.name}"] for one in layer.listed] for index, layer in enumerate(layers)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optimizer.train=[atn1]", 'optimizer.train: no parameter of the U-Net has "atn1" in its name in diffusers; '),
        ("optimizer.rates={lora: 0.5}", 'optimizer.rates: no parameter of the U-Net has "lora" in its name'),
        ("optimizer.train=[attn1.to_q]", "to_q.weight and down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_k"),
        ("optimizer.train=['attn(']", 'optimizer.train = ["attn("] should be a regular expression (missing ), '),
        ("optimizer.rates={attn: 0}", 'optimizer.rates = {"attn": 0} should be names, each with a number > 0'),
    ],
)
def test_bad_patterns_are_one_line(change: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        load_spec(SDXL, ["data.path=pictures", change])
    assert words in str(error.value) and "\n" not in str(error.value), str(error.value)
    if "atn1" in change:
        assert str(error.value).endswith("use a part of a name, such as attn1, attn2, norm1")
