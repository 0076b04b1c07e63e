from __future__ import annotations

import json
import pickle
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from ddpm_ds.data import cache as store_module
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.errors import DataError


@pytest.fixture
def copy(digits: DatasetCache, tmp_path: Path) -> Path:
    """A copy of the digits' store, to be damaged."""
    return Path(shutil.copytree(digits.path, tmp_path / "copy"))


def change_meta(path: Path, **changes: object) -> None:
    file = path / "meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def flip_a_byte(path: Path) -> None:
    content = bytearray((path / "images.npy").read_bytes())
    content[-100] ^= 1
    (path / "images.npy").write_bytes(content)


def drop_a_label(path: Path) -> None:
    np.save(path / "labels.npy", np.load(path / "labels.npy")[:-1])
    sums = {name: sha256((path / name).read_bytes()).hexdigest() for name in ("images.npy", "labels.npy")}
    change_meta(path, sha256=sums)


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


def test_changed_byte_is_found_by_its_checksum(copy: Path) -> None:
    flip_a_byte(copy)
    assert "images.npy has another checksum" in refused(copy)
    DatasetCache.open(copy, verify=False)  # only verifying reads the bytes


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "name, size", [("images.npy", 20000), ("images.npy", 0), ("labels.npy", 200), ("labels.npy", 3)]
)
def test_file_cut_short_is_refused_with_and_without_verifying(copy: Path, name: str, size: int, verify: bool) -> None:
    (copy / name).write_bytes((copy / name).read_bytes()[:size])
    assert name in refused(copy, verify)


def test_number_of_labels_must_be_that_of_images(copy: Path) -> None:
    drop_a_label(copy)
    assert "labels.npy is int64 (1796,) for 1797 images" in refused(copy)


def test_images_must_have_the_shape_that_meta_says(copy: Path) -> None:
    change_meta(copy, shape=[3, 8, 8])
    assert "images.npy is uint8 (1797, 1, 8, 8)" in refused(copy)


def test_foreign_format_is_refused_before_its_other_keys_are_read(copy: Path) -> None:
    change_meta(copy, format=2, something="new")
    assert "its format is 2, this version reads format 1" in refused(copy)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 1}'])
def test_broken_meta_is_refused(copy: Path, content: str) -> None:
    (copy / "meta.json").write_text(content)
    assert "meta.json is not a store's" in refused(copy)


@pytest.mark.parametrize("name", ["images.npy", "labels.npy", "meta.json"])
def test_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert f"{name} can't be read (No such file or directory)" in refused(copy)


def test_missing_store_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no prepared store at .*none; make it with: ddpm-ds prepare"):
        DatasetCache.open(tmp_path / "none")


def test_store_travels_to_another_process_by_its_path(digits: DatasetCache) -> None:
    sent = pickle.dumps(digits)
    received = pickle.loads(sent)
    assert len(sent) < 1000
    assert isinstance(received.images, np.memmap) and (received.images == digits.images).all()


def test_centre_of_a_store_is_a_view_that_travels_and_has_a_key_of_its_own(digits: DatasetCache) -> None:
    for size, first in ((6, 1), (5, 1), (1, 3)):
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


def test_only_a_big_store_shows_a_bar_while_it_is_checked(
    digits: DatasetCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    DatasetCache.open(digits.path, progress=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(store_module, "BAR_BYTES", 1000)
    DatasetCache.open(digits.path)
    assert capsys.readouterr() == ("", "")
    DatasetCache.open(digits.path, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "checking digits-8px-1ch: 100%" in err
