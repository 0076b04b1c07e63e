"""Which image comes when, micro-batches of it in every layout, and how they are read; what is held out never is."""

import queue
import threading
import tracemalloc
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpm_ds.data import loader
from ddpm_ds.data.cache import DatasetCache, StoredImages
from ddpm_ds.data.held_out import split
from ddpm_ds.data.loader import MicroBatch, Order, Share, _Reads
from ddpm_ds.ground.errors import SpecError
from tests.data.reading import loaded
from tests.launching import PATIENCE_SECONDS

counts = st.integers(1, 50)
seeds = st.integers(0, 2**31 - 1)


@settings(deadline=None)
@given(count=st.integers(1, 2000), seed=seeds, epoch=st.integers(0, 2**40))
def test_every_epoch_sees_every_image_once(count: int, seed: int, epoch: int) -> None:
    seen = Order((count,), seed).images_at(epoch * count + np.arange(count))[1]
    assert seen.dtype == np.int64
    assert sorted(seen) == list(range(count))


def test_order_is_the_same_on_every_machine_and_version() -> None:
    """A change here means that resumed runs see other images: numpy may change ``Generator.permutation``."""
    assert Order((12,), 7).images_at(np.arange(24))[1].tolist() == [
        *(0, 1, 9, 3, 11, 5, 2, 6, 10, 7, 8, 4),
        *(1, 8, 5, 2, 9, 11, 0, 4, 3, 7, 10, 6),
    ]


@settings(deadline=None)
@given(count=st.one_of(st.integers(1, 600), st.integers(65_500, 65_600)), seed=seeds, epoch=st.integers(0, 2**40))
def test_small_types_are_shuffled_as_numpy_permutes_int64(count: int, seed: int, epoch: int) -> None:
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64)))
    assert np.array_equal(loader.permutation(count, seed, epoch), generator.permutation(count))


def test_a_thread_shuffles_the_next_epoch_from_the_middle_of_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made, permuted = queue.Queue[tuple[int, threading.Thread]](), loader.permutation

    def noted(count: int, seed: int, epoch: int) -> Any:
        made.put((epoch, threading.current_thread()))
        return permuted(count, seed, epoch)

    monkeypatch.setattr(loader, "permutation", noted)
    order = Order((1000,), 3)
    for epoch in range(3):
        for first in range(1000 * epoch, 1000 * (epoch + 1), 50):
            if first == 1000 * epoch:  # it was begun before, and a run's first one is begun now
                assert made.empty()
            order.images_at(np.arange(first, first + 50))
            if first == 0 or first % 1000 == 500:
                number, thread = made.get(timeout=PATIENCE_SECONDS)
                assert number == -(-first // 1000) and thread is not threading.main_thread()
    assert made.empty()


def test_buckets_in_turn_shuffle_each_epoch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, permuted = list[Any](), loader.permutation

    def noted(*which: int) -> Any:
        made.append(which)
        return permuted(*which)

    monkeypatch.setattr(loader, "permutation", noted)
    order = Order(tuple(range(40, 52)), 3, group=4)
    for first in range(0, 2 * sum(order.counts), 4):
        order.images_at(np.arange(first, first + 4))
    own = [which for which in made if len(which) == 3]  # others are of rounds
    assert len(own) == len(set(own)) > len(order.counts)


def test_an_order_keeps_two_epochs_at_most_and_4_bytes_an_image() -> None:
    count, order = 300_000, Order((300_000,), 3)
    tracemalloc.start()  # sees numpy's memory
    for first in range(0, 3 * count, 1000):
        order.images_at(np.arange(first, first + 1000))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 8 * count <= most < 8.5 * count


def take(store: DatasetCache, count: int, **changes: Any) -> list[MicroBatch]:
    given: dict[str, Any] = {"seed": 3, "micro_batch_images": 4, "replicas": 2, "replica": 0}
    return list(islice(loaded(store, **(given | changes)), count))


def assert_same(one: list[MicroBatch], other: list[MicroBatch]) -> None:
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left[:3], right[:3], strict=True))


