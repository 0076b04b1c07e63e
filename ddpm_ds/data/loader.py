"""Micro-batches of a store, as a function of images seen: nothing is remembered, so nothing is lost on a resume."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddpm_ds.data.order import Indices, image_at
from ddpm_ds.data.store import Store

READ_BYTES, READ_IMAGES = 2**20, 512
"""Micro-batches that are smaller are read several at a time, up to so much: a read costs a tenth of a millisecond
besides its bytes, and one by another process some milliseconds."""


class MicroBatch(NamedTuple):
    """The images of one micro-batch of one replica."""

    images: Tensor  # (n, C, H, W) uint8
    labels: Tensor  # (n,) int64
    index: Tensor  # type: ignore[assignment]  # (n,) int64, images seen before this one; hides tuple.index


def micro_batches(
    store: Store,
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
    """The endless micro-batches of ``replica`` from the ``start_images``-th image of the run on.

    Replicas take turns, so that a global batch is the same images in every layout. Example: batch of 8 images,
    micro-batches of 2, 2 replicas, M = 2 micro-batches per replica::

        position in batch   0 1   2 3   4 5   6 7
        replica             0     1     0     1
        micro-batch         0     0     1     1

    ``among`` are the positions in the store that are trained on, None for all of it.
    ``workers`` processes read ahead; with 0 a thread of this one does. An error or a death of a worker is raised here.
    ``pin_memory`` puts the images where a CUDA device can fetch them from.
    Raises ValueError when ``batch_images`` is not M x ``replicas`` x ``micro_batch_images``.
    """
    turn = replicas * micro_batch_images
    if batch_images % turn:
        raise ValueError(f"batch_images = {batch_images} is no multiple of {replicas} x {micro_batch_images}")
    if not 0 <= replica < replicas:
        raise ValueError(f"replica = {replica} is not one of {replicas}")
    first = start_images + replica * micro_batch_images
    images = _Reads(store, among, seed, first, turn, micro_batch_images, pin_memory and not workers)
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


class _Read(NamedTuple):
    """Some micro-batches. A tensor travels between processes in milliseconds, whatever its size, so there is one."""

    images: Tensor  # (n, C, H, W) uint8
    labels: Indices  # (n,)
    index: Indices  # type: ignore[assignment]  # (n,)


@dataclass(frozen=True)
class _Reads(Dataset[_Read]):
    """Some micro-batches of one replica at a time, by the number of the read.

    A batch is a whole number of turns, hence where batches end doesn't matter here.
    """

    store: Store
    among: Indices | None
    seed: int
    first: int
    turn: int
    size: int
    pin_memory: bool

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a read."""
        image_bytes = math.prod(self.store.meta.shape)
        return max(1, min(READ_BYTES // image_bytes, READ_IMAGES) // self.size)

    def __getitem__(self, number: int) -> _Read:
        count = self.micro_batches
        turns = self.first + self.turn * np.arange(number * count, (number + 1) * count)
        index = (turns[:, None] + np.arange(self.size)).ravel()  # (count x size,)
        stored = image_at(index, len(self.store if self.among is None else self.among), self.seed)
        stored = stored if self.among is None else self.among[stored]
        images = torch.empty((len(stored), *self.store.meta.shape), dtype=torch.uint8, pin_memory=self.pin_memory)
        # The one copy. In its other modes numpy copies into a buffer first; an order's positions are in range.
        np.take(self.store.images, stored, axis=0, out=images.numpy(), mode="clip")
        return _Read(images, self.store.labels[stored], index)


def _one_ahead(reads: Iterator[_Read]) -> Iterator[_Read]:
    """The same, each by a thread while the one before is used: numpy lets go of the interpreter while it copies."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, reads)
        while True:
            read, coming = coming.result(), thread.submit(next, reads)
            yield read


def _parts(read: _Read, size: int, pin_memory: bool) -> Iterator[MicroBatch]:
    """The micro-batches of a read, as views."""
    labels, index = torch.from_numpy(read.labels), torch.from_numpy(read.index)
    if pin_memory:
        labels, index = labels.pin_memory(), index.pin_memory()
    return map(MicroBatch, read.images.split(size), labels.split(size), index.split(size))


def _as_it_is(read: Any) -> Any:
    return read
