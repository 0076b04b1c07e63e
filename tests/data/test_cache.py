import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from ddpm_ds.data import cache, prepare, writing
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError


@pytest.fixture
def copy(digits: DatasetCache, tmp_path: Path) -> Path:
    """A copy of the digits' store, to be damaged."""
    return Path(shutil.copytree(digits.path, tmp_path / "copy"))


def change_meta(path: Path, **changes: object) -> None:
    file = path / "meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(path: Path, verify: bool = True) -> str:
    with pytest.raises(DataError) as caught:
        DatasetCache.open(path, verify=verify)
    message = str(caught.value)
    assert f"delete {path} and prepare again" in message and "\n" not in message
    return message


def test_the_digits_equal_scikit_learns(digits: DatasetCache) -> None:
    expected = load_digits()
    assert np.array_equal(digits.images[:][:, 0], np.rint(expected.images * 255 / 16))
    assert np.array_equal(digits.labels, expected.target) and digits.labels.dtype == np.int64 and len(digits) == 1797
    assert (digits.meta.source, digits.meta.skipped, digits.meta.classes) == ("digits", 0, tuple("0123456789"))


@pytest.mark.parametrize(
    ("labels", "meta", "line"),
    [
        (np.zeros(1796, np.int64), {}, "labels.npy is int64 (1796,) for 1797 images"),
        (np.full(1797, 11), {}, "labels.npy has labels of none of the 10 classes"),
        (None, {"shards": [1796]}, "meta.json has shards of 1,796 images and 1,797 in all"),
        (None, {"shape": [3, 8, 8]}, "images.npy is uint8 (1797, 1, 8, 8)"),
        (None, {"kind": "latents"}, "images.npy is uint8 (1797, 1, 8, 8), meta.json says otherwise"),
        (None, {"format": 2}, "meta.json does not describe a data-set cache of format 1"),
        (None, {"sha256": {}}, "meta.json has no checksum of images.npy"),
    ],
)
def test_arrays_must_fit_the_meta_data(
    labels: np.ndarray[Any, Any] | None, meta: dict[str, Any], line: str, copy: Path
) -> None:
    change_meta(copy, **meta)
    if labels is not None:
        np.save(copy / "labels.npy", labels)
    assert line in refused(copy, verify=False)


@pytest.mark.parametrize("shape", [[10**30] * 3, [3, 2**16, 2**16], [0, 8, 8], [8, 8]])
def test_a_forged_shape_is_one_line_before_it_allocates(shape: list[int], copy: Path) -> None:
    change_meta(copy, shape=shape)
    assert refused(copy).startswith(("data-set cache is unusable: meta.json", "data-set cache is unusable: images.npy"))


def test_a_cache_may_have_a_class_for_each_of_very_many_folders(copy: Path) -> None:
    change_meta(copy, classes=[f"{number:040}" for number in range(400_000)])
    assert (copy / "meta.json").stat().st_size > 2**24
    assert len(DatasetCache.open(copy).meta.classes) == 400_000


def test_a_missing_file_is_named_and_a_missing_cache_says_how_to_make_it(copy: Path) -> None:
    for name in ("labels.npy", "images.npy"):
        (copy / name).unlink()
        assert f"{name} can't be read (No such file or directory)" in refused(copy)
    (copy / "meta.json").unlink()  # it may be a folder of pictures, which no message says to delete
    with pytest.raises(DataError, match=r"copy has no meta.json, so it is .* name another, or move this folder away"):
        DatasetCache.open(copy)
    with pytest.raises(DataError, match=r"no data-set cache at .*none; make it with: ddpm-ds prepare"):
        DatasetCache.open(copy / "none")


@pytest.mark.parametrize("name, size", [("images.npy", 20000), ("images.npy", 0), ("labels.npy", 200)])
def test_file_cut_short_is_refused_with_and_without_verifying(copy: Path, name: str, size: int) -> None:
    (copy / name).write_bytes((copy / name).read_bytes()[:size])
    for verify in (True, False):
        assert name in refused(copy, verify)


