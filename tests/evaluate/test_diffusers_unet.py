"""Our U-Net and diffusers' UNet2DModel and UNet2DConditionModel: configurations and tensors there and back, refusals,
and rung a of the ladder of trust: the same predictions and gradients on the same weights."""

import inspect
import json
import random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.evaluate.diffusers.unet import from_diffusers, to_diffusers
from ddpm_ds.evaluate.diffusers.unet_config import ARGUMENTS, PlainArguments, diffusers_config, unet_spec_from_diffusers
from ddpm_ds.unet.layers import TransformerBlockLayer, unet_layers
from ddpm_ds.unet.model import UNet
from ddpm_ds.unet.spec import Interface, UnetSpec
from tests.launching import REPOSITORY
from tests.unet.variants import INTERFACE, INTERFACES, VARIANTS, interface_of, layers_of, randomise, rounding

diffusers = pytest.importorskip("diffusers", reason="diffusers, an optional extra, is not installed")

DDPM_CIFAR10: dict[str, Any] = {  # google/ddpm-cifar10-32
    **{"_class_name": "UNet2DModel", "_diffusers_version": "0.0.4", "act_fn": "silu", "attention_head_dim": None},
    **{"block_out_channels": [128, 256, 256, 256], "center_input_sample": False, "downsample_padding": 0},
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
    **{"flip_sin_to_cos": False, "freq_shift": 1, "in_channels": 3, "layers_per_block": 2, "mid_block_scale_factor": 1},
    **{"norm_eps": 1e-06, "norm_num_groups": 32, "out_channels": 3, "sample_size": 32},
    "time_embedding_type": "positional",
}
CROSS, PLAIN = "CrossAttnDownBlock2D", "DownBlock2D"
SDXL: dict[str, Any] = {  # stabilityai/stable-diffusion-xl-base-1.0, what differs from diffusers' defaults
    "_class_name": "UNet2DConditionModel",
    "_diffusers_version": "0.19.0.dev0",
    "addition_embed_type": "text_time",
    "addition_embed_type_num_heads": 64,
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": [PLAIN, CROSS, CROSS],
    "only_cross_attention": False,
    "mid_block_scale_factor": 1.0,
    "num_attention_heads": None,
    "projection_class_embeddings_input_dim": 2816,
    "resnet_out_scale_factor": 1.0,
    "reverse_transformer_layers_per_block": None,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "upcast_attention": None,
    "use_linear_projection": True,
}
SD_21: dict[str, Any] = {  # stabilityai/stable-diffusion-2-1
    "_class_name": "UNet2DConditionModel",
    "attention_head_dim": [5, 10, 20, 20],
    "block_out_channels": [320, 640, 1280, 1280],
    "cross_attention_dim": 1024,
    "dual_cross_attention": False,
    "sample_size": 96,
    "upcast_attention": True,
    "use_linear_projection": True,
}
SD_15: dict[str, Any] = {  # stable-diffusion-v1-5
    "_class_name": "UNet2DConditionModel",
    "attention_head_dim": 8,
    "cross_attention_dim": 768,
    "sample_size": 64,
}
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
    torch.manual_seed(seed)
    theirs: Any = getattr(diffusers, config["_class_name"]).from_config(config).eval()
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
    for each in (prediction, expected):
        each.square().mean().backward()
    gradients = from_diffusers({key: parameter.grad for key, parameter in theirs.named_parameters()}, layers)
    for key, parameter in ours.layers.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - gradients[key]).norm() <= tolerance * (gradients[key].norm() + 1e-3), key


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("vector", "text", "text_time")])
def test_there_and_back_is_the_same_unet_with_the_same_predictions_and_gradients(name: str) -> None:
    config = json.loads(json.dumps(diffusers_config(VARIANTS[name], interface_of(name))))
    assert unet_layers(*unet_spec_from_diffusers(config)) == layers_of(name)
    assert_the_same({**config, "_class_name": "UNet2DModel"}, 0)


