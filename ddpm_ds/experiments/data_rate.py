"""Measurement of images per second in preparation, loader and U-Net, and of the wait for data in a step."""

from __future__ import annotations

import itertools
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tqdm import tqdm

from ddpm_ds.config.spec import DataSpec, RunSpec
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.latents import pixels_of
from ddpm_ds.data.loader import MicroBatch, micro_batches, on_device
from ddpm_ds.data.prepare import by_processes, decoding_of
from ddpm_ds.data.writing import Chunk, Plan
from ddpm_ds.device import DTYPES, Dtype, wait_for_device
from ddpm_ds.errors import LayoutError, is_out_of_memory
from ddpm_ds.train.objective import Denoising
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.model import UNet

WARM_UP = 0.1
"""Initial share of a round that is not measured, since it uses data that were read ahead between rounds."""
FEW_IMAGES, LONG_STEP_SECONDS = 8, 2.0
"""Number of images in a U-Net step if a whole micro-batch would take longer than this many seconds, as on a CPU, where
more images hardly raise images/s.
"""
FEWEST_STEPS = 3
"""Minimum number of timed steps of the U-Net, after the warm-up."""
WAITS, WAITS_SECONDS = range(16, 200), 2.0
"""Minimum and maximum number of micro-batches whose waits are timed, and the seconds after which timing ends early."""
DECODED_IMAGES, CHUNK_SECONDS = 8, 0.25
"""Number of images that a single process decodes between two readings of the clock, and maximum seconds that each of
several processes should take for one chunk of images.
"""
LONGEST_PAUSE_SECONDS = 0.02
"""Maximum seconds of the pause that stands for the U-Net's work between two micro-batches; it is longer only if reading
takes more than a quarter of this.
"""


class Preparation(NamedTuple):
    """Speed of preparation in images per second, by one process and by ``cores`` processes."""

    plan: Plan
    """Plan of the images that would be prepared."""
    one_core: float
    cores: int
    """Number of processes that would decode; 1 if there is little or nothing to decode."""
    all_cores: float


