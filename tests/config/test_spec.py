"""The run spec's own rules: frozen, documented, and what no single field can know."""

import copy
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.schema.section import Section

VALUES: dict[str, Any] = {
    "name": "tiny",
    "data": {"source": "digits", "image_size": 8, "channels": 1},
    "unet": {"channels": 16, "multipliers": [1, 2], "attention_resolutions": [4], "norm_groups": 8},
    "diffusion": {},
    "optimizer": {"learning_rate": 1e-3},
    "train": {"images": 640, "batch_images": 64},
    "logging": {"log_every_images": 64},
}


def spec(**changes: Any) -> RunSpec:
    """A small spec with changes given as section__key=value."""
    values = copy.deepcopy(VALUES)
    for key, value in changes.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    return RunSpec.model_validate(values)


def sections() -> list[type[Section]]:
    found: list[type[Section]] = [RunSpec]
    for field in RunSpec.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found.append(field.annotation)
    return found


@pytest.mark.parametrize("section", sections())
def test_every_section_is_frozen_and_every_field_documented(section: type[Section]) -> None:
    assert section.model_config.get("frozen") and section.__doc__
    fields = section.model_fields.items()
    assert [name for name, field in fields if not field.description and field.annotation not in sections()] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__image_size": 9}, ["data.image_size = 9", "multiple of 2"]),
        ({"unet__attention_resolutions": [16]}, ["unet.attention_resolutions has 16", "[8, 4]"]),
        ({"unet__norm_groups": 5}, ["unet.norm_groups = 5", "16 channels"]),
        ({"unet__channels": 9, "unet__norm_groups": 9}, ["unet.channels = 9", "even"]),
        ({"unet__head_channels": 12}, ["unet.head_channels = 12", "32 channels"]),
        ({"data__source": "folder"}, ["data.path is missing", "--set data.path=FOLDER"]),
        (
            {"data__source": "huggingface"},
            ["data.path or data.name is missing", "--set data.path=PATH or --set data.name=OWNER/NAME"],
        ),
        ({"data__crop_from": 7}, ["data.crop_from = 7", "data.image_size = 8", "8 or more", "null"]),
        (
            {"data__image_size": (8, 16)},
            ["unet.attention_resolutions = [4] are sides of squares", "[8,16]", "attention_levels, 0 to 1"],
        ),
        (
            {"unet__attention_levels": (2,), "unet__attention_resolutions": []},
            ["attention_levels has 2", "[0, 1]"],
        ),
        ({"diffusion__beta_end": 1e-5}, ["diffusion.beta_start = 0.0001", "beta_end = 1e-05"]),
        ({"diffusion__beta_end": 1.5}, ["beta_end = 1.5", "below 1"]),
        ({"diffusion__timesteps": 100_000}, ["diffusion.timesteps = 100000", "less than 1e-30 of the image"]),
        ({"diffusion__beta_start": 1e-17}, ["should be greater than or equal to 0.000000000000001"]),
        ({"train__accumulation": 3}, ["train.batch_images = 64", "train.accumulation = 3"]),
    ],
)
def test_what_does_not_fit_together_is_named_with_its_fix(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        spec(**changes)
    (problem,) = caught.value.errors()
    assert "\n" not in problem["msg"]
    for word in words:
        assert word in problem["msg"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__image_size": 52}, ["data.image_size = 52 is no multiple of data.buckets.step = 8"]),
        (
            {"unet__multipliers": [1] * 5, "data__image_size": 48},
            ["data.buckets.step = 8 can't be halved 4 times", "a multiple of 16"],
        ),
    ],
)
def test_what_has_one_size_does_not_go_with_buckets(changes: dict[str, Any], words: list[str]) -> None:
    buckets: dict[str, Any] = {"data__buckets": {"step": 8}, "data__image_size": 48, "unet__attention_resolutions": []}
    assert spec(**buckets).bucket_group == 64 and spec().bucket_group is None
    assert spec(**buckets, data__horizontal_flips=True).data.buckets is not None
    with pytest.raises(ValidationError) as caught:
        spec(**buckets | changes)
    (problem,) = caught.value.errors()
    assert "\n" not in problem["msg"]
    for word in words:
        assert word in problem["msg"]


