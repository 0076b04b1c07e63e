"""Held-out images of a source of their own: never trained on, scaled as the training images are, or refused."""

import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddpm_ds.data.cache import CacheMeta, DatasetCache, by_field, shard_name
from ddpm_ds.data.held_out import checksums_of, parts, prepare_all, training_and_held_out
from ddpm_ds.data.latents import pixels_learned
from ddpm_ds.data.prepare import How, Recipes, prepare
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError, SpecError
from tests.autoencoders import save_autoencoder
from tests.data.reading import loaded

SpecOf = Callable[..., DataSpec]
COUNT, OTHERS = 11, 5
CONDITION: dict[str, Any] = {"kind": "stored", "channels": 1, "normalise": "statistics"}


def arrays(count: int, centre: float, **changes: Any) -> dict[str, Any]:
    """Fields of 4x6 pixels around ``centre``, of which the first row is not a number, with a condition of 2x3."""
    draws = np.random.default_rng(int(centre))
    found = {"images": draws.normal(centre, 2.0, (count, 1, 4, 6)), "condition": draws.random((count, 1, 2, 3))}
    found["images"][:, :, 0] = np.nan
    found["condition"][0] = np.nan
    return {**found, "height": np.arange(24.0).reshape(4, 6), **changes}


@pytest.fixture
def fields_spec(tmp_path: Path) -> SpecOf:
    """Specs of eleven fields around 280 whose held-out ones are five others around 300."""
    np.savez(tmp_path / "train.npz", **arrays(COUNT, 280.0))
    np.savez(tmp_path / "val.npz", **arrays(OTHERS, 300.0))

    def make(condition: dict[str, Any] | None = None, **changes: Any) -> DataSpec:
        given = {"source": "arrays", "path": tmp_path / "train.npz", "held_out_path": tmp_path / "val.npz"}
        given |= {"values": "float32", "normalise": "statistics", "mask": "nan", "image_size": (4, 6), "channels": 1}
        given |= {"condition": {**CONDITION, **(condition or {})}, "store_root": tmp_path / "stores"}
        return DataSpec.model_validate(given | changes)

    return make


@pytest.fixture
def folders_spec(folder: Path, tmp_path: Path) -> SpecOf:
    """Specs of twelve pictures, filled with values up to 45, with a held-out folder of four others of 200 to 203."""
    for number in range(4):
        path = tmp_path / "val" / ("cats", "dogs")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((10, 8, 3), 200 + number, np.uint8)).save(path)

    def make(**changes: Any) -> DataSpec:
        given = {"source": "folder", "path": folder, "held_out_path": tmp_path / "val", "image_size": 8, "channels": 3}
        return DataSpec.model_validate(given | {"store_root": tmp_path / "stores"} | changes)

    return make


def values(store: DatasetCache, positions: Any) -> set[int]:
    return {int(image[0, 0, 0]) for image in store.images[positions]}


def test_all_images_of_one_source_are_trained_on_and_all_of_the_other_are_held_out(folders_spec: SpecOf) -> None:
    data = folders_spec()
    trained, held_out = parts(data, *prepare_all(data, How()))
    batches = loaded(trained.cache, among=trained.positions, micro_batch_images=4)
    seen = {int(image[0, 0, 0]) for batch in islice(batches, 3) for image in batch.images}
    assert seen == {*range(6), *range(40, 46)} and values(*held_out) == {200, 201, 202, 203}
    assert held_out.cache.labels.tolist() == [0, 0, 1, 1]
    assert trained.cache.path == prepare(data.model_copy(update={"held_out_path": None})).path, "of the same name"


def test_some_of_the_other_source_are_held_out_if_a_number_is_given(folders_spec: SpecOf) -> None:
    for how in ("last", "ranges", "random"):
        data = folders_spec(held_out=how, held_out_images=3)
        trained, held_out = parts(data, *prepare_all(data, How()))
        found = values(*held_out)
        assert len(trained.positions) == 12 and len(found) == 3 and found < {200, 201, 202, 203}
        assert how != "last" or found == {201, 202, 203}, "in the order of the folder: 200, 202, 201, 203"
    caches = prepare_all(data, How())
    assert [len(parts(folders_spec(held_out_images=number), *caches)[1].positions) for number in (4, 0)] == [4, 4]
    with pytest.raises(SpecError, match=r"held_out_images = 5, but data.held_out_path = \S+ has 4 images; .*=0 takes"):
        parts(folders_spec(held_out_images=5), *caches)