def random_config(number: int, text: bool) -> dict[str, Any]:
    """A configuration, each of whose options is there in some of fifty; without text it has a condition."""
    draws = random.Random(number)
    groups, outputs, has_level = draws.choice([2, 4]), draws.choice([1, 3, 4]), number % (10 if text else 2) == 0
    down = [draws.choice([CROSS, PLAIN] if text else ["AttnDownBlock2D", PLAIN]) for _ in range(draws.randint(1, 3))]
    config: dict[str, Any] = {
        "_class_name": "UNet2DConditionModel" if text else "UNet2DModel",
        "sample_size": draws.choice([8, [8, 16], [16, 8]]),
        "in_channels": outputs + (draws.randint(1, 6) if has_level or not text else 0),
        "out_channels": outputs,
        "block_out_channels": [8 * draws.randint(1, 3) for _ in down],
        "norm_num_groups": groups,
        "layers_per_block": draws.randint(1, 2),
        "down_block_types": down,
        "up_block_types": [name.replace("Down", "Up") for name in reversed(down)],
        "resnet_time_scale_shift": draws.choice(["default", "scale_shift"]),
        "flip_sin_to_cos": draws.choice([True, False]),
        "freq_shift": draws.choice([0, 1]),
        "downsample_padding": draws.choice([0, 1]),
        "time_embedding_dim": draws.choice([None, 10]),
        "num_class_embeds": 4 if not has_level and number % 5 == 1 else None,
        "class_embed_type": "timestep" if has_level else None,
    }
    if not text:
        heads, attends = draws.choice([None, 2]), draws.choice([True, False])
        return {**config, "attn_norm_num_groups": groups, "attention_head_dim": heads, "add_attention": attends}
    depths, numbers = [draws.randint(1, 2) for _ in down], [draws.choice([1, 2, 4]) for _ in down]
    config |= {
        "transformer_layers_per_block": depths[0] if number % 3 == 0 else depths,
        "attention_head_dim": numbers[0] if number % 4 == 0 else numbers,
        "cross_attention_dim": draws.choice([5, 12]),
        "use_linear_projection": number % 4 < 2,
        "upcast_attention": draws.choice([True, False]),
    }
    if number % 2:
        config |= {"addition_embed_type": "text_time", "addition_time_embed_dim": 6}
        config["projection_class_embeddings_input_dim"] = 7 + 6 * 6
    return config


@pytest.mark.parametrize(("number", "text"), [(n, n % 5 < 3) for n in range(50)])
def test_random_models_predict_the_same_with_the_same_gradients(number: int, text: bool) -> None:
    assert_the_same(random_config(number, text), number)


def test_published_models_have_their_published_parameters() -> None:
    for config, parameters in (
        (DDPM_CIFAR10, 35_746_307),
        (SDXL, 2_567_463_684),
        (SD_21, 865_910_724),
        (SD_15, 859_520_964),
    ):
        unet, interface = unet_spec_from_diffusers(config)
        assert sum(layer.parameters for layer in unet_layers(unet, interface)) == parameters
        again = {**diffusers_config(unet, interface), "_class_name": config["_class_name"]}
        assert unet_spec_from_diffusers(json.loads(json.dumps(again))) == (unet, interface)
    unet, _ = unet_spec_from_diffusers(SDXL)
    assert unet.text is not None
    assert unet.text.blocks == (0, 2, 10) and unet.text.middle_blocks == 10 and unet.text.heads == (5, 10, 20)
    assert unet.text.pooled_channels == 1280 and unet.text.linear_projection
    spec = load_spec(REPOSITORY / "launch" / "specs" / "cifar10.yaml")
    unet, interface = unet_spec_from_diffusers(DDPM_CIFAR10)
    assert unet == spec.unet.model_copy(update={"dropout": 0.0})  # the model's configuration does not say its dropout
    assert interface == spec.data.interface


def defaults_of(kind: str) -> dict[str, Any]:
    """Arguments of a class of diffusers with their defaults."""
    parameters = inspect.signature(getattr(diffusers, kind).__init__).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "self"}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_missing_keys_take_the_defaults_of_diffusers(kind: str) -> None:
    theirs = defaults_of(kind)
    ours = {name: field.default for name, field in ARGUMENTS[kind].model_fields.items()}
    assert ours.items() <= theirs.items() and not any(theirs[name] for name in theirs.keys() - ours.keys())


