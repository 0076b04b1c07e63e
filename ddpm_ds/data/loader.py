"""Loader of micro-batches onto the training device, as a function of the number of images seen.

It keeps no state, so a resumed run loses nothing. The next micro-batch is copied while the current one is used.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import multiprocessing.queues
import os
import re
import shutil
import signal
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddpm_ds.data.cache import IMAGES, DatasetCache, Images, Indices
from ddpm_ds.data.order import BucketOrder, Order
from ddpm_ds.ground.errors import HostError, SpecError
from ddpm_ds.ground.keyed import Draws, Stream
from ddpm_ds.ground.units import gib
from ddpm_ds.schema.types import HeldOut

MOST_RANGES = 10
"""Maximum ranges of neighbouring images that are held out; only the ends of a range resemble images to train on."""
SHARED_MEMORY = "/dev/shm"
"""Folder in memory through which worker processes hand over reads."""
UNSENT = os.EX_IOERR
"""Exit code of a worker process that could not hand over a read."""
READ_BYTES, READ_IMAGES = 2**22, 512
"""Maximum bytes and images of micro-batches that are read together: a read has an overhead of a tenth of a millisecond,
or of some milliseconds in another process."""


class MicroBatch(NamedTuple):
    """Images of one micro-batch of one replica."""

    images: Tensor  # (n, C, H, W) uint8, float16 for latents, float16 or float32 for fields; (n, 0) if not asked for
    labels: Tensor  # (n,) int64
    index: Tensor  # type: ignore[assignment]  # (n,) int64, images seen before this one; hides tuple.index
    condition: Tensor | None = None  # (n, C, h, w), the stored condition, of its own size and dtype
    mask: Tensor | None = None  # (n, 1 or C, H, W) uint8, 1 where a pixel counts in the loss
    vector: Tensor | None = None  # (n, K) float32
    text: Tensor | None = None  # the caption: (n, tokens, channels) float16 or int8, or (n, encoders, tokens) int32
    text_scale: Tensor | None = None  # (n, tokens) float32, factor of the tokens in int8
    pooled: Tensor | None = None  # (n, channels) float16, the pooled text
    sizes: Tensor | None = None  # (n, 6) float32, sizes of the original image and of its crop

    def each(self, work: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return a micro-batch with ``work`` applied to each tensor."""
        others = (None if part is None else work(part) for part in self[3:])
        return MicroBatch(work(self.images), work(self.labels), work(self.index), *others)


