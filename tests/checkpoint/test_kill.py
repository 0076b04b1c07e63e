"""SIGKILL at any moment of writing: each folder with a checkpoint's name is a whole checkpoint."""

import itertools
import multiprocessing
import random
import time
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from ddpm_ds.checkpoint.folder import checkpoint_name, clean, images_of, names
from ddpm_ds.checkpoint.manifest import read_manifest, verify
from ddpm_ds.checkpoint.writer import Writer
from tests.checkpoint.saving import Shapes, check, describe, fragments_of, newest_good, scalars
from tests.launching import wait_for

SHAPES: Shapes = {"0.weight": (300, 100), "1.weight": (200, 100)}
BOUNDS = (0, 20_000, 50_000)


def write_on(folder: Path, rank: int, first: int, barrier: Barrier, port: int) -> None:
    """One rank of a run that does nothing but write checkpoints; the ranks keep pace by ``latest``."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    writer = Writer(folder, rank, len(BOUNDS) - 1, log=print, keep_last=2, store=store)
    barrier.wait()  # as training does: rank 0 has cleaned the folder before another rank writes
    for images in itertools.count(first):
        fragments = fragments_of(images, BOUNDS[rank], BOUNDS[rank + 1], SHAPES)
        writer.begin(f"rank{rank}", fragments, describe(images, SHAPES), scalars(images))
        writer.wait()
        wait_for(partial(is_written, folder, checkpoint_name(images)))


def is_written(folder: Path, name: str) -> bool:
    return (folder / "latest").exists() and (folder / "latest").read_text().strip() >= name


def test_killed_writers_leave_only_whole_checkpoints(tmp_path: Path) -> None:
    folder, randomness = tmp_path, random.Random(0)
    context = multiprocessing.get_context("fork")
    interrupted, first = 0, 1
    for _ in range(8):
        barrier = context.Barrier(len(BOUNDS) - 1)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [
            context.Process(target=write_on, args=(folder, rank, first, barrier, store.port), daemon=True)
            for rank in range(len(BOUNDS) - 1)
        ]
        for process in ranks:
            process.start()
        wait_for(partial(is_written, folder, checkpoint_name(first)))
        randomness.shuffle(ranks)
        for process in ranks:
            time.sleep(randomness.uniform(0, 0.05))
            process.kill()
        for process in ranks:
            process.join()
        interrupted += bool(list(folder.glob(".*-images-*")))
        for name in names(folder):
            verify(folder / name, read_manifest(folder / name), progress=False)
        clean(folder)
        assert not list(folder.glob(".*-images-*"))
        newest = newest_good(folder, pytest.fail)
        assert newest is not None
        images = images_of(newest.name)
        assert images is not None and images >= first
        check(newest, images, SHAPES)
        first = images + randomness.randint(0, 1)  # at times the newest is written again
        (folder / "latest").unlink()
    assert interrupted