def test_blocks_at_a_level_without_attention_are_not_read_and_the_middle_has_those_of_the_last() -> None:
    unet, interface = unet_spec_from_diffusers({**SD_15, "transformer_layers_per_block": [1, 2, 3, 4]})
    assert unet.text is not None and unet.text.blocks == (1, 2, 3, 0) and unet.text.middle_blocks == 4
    layers = unet_layers(unet, interface)
    blocks = [layer.name for layer in layers if isinstance(layer, TransformerBlockLayer)]
    assert blocks.count("down.2.attention.1.2") == 1 and "down.3.attention.0.0" not in blocks
    assert [name for name in blocks if "middle" in name] == [f"middle.attention.{number}" for number in range(4)]


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
OF_TEXT: dict[str, tuple[dict[str, Any], str]] = {
    "simple cross-attention": ({"down_block_types": ["SimpleCrossAttnDownBlock2D"] * 3}, "down_block_types.*'Cross"),
    "cross-attention alone by level": ({"only_cross_attention": [False, True, False]}, "only_cross_attention = "),
    "blocks that differ": ({"layers_per_block": [2, 2, 3]}, r"layers_per_block = \[2, 2, 3\].*same on all levels"),
    "too many layers": ({"layers_per_block": 24}, "layers_per_block = 24.*layers"),
    "contexts that differ": ({"cross_attention_dim": [768, 768, 1024]}, "cross_attention_dim.*same on all levels"),
    "blocks of two levels": ({"transformer_layers_per_block": [1, 2]}, "transformer_layers_per_block.*3 entries"),
    "no block": ({"transformer_layers_per_block": [1, 0, 2]}, "transformer_layers_per_block.*greater than"),
    "blocks by side": ({"transformer_layers_per_block": [[1, 2], [1], [1]]}, "transformer_layers_per_block"),
    "Kolors": ({"encoder_hid_dim": 4096, "encoder_hid_dim_type": "text_proj"}, "encoder_hid_dim = 4096.*project"),
    "image projection": ({"encoder_hid_dim_type": "image_proj"}, 'encoder_hid_dim_type = "image_proj"'),
    "text heads": ({"attention_head_dim": 48}, "attention_head_dim = 48: 48 heads.*640"),
    "no width of sizes": ({"addition_time_embed_dim": None}, "addition_time_embed_dim = null"),
    "odd width of sizes": ({"addition_time_embed_dim": 255}, "addition_time_embed_dim = 255"),
    "sizes alone": ({"projection_class_embeddings_input_dim": 1536}, "projection_class_embeddings_input_dim = 1536.*6"),
    "no pooled": ({"projection_class_embeddings_input_dim": None}, "projection_class_embeddings_input_dim = null"),
    "refiner": ({"projection_class_embeddings_input_dim": 2560, "cross_attention_dim": 1280}, "projection.*refiner"),
    "sizes divided by zero": ({"freq_shift": 1, "addition_time_embed_dim": 2}, "addition_time_embed_dim = 2.*by zero"),
    "unknown of text": ({"fused": 1}, "fused = 1: no such argument of UNet2DConditionModel"),
}


@pytest.mark.parametrize("name", [*REFUSED, *OF_TEXT])
def test_what_our_unet_cannot_express_is_refused_by_name(name: str) -> None:
    config, (change, message) = (DDPM_CIFAR10, REFUSED[name]) if name in REFUSED else (SDXL, OF_TEXT[name])
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        unet_spec_from_diffusers({**config, **change})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


TRANSLATED = {
    *("sample_size", "in_channels", "out_channels", "block_out_channels", "layers_per_block", "dropout", "norm_eps"),
    *("norm_num_groups", "flip_sin_to_cos", "freq_shift", "downsample_padding", "time_embedding_dim"),
    *("cross_attention_dim", "transformer_layers_per_block", "attention_head_dim", "use_linear_projection"),
    *("num_class_embeds", "addition_time_embed_dim", "projection_class_embeddings_input_dim"),
    *("addition_embed_type_num_heads", "upcast_attention"),
}
"""Arguments of many values; in the table above are those of them that are refused."""


@pytest.mark.parametrize("key", sorted(defaults_of("UNet2DConditionModel").keys() - TRANSLATED))
def test_another_value_of_an_argument_that_is_not_translated_is_refused_by_name(key: str) -> None:
    for value in ("other", 5, 1.5, True, [True]):
        if value != defaults_of("UNet2DConditionModel")[key]:
            with pytest.raises(ValueError, match=f"^{key} = "):
                unet_spec_from_diffusers({**SDXL, key: value})


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
        (None, {"middle_attention": False}, r"unet\.middle_attention = false.*UNet2DConditionModel"),
        (None, {"text": {"middle_blocks": 3}}, r"unet\.text\.middle_blocks = 3 and 1 as the last"),
        (None, {"sinusoid_shift": 1, "text": {"size_channels": 2}}, r"unet\.text\.size_channels = 2.*by zero"),
    ],
)
def test_what_diffusers_cannot_hold_is_refused_by_name(
    interface: Interface | None, changes: dict[str, Any], message: str
) -> None:
    """Of the variant ``level`` with an interface, of SDXL without."""
    unet, found = unet_spec_from_diffusers({**SDXL, "transformer_layers_per_block": 1})
    values = (unet if interface is None else VARIANTS["level"]).model_dump()
    values |= {key: {**values[key], **value} if key == "text" else value for key, value in changes.items()}
    with pytest.raises(ValueError, match=message) as caught:
        diffusers_config(UnetSpec.model_validate(values), interface or found)
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


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(PlainArguments.model_fields)), JUNK)
@example("layers_per_block", 24)
def test_junk_under_any_key_is_one_line_that_names_a_key(key: str, junk: Any) -> None:
    try:
        unet_spec_from_diffusers({**DDPM_CIFAR10, key: junk})
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 300
        assert str(error).split(" = ")[0] in PlainArguments.model_fields