def test_replicas_take_turns_within_a_batch(digits: DatasetCache) -> None:
    """The position rule, written out: start + (m R + r) n, with two micro-batches of 4 on each of two replicas."""
    before = torch.get_rng_state()
    positions = [[batch.index.tolist() for batch in take(digits, 3, replica=replica)] for replica in (0, 1)]
    assert positions == [
        [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]],
        [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 23]],
    ]
    assert torch.equal(torch.get_rng_state(), before)


@settings(max_examples=20, deadline=None)
@given(replicas=st.integers(1, 4), micro=st.integers(1, 5), each=st.integers(1, 4), start=st.integers(0, 5000))
def test_global_batch_is_the_same_images_in_every_layout(
    digits: DatasetCache, replicas: int, micro: int, each: int, start: int
) -> None:
    batch = replicas * micro * each
    layout: dict[str, Any] = {"micro_batch_images": micro, "start_images": start}
    streams = [take(digits, 2 * each, replicas=replicas, replica=replica, **layout) for replica in range(replicas)]
    for step in range(2):
        parts = [part for stream in streams for part in stream[step * each : (step + 1) * each]]
        index = torch.cat([part.index for part in parts])
        order = index.argsort()
        first = start + step * batch
        assert index[order].tolist() == list(range(first, first + batch)) and parts[0].index.dtype == torch.int64
        stored = Order((len(digits),), 3).images_at(np.arange(first, first + batch))[1]
        assert (torch.cat([part.images for part in parts])[order].numpy() == digits.images[stored]).all()
        assert (torch.cat([part.labels for part in parts])[order].numpy() == digits.labels[stored]).all()


@pytest.mark.parametrize("workers", [1, 3])
def test_resumed_stream_is_the_uninterrupted_one(digits: DatasetCache, workers: int) -> None:
    """Over the end of an epoch (1797 images), with few and many threads, and on each replica."""
    before = torch.get_rng_state()
    for replica in (0, 1):
        order: dict[str, Any] = {"replica": replica}
        whole = take(digits, 150, **order, start_images=1000)
        rest = take(digits, 50, **order, start_images=1000 + 100 * 8, workers=workers)
        assert_same(whole[100:], rest)
    assert torch.equal(torch.get_rng_state(), before)


def test_error_while_reading_reaches_the_trainer(digits: DatasetCache) -> None:
    class Broken(StoredImages):
        def read(self, *_: Any, **__: Any) -> Any:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        take(replace(digits, images=Broken(digits.path, digits.meta, None)), 1)


def test_micro_batches_are_the_same_however_many_are_read_at_a_time(
    digits: DatasetCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "READ_IMAGES", 1)
    alone = take(digits, 40, replica=1, start_images=1760)
    for images in (12, 2048):
        monkeypatch.setattr(loader, "READ_IMAGES", images)
        assert_same(take(digits, 40, replica=1, start_images=1760), alone)


def test_a_read_is_bounded_in_images_and_in_bytes_and_a_micro_batch_at_least(digits: DatasetCache) -> None:
    def reads(size: int, shape: tuple[int, int, int]) -> int:
        meta = digits.meta.model_copy(update={"shape": shape})
        store = replace(digits, images=StoredImages(digits.path, meta))
        return _Reads(store, (np.arange(1797),), Order((1797,), 3), Share(size)).micro_batches

    assert reads(64, (1, 8, 8)) == 512 // 64
    assert reads(100, (3, 64, 64)) == 3  # of 341 images in 2^22 bytes
    assert reads(8, (3, 1024, 1024)) == 1
    assert reads(1024, (1, 8, 8)) == 1


