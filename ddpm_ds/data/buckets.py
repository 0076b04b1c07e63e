"""Buckets of aspect: which sizes there are, which image is in which, and in what order training takes them.

Images of a bucket are brought to its size, which crops them little. Training takes ``group`` consecutive images from
one bucket, so that a micro-batch has one size on all replicas::

    images          0 ... 31   32 ... 63   64 ... 95   96 ... 127
    bucket          832x1216   1024x1024   1024x1024   1152x896

Both are pure functions: each stage knows the size of each micro-batch before it arrives, and a resumed run goes on with
the image after the last.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ddpm_ds.data.cache import Indices
from ddpm_ds.data.loader import Order, permutation

AREAS = 0.06
"""Largest difference of a bucket's pixels from the pixels that were asked for, as a share: one order of passes serves
all buckets."""


def bucket_sizes(size: tuple[int, int], step: int, widest: float) -> tuple[tuple[int, int], ...]:
    """Return the buckets (height, width) around the pixels of a ``size``, from the tallest to the widest.

    Sides are multiples of ``step`` pixels, their ratio is at most ``widest``, and for each height there is the width
    that comes nearest to the pixels, within :data:`AREAS`.
    """
    pixels = math.prod(size)
    found = []
    for height in range(step, int(math.sqrt(pixels * widest) * (1.0 + AREAS)) + step, step):
        width = max(1, round(pixels / height / step)) * step
        fits = abs(height * width - pixels) <= AREAS * pixels
        if fits and max(height, width) <= widest * min(height, width):
            found.append((height, width))
    return tuple(reversed(found))


def bucket_of(image: tuple[int, int], sizes: tuple[tuple[int, int], ...]) -> int:
    """Return the number of the bucket that crops an ``image`` (height, width) least; of equal ones the first."""
    return min(range(len(sizes)), key=lambda number: cropped(image, sizes[number]))


def cropped(image: tuple[int, int], size: tuple[int, int]) -> float:
    """Return the share of an image (height, width) that is lost when it is scaled to cover a ``size`` and cropped."""
    ratio = image[0] * size[1] / (image[1] * size[0])
    return 1.0 - min(ratio, 1.0 / ratio)


@dataclass(frozen=True)
class BucketOrder:
    """Order in which training sees the images of buckets.

    Each bucket has an endless :class:`ddpm_ds.data.loader.Order` of its own, in which each of its images comes once per
    epoch. Buckets take turns in rounds: after R rounds, which have about as many images as the data set, a bucket of n
    images has had floor(R n / group) groups, in a shuffled order.
    """

    counts: tuple[int, ...]
    """Images of each bucket, at least ``group``."""
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


ROUNDS = 2**32
"""Number among the permutations of a seed, beyond those of windows, of the permutations of groups."""
