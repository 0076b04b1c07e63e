"""Our U-Net and diffusers' UNet2DModel: configurations and tensors there and back, what is refused, and rung a of the
ladder of trust: the same predictions and gradients on the same weights."""

from __future__ import annotations

import inspect
import json
import random
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.evaluate.diffusers.unet import from_diffusers, to_diffusers
from ddpm_ds.evaluate.diffusers.unet_config import PlainArguments, diffusers_config, unet_spec_from_diffusers
from ddpm_ds.unet.layers import Layer, unet_layers
from ddpm_ds.unet.model import UNet
from ddpm_ds.unet.spec import Interface
from tests.launching import REPOSITORY
from tests.unet.variants import (
    INTERFACE,
    INTERFACES,
    VARIANTS,
    batch,
    interface_of,
    layers_of,
    random_unet,
    randomise,
    rounding,
)

DDPM_CIFAR10: dict[str, Any] = {  # google/ddpm-cifar10-32
    **{"_class_name": "UNet2DModel", "_diffusers_version": "0.0.4", "act_fn": "silu", "attention_head_dim": None},
    **{"block_out_channels": [128, 256, 256, 256], "center_input_sample": False, "downsample_padding": 0},
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
    **{"flip_sin_to_cos": False, "freq_shift": 1, "in_channels": 3, "layers_per_block": 2, "mid_block_scale_factor": 1},
    **{"norm_eps": 1e-06, "norm_num_groups": 32, "out_channels": 3, "sample_size": 32},
    "time_embedding_type": "positional",
}


def assert_the_same_gradients(
    ours: UNet, theirs: Any, predictions: tuple[Tensor, Tensor], layers: tuple[Layer, ...], tolerance: float
) -> None:
    """The gradients of the mean square of both predictions are the same by name, within a relative ``tolerance``."""
    for prediction in predictions:
        prediction.square().mean().backward()
    gradients = from_diffusers({key: parameter.grad for key, parameter in theirs.named_parameters()}, layers)
    for key, parameter in ours.layers.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - gradients[key]).norm() <= tolerance * (gradients[key].norm() + 1e-3), key


@pytest.fixture
def diffusers() -> ModuleType:
    found: ModuleType = pytest.importorskip("diffusers", reason="diffusers, an optional extra, is not installed")
    return found


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("vector", "text", "text_time")])
def test_there_and_back_is_the_same_unet_with_the_same_predictions_and_gradients(
    name: str, diffusers: ModuleType
) -> None:
    layers = layers_of(name)
    config = diffusers_config(VARIANTS[name], interface_of(name))
    assert unet_layers(*unet_spec_from_diffusers(json.loads(json.dumps(config)))) == layers

    ours, theirs = random_unet(layers).eval(), diffusers.UNet2DModel(**config)  # dropout differs by design
    state = ours.layers.state_dict()
    theirs.eval().load_state_dict(to_diffusers(state, layers), strict=True)
    back = from_diffusers(theirs.state_dict(), layers)
    assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)

    x_t, t, *labels = batch(name)
    prediction, expected = ours(x_t, t, *labels), theirs(x_t, t, *labels).sample
    tolerance = rounding(layers)
    torch.testing.assert_close(prediction, expected, rtol=0, atol=tolerance * expected.abs().max().item())
    assert_the_same_gradients(ours, theirs, (prediction, expected), layers, 2 * tolerance)


def test_cifar10_unet_of_ddpm_is_that_of_our_spec_with_its_published_parameters(diffusers: ModuleType) -> None:
    spec = load_spec(REPOSITORY / "launch" / "specs" / "cifar10.yaml")
    unet, interface = unet_spec_from_diffusers(DDPM_CIFAR10)
    assert unet == spec.unet.model_copy(update={"dropout": 0.0})  # the model's configuration does not say its dropout
    assert interface == spec.data.interface
    layers = unet_layers(unet, interface)
    with torch.device("meta"):
        theirs = diffusers.UNet2DModel(**diffusers_config(unet, interface))
    state = from_diffusers(theirs.state_dict(), layers)
    assert sum(layer.parameters for layer in layers) == 35_746_307
    assert sum(tensor.numel() for tensor in state.values()) == 35_746_307
    assert len(to_diffusers(state, layers)) == 328