def measure_preparation(spec: DataSpec, seconds: float) -> Preparation:
    """Measure how fast one process, and one per core, decode images, for ``seconds`` each; write nothing.

    For latents these are the images that an autoencoder will encode. The two measurements begin at different images, so
    that the second does not find them in memory.

    Raises:
        DataError: the source raised it.
    """
    decoding = decoding_of(pixels_of(spec), progress=True)
    plan, cores = decoding.plan, len(os.sched_getaffinity(0)) if decoding.shareable else 1
    step = DECODED_IMAGES
    few = (range(first, min(first + step, plan.images)) for first in range(0, plan.images, step))
    alone = map(_images_in, map(decoding.chunk, itertools.cycle(few)))
    next(alone)  # imports decoders
    one_core = all_cores = _rate(alone, seconds)
    if cores > 1:
        decoding.chunk_images = max(1, min(decoding.chunk_images, int(one_core * CHUNK_SECONDS)))
        firsts = itertools.chain([plan.images // 2], itertools.repeat(0))
        with by_processes(decoding, cores) as chunks:
            together = map(
                _images_in, itertools.chain.from_iterable(chunks(range(first, plan.images)) for first in firsts)
            )
            for _ in range(3 * cores):  # skips what is decoded ahead while processes start
                next(together)
            all_cores = _rate(together, seconds)
    return Preparation(plan, one_core, cores, all_cores)


def _images_in(chunk: Chunk) -> int:
    return len(chunk.images) + len(chunk.skipped)


def _rate(reads: Iterator[int], seconds: float, device: torch.device | None = None) -> float:
    """Return images per second, reading as fast as possible; ``reads`` yields the number of images of each read."""
    images, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        images += next(reads)
    if device is not None:
        wait_for_device(device)
    return images / (time.perf_counter() - begin)


@dataclass(frozen=True)
class Feed:
    """Micro-batches of one replica, as training reads them."""

    store: DatasetCache
    micro_batch_images: int
    device: torch.device
    window: int | None = None
    """Number of images that are shuffled together, as ``data.shuffle_images`` says; None shuffles all."""

    def batches(self, workers: int) -> Iterator[MicroBatch]:
        """Yield micro-batches on the device without end, read by ``workers`` worker processes."""
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # too many workers are measured, too
            batches = micro_batches(
                self.store,
                seed=0,
                window=self.window,
                batch_images=self.micro_batch_images,
                micro_batch_images=self.micro_batch_images,
                replicas=1,
                replica=0,
                workers=workers,
                pin_memory=self.device.type == "cuda",
            )
        return on_device(batches, self.device)


@dataclass(frozen=True)
class Loading:
    """Speed of the loader with one number of workers."""

    workers: int
    images_per_second: Spread
    wait_share: float | None
    """Share of a step spent waiting for micro-batches; None if the U-Net's speed is unknown."""


def measure_loading(
    feed: Feed, workers: Sequence[int], *, seconds: float, rounds: int, needs: float | None
) -> list[Loading]:
    """Measure the loader with each number of workers, ``seconds`` in all for each, divided into ``rounds`` turns.

    The numbers of workers take turns, so that other load on the machine affects all. ``needs`` is the U-Net's images/s,
    if known.
    """
    reads = {count: (len(batch.images) for batch in feed.batches(count)) for count in workers}
    rates: dict[int, list[float]] = {count: [] for count in workers}
    turns = [count for _ in range(rounds) for count in workers]
    for count in tqdm(turns, "reading", leave=False, disable=None):
        _rate(reads[count], WARM_UP * seconds / rounds, feed.device)
        rates[count].append(_rate(reads[count], seconds / rounds, feed.device))
    found = []
    for count in workers:
        speed = Spread.of(rates[count])
        _rate(reads[count], WARM_UP * seconds / rounds, feed.device)
        share = None if needs is None else _wait_share(reads[count], feed.micro_batch_images, needs, speed.median)
        found.append(Loading(count, speed, share))
    return found


def _wait_share(reads: Iterator[int], images: int, needs: float, speed: float) -> float:
    """Return the mean wait for the next micro-batch of ``images`` as a share of a step. A pause before each stands for
    the U-Net's work.
    """
    working, reading = images / needs, images / speed
    pause = min(working, max(LONGEST_PAUSE_SECONDS, 4 * reading))
    waits: list[float] = []
    end = time.perf_counter() + WAITS_SECONDS
    while len(waits) < WAITS.start or (len(waits) < WAITS.stop and time.perf_counter() < end):
        time.sleep(pause)
        begin = time.perf_counter()
        next(reads)
        waits.append(time.perf_counter() - begin)
    wait = statistics.mean(waits)
    return wait / (wait + working)


@dataclass(frozen=True)
class UnetPace:
    """Speed of the U-Net in images per second."""

    images_per_second: float
    words: str
    """Origin of the number in words."""


def unet_need(spec: RunSpec, feed: Feed, precision: Dtype, seconds: float) -> UnetPace:
    """Measure images/s of the U-Net's forward and backward on one device without an optimizer, as a median of steps.

    A step takes a whole micro-batch, or only its first images if the whole would take long.

    Raises:
        LayoutError: the micro-batch does not fit into the memory of the device.
    """
    device, batch = feed.device, next(feed.batches(0))
    batch = batch._replace(labels=torch.zeros_like(batch.labels))  # class 0, which every U-Net with classes has
    layers = unet_layers(spec.unet, image_channels=spec.data.channels, image_size=spec.data.image_size)
    unet = UNet(layers, seed=0).to(device=device, dtype=DTYPES[precision][1]).train()
    objective = Denoising(spec, device)
    bar = tqdm(desc="timing the U-Net", unit=" steps", leave=False, disable=None)

    def step(batch: MicroBatch) -> float:
        begin = time.perf_counter()
        prepared = objective.prepare(batch)
        x_t, *conditions = objective.inputs(prepared)
        prediction = unet(x_t.to(DTYPES[precision][1]), *conditions, images=batch.index.to(device))
        objective.loss(prediction, prepared).backward()
        unet.zero_grad()
        wait_for_device(device)
        bar.update()
        return time.perf_counter() - begin

    times: list[float] = []
    try:
        with bar:
            few = MicroBatch(*(tensor[:FEW_IMAGES] for tensor in batch))
            step(few)
            if step(few) * len(batch.images) / len(few.images) > LONG_STEP_SECONDS:
                batch = few
            step(batch)
            while len(times) < FEWEST_STEPS or sum(times) < seconds:
                times.append(step(batch))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise LayoutError(
            f"--micro-batch = {feed.micro_batch_images}: the device has no memory for a step of the U-Net with so many "
            "images; use fewer"
        ) from None
    images = len(batch.images)
    return UnetPace(images / statistics.median(times), f"{spec.name}, forward and backward of {images} in {precision}")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a quantity over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        one = len(values) == 1
        low, median, high = [values[0]] * 3 if one else statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def as_ratio(self) -> str:
        """Return the median as a ratio, with the quartiles in brackets."""
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"

    def as_milliseconds(self) -> str:
        """Return the median of seconds in milliseconds, with the quartiles in brackets."""
        median, low, high = (
            f"{1e3 * value:.4g}" if value < 10 else f"{1e3 * value:.0f}" for value in (self.median, self.low, self.high)
        )
        return f"{median} ({low}-{high})"
