"""What a run spec chooses by name: a source, schedule, objective or sampler needs one entry of a registry, no more."""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpm_ds.config.spec_file import SPEC, load_spec
from ddpm_ds.data.prepare import Recipes
from ddpm_ds.data.sources import FIELD_OPENERS
from ddpm_ds.data.spec import DataSpec, SourceSpec, TextSpec
from ddpm_ds.diffusion.choices import NOISE, ContinuousSchedule
from ddpm_ds.evaluate.diffusers.scheduler import scheduler_config
from ddpm_ds.ground.errors import SpecError
from ddpm_ds.schema.choices import SCHEDULES
from tests import extended
from tests.extended import DOING, NEW, REGISTRIES
from tests.launching import REPOSITORY, run_ranks, tiny_spec

DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
DOCUMENTS = {"data.source": "data.md", "diffusion.schedule": "export.md", "sampler.kind": "sampling.md"}
"""Pages that list the names of a registry besides docs/spec.md."""


@pytest.fixture
def registered() -> Iterator[None]:
    for key in NEW:
        SPEC.schema(key.split("."))
    extended.register()
    yield
    for key, name in NEW.items():
        REGISTRIES[key].pop(name)
        DOING[key].pop(name)


def pictures(path: Path, seed: int = 0) -> Path:
    values = np.random.default_rng(seed).integers(0, 100, (16, 8, 8), np.uint8)
    labels = np.arange(16) % 2
    np.savez(path, images=values + 150 * labels.astype(np.uint8)[:, None, None], labels=labels)
    return path


def choices_of(key: str) -> list[str]:
    """The names that the JSON schema of the spec lists for a key."""
    section, field = key.split(".")
    schema: dict[str, Any] = SPEC.file_schema()
    (definition,) = [
        part for part in schema["$defs"].values() if field in part["properties"] and "enum" in part["properties"][field]
    ]
    assert schema["properties"][section]["$ref"].endswith(definition["title"])
    return list(definition["properties"][field]["enum"])


@pytest.mark.launch
def test_a_choice_of_each_kind_that_was_only_registered_trains_and_draws_and_is_not_exported(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    worker = Path(extended.__file__)
    done = run_ranks(
        1, worker, str(run_dir), str(pictures(tmp_path / "a.npz")), MLFLOW_TRACKING_URI="", XDG_CACHE_HOME=str(tmp_path)
    )
    said = done.stdout + done.stderr
    assert "exit codes 0 0 2" in done.stdout, said[-4000:]
    points = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [point["train/seen_images"] for point in points] == [16, 32, 48, 64]
    assert "4 images by jump in 3 steps" in said and list(run_dir.glob("samples-*/grid.png"))
    (refusal,) = [line for line in done.stderr.splitlines() if "can't be exported" in line]
    assert 'diffusion.schedule = "flat": diffusers has none like it' in refusal
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize("key", REGISTRIES)
def test_the_spec_takes_registered_names_and_lists_them_for_an_unknown_one(registered: None, key: str) -> None:
    assert choices_of(key) == list(REGISTRIES[key]) and NEW[key] in choices_of(key)
    path = ["data.path=a.npz"] if key == "data.source" else []
    section, field = key.split(".")
    spec = load_spec(DIGITS, [f"{key}={NEW[key]}", *path])
    assert getattr(getattr(spec, section), field) == NEW[key]
    with pytest.raises(SpecError) as caught:
        load_spec(DIGITS, [f"{key}=nothing"])
    listed = " or ".join(f'"{name}"' for name in REGISTRIES[key])
    assert str(caught.value) == f'--set {key}=nothing: {key} = "nothing" should be {listed}'


@pytest.mark.parametrize("key", REGISTRIES)
def test_every_name_has_something_behind_it(key: str) -> None:
    behind = {**DOING[key], **FIELD_OPENERS} if key == "data.source" else DOING[key]
    assert list(REGISTRIES[key]) == list(behind)


def test_the_spec_knows_which_schedules_have_continuous_levels() -> None:
    continuous = {name for name, kind in NOISE.items() if isinstance(kind, ContinuousSchedule)}
    assert continuous == {name for name, choice in SCHEDULES.items() if choice.continuous}


def test_a_source_with_a_path_says_what_it_takes_it_for(registered: None) -> None:
    with pytest.raises(SpecError, match=r"data\.path is missing; source npz needs it: --set data\.path=FILE\.npz"):
        load_spec(DIGITS, ["data.source=npz"])
    with pytest.raises(SpecError, match=r"used only with data\.source: folder or .* or npz; remove it"):
        load_spec(DIGITS, ["data.path=a.npz"])


def test_a_store_is_named_after_all_that_decides_its_images(tmp_path: Path) -> None:
    others = {"source": "cifar10", "path": tmp_path, "image_size": 16, "crop_from": 12, "channels": 3}
    others |= {"store_root": tmp_path, "name": "a/b", "split": "test", "image_column": "x", "label_column": "y"}
    of_training = {"horizontal_flips", "held_out_images", "max_bad_fraction", "workers"}
    of_training |= {"normalise", "held_out", "flips_negate"}
    # These name stores of their own, as far as they decide what is stored; they have tests of their own.
    of_training |= {"autoencoder", "latent_scale", "latent_shift"}
    of_training |= {"residual_of", "buckets", "held_out_path", "condition"}
    others |= {"values": "float32", "variables": ("u", "v"), "mask": "nan", "text": TextSpec(encoders="x")}
    others |= {"sources": (SourceSpec(path=tmp_path / "a"), SourceSpec(path=tmp_path / "b"))}
    assert {*others, *of_training} == set(DataSpec.model_fields), "does the new key decide what is prepared?"
    spec = DataSpec(source="digits", image_size=8, channels=1)
    named = [Recipes(spec.model_copy(update={key: value})).of().path for key, value in others.items()]
    assert len({Recipes(spec).of().path, *named}) == 1 + len(others)
    assert Recipes(spec).of().path == Path("data/digits-8px-1ch"), "stores that exist keep their names"
    photos = spec.model_copy(update={"source": "folder", "path": Path("/here/../photos")})
    assert Recipes(photos).of().path == Path(f"data/folder-8px-1ch-{sha256(b'/photos').hexdigest()[:8]}")


@pytest.mark.parametrize("key", ["diffusion.schedule", "diffusion.objective"])
def test_what_diffusers_does_not_know_is_refused_by_name(registered: None, key: str) -> None:
    spec = tiny_spec(diffusion={key.split(".")[1]: NEW[key]})
    with pytest.raises(ValueError, match=rf'^{key} = "{NEW[key]}": diffusers has none like it; draw with'):
        scheduler_config(spec.diffusion, spec.sampler)


@pytest.mark.parametrize("key", REGISTRIES)
def test_the_documents_have_every_name(key: str) -> None:
    for page in filter(None, ("spec.md", DOCUMENTS.get(key))):
        text = (REPOSITORY / "docs" / page).read_text()
        missing = [name for name in REGISTRIES[key] if f"`{name}`" not in text and f'"{name}"' not in text]
        assert missing == [], page