@pytest.mark.parametrize("size", [33, 1, (33, 48), (30, 50), (3, 8191)])
def test_the_sizes_named_for_one_that_can_not_be_halved_can_be(size: int | tuple[int, int]) -> None:
    unet = {"unet__multipliers": (1,) * 4, "unet__attention_resolutions": []}
    with pytest.raises(ValidationError) as caught:
        spec(data__image_size=size, **unet)
    advice = str(caught.value.errors()[0]["msg"]).partition("such as ")[2].partition(", or fewer")[0]
    given = (size, size) if isinstance(size, int) else size
    for named in advice.split(" or "):
        typed = spec(data__image_size=yaml.safe_load(named), **unet).data.size
        assert all(abs(one - other) < 8 for one, other in zip(typed, given, strict=True))


def test_two_equal_sides_are_a_square() -> None:
    assert spec(data__image_size=(8, 8)) == spec(data__image_size=8)


FIELDS: dict[str, Any] = {"data__values": "float32", "data__channels": 2, "sampler__clip": "none"}
SOURCE: dict[str, Any] = {"data__source": "arrays", "data__path": "fields.npz"}
STORED: dict[str, Any] = {"kind": "stored", "channels": 2}


@pytest.mark.parametrize(
    ("condition", "changes", "words"),
    [
        ({}, {}, ["data.condition has neither", "use null"]),
        ({"channels": 2}, {}, ["data.condition has neither"]),
        ({"drop": 0.1}, {}, ["data.condition has neither"]),
        (
            {**STORED, "path": "a.h5"},
            {"data__held_out_path": "val.npz"},
            ["data.condition.path = a.h5", "val.npz has none; name it by data.condition.held_out_path"],
        ),
        ({"kind": "cut_out", "cut": [0.5, 0.2]}, {}, ["data.condition.cut = [0.5, 0.2] should not fall"]),
        ({"kind": "reduced", "factor": 3}, {}, ["data.condition.factor = 3 does not divide data.image_size = 8"]),
        (STORED, {"sampler__guidance": 2.0}, ["sampler.guidance = 2", "data.condition.drop"]),
        (STORED, {**FIELDS, "sampler__clip": "static"}, ["sampler.clip = static", "use none"]),
        (STORED, {"diffusion__channel_weights": [1.0, 2.0]}, ["diffusion.channel_weights", "data.channels = 1"]),
        (STORED, {"diffusion__channel_weights": [0.0]}, ["diffusion.channel_weights = [0.0] leaves no loss"]),
        (None, {**FIELDS, "data__autoencoder": "a"}, ["data.autoencoder needs pictures", "has arrays here; use null"]),
        (None, {"data__channels": 5}, ["data.channels = 5 should be 1 (grey) or 3"]),
        (
            STORED,
            {**FIELDS, "data__flips_negate": [4], "data__horizontal_flips": True},
            ["data.flips_negate has 4", "0 to 3"],
        ),
        (
            STORED,
            {**FIELDS, "data__flips_negate": ["u"], "data__horizontal_flips": True},
            ["data.flips_negate has u", "the channel's number"],
        ),
        (
            STORED,
            {"diffusion__objective": "regression", "sampler__steps": 20},
            ["sampler.steps = 20", "evaluates the U-Net once; use null"],
        ),
    ],
)
def test_a_condition_that_does_not_fit_is_named_with_its_fix(
    condition: dict[str, Any] | None, changes: dict[str, Any], words: list[str]
) -> None:
    test_what_does_not_fit_together_is_named_with_its_fix({**SOURCE, "data__condition": condition, **changes}, words)


FOLDER: dict[str, Any] = {"data__source": "folder", "data__path": "pictures", "unet__attention_resolutions": []}
LATENTS: dict[str, Any] = {**FOLDER, "data__channels": 4, "data__autoencoder": "vae", "sampler__clip": "none"}
PAIR = [{"path": "a", "condition": "b"}, {"path": "c"}]


