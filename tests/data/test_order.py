from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpm_ds.data.loader import image_at

counts = st.integers(1, 50)
seeds = st.integers(0, 2**31 - 1)


@settings(deadline=None)
@given(count=counts, seed=seeds, epoch=st.integers(0, 2**40))
def test_every_epoch_sees_every_image_once(count: int, seed: int, epoch: int) -> None:
    seen = image_at(epoch * count + np.arange(count), count, seed)
    assert seen.dtype == np.int64
    assert sorted(seen) == list(range(count))


@settings(deadline=None)
@given(count=counts, seed=seeds, index=st.lists(st.integers(0, 500), min_size=1, max_size=40))
def test_image_depends_on_its_index_alone(count: int, seed: int, index: list[int]) -> None:
    together = image_at(np.array(index), count, seed)
    alone = [image_at(np.array([i]), count, seed)[0] for i in index]
    assert together.tolist() == alone


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    epochs = image_at(np.arange(3000), 1000, seed=0).reshape(3, 1000)
    other = image_at(np.arange(1000), 1000, seed=1)
    for one, two in ((epochs[0], epochs[1]), (epochs[1], epochs[2]), (epochs[0], other), (epochs[1], other)):
        assert (one == two).mean() < 0.01


def test_order_is_the_same_on_every_machine_and_version() -> None:
    """A change here means that resumed runs see other images: numpy may change ``Generator.permutation``."""
    assert image_at(np.arange(24), 12, seed=7).tolist() == [
        *(0, 1, 9, 3, 11, 5, 2, 6, 10, 7, 8, 4),
        *(1, 8, 5, 2, 9, 11, 0, 4, 3, 7, 10, 6),
    ]
