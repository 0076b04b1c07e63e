"""Order in which training sees images, as pure functions of their number: of all images, or of buckets of aspect."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ddpm_ds.data.cache import Indices

RUNS = 256
"""Number of runs of neighbouring images in a window of ``data.shuffle_images``."""
ROUNDS = 2**32
"""Number among the permutations of a seed, beyond those of windows, of the permutations of groups."""


@dataclass(frozen=True)
class Order:
    """Order in which training sees ``count`` images: each once per epoch, every epoch in a different order.

    Without ``window`` it is a full shuffle. With it, the images are divided into runs of ``window`` / 256 neighbours;
    an epoch shuffles the runs, takes 256 runs at a time as a window, and shuffles the images within each window. So
    disks read whole runs, and memory holds two windows. Both orders are pure functions of ``seed`` and the number of
    images seen.
    """

    count: int
    seed: int
    window: int | None = None

    def image_at(self, index: Indices) -> Indices:
        """Return the positions, 0 to ``count - 1``, of the images of indices ``index``, int64 (n,) to (n,)."""
        epochs, places = np.divmod(index, self.count)
        images = np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            if self.window is None:
                images[now] = permutation(self.count, self.seed, epoch)[places[now]]
                continue
            starts = _runs(self, epoch)[1][:-1:RUNS]  # places in the epoch where windows begin
            windows = starts.searchsorted(places, side="right") - 1
            for window in np.unique(windows[now]).tolist():
                there = now & (windows == window)
                images[there] = _window(self, epoch, window)[places[there] - starts[window]]
        return images

    @property
    def runs(self) -> int:
        """Number of runs in an epoch; the last in the cache may be shorter."""
        return math.ceil(self.count / self.run_images)

    @property
    def run_images(self) -> int:
        """Number of images in a run."""
        return max(1, (self.window or self.count) // RUNS)

    def ahead(self, first: int, last: int, begin: bool) -> Iterator[tuple[int, int]]:
        """Yield the runs, as (first position, last position + 1), to read from disk while training uses its images
        ``first`` to ``last``.

        They are an equal part of the next window and, at the ``begin`` of training, all of the current window.
        """
        if self.window is None:
            return
        for number in range(self._wanted(first)[0] if begin else self._wanted(first)[1], self._wanted(last)[1]):
            epoch, run = divmod(number, self.runs)
            position = int(_runs(self, epoch)[0][run])
            yield position, min(self.count, position + self.run_images)

    def _wanted(self, index: int) -> tuple[int, int]:
        """Return two run numbers, counted over all epochs: the first run in the window of the ``index``-th image, and
        the first run that need not be read yet.
        """
        epoch, place = divmod(index, self.count)
        places = _runs(self, epoch)[1]
        run = (int(places.searchsorted(place, side="right")) - 1) // RUNS * RUNS
        end = min(run + RUNS, self.runs)
        following = min(RUNS, self.runs - end) or min(RUNS, self.runs)
        done = (place - places[run]) / (places[end] - places[run])
        return epoch * self.runs + run, epoch * self.runs + end + int(done * following)


@lru_cache(maxsize=4)  # a micro-batch rarely touches more than two epochs; a permutation takes 8 bytes per image
def permutation(count: int, seed: int, epoch: int, part: int = 0) -> Indices:
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, 0, part], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).permutation(count)


@lru_cache(maxsize=2)
def _runs(order: Order, epoch: int) -> tuple[Indices, Indices]:
    """Return the runs in the order of an epoch: positions of their first images in the cache (runs,), and places of
    these images in the epoch, followed by its end (runs + 1,).
    """
    begins = permutation(order.runs, order.seed, epoch) * order.run_images
    sizes = np.minimum(order.count - begins, order.run_images)
    return begins, np.cumsum(np.concatenate(([0], sizes)))


@lru_cache(maxsize=4)
def _window(order: Order, epoch: int, window: int) -> Indices:
    """Return the positions of the images in a window, in order."""
    begins, places = _runs(order, epoch)
    mine = slice(window * RUNS, (window + 1) * RUNS)
    starts, sizes = begins[mine], np.diff(places)[mine]
    positions = np.repeat(starts - places[:-1][mine], sizes) + np.arange(places[mine][0], places[mine][0] + sizes.sum())
    return positions[permutation(len(positions), order.seed, epoch, window + 1)]


@dataclass(frozen=True)
class BucketOrder:
    """Order in which training sees the images of buckets.

    Each bucket has an endless :class:`Order` of its own, in which each of its images comes once per
    epoch. Buckets take turns in rounds: after R rounds, which have about as many images as the data set, a bucket of n
    images has had floor(R n / group) groups, in a shuffled order.
    """

    counts: tuple[int, ...]
    """Images of each bucket; of one with fewer than ``group`` some come again in a group."""
    seed: int
    group: int
    """Consecutive images of training that share a bucket."""

    def bucket_at(self, index: int) -> int:
        """Return the bucket of an image index."""
        return self._turn(index // self.group)[0]

    def images_at(self, index: Indices) -> tuple[int, Indices]:
        """Return the bucket of some images of one group, int64 (n,), and their positions in it, int64 (n,)."""
        bucket, before = self._turn(int(index[0]) // self.group)
        places = before * self.group + index % self.group
        return bucket, Order(self.counts[bucket], self.seed + bucket).image_at(places)

    def _turn(self, group: int) -> tuple[int, int]:
        """Return the bucket of a group, and how many groups of this bucket come before."""
        number = group * self.group // sum(self.counts)
        while self._before(number + 1) <= group:
            number += 1
        while self._before(number) > group:
            number -= 1
        turns, earlier = _round(self, number)
        place = group - self._before(number)
        bucket = int(turns[place])
        return bucket, number * self.counts[bucket] // self.group + int(earlier[place])

    def _before(self, number: int) -> int:
        """Return the number of groups before a round."""
        return sum(number * count // self.group for count in self.counts)


@lru_cache(maxsize=4)
def _round(order: BucketOrder, number: int) -> tuple[Indices, Indices]:
    """Return the bucket of each group of a round, and how many groups of it come before in the round."""
    turns = np.concatenate(
        [
            np.full((number + 1) * count // order.group - number * count // order.group, bucket)
            for bucket, count in enumerate(order.counts)
        ]
    )
    turns = turns[permutation(len(turns), order.seed, number, ROUNDS)]
    earlier = np.zeros_like(turns)
    for bucket in range(len(order.counts)):
        own = turns == bucket
        earlier[own] = np.arange(own.sum())
    return turns, earlier
