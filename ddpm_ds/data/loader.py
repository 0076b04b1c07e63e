"""Loader: yields micro-batches on the training device as a function of the number of images seen.

It keeps no state, so nothing is lost on a resume. The next micro-batch is copied while the current one is computed
with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.errors import SpecError

Indices = npt.NDArray[np.int64]


def image_at(index: Indices, count: int, seed: int) -> Indices:
    """Return the positions in a cache of ``count`` images of the ``index``-th images of a run, int64 ``(n,)`` to
    ``(n,)``.

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


READ_BYTES, READ_IMAGES = 2**20, 512
"""Bytes and images up to which smaller micro-batches are read together: a read costs a tenth of a millisecond besides
its bytes, and one by another process some milliseconds.
"""


class MicroBatch(NamedTuple):
    """Images of one micro-batch of one replica."""

    images: Tensor  # (n, C, H, W) uint8
    labels: Tensor  # (n,) int64
    index: Tensor  # type: ignore[assignment]  # (n,) int64, images seen before this one; hides tuple.index


def micro_batches(
    cache: DatasetCache,
    *,
    among: Indices | None = None,
    seed: int,
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

    ``among`` are the positions in the cache that are trained on, None for all of it. ``workers`` processes read ahead;
    with 0 a thread of this one does. An error or the death of a worker is raised here. ``pin_memory`` puts the images
    into pinned memory. Raises ValueError when ``batch_images`` is not M x ``replicas`` x ``micro_batch_images``.
    """
    turn = replicas * micro_batch_images
    if batch_images % turn:
        raise ValueError(f"batch_images = {batch_images} is no multiple of {replicas} x {micro_batch_images}")
    if not 0 <= replica < replicas:
        raise ValueError(f"replica = {replica} is not one of {replicas}")
    first = start_images + replica * micro_batch_images
    images = _Reads(cache, among, seed, first, turn, micro_batch_images, pin_memory and not workers)
    if not workers:
        reads = _one_ahead(map(images.__getitem__, itertools.count()))
    else:
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
    return (micro_batch for read in reads for micro_batch in _parts(read, micro_batch_images, pin_memory))


_Read = tuple[Tensor, Indices, Indices]
"""Images, labels and index of some micro-batches. One tensor only: to send one to a process takes milliseconds."""


@dataclass(frozen=True)
class _Reads(Dataset[_Read]):
    """Reads of one replica, by their number; each holds some micro-batches.

    A batch is a whole number of turns, so where batches end doesn't matter here.
    """

    cache: DatasetCache
    among: Indices | None
    seed: int
    first: int
    turn: int
    size: int
    pin_memory: bool

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a read."""
        image_bytes = math.prod(self.cache.meta.shape)
        return max(1, min(READ_BYTES // image_bytes, READ_IMAGES) // self.size)

    def __getitem__(self, number: int) -> _Read:
        count = self.micro_batches
        turns = self.first + self.turn * np.arange(number * count, (number + 1) * count)
        index = (turns[:, None] + np.arange(self.size)).ravel()  # (count x size,)
        stored = image_at(index, len(self.cache if self.among is None else self.among), self.seed)
        stored = stored if self.among is None else self.among[stored]
        dtype = torch.uint8 if self.cache.images.dtype == np.uint8 else torch.float16
        images = torch.empty((len(stored), *self.cache.meta.shape), dtype=dtype, pin_memory=self.pin_memory)
        self.cache.check_file()
        # The one copy. In its other modes numpy copies into a buffer first; an order's positions are in range.
        np.take(self.cache.images, stored, axis=0, out=images.numpy(), mode="clip")
        return images, self.cache.labels[stored], index


def _one_ahead(reads: Iterator[_Read]) -> Iterator[_Read]:
    """Yield the same reads, each made by a thread while the one before is used."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, reads)
        while True:
            read, coming = coming.result(), thread.submit(next, reads)
            yield read


def _parts(read: _Read, size: int, pin_memory: bool) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a read, as views."""
    images, labels, index = read[0], torch.from_numpy(read[1]), torch.from_numpy(read[2])
    if pin_memory:
        labels, index = labels.pin_memory(), index.pin_memory()
    return map(MicroBatch, images.split(size), labels.split(size), index.split(size))


def _as_it_is(read: Any) -> Any:
    return read


def on_device(batches: Iterator[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Yield the same micro-batches on ``device``, still uint8.

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

    for arrived, _ in itertools.pairwise(itertools.chain(map(copy, batches), [None])):  # the next one is on its way
        assert arrived is not None
        batch, copied = arrived
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
