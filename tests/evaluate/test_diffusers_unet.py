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
from ddpm_ds.unet.spec import Interface, UnetSpec
from tests.launching import REPOSITORY
from tests.unet.variants import (
    INTERFACE,
    INTERFACES,
    VARIANTS,
    interface_of,
    layers_of,
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


LARGEST = 32
"""Above all timesteps, levels and sizes among the inputs of the U-Nets."""


def inputs_of(
    unet: UnetSpec, interface: Interface, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor | None, dict[str, Any]]:
    """Two images: the inputs of ours, their context, and what diffusers takes beside the first two inputs."""
    x_t = torch.randn(2, interface.channels + interface.condition_channels, *interface.size, dtype=dtype)
    ours, context, theirs = [x_t, torch.tensor([3, 31])], None, dict[str, Any]()
    if unet.classes is not None:
        ours.append(torch.tensor([1, unet.classes]))
        theirs["class_labels"] = ours[-1]
    if interface.condition_level:
        ours.append(torch.tensor([12.5, 0.5], dtype=dtype))
        theirs["class_labels"] = ours[-1]
    if unet.text is not None:
        theirs["encoder_hidden_states"] = context = torch.randn(2, 3, unet.text.context_channels, dtype=dtype)
        if unet.text.pooled_channels is not None:
            pooled = torch.randn(2, unet.text.pooled_channels, dtype=dtype)
            sizes = torch.randint(0, LARGEST, (2, 6)).to(dtype)
            ours.append(torch.cat((pooled, sizes), dim=1))
            theirs["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": sizes}
    return ours, context, theirs


def assert_the_same(config: dict[str, Any], seed: int) -> None:
    """The same predictions and every gradient by name, and the way back."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers, an optional extra, is not installed")
    torch.manual_seed(seed)
    theirs = getattr(diffusers, config["_class_name"]).from_config(config).eval()
    randomise(theirs, seed)
    unet, interface = unet_spec_from_diffusers(config)
    layers = unet_layers(unet, interface)
    ours, state = UNet(layers, 0).eval(), theirs.state_dict()
    ours.layers.load_state_dict(from_diffusers(state, layers), strict=True)
    linear = unet.text is not None and unet.text.linear_projection
    back = to_diffusers(ours.layers.state_dict(), layers, linear_projection=linear)
    assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)
    again = json.loads(json.dumps({**diffusers_config(unet, interface), "_class_name": config["_class_name"]}))
    assert unet_spec_from_diffusers(again) == (unet, interface)

    mine, context, others = inputs_of(unet, interface)
    with torch.no_grad():
        prediction, expected = ours(*mine, context=context), theirs(*mine[:2], **others).sample
    torch.testing.assert_close(prediction, expected, rtol=0, atol=rounding(layers) * expected.abs().max().item())

    mine, context, others = inputs_of(unet, interface, torch.float64)
    theirs.double().time_proj.register_forward_hook(lambda *call: call[-1].double())  # which it forgets for labels
    prediction, expected = ours.double()(*mine, context=context), theirs(*mine[:2], **others).sample
    # Only sinusoids are in fp32: of a division, product, exponential and product, each within half a unit, of numbers
    # below LARGEST.
    tolerance = 4 * LARGEST * 2**-24
    torch.testing.assert_close(prediction, expected, rtol=0, atol=tolerance * expected.abs().max().item())
    assert_the_same_gradients(ours, theirs, (prediction, expected), layers, tolerance)


@pytest.fixture
def diffusers() -> ModuleType:
    found: ModuleType = pytest.importorskip("diffusers", reason="diffusers, an optional extra, is not installed")
    return found


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("vector", "text", "text_time")])
def test_there_and_back_is_the_same_unet_with_the_same_predictions_and_gradients(name: str) -> None:
    config = json.loads(json.dumps(diffusers_config(VARIANTS[name], interface_of(name))))
    assert unet_layers(*unet_spec_from_diffusers(config)) == layers_of(name)
    assert_the_same({**config, "_class_name": "UNet2DModel"}, 0)


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


def test_twenty_random_models_with_a_condition_predict_the_same() -> None:
    """Inputs of more channels than outputs; every second one takes the condition's level, others have classes."""
    draws = random.Random(5)
    for number in range(20):
        groups, levels, has_level = draws.choice([2, 3, 4]), draws.randint(1, 3), number % 2 == 0
        down = [draws.choice(["DownBlock2D", "AttnDownBlock2D"]) for _ in range(levels)]
        outputs = draws.choice([1, 3, 5])
        config: dict[str, Any] = {
            "_class_name": "UNet2DModel",
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
        assert_the_same(config, number)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(PlainArguments.model_fields)), JUNK)
@example("layers_per_block", 24)
def test_junk_under_any_key_is_one_line_that_names_a_key(key: str, junk: Any) -> None:
    try:
        unet_spec_from_diffusers({**DDPM_CIFAR10, key: junk})
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 300
        assert str(error).split(" = ")[0] in PlainArguments.model_fields
