"""Whether a data-set cache fits the memory that there is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpm_ds.data import residence
from ddpm_ds.data.prepare import prepare
from ddpm_ds.data.residence import Residence
from tests.launching import tiny_spec


def test_a_cache_is_in_memory_where_memory_holds_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = prepare(tiny_spec(data={"store_root": str(tmp_path)}).data)
    file = (store.path / "images.npy").stat().st_size
    for memory, fits in ((2 * file, True), (file, False)):
        monkeypatch.setattr(residence, "host_memory", lambda memory=memory: memory)
        found = Residence.of(store)
        assert found == Residence("pixels", 1797, file, 1797 * 64, memory, len(os.sched_getaffinity(0)))
        assert found.in_memory == fits


def test_memory_holds_two_windows_and_more() -> None:
    cache = Residence("pixels", 10**6, 12_288 * 10**6, 12_288 * 10**6, 2**32, 2)
    assert not cache.in_memory
    assert cache.notice(1024) is None
    assert cache.notice(None) == (
        "data.shuffle_images: the 11.44 GiB of images are more than memory holds, and a full shuffle reads each from "
        "another place on the disk; use 32768"
    )
    assert cache.window == 32_768 and 2 * cache.window * 12_288 < 2**32 / 4 <= 4 * cache.window * 12_288