def micro_batches(
    cache: DatasetCache,
    *,
    fields: Set[str] = frozenset({IMAGES}),
    among: Indices | None = None,
    seed: int,
    group: int | None = None,
    batch_images: int,
    micro_batch_images: int,
    replicas: int,
    replica: int,
    start_images: int = 0,
    workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[MicroBatch]:
    """Yield the endless micro-batches of ``replica``, starting at image ``start_images`` of the run.

    Replicas take turns, so that a global batch has the same images in every layout. Example: batch of 8 images,
    micro-batches of 2, 2 replicas, M = 2 micro-batches per replica::

        position in batch   0 1   2 3   4 5   6 7
        replica             0     1     0     1
        micro-batch         0     0     1     1

    Only the named ``fields`` of the cache are read; others are None, or images (n, 0). ``among`` are the
    rising positions in the cache that are trained on (None: all). Of a cache with buckets of aspect, ``group`` images
    that follow each other are of one bucket. ``workers`` processes read ahead, or two threads of this process if 0. A
    worker's error or death is raised here. ``pin_memory`` puts the images into pinned memory. Raises ValueError if
    ``batch_images``, ``group`` or ``start_images`` of buckets is not M x ``replicas`` x ``micro_batch_images``, and
    KeyError for a field that the cache does not have.
    """
    turn = replicas * micro_batch_images
    if batch_images % turn:
        raise ValueError(f"batch_images = {batch_images} is no multiple of {replicas} x {micro_batch_images}")
    if not 0 <= replica < replicas:
        raise ValueError(f"replica = {replica} is not one of {replicas}")
    first = start_images + replica * micro_batch_images
    of_buckets = None if among is None else cache.by_bucket(among)
    counts = cache.counts if of_buckets is None else tuple(map(len, of_buckets))
    order: Order | BucketOrder = Order(counts[0], seed)
    if group is not None:
        order = BucketOrder(counts, seed, group)
        if group % turn or start_images % turn:
            raise ValueError(f"group = {group} or start_images = {start_images} is no multiple of {turn}")
    names = tuple(name for name in cache.fields if name in fields)
    if missing := sorted(fields - cache.fields.keys()):
        raise KeyError(missing[0])
    data = _Reads(cache, of_buckets, order, first, turn, micro_batch_images, pin_memory and not workers, names)
    if not workers:
        return _ahead(data.__getitem__, 2, micro_batch_images, pin_memory, names)
    try:
        reads = _from_workers(data, workers, pin_memory)
    except OSError as error:
        raise _no_room() from error
    return _ahead(reads, 1, micro_batch_images, pin_memory, names)


def _from_workers(data: _Reads, workers: int, pin_memory: bool) -> Callable[[int], _Read]:
    """Return a function that returns the next read of worker processes, which it starts."""
    loader = DataLoader(
        data,
        batch_size=None,
        sampler=itertools.count(),
        collate_fn=tuple,
        num_workers=workers,
        worker_init_fn=_begin_worker,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # keeps the loader from drawing from torch's global generator
    )
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # workers inherit this: see _begin_worker
    try:
        reads = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    return lambda _: next(reads)


@contextlib.contextmanager
def worker_failures() -> Iterator[None]:
    """Turn the failure of a worker, which PyTorch raises anywhere, into HostError or, if it was killed, MemoryError."""
    try:
        yield
    except RuntimeError as error:
        found = re.search(rf"DataLoader worker .*(Killed|Bus error|exit code {UNSENT}\b)", str(error))
        if found is None:
            raise
        if found[1] == "Killed":
            raise MemoryError("a process that reads images was killed, probably for memory") from error
        raise _no_room() from error


def _no_room() -> HostError:
    return HostError(
        f"data.workers: a process that reads images can't hand them over, since {SHARED_MEMORY} "
        f"({gib(shutil.disk_usage(SHARED_MEMORY).total)}) is full or too many files are open; start the container with "
        "more, such as --shm-size 8g, or --set data.workers=0"
    )


class ArrayPool:
    """Pool of freed host arrays, by size, as PyTorch has one of pinned memory.

    The system clears memory before it gives it to a process, which takes as long as copying an image into it.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)  # by size in bytes

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Images:
        """Return an array of any content, in memory that is free again when it and all views of it are gone."""
        size = math.prod(shape) * dtype.itemsize
        free = self._free[size]
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(size, np.uint8)  # numpy asks for huge pages, torch does not
        array = np.asarray(memory.data)  # by way of a memoryview, so that a view of a view refers to this array
        weakref.finalize(array, free.append, memory).atexit = False
        return array.view(dtype).reshape(shape)


_Read = tuple[Any, ...]
"""Each field, labels and image indices of some micro-batches. Only fields are tensors, since sending one to another
process takes milliseconds."""


@dataclass(frozen=True)
class _Reads(Dataset[_Read]):
    """Reads of one replica, by number, of several micro-batches each, which may cross the end of a batch."""

    cache: DatasetCache
    among: tuple[Indices, ...] | None
    """Positions that are trained on in each bucket of aspect, or in the cache without buckets; None is all."""
    order: Order | BucketOrder
    first: int
    turn: int
    size: int
    pin_memory: bool
    fields: tuple[str, ...] = (IMAGES,)
    pool: ArrayPool = field(default_factory=ArrayPool)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a read: one of a bucket, since the next may be of another."""
        if isinstance(self.order, BucketOrder):
            return 1
        image_bytes = sum(self.cache.fields[name].image_bytes for name in self.fields)
        return max(1, min(READ_BYTES // max(1, image_bytes), READ_IMAGES) // self.size)

    def __getitem__(self, number: int) -> _Read:
        count = self.micro_batches
        turns = self.first + self.turn * np.arange(number * count, (number + 1) * count)
        index = (turns[:, None] + np.arange(self.size)).ravel()  # (count x size,)
        if isinstance(self.order, BucketOrder):
            bucket, places = self.order.images_at(index)
        else:
            bucket, places = 0, self.order.image_at(index)
        cache, stored = self.cache.caches[bucket], places if self.among is None else self.among[bucket][places]
        fields = {name: field for name, field in cache.fields.items() if name in self.fields}
        draws = None
        if cache.text is not None:
            drawn = Draws(self.order.seed, torch.from_numpy(index), {Stream.CAPTION: 1})
            draws = drawn.bits(Stream.CAPTION)[:, 0].numpy()
        read = list[Tensor]()
        for values in fields.values():
            shape = (len(stored), *values.shape[1:])
            if self.pin_memory:
                dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
                read.append(torch.empty(shape, dtype=dtype, pin_memory=True))
            else:
                read.append(torch.from_numpy(self.pool.array(shape, values.dtype)))
            values.read(stored, read[-1].numpy(), draws)
        return *read, cache.labels[stored], index


def _ahead(
    read: Callable[[int], _Read], threads: int, size: int, pin_memory: bool, fields: Sequence[str]
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of ``size`` images of read 0, 1, ... as views, while ``threads`` read ahead."""

    def parts(number: int) -> list[MicroBatch]:
        *found, labels, index = read(number)
        numbers = {"labels": torch.from_numpy(labels), "index": torch.from_numpy(index)}
        if pin_memory:
            numbers = {name: values.pin_memory() for name, values in numbers.items()}
        tensors = {IMAGES: torch.empty(len(index), 0), **dict(zip(fields, found, strict=True)), **numbers}
        columns = zip(*(tensor.split(size) for tensor in tensors.values()), strict=True)
        return [MicroBatch(**dict(zip(tensors, row, strict=True))) for row in columns]

    with ThreadPoolExecutor(threads) as pool:
        coming = deque(pool.submit(parts, number) for number in range(threads))
        for number in itertools.count(threads):
            batches = coming.popleft().result()
            coming.append(pool.submit(parts, number))
            yield from batches


def _begin_worker(_: int) -> None:
    """End this worker process if it can't hand over a read, or its training process sends SIGTERM."""
    # A scheduler that stops a run sends SIGTERM to all processes, and training needs images to finish its step and
    # save. So all threads block it, from before the start, since libraries may start threads before this is called.
    queue: Any = multiprocessing.queues.Queue
    queue._on_queue_feeder_error = staticmethod(lambda error, read: os._exit(UNSENT))
    parent = multiprocessing.parent_process()
    assert parent is not None
    pid = parent.pid

    def end_by_parent() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != pid:
            pass
        os._exit(0)

    threading.Thread(target=end_by_parent, daemon=True).start()


def on_device(batches: Iterator[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Yield the same endless micro-batches on ``device``, still uint8.

    On CUDA each is copied on a separate stream while the one before is used; the current stream waits for the copy, but
    the host does not::

        copies        1     2     3           4
        current       .  1111111  2222222222  3333333

    That needs ``batches`` in pinned memory. Without CUDA they are passed through.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)

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


def split(count: int, held_out: int, how: HeldOut = "random") -> tuple[Indices, Indices]:
    """Split a cache of ``count`` images into training images and ``held_out`` others; positions are int64 and rising.

    The split depends on these arguments alone, so that runs of any seed are measured on the same images. ``how`` is
    ``data.held_out``; "ranges" are at most 10, of equal length but for one image, in the middle of equal parts::

        count = 20, held_out = 4, ranges of 1     ..h.. ..h.. ..h.. ..h..

    Raises:
        SpecError: no image would be left to train on.
    """
    if held_out >= count:
        raise SpecError(
            f"data.held_out_images = {held_out:,} leaves nothing of the {count:,} images; --set data.held_out_images="
            f"{count // 10}"
        )
    chosen = np.zeros(count, bool)
    if how == "random":
        chosen[shuffled(count)[:held_out]] = True
    elif how == "last":
        chosen[count - held_out :] = True
    else:
        ranges = min(MOST_RANGES, held_out)
        for number in range(ranges):
            begin, end = (count * edge // ranges for edge in (number, number + 1))
            length = held_out * (number + 1) // ranges - held_out * number // ranges
            first = begin + (end - begin - length) // 2
            chosen[first : first + length] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def shuffled(count: int) -> Indices:
    """Return the positions 0 to ``count - 1``, int64, shuffled in a fixed order."""
    return np.random.Generator(np.random.Philox(key=np.uint64(0))).permutation(count)