def test_threads_read_while_a_micro_batch_is_used(digits: DatasetCache, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, threads = queue.Queue[tuple[int, bool]](), set[threading.Thread]()
    read = _Reads.__getitem__

    def noted(self: _Reads, number: int) -> Any:
        threads.add(threading.current_thread())
        reads.put((number, threading.current_thread() is threading.main_thread()))
        return read(self, number)

    monkeypatch.setattr(_Reads, "__getitem__", noted)
    batches = loaded(digits, seed=3, micro_batch_images=512)
    next(batches)
    assert sorted(reads.get(timeout=PATIENCE_SECONDS) for _ in range(3)) == [(0, False), (1, False), (2, False)]
    del batches
    assert reads.empty() and len(threads) == 2 and not any(thread.is_alive() for thread in threads)


def test_images_are_copied_once(digits: DatasetCache, tmp_path: Path) -> None:
    """From the mapped file into the tensor that is handed out: numpy may take a second one as a buffer."""
    meta = digits.meta.model_copy(update={"count": 20, "shape": (3, 64, 64)})
    np.save(tmp_path / "images.npy", np.zeros((20, 3, 64, 64), np.uint8))
    large = replace(digits, meta=meta, images=StoredImages(tmp_path, meta))
    reads = _Reads(large, (np.arange(20),), Order((20,), 3), Share(80))
    _ = reads[0]  # maps the file
    tracemalloc.start()  # sees numpy's memory
    batches = reads[1]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = sum(batch.images.numel() for batch in batches)
    assert size <= most < 1.1 * size


def test_reads_reuse_freed_memory_alone(digits: DatasetCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is cleared by the system first, which takes as long as the copy."""
    empty, made = np.empty, list[Any]()

    def counted(shape: Any, *arguments: Any, **options: Any) -> Any:
        made.append(shape)
        return empty(shape, *arguments, **options)

    monkeypatch.setattr(np, "empty", counted)
    batches = loaded(digits, seed=3, micro_batch_images=512)
    kept = next(batches).images[:1].numpy()  # keeps the memory of all, as any part does
    for _ in range(40):
        next(batches)
    assert made.count(512 * 64) <= 5, "one is kept, one used, one handed out and two are read ahead"
    assert (kept == digits.images[Order((1797,), 3).images_at(np.arange(1))[1]]).all()


def test_the_two_parts_are_the_whole_and_have_nothing_in_common() -> None:
    trained, held_out = split(1797, 197)
    assert len(trained) == 1600 and len(held_out) == 197
    assert sorted([*trained, *held_out]) == list(range(1797))
    assert np.array_equal(split(1797, 197)[1], held_out)
    assert held_out.max() > 1600  # not simply the first ones
    trained, held_out = split(10, 0)
    assert list(trained) == list(range(10)) and len(held_out) == 0
    with pytest.raises(SpecError, match=r"data\.held_out_images = 50 leaves nothing of the 50 images.*=5"):
        split(50, 50)


def test_images_are_held_out_by_time() -> None:
    """Neighbouring hours leak: the last ones, or few ranges, have few neighbours among the training images."""
    trained, held_out = split(20, 4, "last")
    assert list(held_out) == [16, 17, 18, 19] and list(trained) == list(range(16))
    for count, asked, ranges in ((1000, 105, 10), (100, 3, 3), (12, 11, 10), (997, 200, 10)):
        trained, held_out = split(count, asked, "ranges")
        assert sorted([*trained, *held_out]) == list(range(count)) and len(held_out) == asked
        runs = np.split(held_out, np.flatnonzero(np.diff(held_out) > 1) + 1)
        assert len(runs) <= ranges and (count < 100 or len(runs) == ranges)
        if count >= 100:
            gaps = [later[0] - earlier[-1] for earlier, later in pairwise(runs)]
            assert max(map(len, runs)) - min(map(len, runs)) <= 1 and max(gaps) - min(gaps) <= 2, "evenly spaced"
    assert len(split(10, 0, "ranges")[1]) == 0


def test_a_held_out_image_is_never_loaded_and_every_other_one_is_once_an_epoch(digits: DatasetCache) -> None:
    numbered = replace(digits, labels=np.arange(len(digits)))
    among, held_out = split(20, 4)
    images = [int(label) for batch in islice(loaded(numbered, 4, among=among), 8) for label in batch.labels]
    for epoch in (images[:16], images[16:]):
        assert sorted(epoch) == list(among) and not set(epoch) & set(held_out)
