"""Processes that share a work in parts: who does which, and how they wait for each other.

Many images, drawn in batches that outlive an interruption and that several processes can share.

::

    STORE/
        sampling.json    what is drawn: a SavedRequest
        000000000.npy    a finished batch by its first image, uint8 (N, C, H, W)
        000000064.npy
        images.npy       all of them, once all are there; the batches are gone then

A file is complete or not there, so whatever is there counts, and a batch belongs to one process by its number: the
processes meet before the first batch and after the last one only.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from ddpm_ds.checkpoint.folder import write_file
from ddpm_ds.config.spec import SamplerSpec
from ddpm_ds.errors import LayoutError, OutputError, PeerLostError
from ddpm_ds.evaluate.draw import Request, SavedRequest, draw, refuse_other
from ddpm_ds.evaluate.trained import Trained

JOIN_LIMIT = timedelta(minutes=10)
"""For all processes to have loaded the weights."""
WAIT_LIMIT = timedelta(days=1)
"""For the slowest process to finish; one that has died is noticed at once, by its connection."""


class Share(NamedTuple):
    """Which part of the work is this process's."""

    rank: int
    world_size: int


ALONE = Share(0, 1)


def share_of_launcher() -> Share:
    """As a launcher says in the environment; alone without one."""
    return Share(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


@contextlib.contextmanager
def together(share: Share) -> Iterator[Callable[[], None]]:
    """Meet the other processes; the block gets a function that waits until all have called it.

    Raises:
        PeerLostError: from that function, when another process has died or does not come. Nothing that waits for the
            others may follow.
    """
    if share.world_size == 1:
        yield lambda: None
        return
    dist.init_process_group("gloo", timeout=JOIN_LIMIT)
    try:
        yield _wait_for_all
    finally:
        dist.destroy_process_group()  # a process that leaves with a gloo group can abort after it has succeeded


def _wait_for_all() -> None:
    try:
        dist.monitored_barrier(timeout=WAIT_LIMIT)
    except RuntimeError:
        raise PeerLostError(
            "another process was lost before it had done its share; what is done is kept, start it again"
        ) from None


RECORD = "sampling.json"
LOG_SECONDS = 30.0
"""Time between two lines of the progress bar where it is not a terminal that shows it."""


class Keeper(Protocol):
    """Where finished images are kept."""

    def check(self) -> None:
        """Raises OutputError when what is kept there is something else; writes nothing."""

    def claim(self) -> None:
        """Make it this drawing's; by one process, before any :meth:`keep`."""

    def missing(self, batch: range) -> Sequence[int]:
        """The images of a batch that are not there yet."""

    def keep(self, index: Sequence[int], images: Tensor) -> None:
        """Keep what was :meth:`missing` of one batch, (N, C, H, W) uint8."""

    def done(self) -> int:
        """How many of the images that were asked for are there."""


class DrawnImages:
    """A :class:`Keeper` of batches in a folder, and at the end of all images in one file.

    Raises:
        OutputError: all methods, where the file system refuses.
    """

    def __init__(self, folder: Path, job: SavedRequest, image_shape: tuple[int, int, int]) -> None:
        self._folder, self._job, self._shape = folder, job, image_shape
        self._record, self._whole = folder / RECORD, folder / "images.npy"

    def check(self) -> None:
        if not any(self._folder.glob("*.npy")):
            return
        there = SavedRequest.read(self._record.read_bytes()) if self._record.exists() else None
        # Once all images are there, in which batches they were drawn no longer matters.
        kind = Request if self._whole.exists() else SavedRequest
        refuse_other(self._folder, self._job.only(kind), there and there.only(kind))

    def claim(self) -> None:
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(self._record, self._job.dump())

    def missing(self, batch: range) -> Sequence[int]:
        return () if self._whole.exists() or self._path(batch).exists() else batch

    def keep(self, index: Sequence[int], images: Tensor) -> None:
        content = io.BytesIO()
        np.save(content, images.numpy())
        with writing(self._folder):
            write_file(self._path(index), content.getvalue())

    def done(self) -> int:
        return sum(len(batch) - len(self.missing(batch)) for batch in self._job.batches)

    def images(self) -> np.ndarray:
        """All images in order, (N, C, H, W) uint8, mapped into memory; to be called when none is missing."""
        with writing(self._folder):
            if not self._whole.exists():
                self._join_batches()
            for batch in self._job.batches:
                self._path(batch).unlink(missing_ok=True)
        return np.load(self._whole, mmap_mode="r")

    def _join_batches(self) -> None:
        temporary = self._whole.with_name(".images.npy.tmp")
        shape = (self._job.count, *self._shape)
        whole = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=shape)
        for batch in self._job.batches:
            start = batch.start - self._job.first
            whole[start : start + len(batch)] = np.load(self._path(batch))
        whole.flush()
        temporary.replace(self._whole)

    def _path(self, batch: Sequence[int]) -> Path:
        return self._folder / f"{batch[0]:09}.npy"


