"""Measure how fast the loader reads the images of a spec, and how fast they are prepared: the tables of docs/data.md.

    python launch/data_rate.py --workers 0,1,2 --needs 2000
    python launch/data_rate.py --spec launch/specs/folder.yaml --set data.path=photos --preparation
    python launch/data_rate.py --spec weather.yaml --micro-batch 2 --fields

Needs is the images/s of the U-Net: a pause stands for its work between two micro-batches, and the wait for each next
one is given as a share of a step. Nothing is trained. A run measures its own wait, usage/data_wait_seconds.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence

import numpy as np

from ddpm_ds.command_line import (
    OneLineParser,
    add_spec_options,
    aligned,
    batch,
    limited_seconds,
    natural,
    positive,
    take_files,
)
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import DEFAULT_SPEC, load_spec
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.fields import joined, open_fields
from ddpm_ds.data.loader import Residence, micro_batches
from ddpm_ds.data.order import Order
from ddpm_ds.data.prepare import Decoding, by_processes, decoding_of, prepare
from ddpm_ds.data.sources.base import map_array
from ddpm_ds.errors import DataError, UserError

WAITS = 100
"""Number of micro-batches whose waits are timed."""
FEW_IMAGES = 8
"""Number of images that one process decodes between two readings of the clock."""
WARM_PASSES = 4
"""Number of times that all fields are read in a turn from memory, which is short."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = OneLineParser(description=__doc__)
    add_spec_options(parser)
    parser.add_argument("--workers", type=numbers, default=[0, 1, 2], metavar="N,...", help="default 0,1,2")
    parser.add_argument("--micro-batch", type=batch, metavar="N", help="images of one (default train.batch_images)")
    parser.add_argument("--seconds", type=limited_seconds, default=4.0, metavar="S", help="for each figure (default 4)")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="turns of the numbers of workers")
    parser.add_argument("--needs", type=positive, metavar="X", help="images/s of the U-Net, for the share of waits")
    parser.add_argument("--preparation", action="store_true", help="time decoding, on one core and on all")
    parser.add_argument("--fields", action="store_true", help="time named arrays beside the loops of their libraries")
    try:
        options = parser.parse_args(arguments)
        take_files(options, DEFAULT_SPEC)
        spec = load_spec(options.spec, options.overrides)
        if options.preparation:
            preparation(spec, options.seconds)
        elif options.fields:
            compared(spec, options.micro_batch or spec.train.batch_images, options.rounds)
        else:
            images = options.micro_batch or spec.train.batch_images
            loading(spec, options.workers, images, options.seconds, options.rounds, options.needs)
    except UserError as error:
        print(f"data_rate.py: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def numbers(text: str) -> list[int]:
    """Parse numbers of loader processes such as ``0,1,2``."""
    return [natural(word) for word in text.split(",")]


def rate(reads: Iterator[int], seconds: float) -> float:
    """Return images per second, reading as fast as possible; ``reads`` yields the number of images of each read."""
    images, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        images += next(reads)
    return images / (time.perf_counter() - begin)


def loading(
    spec: RunSpec, workers: Sequence[int], images: int, seconds: float, rounds: int, needs: float | None
) -> None:
    """Print a table of images/s by number of workers, which take turns, so that other load affects all."""
    store = prepare(spec.data, progress=True)
    print(f"{store.path}: {Residence.of(store).kind}, {len(store):,} of {'x'.join(map(str, store.meta.shape))}")

    def reads(count: int) -> Iterator[int]:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # too many workers are measured, too
            batches = micro_batches(
                store,
                seed=0,
                window=spec.data.shuffle_images,
                batch_images=images,
                micro_batch_images=images,
                replicas=1,
                replica=0,
                workers=count,
                pin_memory=False,
            )
        return (len(micro_batch.images) for micro_batch in batches)

    feeds = {count: reads(count) for count in workers}
    rates: dict[int, list[float]] = {count: [] for count in workers}
    for count in [*workers] * rounds:
        rate(feeds[count], 0.1 * seconds / rounds)  # what was read ahead between the rounds
        rates[count].append(rate(feeds[count], seconds / rounds))
    rows = [["workers", "images/s", "(range)"] + ["data wait"] * (needs is not None)]
    for count, found in rates.items():
        row = [f"{count}", f"{statistics.median(found):,.0f}", f"({min(found):,.0f} - {max(found):,.0f})"]
        rows.append(row + ([] if needs is None else [f"{wait_share(feeds[count], images / needs):.2%}"]))
    print("\n".join(aligned(rows)))


def wait_share(reads: Iterator[int], work_seconds: float) -> float:
    """Return the mean wait for the next micro-batch as a share of a step in which the U-Net works ``work_seconds``."""
    waited = 0.0
    for _ in range(WAITS):
        time.sleep(work_seconds)
        begin = time.perf_counter()
        next(reads)
        waited += time.perf_counter() - begin
    return waited / (waited + WAITS * work_seconds)


def preparation(spec: RunSpec, seconds: float) -> None:
    """Print how fast one process, and one for each core, decode images from different places of the source."""
    decoding = decoding_of(spec.data, progress=True)
    several = isinstance(decoding, Decoding) and decoding.shareable
    images, cores = decoding.plan.images, len(os.sched_getaffinity(0)) if several else 1
    few = (range(first, min(first + FEW_IMAGES, images)) for first in range(0, images, FEW_IMAGES))
    read = itertools.chain.from_iterable(map(decoding.chunks, itertools.cycle(few)))
    alone = (len(chunk.images) + len(chunk.skipped) for chunk in read)
    next(alone)  # imports decoders
    one_core = rate(alone, seconds)
    print(f"1 core    {one_core:,.0f} images/s of {images:,}")
    if isinstance(decoding, Decoding) and cores > 1:
        with by_processes(decoding, cores) as chunks:
            passes = itertools.chain([images // 2], itertools.repeat(0))
            decoded = itertools.chain.from_iterable(chunks(range(first, images)) for first in passes)
            together = (len(chunk.images) + len(chunk.skipped) for chunk in decoded)
            for _ in range(3 * cores):  # what is decoded ahead while processes start
                next(together)
            all_cores = rate(together, seconds)
        print(
            f"{f'{cores} cores':10}{all_cores:,.0f} images/s, {all_cores / one_core / cores:.2f} x {cores} x one core"
        )


def compared(spec: RunSpec, images: int, rounds: int) -> None:
    """Print MB/s of ways to bring a source of named arrays into memory of their own, image after image.

    They take turns, and the fastest turn of each counts, since other work only makes turns slower.
    """
    store, source = prepare(spec.data, progress=True), open_fields(spec.data)
    files = [store.path / name for name in store.meta.files]
    for path in {part.arrays.path for part in source.parts.values()}:
        files += [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    count, order, starts = len(store), Order(len(store), 0), np.cumsum((0, *store.meta.counts))
    variables = [variable for part in source.parts.values() for variable in part.variables]

    def library() -> Iterator[int]:
        for i in itertools.cycle(range(count)):
            for variable in variables:
                variable.read(slice(i, i + 1))
            yield 1

    def reading() -> Iterator[int]:
        rows = source.rows()
        for i in itertools.cycle(range(count)):
            for name, part in source.parts.items():
                joined(part.stored, rows[name], i)
            yield 1

    def preparing() -> Iterator[int]:
        for numbers in itertools.repeat(range(count)):
            yield from (len(chunk.images) for chunk in source.chunks(numbers))

    def mapping() -> Iterator[int]:
        mapped = [[map_array(store.path / file) for file in store.meta.files_of(name)] for name in store.fields]
        for i in itertools.count():
            position = int(order.image_at(np.array([i]))[0])
            file = int(starts.searchsorted(position, side="right")) - 1
            for arrays in mapped:
                np.array(arrays[file][position - starts[file]])
            yield 1

    def loader() -> Iterator[int]:
        batches = micro_batches(
            DatasetCache.open(store.path, verify=False),
            fields=store.fields.keys(),
            seed=0,
            batch_images=images,
            micro_batch_images=images,
            replicas=1,
            replica=0,
            workers=spec.data.workers,
        )
        yield from (len(batch.index) for batch in batches)

    ways = {
        "library": (library, "library"),
        "readers": (reading, "library"),
        "preparation": (preparing, "library"),
        "mapped cache": (mapping, "mapped cache"),
        "loader": (loader, "mapped cache"),
    }
    image_bytes = sum(stored.nbytes for stored in source.fields.values())
    if count <= 5 * images:
        raise DataError(
            f"{count:,} images are too few to time; take more than {5 * images:,}, or a smaller --micro-batch"
        )
    found: dict[tuple[str, bool], list[float]] = {}
    for _, cold, (name, (way, _)) in itertools.product(range(rounds), (True, False), ways.items()):
        for file in files if cold else ():  # nothing maps them now, which would keep them in memory
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        reads, read = way(), 0
        while read < 3 * images:  # starts threads, and takes memory that is used again
            read += next(reads)
        begun, end, begin = read, count - 2 * images if cold else WARM_PASSES * count, time.perf_counter()
        while read < end:  # what is read ahead from a cold disk, before the clock starts and when it stops, is equal
            read += next(reads)
        found.setdefault((name, cold), []).append((read - begun) * image_bytes / 1e6 / (time.perf_counter() - begin))
        del reads  # waits for what it reads ahead
    rows = [["MB/s", "cold", "(range)", "over its loop", "warm", "(range)", "over its loop"]]
    for name, (_, loop) in ways.items():
        rows.append([name])
        for cold in (True, False):
            here = found[name, cold]
            over = max(here) / max(found[loop, cold])
            rows[-1] += [f"{max(here):,.0f}", f"({min(here):,.0f} - {max(here):,.0f})", f"{over:.2f}"]
    print("\n".join(aligned(rows)))


if __name__ == "__main__":
    sys.exit(main())
