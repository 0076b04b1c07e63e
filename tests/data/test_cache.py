from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.errors import DataError


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


def test_store_holds_the_digits(digits: DatasetCache) -> None:
    assert (digits.images.shape, digits.images.dtype) == ((1797, 1, 8, 8), np.uint8)
    assert isinstance(digits.images, np.memmap) and not digits.images.flags.writeable
    assert (digits.labels.shape, digits.labels.dtype, len(digits)) == ((1797,), np.int64, 1797)
    assert np.bincount(digits.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (digits.meta.source, digits.meta.skipped, digits.meta.classes) == ("digits", 0, tuple("0123456789"))


def test_a_changed_byte_is_found_by_its_checksum_and_arrays_must_fit_the_meta_data(copy: Path) -> None:
    content = bytearray((copy / "images.npy").read_bytes())
    content[-100] ^= 1
    (copy / "images.npy").write_bytes(content)
    assert "images.npy has another checksum" in refused(copy)
    DatasetCache.open(copy, verify=False)  # only verifying reads the bytes
    np.save(copy / "labels.npy", np.load(copy / "labels.npy")[:-1])
    assert "labels.npy is int64 (1796,) for 1797 images" in refused(copy, verify=False)
    change_meta(copy, shape=[3, 8, 8])
    assert "images.npy is uint8 (1797, 1, 8, 8)" in refused(copy, verify=False)
    change_meta(copy, format=2)
    assert "meta.json is not that of a data-set cache of format 1" in refused(copy)
    (copy / "meta.json").write_text("{")
    assert "meta.json is not that of a data-set cache" in refused(copy)


def test_a_missing_file_is_named_and_a_missing_cache_says_how_to_make_it(copy: Path) -> None:
    for name in ("labels.npy", "images.npy", "meta.json"):
        (copy / name).unlink()
        assert f"{name} can't be read (No such file or directory)" in refused(copy)
    with pytest.raises(DataError, match=r"no data-set cache at .*none; make it with: ddpm-ds prepare"):
        DatasetCache.open(copy / "none")


@pytest.mark.parametrize("name, size", [("images.npy", 20000), ("images.npy", 0), ("labels.npy", 200)])
def test_file_cut_short_is_refused_with_and_without_verifying(copy: Path, name: str, size: int) -> None:
    (copy / name).write_bytes((copy / name).read_bytes()[:size])
    for verify in (True, False):
        assert name in refused(copy, verify)


def test_a_cache_travels_by_its_path_and_its_centre_is_a_view_with_a_key_of_its_own(digits: DatasetCache) -> None:
    sent = pickle.dumps(digits)
    received = pickle.loads(sent)
    assert len(sent) < 1000 and isinstance(received.images, np.memmap) and (received.images == digits.images).all()
    for size, first in ((6, 1), (5, 1)):
        centre = digits.centre(size)
        assert centre.meta.shape == (1, size, size) and len(centre) == len(digits)
        assert np.shares_memory(centre.images, digits.images)
        expected = digits.images[:, :, first : first + size, first : first + size]
        assert (centre.images == expected).all()
        received = pickle.loads(pickle.dumps(centre))
        assert (received.images == expected).all() and received.meta == centre.meta
        assert received.key == centre.key
    assert digits.centre(8) is digits and digits.key == digits.meta.sha256["images.npy"]
    assert len({digits.key, digits.centre(6).key, digits.centre(5).key}) == 3