def draw_share(
    trained: Trained, job: SavedRequest, keeper: Keeper, share: Share = ALONE, *, progress: bool = False
) -> None:
    """Draw this process's share of what is missing: batch i is that of process i modulo their number.

    Raises:
        LayoutError: a batch does not fit into the memory of the device.
        OutputError: the file system refuses.
    """
    with _bar(job.count, keeper.done() if progress else 0, shown=progress) as bar:
        for batch in job.batches[share.rank :: share.world_size]:
            if index := keeper.missing(batch):
                images = _draw_batch(trained, job, index, _step_shower(bar, job.sampler.steps))
                keeper.keep(index, images)
                bar.update(len(index))
            if progress and share.world_size > 1:
                bar.update(keeper.done() - bar.n)  # the others' images too


def draw_many(
    trained: Trained,
    sampler: SamplerSpec,
    *,
    count: int,
    first: int = 0,
    seed: int,
    labels: Sequence[int] | None,
    batch_images: int,
    store: Path,
    progress: bool = True,
) -> np.ndarray:
    """Images ``first`` to ``first + count - 1`` as uint8 (N, C, H, W), mapped from a file in the folder ``store``.

    One process. Batches that ``store`` has from an earlier call of the same drawing are not drawn again, and when all
    are there nothing is. ``labels``: image i has label number i modulo their number; None draws without labels.

    Raises:
        LayoutError: a batch does not fit into the memory of the device.
        OutputError: ``store`` holds images of another drawing, or can't be written.
    """
    job = SavedRequest.of(trained, sampler, seed, labels, first=first, count=count, batch_images=batch_images)
    kept = DrawnImages(store, job, trained.image_shape)
    kept.check()
    kept.claim()
    draw_share(trained, job, kept, progress=progress)
    return kept.images()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the file system refuses becomes an OutputError about ``path``."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} can't be written ({error.strerror or error}); mend that and give the same command again: what "
            "is drawn is kept"
        ) from None


def _draw_batch(trained: Trained, job: SavedRequest, index: Sequence[int], after_step: Callable[[int], None]) -> Tensor:
    try:
        return draw(
            trained,
            job.sampler,
            torch.tensor(index),
            labels=job.labels_of(index),
            seed=job.seed,
            after_step=after_step,
        )
    except torch.OutOfMemoryError:
        raise LayoutError(
            f"--batch-images = {job.batch_images}: the device has no memory for so many images at once; use fewer"
        ) from None


def _bar(total: int, done: int, *, shown: bool) -> tqdm[Any]:
    """A bar over images. Its rate is the mean since the start: batches come seldom."""
    return tqdm(
        total=total,
        initial=done,
        unit=" images",
        bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]",
        mininterval=0.2 if sys.stderr.isatty() else LOG_SECONDS,
        miniters=0,
        smoothing=0,
        disable=not shown,
    )


def _step_shower(bar: tqdm[Any], steps: int | None) -> Callable[[int], None]:
    """Shows how far a batch is, which may take minutes."""

    def show(step: int) -> None:
        bar.set_postfix_str(f"step {step}/{steps}", refresh=False)
        bar.update(0)

    return show