def test_missing_keys_take_the_defaults_of_diffusers(diffusers: ModuleType) -> None:
    parameters = inspect.signature(diffusers.UNet2DModel.__init__).parameters.values()
    theirs = {parameter.name: parameter.default for parameter in parameters if parameter.name != "self"}
    ours = {name: field.default for name, field in PlainArguments.model_fields.items()}
    assert ours.items() <= theirs.items() and all(theirs[name] in (None, False) for name in theirs.keys() - ours.keys())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "class": ({"_class_name": "UNet1DModel"}, r'_class_name = "UNet1DModel": only UNet2DModel or UNet2DCond'),
    "down block": ({"down_block_types": ["ResnetDownsampleBlock2D"] * 4}, "down_block_types.*'DownBlock2D' or 'Attn"),
    "attention not mirrored": ({"up_block_types": ["AttnUpBlock2D"] + ["UpBlock2D"] * 3}, "up_block_types.*mirrored"),
    "too few blocks": ({"down_block_types": ["DownBlock2D"]}, "down_block_types.*4 entries"),
    "no levels": ({"block_out_channels": []}, r"block_out_channels = \[\]: "),
    "no middle": ({"mid_block_type": None}, "mid_block_type = null.*'UNetMidBlock2D'"),
    "resnet down": ({"downsample_type": "resnet"}, "downsample_type = \"resnet\".*'conv'"),
    "no middle normalisation": ({"resnet_time_scale_shift": "scale_shift"}, "attn_norm_num_groups = null.*32 groups"),
    "middle groups": ({"attn_norm_num_groups": 16}, "attn_norm_num_groups = 16"),
    "groups": ({"norm_num_groups": 48}, "norm_num_groups = 48: it does not divide the 128"),
    "heads": ({"attention_head_dim": 48}, "attention_head_dim = 48: it does not divide the 256"),
    "level of nothing": ({"class_embed_type": "timestep"}, 'class_embed_type = "timestep".*this model has none'),
    "one label": ({"num_class_embeds": 1}, "num_class_embeds = 1"),
    "learned variance": ({"out_channels": 6}, "out_channels = 6.*variances"),
    "too many channels": ({"in_channels": 257, "out_channels": 257}, "out_channels = 257.*"),
    "no size": ({"sample_size": None}, "sample_size = null"),
    "not halved": ({"sample_size": 28}, "sample_size = 28.*3 times"),
    "width not halved": ({"sample_size": [32, 60]}, r"sample_size = \[32, 60\].*3 times"),
    "of no average": ({"decays": 0.9}, "decays = 0.9"),
    "unknown": ({"encoder_hid_dim": 512}, "encoder_hid_dim = 512"),
    "text for a number": ({"layers_per_block": "2"}, 'layers_per_block = "2"'),
    "not a number": ({"norm_eps": float("nan")}, "norm_eps = NaN"),
    "division by zero": ({"block_out_channels": [2] * 4, "norm_num_groups": 1}, "freq_shift = 1.*divides by zero"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_our_unet_cannot_express_is_refused_by_name(name: str) -> None:
    change, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        unet_spec_from_diffusers({**DDPM_CIFAR10, **change})
    assert "\n" not in str(caught.value)


def test_sizes_swish_and_unknown_keys_that_are_off_are_read() -> None:
    change = {"sample_size": [32, 32], "act_fn": "swish", "downscale": None, "upcast": False, "_name_or_path": "x"}
    assert unet_spec_from_diffusers({**DDPM_CIFAR10, **change}) == unet_spec_from_diffusers(DDPM_CIFAR10)
    unet, interface = unet_spec_from_diffusers({**DDPM_CIFAR10, "sample_size": [32, 64]})
    assert interface.size == (32, 64) and unet.attention_levels == (1,) and not unet.attention_resolutions


@pytest.mark.parametrize(
    ("interface", "changes", "message"),
    [
        (INTERFACES["vector"], {}, r"data\.condition\.vector.*flag of data\.condition\.drop"),
        (INTERFACES["level"], {"classes": 3}, r"unet\.classes = 3 and data\.condition\.noise"),
        (INTERFACE, {"channels": 2, "norm_groups": 1}, r"unet\.sinusoid_shift = 1 with a first width of 2"),
    ],
)
def test_what_diffusers_cannot_hold_is_refused_by_name(
    interface: Interface, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        diffusers_config(VARIANTS["level"].model_copy(update=changes), interface)
    assert "\n" not in str(caught.value)


def test_names_of_another_unet_are_refused_by_name() -> None:
    layers = layers_of("bare")
    theirs = to_diffusers(UNet(layers, 0).layers.state_dict(), layers)
    with pytest.raises(ValueError, match=r"add_embedding\.linear\.weight"):
        from_diffusers({**theirs, "add_embedding.linear.weight": torch.zeros(1)}, layers)
    del theirs["conv_in.bias"]
    with pytest.raises(ValueError, match=r"conv_in\.bias"):
        from_diffusers(theirs, layers)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 40),
    st.floats(),
    st.sampled_from(["", "silu", "conv", "scale_shift", "AttnDownBlock2D"]),
    st.lists(st.integers(0, 9), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def test_twenty_random_models_with_a_condition_predict_the_same(diffusers: ModuleType) -> None:
    """Inputs of more channels than outputs; every second one takes the condition's level, others have classes."""
    draws = random.Random(5)
    for number in range(20):
        groups, levels, has_level = draws.choice([2, 3, 4]), draws.randint(1, 3), number % 2 == 0
        down = [draws.choice(["DownBlock2D", "AttnDownBlock2D"]) for _ in range(levels)]
        outputs = draws.choice([1, 3, 5])
        config: dict[str, Any] = {
            "sample_size": draws.choice([8, [8, 16], [16, 8]]),
            "in_channels": outputs + draws.randint(1, 6),
            "out_channels": outputs,
            "block_out_channels": [groups * draws.randint(2, 5) * 2 for _ in down],
            "norm_num_groups": groups,
            "attn_norm_num_groups": groups,
            "layers_per_block": draws.randint(1, 2),
            "down_block_types": down,
            "up_block_types": [name.replace("Down", "Up") for name in reversed(down)],
            "attention_head_dim": draws.choice([None, 2]),
            "resnet_time_scale_shift": draws.choice(["default", "scale_shift"]),
            "flip_sin_to_cos": draws.choice([True, False]),
            "freq_shift": draws.choice([0, 1]),
            "downsample_padding": draws.choice([0, 1]),
            "add_attention": draws.choice([True, False]),
            "time_embedding_dim": draws.choice([None, 6]),
            "num_class_embeds": draws.choice([None, 4]) if not has_level else None,
            "class_embed_type": "timestep" if has_level else None,
        }
        torch.manual_seed(number)
        theirs = diffusers.UNet2DModel(**config).eval()
        randomise(theirs, number)
        unet, interface = unet_spec_from_diffusers(config)
        assert interface.told_level == has_level and interface.condition_channels == config["in_channels"] - outputs
        layers = unet_layers(unet, interface)
        ours = UNet(layers, 0).eval()
        ours.layers.load_state_dict(from_diffusers(theirs.state_dict(), layers), strict=True)
        x_t, t = torch.randn(2, config["in_channels"], *interface.size), torch.tensor([3, 777])
        level = (torch.tensor([12.5, 400.0]),) if has_level else (torch.tensor([0, 3]),) if unet.classes else ()
        with torch.no_grad():
            expected = theirs(x_t, t, *level).sample
            found = ours(x_t, t, *level)
        tolerance = rounding(layers) * expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        back = json.loads(json.dumps(diffusers_config(unet, interface)))
        assert all(back.get(key) == value for key, value in config.items())


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(PlainArguments.model_fields)), JUNK)
@example("layers_per_block", 24)
def test_junk_under_any_key_is_one_line_that_names_a_key(key: str, junk: Any) -> None:
    try:
        unet_spec_from_diffusers({**DDPM_CIFAR10, key: junk})
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 300
        assert str(error).split(" = ")[0] in PlainArguments.model_fields