def test_the_centre_of_a_cache_has_a_key_of_its_own(digits: DatasetCache) -> None:
    for size, top, left in (((6, 6), 1, 1), ((5, 5), 1, 1), ((6, 4), 1, 2), ((8, 6), 0, 1)):
        centre = digits.centre(size)
        assert centre.meta.shape == (1, *size) and len(centre) == len(digits)
        expected = digits.images[:][:, :, top : top + size[0], left : left + size[1]]
        assert centre.images.shape == expected.shape and (centre.images[:] == expected).all()
    assert digits.centre((8, 8)) is digits and digits.key == digits.meta.sha256["images.npy"]
    keys = {digits.key, *(digits.centre(size).key for size in ((6, 6), (5, 5), (6, 5), (5, 6)))}
    assert len(keys) == 5


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, DatasetCache]:
    """Twenty photos in one file of pixels, and in several."""
    random = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(20):
        pixels = random.integers(0, 256, (9 + number, 12, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number:02}.{('png', 'jpg')[number % 2]}")

    def made(root: str) -> DatasetCache:
        given = {"source": "folder", "path": tmp_path / "photos", "image_size": 8, "channels": 3}
        return prepare.prepare(DataSpec.model_validate(given | {"store_root": tmp_path / root}))

    one = made("one")
    monkeypatch.setattr(writing, "SHARD_BYTES", 1300)
    return {"one": one, "several": made("several")}


def test_images_in_several_files_are_those_in_one(photos: dict[str, DatasetCache]) -> None:
    one, several = photos["one"], photos["several"]
    assert len(several.meta.counts) > 3 and sum(several.meta.counts) == 20
    assert several.images.shape == one.images.shape and (several.labels == one.labels).all()
    assert (several.images[:] == one.images[:]).all()
    order = np.random.default_rng(1).permutation(20)
    out = np.empty((20, 3, 8, 8), np.uint8)
    assert several.images.read(order, out) is out and (out == one.images[:][order]).all()
    assert (several.images[7] == one.images[7]).all() and (several.images[3:9] == one.images[3:9]).all()
    assert (several.centre((4, 6)).images[order] == one.centre((4, 6)).images[order]).all()
    assert several.key != one.key


def test_no_more_files_are_open_than_a_limit(photos: dict[str, DatasetCache], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_OPEN", 2)
    several, expected = DatasetCache.open(photos["several"].path), photos["one"].images[:]
    before = len(os.listdir("/proc/self/fd"))
    assert (several.images[:] == expected).all()
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * 2


def test_threads_may_read_at_once_whichever_files_are_closed_meanwhile(
    photos: dict[str, DatasetCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that one thread has just opened must not be closed by what another thread opens."""
    monkeypatch.setattr(cache, "MOST_OPEN", 2)
    several, expected = DatasetCache.open(photos["several"].path), photos["one"].images[:]
    begun = [DatasetCache.open(photos["one"].path) for _ in range(100)]  # each opens its only file in several threads
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all((found == expected).all() for found in threads.map(lambda _: several.images[:], range(100)))
            for one in begun:
                found = threads.map(one.images.__getitem__, [slice(None)] * 4)
                assert all((images == expected).all() for images in found)
    finally:
        sys.setswitchinterval(before)


def test_damage_to_one_of_several_files_is_named(photos: dict[str, DatasetCache]) -> None:
    several = photos["several"]
    name = several.meta.files[2]
    content = (several.path / name).read_bytes()
    (several.path / name).write_bytes(content[:-20] + bytes(20))
    assert f"{name} has another checksum" in refused(several.path)
    os.truncate(several.path / name, len(content) - 1)
    with pytest.raises(DataError, match=rf"{name} was cut from {len(content):,} to {len(content) - 1:,} bytes"):
        several.images[:]
    assert name in refused(several.path, verify=False)
