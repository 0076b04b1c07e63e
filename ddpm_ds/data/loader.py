"""Loader: yields micro-batches on the training device as a function of the number of images seen.

It keeps no state, so nothing is lost on a resume. The next micro-batch is copied while the current one is computed
with.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddpm_ds.data.cache import DatasetCache, Indices
from ddpm_ds.errors import SpecError

RUNS = 256
"""Runs of neighbouring images that make a window of ``data.shuffle_images``."""


@dataclass(frozen=True)
class Order:
    """Order in which a run sees ``count`` images: each once an epoch, every epoch in an order of its own.

    Without ``window`` it is a full shuffle. With it, the images are cut into runs of neighbours, each a 256th of
    ``window`` images long; an epoch shuffles the runs, takes 256 of them after the other as a window, and shuffles the
    images within each window. So a disk reads whole runs, and memory holds two windows. Either is a pure function of
    ``seed`` and of the number of images seen.
    """

    count: int
    seed: int
    window: int | None = None

    def image_at(self, index: Indices) -> Indices:
        """Return the positions, 0 to ``count - 1``, of the ``index``-th images of the training run, int64 (n,) to
        (n,).
        """
        epochs, places = np.divmod(index, self.count)
        images = np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            if self.window is None:
                images[now] = _permutation(self.count, self.seed, epoch)[places[now]]
                continue
            starts = _runs(self, epoch)[1][:-1:RUNS]  # of the windows
            windows = starts.searchsorted(places, side="right") - 1
            for window in np.unique(windows[now]).tolist():
                there = now & (windows == window)
                images[there] = _window(self, epoch, window)[places[there] - starts[window]]
        return images

    @property
    def runs(self) -> int:
        """Number of runs of an epoch; the last images in the cache may be a shorter one."""
        return math.ceil(self.count / self.run_images)

    @property
    def run_images(self) -> int:
        """Number of images of a run."""
        return max(1, (self.window or self.count) // RUNS)

    def ahead(self, first: int, last: int, begin: bool) -> Iterator[tuple[int, int]]:
        """Yield the runs, as their first position and the one after their last, that should be read from the disk
        while the ``first``-th image of the training run up to the ``last``-th are used.

        They are as large a part of the next window, and at the ``begin`` of training all of the current one as well.
        """
        if self.window is None:
            return
        for number in range(self._wanted(first)[0] if begin else self._wanted(first)[1], self._wanted(last)[1]):
            epoch, run = divmod(number, self.runs)
            position = int(_runs(self, epoch)[0][run])
            yield position, min(self.count, position + self.run_images)

    def _wanted(self, index: int) -> tuple[int, int]:
        """Return two numbers of runs, counted over all epochs: the first of the window that the ``index``-th image is
        in, and the first that need not be read yet.
        """
        epoch, place = divmod(index, self.count)
        places = _runs(self, epoch)[1]
        run = (int(places.searchsorted(place, side="right")) - 1) // RUNS * RUNS
        end = min(run + RUNS, self.runs)
        following = min(RUNS, self.runs - end) or min(RUNS, self.runs)
        done = (place - places[run]) / (places[end] - places[run])
        return epoch * self.runs + run, epoch * self.runs + end + int(done * following)


@lru_cache(maxsize=4)  # a micro-batch rarely touches more than two epochs; a permutation takes 8 bytes per image
def _permutation(count: int, seed: int, epoch: int, part: int = 0) -> Indices:
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, 0, part], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).permutation(count)


@lru_cache(maxsize=2)
def _runs(order: Order, epoch: int) -> tuple[Indices, Indices]:
    """Return the runs in the order of an epoch: the positions of their first images (runs,), and the places of these
    in the epoch, with its end (runs + 1,).
    """
    begins = _permutation(order.runs, order.seed, epoch) * order.run_images
    sizes = np.minimum(order.count - begins, order.run_images)
    return begins, np.cumsum(np.concatenate(([0], sizes)))


@lru_cache(maxsize=4)
def _window(order: Order, epoch: int, window: int) -> Indices:
    """Return the positions of the images of a window, in their order."""
    begins, places = _runs(order, epoch)
    mine = slice(window * RUNS, (window + 1) * RUNS)
    starts, sizes = begins[mine], np.diff(places)[mine]
    positions = np.repeat(starts - places[:-1][mine], sizes) + np.arange(places[mine][0], places[mine][0] + sizes.sum())
    return positions[_permutation(len(positions), order.seed, epoch, window + 1)]


READ_BYTES, READ_IMAGES = 2**22, 512
"""Bytes and images up to which smaller micro-batches are read together: a read costs a tenth of a millisecond besides
its bytes, and one by another process some milliseconds.
"""


class MicroBatch(NamedTuple):
    """Images of one micro-batch of one replica."""

    images: Tensor  # (n, C, H, W) uint8, float16 for latents
    labels: Tensor  # (n,) int64
    index: Tensor  # type: ignore[assignment]  # (n,) int64, images seen before this one; hides tuple.index


def micro_batches(
    cache: DatasetCache,
    *,
    among: Indices | None = None,
    seed: int,
    window: int | None = None,
    batch_images: int,
    micro_batch_images: int,
    replicas: int,
    replica: int,
    start_images: int = 0,
    workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[MicroBatch]:
    """Yield the endless micro-batches of ``replica`` from the ``start_images``-th image of the run on.

    Replicas take turns, so that a global batch is the same images in every layout. Example: batch of 8 images,
    micro-batches of 2, 2 replicas, M = 2 micro-batches per replica::

        position in batch   0 1   2 3   4 5   6 7
        replica             0     1     0     1
        micro-batch         0     0     1     1

    ``among`` are the positions in the cache that are trained on, rising, None for all of it, and ``window`` is that of
    their :class:`Order`. ``workers`` processes read ahead; with 0 two threads of this one do. An error or the death of
    a worker is raised here. ``pin_memory`` puts the images into pinned memory. Raises ValueError when ``batch_images``
    is not M x ``replicas`` x ``micro_batch_images``.
    """
    turn = replicas * micro_batch_images
    if batch_images % turn:
        raise ValueError(f"batch_images = {batch_images} is no multiple of {replicas} x {micro_batch_images}")
    if not 0 <= replica < replicas:
        raise ValueError(f"replica = {replica} is not one of {replicas}")
    first = start_images + replica * micro_batch_images
    order = Order(len(cache if among is None else among), seed, window)
    images = _Reads(cache, among, order, first, turn, micro_batch_images, pin_memory and not workers)
    if not workers:
        return _ahead(images.__getitem__, 2, micro_batch_images, pin_memory)
    loader = DataLoader(
        images,
        batch_size=None,
        sampler=itertools.count(),
        collate_fn=_as_it_is,
        num_workers=workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # else the loader draws from torch's global generator
    )
    reads = iter(loader)
    return _ahead(lambda _: next(reads), 1, micro_batch_images, pin_memory)


_Read = tuple[Tensor, Indices, Indices]
"""Images, labels and index of some micro-batches. One tensor only: to send one to a process takes milliseconds."""


@dataclass(frozen=True)
class _Reads(Dataset[_Read]):
    """Reads of one replica, by their number; each holds some micro-batches.

    A batch is a whole number of turns, so where batches end doesn't matter here.
    """

    cache: DatasetCache
    among: Indices | None
    order: Order
    first: int
    turn: int
    size: int
    pin_memory: bool

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a read."""
        image_bytes = math.prod(self.cache.meta.shape) * self.cache.meta.dtype.itemsize
        return max(1, min(READ_BYTES // image_bytes, READ_IMAGES) // self.size)

    def __getitem__(self, number: int) -> _Read:
        count = self.micro_batches
        turns = self.first + self.turn * np.arange(number * count, (number + 1) * count)
        index = (turns[:, None] + np.arange(self.size)).ravel()  # (count x size,)
        stored = self.order.image_at(index)
        stored = stored if self.among is None else self.among[stored]
        begins = int(index[0])
        for start, stop in self.order.ahead(begins, begins + self.turn * count, begin=number == 0):
            if self.among is not None:
                start, stop = int(self.among[start]), int(self.among[stop - 1]) + 1
            self.cache.images.will_read(start, stop)
        dtype = torch.from_numpy(np.empty(0, self.cache.meta.dtype)).dtype
        images = torch.empty((len(stored), *self.cache.meta.shape), dtype=dtype, pin_memory=self.pin_memory)
        self.cache.images.read(stored, images.numpy())
        return images, self.cache.labels[stored], index


def _ahead(read: Callable[[int], _Read], threads: int, size: int, pin_memory: bool) -> Iterator[MicroBatch]:
    """Yield the micro-batches of ``size`` images of read 0, read 1 and so on, as views; while one is used, each of
    ``threads`` makes another.
    """

    def parts(number: int) -> list[MicroBatch]:
        images, *others = read(number)
        labels, index = (torch.from_numpy(numbers) for numbers in others)
        if pin_memory:
            labels, index = labels.pin_memory(), index.pin_memory()
        return list(map(MicroBatch, images.split(size), labels.split(size), index.split(size)))

    with ThreadPoolExecutor(threads) as pool:
        coming = deque(pool.submit(parts, number) for number in range(threads))
        for number in itertools.count(threads):
            batches = coming.popleft().result()
            coming.append(pool.submit(parts, number))
            yield from batches


def _as_it_is(read: Any) -> Any:
    return read


def on_device(batches: Iterator[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Yield the same endless micro-batches on ``device``, still uint8.

    On CUDA each is copied on a stream of its own while the one before is computed with; the current stream waits for
    the copy, the host does not::

        copies        1     2     3           4
        current       .  1111111  2222222222  3333333

    That needs ``batches`` in pinned memory. Without CUDA they are passed through.
    """
    return _copied_ahead(batches, device) if device.type == "cuda" else batches


def _copied_ahead(batches: Iterator[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    stream = torch.cuda.Stream(device)

    def copy(batch: MicroBatch) -> tuple[MicroBatch, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            copied = MicroBatch(*(tensor.to(device, non_blocking=True) for tensor in batch))
            return copied, stream.record_event()

    for (batch, copied), _ in itertools.pairwise(map(copy, batches)):  # the next one is on its way
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        for tensor in batch:
            tensor.record_stream(current)  # keeps the memory until the current stream has used it
        yield batch


def split(count: int, held_out: int) -> tuple[Indices, Indices]:
    """Return positions in a cache of ``count`` images, int64 and rising: those to train on, and ``held_out`` others.

    They follow from the two numbers alone, so that runs of any seed are measured on the same images.

    Raises:
        SpecError: nothing would be left to train on.
    """
    if held_out >= count:
        raise SpecError(
            f"data.held_out_images = {held_out:,} leaves nothing of the {count:,} images; --set data.held_out_images="
            f"{count // 10}"
        )
    order = shuffled(count)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def shuffled(count: int) -> Indices:
    """Return the positions 0 to ``count - 1``, int64, in an order that is always the same."""
    return np.random.Generator(np.random.Philox(key=np.uint64(0))).permutation(count)
