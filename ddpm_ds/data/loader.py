"""Order in which training sees images, and the loader of their micro-batches.

Both are functions of the number of images seen, without a state, so a resumed run loses nothing.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpm_ds.data.cache import IMAGES, SOURCE, DatasetCache, Images, Indices, Subset
from ddpm_ds.data.spec import SourceSpec
from ddpm_ds.ground.keyed import Draws

ROUNDS = 2**32
"""Number of the stream of permutations that orders groups; images have stream 0, parts of buckets the streams after."""
MOST_TURNS = 4096
"""Maximum images in a round of a bucket's parts."""
SPACING = 2**16
"""Distance of the seeds of a bucket's parts; there are fewer buckets."""
READ_BYTES, READ_IMAGES = 2**22, 512
"""Maximum bytes and images that are read together: a read has an overhead of a tenth of a millisecond."""


def permutation(count: int, seed: int, epoch: int, part: int = 0) -> npt.NDArray[np.unsignedinteger]:
    """Return 0 to ``count - 1`` in a random order, as numpy's ``permutation`` does, in the smallest type."""
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, 0, part], np.uint64)
    numbers = np.arange(count, dtype=np.min_scalar_type(count))
    np.random.Generator(np.random.Philox(key=key, counter=counter)).shuffle(numbers)
    return numbers


class Shuffled:
    """Endless order of ``count`` images, shuffled anew in each epoch: 4 bytes an image, 8 from an epoch's middle on.

    A thread then shuffles the next epoch, without Python's lock, so that only a run's first read waits.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._lock, self._epochs = Lock(), dict[int, Future[npt.NDArray[np.unsignedinteger]]]()

    def __getitem__(self, places: Indices) -> Indices:
        """Return the images at some places of the order, which rise; int64."""
        epochs, places = np.divmod(places, self._count)
        images = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            images[now] = self._shuffling(epoch).result()[places[now]]
        if 2 * places[-1] >= self._count:
            self._shuffling(int(epochs[-1]) + 1)
        return images

    def _shuffling(self, epoch: int) -> Future[npt.NDArray[np.unsignedinteger]]:
        """Return an epoch's permutation, which is begun if it is new; keep that of the epoch before."""
        with self._lock:
            if epoch not in self._epochs:
                self._epochs = {one: kept for one, kept in self._epochs.items() if one == epoch - 1}
                thread = ThreadPoolExecutor(1)
                self._epochs[epoch] = thread.submit(permutation, self._count, self._seed, epoch)
                thread.shutdown(wait=False)
            return self._epochs[epoch]


