"""Our U-Net with text and diffusers' UNet2DConditionModel: configurations and tensors there and back, the same
predictions and gradients, and what is refused."""

from __future__ import annotations

import inspect
import json
import random
from typing import Any

import pytest

from ddpm_ds.evaluate.diffusers.unet_config import TextArguments, diffusers_config, unet_spec_from_diffusers
from ddpm_ds.unet.layers import TransformerBlockLayer, unet_layers
from ddpm_ds.unet.spec import UnetSpec
from tests.evaluate.test_diffusers_unet import assert_the_same

diffusers = pytest.importorskip("diffusers", reason="diffusers, an optional extra, is not installed")

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


def test_published_models_have_their_published_parameters() -> None:
    for config, parameters in ((SDXL, 2_567_463_684), (SD_21, 865_910_724), (SD_15, 859_520_964)):
        unet, interface = unet_spec_from_diffusers(config)
        assert sum(layer.parameters for layer in unet_layers(unet, interface)) == parameters
        again = {**diffusers_config(unet, interface), "_class_name": "UNet2DConditionModel"}
        assert unet_spec_from_diffusers(json.loads(json.dumps(again))) == (unet, interface)
    unet, _ = unet_spec_from_diffusers(SDXL)
    assert unet.text is not None
    assert unet.text.blocks == (0, 2, 10) and unet.text.middle_blocks == 10 and unet.text.heads == (5, 10, 20)
    assert unet.text.pooled_channels == 1280 and unet.text.linear_projection


def random_config(number: int) -> dict[str, Any]:
    """A configuration of the kind, each of whose options is there in some of thirty."""
    draws = random.Random(number)
    groups, levels = draws.choice([2, 4]), draws.randint(1, 3)
    down = [draws.choice([CROSS, CROSS, PLAIN]) for _ in range(levels)]
    depths = [draws.randint(1, 2) for _ in down]
    heads = [draws.choice([1, 2, 4]) for _ in down]
    size = draws.choice([4, 8, [4, 8]])
    width = draws.choice([2, 6])
    outputs, has_level = draws.choice([3, 4]), number % 10 == 5
    return {
        "_class_name": "UNet2DConditionModel",
        "sample_size": size,
        "in_channels": outputs + 2 * has_level,
        "out_channels": outputs,
        "block_out_channels": [8 * draws.randint(1, 3) for _ in down],
        "norm_num_groups": groups,
        "layers_per_block": draws.randint(1, 2),
        "down_block_types": down,
        "up_block_types": [name.replace("Down", "Up") for name in reversed(down)],
        "transformer_layers_per_block": depths[0] if number % 3 == 0 else depths,
        "attention_head_dim": heads[0] if number % 4 == 0 else heads,
        "cross_attention_dim": draws.choice([5, 12]),
        "use_linear_projection": number % 2 == 0,
        "upcast_attention": draws.choice([True, False]),
        "resnet_time_scale_shift": draws.choice(["default", "scale_shift"]),
        "flip_sin_to_cos": draws.choice([True, False]),
        "freq_shift": draws.choice([0, 0, 1]) if width > 2 else 0,
        "downsample_padding": draws.choice([0, 1]),
        "time_embedding_dim": draws.choice([None, 10]),
        "num_class_embeds": 4 if number % 5 == 1 else None,
        "class_embed_type": "timestep" if has_level else None,
        **({"addition_embed_type": "text_time", "addition_time_embed_dim": width} if number % 2 else {}),
        **({"projection_class_embeddings_input_dim": 7 + 6 * width} if number % 2 else {}),
    }


QUICK = (1, 4, 5, 6, 9, 20)
"""Some of the thirty, with and without each option: text_time, classes, a condition's level, linear projections."""


@pytest.mark.parametrize(
    "number", [number if number in QUICK else pytest.param(number, marks=pytest.mark.long) for number in range(30)]
)
def test_thirty_random_models_predict_the_same_with_the_same_gradients(number: int) -> None:
    assert_the_same(random_config(number), number)