def test_without_a_source_of_their_own_held_out_images_are_of_the_one_cache(folders_spec: SpecOf) -> None:
    data = folders_spec(held_out_path=None, held_out_images=4)
    store, other = prepare_all(data, How())
    trained, held_out = parts(data, store, other)
    assert other is store and checksums_of(store, other) == store.meta.sha256
    assert sorted([*trained.positions, *held_out.positions]) == list(range(12)) and len(held_out.positions) == 4


def test_statistics_are_those_of_the_training_images_alone(fields_spec: SpecOf) -> None:
    """Masked values are read as their means too; the file keeps its own."""
    store, other = prepare_all(fields_spec(), How())
    mean = arrays(COUNT, 280.0)["images"][:, :, 1:].astype(np.float32).mean(dtype=np.float64)
    assert store.meta.statistics["images"].mean[0] == pytest.approx(mean, rel=1e-9)
    assert other.meta.statistics == store.meta.statistics
    for each in (store, other):
        np.testing.assert_allclose(each.images[:][:, :, 0], np.float32(mean), rtol=1e-6)
        assert (each.others["condition"][0] == np.float32(store.meta.statistics["condition"].mean[0])).all()
    assert np.array_equal(other.images[:][:, :, 1:], arrays(OTHERS, 300.0)["images"][:, :, 1:].astype(np.float32))
    assert np.array_equal(other.centre((2, 4)).others["mask"][:], other.others["mask"][:][:, :, 1:3, 1:5])
    assert CacheMeta.read(other.path).statistics["images"].mean[0] == pytest.approx(300.0, abs=2.0)


def test_held_out_fields_may_be_the_same_everywhere(fields_spec: SpecOf, tmp_path: Path) -> None:
    """Nothing is divided by their own standard deviation."""
    np.savez(tmp_path / "val.npz", **arrays(2, 300.0, images=np.ones((2, 1, 4, 6)), condition=np.ones((2, 1, 2, 3))))
    assert len(prepare_all(fields_spec(), How())[1]) == 2


def test_a_condition_in_a_file_of_its_own_has_another_for_the_held_out_images(
    fields_spec: SpecOf, tmp_path: Path
) -> None:
    own = {"path": tmp_path / "coarse.npz", "held_out_path": tmp_path / "coarse_val.npz", "variables": ["coarse"]}
    for name, count in (("coarse.npz", COUNT), ("coarse_val.npz", OTHERS)):
        np.savez(tmp_path / name, coarse=np.linspace(count, count + 1.0, count * 6).reshape(count, 1, 2, 3))
    store, other = prepare_all(fields_spec(own), How())
    assert store.others["condition"][:].min() == COUNT and other.others["condition"][:].min() == OTHERS
    (tmp_path / "coarse_val.npz").rename(tmp_path / "gone.npz")
    with pytest.raises(DataError, match=r"^data.condition.held_out_path = \S+coarse_val.npz does not exist"):
        prepare_all(fields_spec(own, store_root=tmp_path / "anew"), How())
    assert not [*(tmp_path / "anew").glob("[!.]*")]


def test_checksums_of_both_are_kept_and_training_and_held_out(folders_spec: SpecOf) -> None:
    store, other = prepare_all(folders_spec(), How())
    assert training_and_held_out(checksums_of(store, other)) == (store.meta.sha256, other.meta.sha256)
    shutil.rmtree(folders_spec().held_out_path or "")
    (path := folders_spec().held_out_path or Path()).mkdir()
    Image.new("RGB", (8, 8)).save(path / "another.png")
    with pytest.raises(DataError, match=r"^data.held_out_path = \S+val has other images than"):
        prepare_all(folders_spec(), How())
    again = prepare_all(folders_spec(), How(), learned=checksums_of(store, other))
    assert [each.path for each in again] == [store.path, other.path], "a checkpoint's images are those of its start"