class Turns:
    """Members that take turns in rounds: a member has floor(R weight) turns in R rounds, which are shuffled."""

    def __init__(self, weights: Sequence[Fraction], seed: int, part: int) -> None:
        self._denominator = math.lcm(*(weight.denominator for weight in weights))
        self._weights = [int(weight * self._denominator) for weight in weights]
        self._seed, self._part = seed, part
        self._round = lru_cache(maxsize=2)(self._shuffled)

    def __getitem__(self, places: Indices) -> tuple[Indices, Indices]:
        """Return the member of each place, and the number of its earlier turns, int64; places rise."""
        members, earlier = np.empty_like(places), np.empty_like(places)
        number = int(places[0]) * self._denominator // sum(self._weights)
        while sum(self._before(number + 1)) <= places[0]:
            number += 1
        while sum(before := self._before(number)) > places[0]:
            number -= 1
        while True:
            start, after = sum(before), self._before(number + 1)
            now = (places >= start) & (places < sum(after))
            turns, counts = self._round(number)
            members[now] = turns[places[now] - start]
            earlier[now] = np.array(before)[members[now]] + counts[places[now] - start]
            if places[-1] < sum(after):
                return members, earlier
            number, before = number + 1, after

    def _before(self, number: int) -> list[int]:
        """Return each member's turns before a round."""
        return [number * weight // self._denominator for weight in self._weights]

    def _shuffled(self, number: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return each turn's member in a round, and the number of the round's earlier turns of this member."""
        counts = np.subtract(self._before(number + 1), self._before(number))
        turns = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        turns = turns[permutation(len(turns), self._seed, number, self._part)]
        earlier = np.zeros_like(turns)
        for member in range(len(counts)):
            own = turns == member
            earlier[own] = np.arange(own.sum())
        return turns, earlier


Part = tuple[int, Fraction]
"""Number of images that come equally often, and times that each comes while another comes once."""


@dataclass
class Order:
    """Order in which training sees images, a function of ``seed``: each image once per epoch, shuffled anew.

    Each bucket of aspect has an endless order of its own. Buckets take turns in rounds of about as many images as the
    data set: in R rounds a bucket of n images has floor(R n / group) groups. A round's groups are shuffled.

    Images that repeat are a part of their bucket. Each part has an endless order of its own, and parts take turns in
    proportion to images times repeats, in rounds of at most :data:`MOST_TURNS`.
    """

    counts: tuple[int, ...]
    """Images of each bucket, or of the only one. A bucket of fewer than ``group`` repeats some in a group."""
    seed: int
    group: int = 0
    """Consecutive images of training that share a bucket; 0 without buckets."""
    parts: tuple[tuple[Part, ...], ...] = ()
    """Parts of each bucket, in the order of its images; () if all images come equally often."""

    def __post_init__(self) -> None:
        parts = self.parts or tuple(((count, Fraction(1)),) for count in self.counts)
        self._images = [
            [Shuffled(count, self.seed + bucket + number * SPACING) for number, (count, _) in enumerate(each)]
            for bucket, each in enumerate(parts)
        ]
        self._starts = [np.cumsum([0, *(count for count, _ in each)]) for each in parts]
        weights = [[count * repeats for count, repeats in each] for each in parts]
        totals = [sum(each, Fraction()) for each in weights]
        self._turns = [
            Turns([weight / max(Fraction(1), total / MOST_TURNS) for weight in each], self.seed, ROUNDS + 1 + bucket)
            for bucket, (each, total) in enumerate(zip(weights, totals, strict=True))
        ]
        self._buckets = Turns([total / self.group for total in totals], self.seed, ROUNDS) if self.group else None

    def bucket_at(self, index: int) -> int:
        """Return the bucket of an image index."""
        return self._bucket_of(index)[0]

    def _bucket_of(self, index: int) -> tuple[int, int]:
        """Return the bucket of an image index, and the number of its earlier groups."""
        assert self._buckets is not None, "there are buckets"
        (bucket,), (before,) = (found.tolist() for found in self._buckets[np.array([index // self.group])])
        return bucket, before

    def images_at(self, index: Indices) -> tuple[int, Indices]:
        """Return the bucket of the images ``index`` of one group, int64 (n,), and their positions in the bucket."""
        bucket, places = 0, index
        if self._buckets is not None:
            bucket, before = self._bucket_of(int(index[0]))
            places = before * self.group + index % self.group
        images, starts = self._images[bucket], self._starts[bucket]
        if len(images) == 1:
            return bucket, images[0][places]
        members, earlier = self._turns[bucket][places]
        found = np.empty_like(places)
        for number in np.unique(members).tolist():
            own = members == number
            found[own] = starts[number] + images[number][earlier[own]]
        return bucket, found


def repeats_of(cache: DatasetCache, sources: Sequence[SourceSpec]) -> npt.NDArray[np.float64]:
    """Return the repeats of each image of a cache, (N,): the source's or, where it has none, the folder's name's."""
    numbers, named = cache.others[SOURCE][:].T
    asked = np.array([each.repeats or 0.0 for each in sources])[numbers]
    return np.where(asked > 0, asked, np.maximum(named, 1))


def ordered(
    images: Subset, sources: Sequence[SourceSpec], seed: int, group: int = 0
) -> tuple[Order, tuple[Indices, ...]]:
    """Return the order of training images, and the positions of each bucket's images in the bucket's cache."""
    among, parts = list[Indices](), list[tuple[Part, ...]]()
    for bucket, positions in zip(images.cache.caches, images.cache.by_bucket(images.positions), strict=True):
        if SOURCE not in bucket.others:
            among.append(positions)
            parts.append(((len(positions), Fraction(1)),))
            continue
        repeats = repeats_of(bucket, sources)[positions]
        values, which, counts = np.unique(repeats, return_inverse=True, return_counts=True)
        among.append(positions[np.argsort(which, kind="stable")])
        parts.append(tuple(zip(counts.tolist(), map(Fraction, values.tolist()), strict=True)))
    return Order(tuple(map(len, among)), seed, group, tuple(parts)), tuple(among)


class MicroBatch(NamedTuple):
    """Images of one micro-batch of one replica."""

    images: Tensor  # (n, C, H, W) uint8, float16 for latents, float16 or float32 for fields; (n, 0) if not asked for
    labels: Tensor  # (n,) int64
    index: Tensor  # type: ignore[assignment]  # (n,) int64, images seen before this one; hides tuple.index
    condition: Tensor | None = None  # (n, C, h, w), the stored condition, of its own size and dtype
    mask: Tensor | None = None  # (n, 1 or C, H, W) uint8, 1 where a pixel counts in the loss
    vector: Tensor | None = None  # (n, K) float32
    text: Tensor | None = None  # the caption: (n, tokens, channels) float16, or (n, encoders, tokens) int32
    pooled: Tensor | None = None  # (n, channels) float16, the pooled text
    sizes: Tensor | None = None  # (n, 6) float32, sizes of the original image and of its crop
    pairs: Tensor | None = None  # (n,) int64, whose noise each image takes
    weight: Tensor | None = None  # (n,) float32, factor of the loss of the image's source; None if all are 1

    def each(self, work: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return a micro-batch with ``work`` applied to each tensor."""
        others = (None if part is None else work(part) for part in self[3:])
        return MicroBatch(work(self.images), work(self.labels), work(self.index), *others)


@dataclass(frozen=True)
class Share:
    """Share of one replica in the images of a batch: replicas take turns, micro-batch by micro-batch.

    So a batch has the same images in every layout. Example: batch of 8 images, micro-batches of 2, 2 replicas::

        position in batch   0 1   2 3   4 5   6 7
        replica             0     1     0     1
        micro-batch         0     0     1     1
    """

    micro_batch_images: int
    replicas: int = 1
    replica: int = 0

    @property
    def turn(self) -> int:
        """Images of a micro-batch of each replica."""
        return self.replicas * self.micro_batch_images


def micro_batches(
    images: Subset,
    share: Share,
    *,
    fields: Set[str] = frozenset({IMAGES}),
    sources: Sequence[SourceSpec] = (),
    seed: int,
    group: int | None = None,
    start_images: int = 0,
    workers: int = 2,
    pin_memory: bool = False,
    finish: Callable[[MicroBatch], MicroBatch] | None = None,
) -> Iterator[MicroBatch]:
    """Yield the endless micro-batches of a replica, starting at image ``start_images`` of the run.

    Only the named ``fields`` of the cache are read; others are None, or images (n, 0). ``sources`` are the spec's
    folders. With buckets of aspect ``group`` consecutive images share a bucket; it and ``start_images`` are multiples
    of the share's turn. ``workers`` threads read ahead, and ``finish`` micro-batches; their errors are raised here.
    ``pin_memory`` puts the images into pinned memory. Raises KeyError for a field that the cache does not have.
    """
    cache, (order, among) = images.cache, ordered(images, sources, seed, group or 0)
    if missing := sorted(fields - cache.fields.keys()):
        raise KeyError(missing[0])
    weights = np.array([each.loss_weight for each in sources], np.float32)
    weighted = weights if (weights != 1).any() else None
    reads = _Reads(cache, among, order, share, start_images, pin_memory, fields, weighted, finish)
    return _ahead(reads, workers)


class ArrayPool:
    """Pool of freed host arrays, by size, as PyTorch has one of pinned memory.

    The system clears new memory, which takes as long as copying an image into it.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)  # by size in bytes

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Images:
        """Return an array of any content; its memory is free again when the array and all views of it are gone."""
        size = math.prod(shape) * dtype.itemsize
        free = self._free[size]
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(size, np.uint8)  # numpy asks for huge pages, torch does not
        array = np.asarray(memory.data)  # a memoryview, so that a view of a view refers to this array
        weakref.finalize(array, free.append, memory).atexit = False
        return array.view(dtype).reshape(shape)


@dataclass(frozen=True)
class _Reads:
    """Reads of one replica, by number. A read has several micro-batches, which may belong to two batches."""

    cache: DatasetCache
    among: tuple[Indices, ...]
    """Positions of the training images in each bucket of aspect, or in the cache without buckets."""
    order: Order
    share: Share
    start_images: int = 0
    pin_memory: bool = False
    fields: Set[str] = frozenset({IMAGES})
    weights: npt.NDArray[np.float32] | None = None
    """Factor of the loss of each source, (sources,); None if all are 1."""
    finish: Callable[[MicroBatch], MicroBatch] | None = None
    pool: ArrayPool = field(default_factory=ArrayPool)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a read: one of a bucket, since the next may be of another."""
        if self.order.group:
            return 1
        image_bytes = sum(self.cache.fields[name].image_bytes for name in self.fields)
        return max(1, min(READ_BYTES // max(1, image_bytes), READ_IMAGES) // self.share.micro_batch_images)

    def __getitem__(self, number: int) -> list[MicroBatch]:
        count, size = self.micro_batches, self.share.micro_batch_images
        turns = self.share.turn * np.arange(number * count, (number + 1) * count) + self.start_images
        index = (turns[:, None] + self.share.replica * size + np.arange(size)).ravel()  # (count x size,)
        bucket, places = self.order.images_at(index)
        cache, stored = self.cache.caches[bucket], self.among[bucket][places]

        @lru_cache
        def draw(stream: int, words: int) -> Indices:
            return Draws(self.order.seed, torch.from_numpy(index), {stream: words}).bits(stream).numpy()

        numbers = {"labels": torch.from_numpy(cache.labels[stored]), "index": torch.from_numpy(index)}
        if self.weights is not None:
            numbers["weight"] = torch.from_numpy(self.weights[cache.others[SOURCE].read(stored)[:, 0]])
        if self.pin_memory:
            numbers = {name: tensor.pin_memory() for name, tensor in numbers.items()}
        tensors = {IMAGES: torch.empty(len(index), 0), **numbers}
        for name, values in cache.fields.items():
            if name not in self.fields:
                continue
            shape = (len(stored), *values.shape[1:])
            if self.pin_memory:
                dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
                tensors[name] = torch.empty(shape, dtype=dtype, pin_memory=True)
            else:
                tensors[name] = torch.from_numpy(self.pool.array(shape, values.dtype))
            values.read(stored, tensors[name].numpy(), draw)
        rows = zip(*(tensor.split(size) for tensor in tensors.values()), strict=True)
        batches = [MicroBatch(**dict(zip(tensors, row, strict=True))) for row in rows]
        return batches if self.finish is None else [*map(self.finish, batches)]


def _ahead(reads: _Reads, threads: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of read 0, 1, ... as views, while ``threads`` read ahead."""
    with ThreadPoolExecutor(threads) as pool:
        coming = deque(pool.submit(reads.__getitem__, number) for number in range(threads))
        for number in itertools.count(threads):
            batches = coming.popleft().result()
            coming.append(pool.submit(reads.__getitem__, number))
            yield from batches


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """Return the process's stream for copies: each roll-back makes a new loader, and PyTorch has 32 streams in all."""
    return torch.cuda.Stream(device)


def on_device(batches: Iterator[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Yield the same endless micro-batches on ``device``, still uint8.

    On CUDA each is copied from pinned memory on a separate stream while training uses the one before. The current
    stream waits for the copy, the host does not::

        copies        1     2     3           4
        current       .  1111111  2222222222  3333333
    """
    if device.type != "cuda":
        yield from batches
        return
    stream = _copying(device)

    def copy(batch: MicroBatch) -> tuple[MicroBatch, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            copied = batch.each(lambda tensor: tensor.to(device, non_blocking=True))
            return copied, stream.record_event()

    for (batch, copied), _ in itertools.pairwise(map(copy, batches)):  # the next one is on its way
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        for tensor in (part for part in batch if part is not None):
            tensor.record_stream(current)  # keeps the memory until the current stream has used it
        yield batch