PARAMETERS = inspect.signature(diffusers.UNet2DConditionModel.__init__).parameters.values()
DEFAULTS = {parameter.name: parameter.default for parameter in PARAMETERS if parameter.name != "self"}


def test_missing_keys_take_the_defaults_of_diffusers() -> None:
    ours = {name: field.default for name, field in TextArguments.model_fields.items()}
    assert ours.items() <= DEFAULTS.items() and all(not DEFAULTS[name] for name in DEFAULTS.keys() - ours.keys())


def test_blocks_at_a_level_without_attention_are_not_read_and_the_middle_has_those_of_the_last() -> None:
    unet, interface = unet_spec_from_diffusers({**SD_15, "transformer_layers_per_block": [1, 2, 3, 4]})
    assert unet.text is not None and unet.text.blocks == (1, 2, 3, 0) and unet.text.middle_blocks == 4
    layers = unet_layers(unet, interface)
    blocks = [layer.name for layer in layers if isinstance(layer, TransformerBlockLayer)]
    assert blocks.count("down.2.attention.1.2") == 1 and "down.3.attention.0.0" not in blocks
    assert [name for name in blocks if "middle" in name] == [f"middle.attention.{number}" for number in range(4)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
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
    "heads": ({"attention_head_dim": 48}, "attention_head_dim = 48: 48 heads.*640"),
    "no width of sizes": ({"addition_time_embed_dim": None}, "addition_time_embed_dim = null"),
    "odd width of sizes": ({"addition_time_embed_dim": 255}, "addition_time_embed_dim = 255"),
    "sizes alone": ({"projection_class_embeddings_input_dim": 1536}, "projection_class_embeddings_input_dim = 1536.*6"),
    "no pooled": ({"projection_class_embeddings_input_dim": None}, "projection_class_embeddings_input_dim = null"),
    "refiner": ({"projection_class_embeddings_input_dim": 2560, "cross_attention_dim": 1280}, "projection.*refiner"),
    "division by zero": ({"freq_shift": 1, "addition_time_embed_dim": 2}, "addition_time_embed_dim = 2.*by zero"),
    "unknown": ({"fused": 1}, "fused = 1: no such argument of UNet2DConditionModel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_our_unet_cannot_express_is_refused_by_name(name: str) -> None:
    change, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        unet_spec_from_diffusers({**SDXL, **change})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


TRANSLATED = {
    *("sample_size", "in_channels", "out_channels", "block_out_channels", "layers_per_block", "dropout", "norm_eps"),
    *("norm_num_groups", "flip_sin_to_cos", "freq_shift", "downsample_padding", "time_embedding_dim"),
    *("cross_attention_dim", "transformer_layers_per_block", "attention_head_dim", "use_linear_projection"),
    *("num_class_embeds", "addition_time_embed_dim", "projection_class_embeddings_input_dim"),
    *("addition_embed_type_num_heads", "upcast_attention"),
}
"""Arguments of many values; in the table above are those of them that are refused."""


@pytest.mark.parametrize("key", sorted(DEFAULTS.keys() - TRANSLATED))
def test_another_value_of_an_argument_that_is_not_translated_is_refused_by_name(key: str) -> None:
    for value in ("other", 5, 1.5, True, [True]):
        if value != DEFAULTS[key]:
            with pytest.raises(ValueError, match=f"^{key} = "):
                unet_spec_from_diffusers({**SDXL, key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"middle_attention": False}, r"unet\.middle_attention = false.*UNet2DConditionModel"),
        ({"text": {"middle_blocks": 3}}, r"unet\.text\.middle_blocks = 3 and 1 as the last"),
        ({"sinusoid_shift": 1, "text": {"size_channels": 2}}, r"unet\.text\.size_channels = 2.*by zero"),
    ],
)
def test_what_diffusers_cannot_hold_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    unet, interface = unet_spec_from_diffusers({**SDXL, "transformer_layers_per_block": 1})
    values = unet.model_dump()
    values["text"] |= change.pop("text", {})
    with pytest.raises(ValueError, match=message) as caught:
        diffusers_config(UnetSpec.model_validate({**values, **change}), interface)
    assert "\n" not in str(caught.value)