def test_a_run_keeps_one_checksum_of_a_field_however_many_files_it_has() -> None:
    alone = {"images.npy": "a" * 64, "text/encoders": "b" * 64, "labels.npy": "c" * 64, "bucket/8x8/images.npy": "d"}
    assert by_field(alone) == alone
    more = {shard_name(number, name): f"{name}{number}" for name in ("images", "pixels/images") for number in range(12)}
    kept = by_field(alone | more)
    assert [*kept] == [*alone, "pixels/images.npy"] and by_field(kept) == kept, "a sum of sums is of what it was"
    assert kept == by_field(dict(reversed((alone | more).items())))
    for changed in (shard_name(2), shard_name(11)):
        assert by_field(alone | more | {changed: "0"})["images.npy"] != kept["images.npy"]
    assert by_field(more)["images.npy"] != by_field({**more, shard_name(1): "images2", shard_name(2): "images1"})
    assert pixels_learned(kept) == by_field(pixels_learned(alone | more)), "before or after a name's beginning is cut"


def test_latents_of_both_are_made_by_one_autoencoder(folders_spec: SpecOf, tmp_path: Path) -> None:
    save_autoencoder(tmp_path / "vae")
    data = folders_spec(image_size=4, channels=4, autoencoder=tmp_path / "vae")
    with pytest.raises(DataError, match=r"there are no latents at .*ddpm-ds prepare --encode"):
        prepare_all(data, How())
    store, other = prepare_all(data, How(encode_on=torch.device("cpu")))
    assert (len(store), len(other)) == (12, 4) and other.images.dtype == np.float16
    learned, held_out = training_and_held_out(checksums_of(store, other))
    assert pixels_learned(learned) != pixels_learned(held_out) and "autoencoder" in learned


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": np.ones((5, 1, 4, 8))}, "--set data.image_size=[4,8] if data.path has that too, or name another"),
        ({"images": np.ones((5, 2, 4, 6))}, "--set data.channels=2 if data.path has that too, or name another"),
        ({"images": np.full((5, 1, 4, 6), "a")}, "val.npz"),
        (
            {"condition": np.ones((5, 1, 4, 6))},
            "condition is 1x4x6 float32 (condition.0) for each image, and 1x2x3 float32 (condition.0) in ",
        ),
        ({"condition": np.ones((4, 1, 2, 3))}, " 4; each image needs its own"),
        ({"height": np.zeros((4, 6))}, "has other data.condition.constants than data.path"),
        (arrays(COUNT, 280.0), "has the training images of data.path = "),
    ],
)
def test_a_held_out_source_that_does_not_fit_is_refused_by_its_key(
    changes: dict[str, Any], words: str, fields_spec: SpecOf, tmp_path: Path
) -> None:
    np.savez(tmp_path / "val.npz", **arrays(OTHERS, 300.0) | changes)
    with pytest.raises((DataError, SpecError)) as refused:
        prepare_all(fields_spec({"constants": ["height"], "constant_channels": 1}), How())
    line = str(refused.value)
    assert "\n" not in line and "held_out_path" in line and words in line
    assert all((cache / "meta.json").exists() for cache in (tmp_path / "stores").glob("*") if cache.is_dir())


def test_a_held_out_source_that_is_missing_is_refused_before_anything_is_prepared(
    folders_spec: SpecOf, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "val")
    with pytest.raises(DataError, match=r"^data.held_out_path = \S+val does not exist; .*--set data.held_out_path="):
        prepare_all(folders_spec(), How())
    assert not Recipes(folders_spec()).of().path.exists()


@pytest.mark.parametrize("inner", ["train", "train/val", "."])
def test_a_held_out_folder_in_the_training_folder_is_refused(inner: str, folders_spec: SpecOf, tmp_path: Path) -> None:
    (tmp_path / "train" / "val").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / inner)
    with pytest.raises(DataError, match=r"^data.held_out_path = \S+link and data.path = .* use two separate paths$"):
        prepare_all(folders_spec(path=tmp_path / "train", held_out_path=tmp_path / "link"), How())
    assert not (tmp_path / "stores").exists()