@pytest.mark.parametrize(
    ("condition", "changes", "words"),
    [
        (
            {"kind": "stored"},
            LATENTS,
            ["data.condition.kind = stored needs a condition of each image", "condition.path"],
        ),
        (
            {"kind": "stored", "channels": 4, "path": "b"},
            LATENTS,
            ["data.condition.channels = 4 is used only with data"],
        ),
        (
            {"kind": "cut_out"},
            {**LATENTS, "data__path": None, "data__sources": PAIR},
            ["data.condition.kind = cut_out needs a condition of each image"],
        ),
        ({"kind": "reduced"}, LATENTS, ["data.condition.kind = reduced needs data.autoencoder: null"]),
        (
            {"kind": "cut_out", "variants": 2},
            SOURCE,
            ["data.condition.variants = 2 is used only with data.autoencoder"],
        ),
        (
            {"kind": "cut_out", "path": "b"},
            {**FOLDER, "data__channels": 3},
            ["data.condition.path has masks for kind: cut_out", "give data.autoencoder"],
        ),
        (
            {"kind": "cut_out"},
            {**FOLDER, "data__channels": 3, "data__image_size": 48, "data__buckets": {"step": 8}},
            ["data.condition is used only with data.autoencoder or data.buckets: null; remove it"],
        ),
        (
            {"kind": "cut_out", "path": "b"},
            {**LATENTS, "data__held_out_path": "val"},
            ["data.held_out_path = val has none; name it by data.condition.held_out_path"],
        ),
        (
            None,
            {**LATENTS, "data__held_out_path": "val", "data__mask": "masks"},
            ["data.mask = masks has no masks of data.held_out_path; use alpha or beside"],
        ),
        (
            None,
            {**LATENTS, "data__path": None, "data__sources": PAIR},
            ["data.sources has a condition, which only data.condition.kind = stored or cut_out reads; remove it"],
        ),
        (None, {"data__mask": "alpha"}, ["data.mask = alpha is used only with data.source: folder or arrays"]),
    ],
)
def test_masks_and_conditions_that_do_not_fit_are_named_with_their_fix(
    condition: dict[str, Any] | None, changes: dict[str, Any], words: list[str]
) -> None:
    test_what_does_not_fit_together_is_named_with_its_fix({**changes, "data__condition": condition}, words)


def test_conditions_that_fit() -> None:
    for condition in (
        {**STORED, "drop": 0.1, "constants": ["a"], "constant_channels": 1, "normalise": "range"},
        {"vector": ["lead"], "vector_size": 1},
        {"grid_channels": 8},
        {"kind": "reduced", "factor": 2, "noise": 0.3, "resize": "bicubic"},
    ):
        drops = 2.0 if "drop" in condition else 1.0
        found = spec(**SOURCE, data__condition=condition, sampler__guidance=drops).data.condition
        assert (
            found is not None
            and found.input_channels(1) == spec(**SOURCE, data__condition=condition).data.interface.condition_channels
        )
    assert spec(**SOURCE, data__condition=STORED, diffusion__objective="regression").data.interface.channels == 1


def test_heads_only_have_to_divide_the_widths_that_are_attended() -> None:
    wide_heads = {"unet__head_channels": 32, "unet__attention_resolutions": [4]}
    assert spec(**wide_heads).unet.head_channels == 32  # 32 channels at 4 pixels and in the middle, 16 at 8 pixels
    with pytest.raises(ValidationError, match="16 channels"):
        spec(**wide_heads | {"unet__attention_resolutions": [8]})


def test_betas_only_matter_to_the_schedule_that_has_them() -> None:
    assert spec(diffusion__schedule="cosine", diffusion__beta_end=1e-5).diffusion.beta_end == 1e-5


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinity_is_no_learning_rate(value: float) -> None:
    with pytest.raises(ValidationError):
        spec(optimizer__learning_rate=value)
