"""Which stored image is seen when: a pure function of (seed, number of images seen before)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def image_at(index: Indices, count: int, seed: int) -> Indices:
    """Positions in a store of ``count`` images of the ``index``-th images of a run, int64 ``(n,)`` to ``(n,)``.

    Every run of ``count`` indices from a multiple of ``count`` (an epoch) sees each image once, in an order of its
    own.
    """
    epochs, places = np.divmod(index, count)
    images = np.empty_like(index)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        images[now] = _permutation(count, seed, int(epoch))[places[now]]
    return images


@lru_cache(maxsize=4)  # a micro-batch rarely touches more than two epochs; a permutation takes 8 bytes per image
def _permutation(count: int, seed: int, epoch: int) -> Indices:
    key = np.array([seed, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(count)
