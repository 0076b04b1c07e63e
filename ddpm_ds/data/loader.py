"""Micro-batches of a store, as a function of images seen: nothing is remembered, so nothing is lost on a resume."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddpm_ds.data.order import Indices, image_at
from ddpm_ds.data.store import Store


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
    ``workers`` processes read ahead; 0 reads in this process. An error or a death of a worker is raised here.
    Raises ValueError when ``batch_images`` is not M x ``replicas`` x ``micro_batch_images``.
    """
    turn = replicas * micro_batch_images
    if batch_images % turn:
        raise ValueError(f"batch_images = {batch_images} is no multiple of {replicas} x {micro_batch_images}")
    if not 0 <= replica < replicas:
        raise ValueError(f"replica = {replica} is not one of {replicas}")
    loader = DataLoader(
        _Images(store, among, seed),
        batch_sampler=_Positions(start_images + replica * micro_batch_images, turn, micro_batch_images),
        collate_fn=_as_it_is,
        num_workers=workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # else the loader draws from torch's global generator
    )
    return iter(loader)


@dataclass(frozen=True)
class _Positions:
    """The positions of one replica's micro-batches in the endless sequence of training images.

    A batch is a whole number of turns, hence where batches end doesn't matter here.
    """

    first: int
    turn: int
    size: int

    def __iter__(self) -> Iterator[list[int]]:
        for first in itertools.count(self.first, self.turn):
            yield list(range(first, first + self.size))


class _Images(Dataset[MicroBatch]):
    """The images of a store by their position in the training sequence; read a micro-batch at a time."""

    def __init__(self, store: Store, among: Indices | None, seed: int) -> None:
        self.store = store
        self.among = among
        self.seed = seed

    def __getitems__(self, positions: list[int]) -> MicroBatch:
        index = np.array(positions, np.int64)
        stored = image_at(index, len(self.store if self.among is None else self.among), self.seed)
        stored = stored if self.among is None else self.among[stored]
        return MicroBatch(
            images=torch.from_numpy(self.store.images[stored]),  # the one copy: (n, C, H, W)
            labels=torch.from_numpy(self.store.labels[stored]),
            index=torch.from_numpy(index),
        )


def _as_it_is(batch: Any) -> Any:
    return batch
