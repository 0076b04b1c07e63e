"""Order in which training sees images, as pure functions of their number: of all images, or of buckets of aspect."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ddpm_ds.data.cache import Indices

ROUNDS = 2**32
"""Number of the stream of permutations that orders groups; a seed has others for images."""


@dataclass(frozen=True)
class Order:
    """Order in which training sees ``count`` images, a function of ``seed``: each once per epoch, shuffled anew."""

    count: int
    seed: int

    def image_at(self, index: Indices) -> Indices:
        """Return the positions, 0 to ``count - 1``, of the images of indices ``index``, int64 (n,) to (n,)."""
        epochs, places = np.divmod(index, self.count)
        images = np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            images[now] = permutation(self.count, self.seed, epoch)[places[now]]
        return images


@lru_cache(maxsize=4)  # a micro-batch rarely touches more than two epochs; a permutation takes 8 bytes per image
def permutation(count: int, seed: int, epoch: int, part: int = 0) -> Indices:
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, 0, part], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).permutation(count)


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
    """Return each group's bucket in a round, and how many groups of this bucket come before in it."""
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
