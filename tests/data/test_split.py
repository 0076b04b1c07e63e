"""The held-out images: the same for every run, and none of them trained on."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.loader import micro_batches, split
from ddpm_ds.errors import SpecError


def test_the_two_parts_are_the_whole_and_have_nothing_in_common() -> None:
    trained, held_out = split(1797, 197)
    assert len(trained) == 1600 and len(held_out) == 197
    assert sorted([*trained, *held_out]) == list(range(1797))
    assert np.array_equal(split(1797, 197)[1], held_out)
    assert held_out.max() > 1600  # not simply the first ones


def test_nothing_is_held_out_unless_asked_for() -> None:
    trained, held_out = split(10, 0)
    assert list(trained) == list(range(10)) and len(held_out) == 0


def test_holding_out_everything_is_refused_with_a_number_that_would_do() -> None:
    with pytest.raises(SpecError, match=r"data\.held_out_images = 50 leaves nothing of the 50 images.*=5"):
        split(50, 50)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_held_out_image_is_never_loaded_and_every_other_one_is_once_an_epoch(workers: int, tmp_path: Path) -> None:
    images = np.arange(20, dtype=np.uint8)[:, None, None, None] + np.zeros((1, 1, 2, 2), np.uint8)
    store = cast(DatasetCache, FakeStore(images=images, labels=np.arange(20), meta=SimpleNamespace(shape=(1, 2, 2))))
    among, held_out = split(20, 4)
    batches = micro_batches(
        store, among=among, seed=1, batch_images=4, micro_batch_images=4, replicas=1, replica=0, workers=workers
    )
    for _ in range(2):
        epoch = [int(label) for batch in itertools.islice(batches, 4) for label in batch.labels]
        assert sorted(epoch) == list(among) and not set(epoch) & set(held_out)


class FakeStore(SimpleNamespace):
    """Twenty images, each of its own number."""

    def __len__(self) -> int:
        return len(self.images)
