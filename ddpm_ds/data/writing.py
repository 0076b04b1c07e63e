"""Writing of a data-set cache by any number of processes and hosts that share its folder.

Images, and other fields of them, are written in order to files of bounded size, in a folder beside the cache. Each
process takes the next file that no other works on. A finished file has a record of its labels and survives if its
process is killed, so that others can continue. A cache is complete or does not exist.
"""

from __future__ import annotations

import fcntl
import glob
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias
from uuid import uuid4

import numpy as np
import psutil
from pydantic import BaseModel, ConfigDict
from tqdm import tqdm

from ddpm_ds.command_line import gib
from ddpm_ds.config.spec import DataSpec
from ddpm_ds.data import cache
from ddpm_ds.data.statistics import Moments, Numbers, Statistics, merged, rounding_of
from ddpm_ds.errors import DataError, one_line
from ddpm_ds.files import open_regular, read_bytes, sha256_of, sync

CLAIMS = "claims"
"""Name of the file in which processes lock one byte for each file of images that they write."""
MOST_RECORD_BYTES = 2**27
CLAIM_SECONDS, CLAIM_POLL_SECONDS = 3600.0, 0.5
"""Age at which the claim of a process of another host counts as left behind, and time between two looks at one."""


@dataclass(frozen=True)
class CachePlan:
    """Plan of a cache, which its files must match."""

    kind: cache.Kind
    fields: Mapping[str, cache.StoredField]
    """Fields of an image, images among them."""
    images: int
    """Images of the source, including unreadable ones."""
    image_bytes: float
    """Mean bytes per image, of all fields together."""
    shard_images: int
    """Images of the source per file."""
    origin: str
    """Hash of the source's names and labels."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of the images."""
        channels, height, width = self.fields[cache.IMAGES].shape
        return channels, height, width

    @property
    def shards(self) -> int:
        """Number of files."""
        return math.ceil(self.images / self.shard_images)

    def images_of(self, number: int) -> range:
        """Return the range of source images in file ``number``."""
        return range(number * self.shard_images, min(self.images, (number + 1) * self.shard_images))


class Record(BaseModel):
    """Record of a finished file of images."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    labels: tuple[int, ...]
    sizes: tuple[int, ...]
    """Bytes of each encoded image."""
    skipped: tuple[tuple[str, str], ...]
    """Names of unreadable images, with reasons."""
    sha256: dict[str, str]
    """Checksum of the file of each field."""
    moments: dict[str, tuple[Numbers, ...]] = {}
    """Moments (5, C) of fields."""


class Chunk(NamedTuple):
    """Consecutive images of the source."""

    images: Sequence[bytes | memoryview]
    """What to write for each image: pixels, latents or fields (C, H, W), or an encoded file."""
    labels: list[int]
    skipped: list[tuple[str, str]]
    others: Mapping[str, Sequence[bytes | memoryview]] = {}
    """What to write for each image in other fields."""
    moments: Mapping[str, Moments] = {}
    """Moments of fields, of all images in the chunk."""


@dataclass(frozen=True)
class Facts:
    """What a cache says of its images beside their values."""

    classes: tuple[str, ...]
    made_of: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the images' origins, also kept in ``meta.json``, by names that no file has."""
    origin: cache.Origin | None = None
    constants: cache.Images | None = None
    """Fields that are the same for all images, float32 (C, H, W)."""
    coordinates: tuple[cache.Coordinate, ...] = ()
    masked: bool = False
    """Whether values can be NaN, for masked ones."""
    captions: bytes | None = None
    """Content of the file of distinct captions."""


Chunks: TypeAlias = Callable[[range], Iterator[Chunk]]
"""Function that yields the images of a range of the source in order, listing unreadable ones as skipped."""


@contextmanager
def locked(file: Path, number: int | None = None, wait: bool = True) -> Iterator[bool]:
    """Lock byte ``number`` of a file, or all of it; without ``wait``, yield False if another process holds the lock.

    On file systems without locks (some Lustre mounts), who makes a file beside it holds the lock.
    """
    with open_regular(file, "ab") as opened:
        mine = True
        try:
            how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.lockf(opened, how, 0 if number is None else 1, number or 0)
        except (BlockingIOError, PermissionError):
            mine = False
        except OSError:
            with _claimed(file.with_name(f"{file.name}.{'all' if number is None else number}"), wait) as mine:
                yield mine
            return
        yield mine


@contextmanager
def _claimed(claim: Path, wait: bool) -> Iterator[bool]:
    """Hold a lock by a file that one process alone can make; one that a killed process has left is taken over."""
    own = f"{socket.gethostname()} {os.getpid()}"
    while True:
        try:
            with claim.open("x") as file:
                file.write(own)
            break
        except FileExistsError:
            with suppress(OSError, ValueError):  # just removed, or not written yet
                host, process = read_bytes(claim, 2**10).decode().split()
                gone = host == socket.gethostname() and not psutil.pid_exists(int(process))
                if gone or time.time() - claim.stat().st_mtime > CLAIM_SECONDS:
                    claim.unlink(missing_ok=True)
                    continue
            if not wait:
                yield False
                return
            time.sleep(CLAIM_POLL_SECONDS)
    try:
        yield True
    finally:
        claim.unlink(missing_ok=True)


def lock_of(path: Path) -> Path:
    """Return the file whose lock lets one process at a time list, begin or finish the cache at ``path``."""
    return path.with_name(f".{path.name}.lock")


def write_cache(
    path: Path,
    plan: CachePlan,
    chunks: Chunks,
    spec: DataSpec,
    facts: Facts,
    progress: bool,
    beginnings: int = 3,
) -> None:
    """Write the cache at ``path`` unless it exists, together with other processes that do the same.

    If the unfinished folder is removed, the cache is begun again, ``beginnings`` times in all.

    Raises:
        DataError: the disk has too little space, or too many images are unreadable; nothing is kept.
        OSError: the disk fails, and finished files are kept; or the folder was removed each time.
    """
    with locked(lock_of(path)):
        if path.exists():
            return
        folder = _begun(path, plan)
    try:
        with tqdm(total=plan.images, desc=f"preparing {path.name}", disable=not progress) as bar:
            shards = _Shards(folder, plan, chunks, spec.max_bad_fraction, bar)
            while not _finished(path, shards, spec, facts):
                pass  # files that changed after they were written are written again
    except OSError as error:
        if path.exists():  # another process has finished
            return
        if beginnings == 1 or not isinstance(error, FileNotFoundError) or set(_folders(path)) - {folder}:
            raise
        # Another process gave up and removed the folder; begin again, to meet what it has met.
        write_cache(path, plan, chunks, spec, facts, progress, beginnings - 1)
    except DataError:
        shutil.rmtree(folder, ignore_errors=True)  # a repaired source file keeps its name and must be read again
        raise


def _finished(path: Path, shards: _Shards, spec: DataSpec, facts: Facts) -> bool:
    """Write the files that are missing and put the cache in place; return False if a file of another process, or of a
    start that was killed, is not what its record says, and has to be written again.
    """
    records = shards.write()
    with locked(lock_of(path)):
        if path.exists():  # written by another process, perhaps by another plan
            shutil.rmtree(shards.folder, ignore_errors=True)
        elif shards.forget_damaged(records):
            return False
        else:
            _describe(shards.folder, shards.plan, records, spec, facts)
            shards.folder.rename(path)
            sync(path.parent)
            tidy(path)
    return True


def tidy(path: Path) -> None:
    """Remove from a finished cache what its preparation needed, perhaps one that was killed at its very end."""
    for name in (f"{CLAIMS}*", _record_name("*"), ".????????"):
        for left in path.glob(name):
            left.unlink(missing_ok=True)


def _begun(path: Path, plan: CachePlan) -> Path:
    """Return the folder, named after the plan, in which the cache at ``path`` is written, creating it if needed.

    Raises:
        DataError: the disk has too little space.
    """
    folder = path.with_name(f".{path.name}.{sha256(repr(plan).encode()).hexdigest()[:8]}.preparing")
    if folder.exists():
        return folder
    needed, free = plan.images * plan.image_bytes, shutil.disk_usage(path.parent).free
    if needed > free:
        raise DataError(
            f"data.store_root = {path.parent} has {gib(free)} free, and the "
            f"{'texts' if plan.kind == 'text' else 'images'} take {gib(needed)}; free some, or "
            "choose another folder with --set data.store_root=FOLDER"
        )
    for other in _folders(path):
        if other != folder:  # another process may have just made it, if the lock does not work
            with locked(other / CLAIMS, wait=False) as mine:  # else a process works on another plan
                if mine:
                    shutil.rmtree(other)
    folder.mkdir(exist_ok=True)
    return folder


def _folders(path: Path) -> list[Path]:
    """Return the folders in which processes write the cache at ``path``, one for each plan."""
    return list(path.parent.glob(f".{glob.escape(path.name)}.*preparing"))


def _record_name(number: int | str) -> str:
    return f"shard.{number}.json"


@dataclass
class _Shards:
    """Files of a cache that is being written."""

    folder: Path
    plan: CachePlan
    chunks: Chunks
    max_bad_fraction: float
    bar: tqdm[Any]
    found: set[int] = field(default_factory=set)
    """Numbers of the files that were there when this process began, and whose content it has not yet compared."""

    def __post_init__(self) -> None:
        self.found.update(number for number in range(self.plan.shards) if self._read_record(number) is not None)

    def write(self) -> list[Record]:
        """Write the files that no other process writes, wait for the others, and return all records."""
        records: dict[int, Record] = {}
        wait = False
        while len(records) < self.plan.shards:
            worked = False
            for number in range(self.plan.shards):
                if number in records:
                    continue
                with locked(self.folder / CLAIMS, number, wait) as mine:
                    record = self._read_record(number)
                    if mine and record is None:
                        skipped = [image for record in records.values() for image in record.skipped]
                        record = self._write_shard(number, skipped)
                        worked = True
                if record is not None:
                    records[number] = record
            wait = not worked
        self._check_skipped([image for record in records.values() for image in record.skipped])  # of all processes
        self.bar.update(self.plan.images - self.bar.n)
        return [records[number] for number in range(self.plan.shards)]

    def _check_skipped(self, skipped: Sequence[tuple[str, str]]) -> None:
        """Raise DataError if more images are unreadable than ``data.max_bad_fraction`` allows."""
        if len(skipped) > self.max_bad_fraction * self.plan.images:
            name, reason = skipped[0]
            raise DataError(
                f"data.max_bad_fraction = {self.max_bad_fraction:g} is passed: {len(skipped)} of {self.plan.images} "
                f"images are unreadable so far, first {name}: {reason}; fix or remove them, or raise it to skip them"
            )

    def _read_record(self, number: int) -> Record | None:
        """Return the record of a file; None if there is none, or a damaged one: then the file is written again."""
        with suppress(OSError, ValueError):
            record = Record.model_validate_json(read_bytes(self.folder / _record_name(number), MOST_RECORD_BYTES))
            if len(record.labels) + len(record.skipped) == len(self.plan.images_of(number)):
                return record
        return None

    def forget_damaged(self, records: Sequence[Record]) -> bool:
        """Remove the records of files of earlier starts that are damaged; return whether there were any."""

        def is_damaged(number: int) -> bool:
            with suppress(OSError):
                return any(
                    sha256_of(self.folder / cache.shard_name(self.plan.kind, number, name)) != checksum
                    for name, checksum in records[number].sha256.items()
                )
            return True

        with ThreadPoolExecutor() as pool:
            damaged = [number for number, bad in zip(self.found, pool.map(is_damaged, self.found), strict=True) if bad]
        self.found.clear()
        for number in damaged:
            (self.folder / _record_name(number)).unlink(missing_ok=True)
        return bool(damaged)

    def _write_shard(self, number: int, skipped_before: Sequence[tuple[str, str]]) -> Record:
        """Write one file of each field and their record; ``skipped_before`` are the unreadable images of earlier
        files.
        """
        plan, bar, numbers = self.plan, self.bar, self.plan.images_of(number)
        bar.update(max(0, numbers.start - bar.n))
        labels: list[int] = []
        sizes: list[int] = []
        skipped: list[tuple[str, str]] = []
        moments: dict[str, Moments] = {}
        with ExitStack() as stack:
            names = {name: self.folder / cache.shard_name(plan.kind, number, name) for name in plan.fields}
            files = {name: stack.enter_context(_complete(path)) for name, path in names.items()}
            self._write_headers(files, len(numbers))
            for chunk in self.chunks(numbers):
                files[cache.IMAGES].writelines(chunk.images)
                for name, images in chunk.others.items():
                    files[name].writelines(images)
                for name, found in chunk.moments.items():
                    moments[name] = merged(np.stack([moments[name], found])) if name in moments else found
                labels += chunk.labels
                sizes += map(len, chunk.images) if plan.kind == "encoded" else []
                skipped += chunk.skipped
                bar.update(len(chunk.images) + len(chunk.skipped))
                self._check_skipped([*skipped_before, *skipped])
                del chunk  # an image may take 200 MB, and the next is about to be read
            self._write_headers(files, len(labels))
            for file in files.values():
                file.flush()
            checksums = {name: sha256_of(Path(file.name)) for name, file in files.items()}
        record = Record(
            labels=tuple(labels),
            sizes=tuple(sizes),
            skipped=tuple(skipped),
            sha256=checksums,
            moments={name: tuple(map(tuple, found.tolist())) for name, found in moments.items()},
        )
        with _complete(self.folder / _record_name(number)) as file:
            file.write(record.model_dump_json().encode())
        self.found.discard(number)
        return record

    def _write_headers(self, files: Mapping[str, BinaryIO], count: int) -> None:
        """Write the headers of ``.npy`` files of ``count`` images, padded so that the count can be changed later."""
        for name, file in files.items():
            if self.plan.kind != "encoded" or name != cache.IMAGES:
                stored = self.plan.fields[name]
                header = {"descr": stored.dtype.str, "fortran_order": False, "shape": (count, *stored.shape)}
                file.seek(0)
                np.lib.format.write_array_header_1_0(file, header)


@contextmanager
def _complete(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that is at ``path``, whole and on disk, once the body ends without an error."""
    temporary = path.with_name(f".{uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as file:
            yield file
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _describe(
    folder: Path,
    plan: CachePlan,
    records: Sequence[Record],
    spec: DataSpec,
    facts: Facts,
) -> None:
    """Write the files of a cache other than its fields."""
    labels = [label for record in records for label in record.labels]
    skipped = [image for record in records for image in record.skipped]
    files: dict[str, cache.Images] = {cache.LABELS: np.array(labels, np.int64)}
    if plan.kind == "encoded":
        files[cache.OFFSETS] = np.cumsum([0, *(size for record in records for size in record.sizes)])
    if facts.constants is not None:
        files[cache.CONSTANTS] = facts.constants
    for name, array in files.items():
        with _complete(folder / name) as file:
            np.save(file, array)
    if facts.captions is not None:
        with _complete(folder / cache.CAPTIONS_FILE) as file:
            file.write(facts.captions)
    if skipped:
        report = "".join(f"{one_line(name)}\t{reason}\n" for name, reason in skipped)
        with _complete(folder / cache.SKIPPED) as file:
            file.write(report.encode(errors="backslashreplace"))
    checksums = {
        cache.shard_name(plan.kind, number, name): checksum
        for number, record in enumerate(records)
        for name, checksum in record.sha256.items()
    }
    kept = [*files, *([] if facts.captions is None else [cache.CAPTIONS_FILE])]
    measured = {name: _moments(records, name) for record in records for name in record.moments}
    constants = facts.constants
    roundings = {name: measured[key] for name in sorted(plan.fields) if (key := rounding_of(name)) in measured}
    meta = cache.CacheMeta(
        format=cache.FORMAT,
        source=spec.source,
        folder=spec.name if spec.path is None else str(spec.path),
        count=len(labels),
        shape=plan.shape,
        classes=facts.classes,
        skipped=len(skipped),
        sha256=checksums | {name: sha256_of(folder / name) for name in kept} | dict(facts.made_of),
        kind=plan.kind,
        shards=tuple(len(record.labels) for record in records) if len(records) > 1 else (),
        origin=facts.origin,
        constants=None if constants is None else cache.StoredField(shape=constants.shape, values="float32"),
        statistics={name: Statistics.of(measured[name]) for name in sorted(plan.fields) if name in measured},
        rounding={name: _shares(measured[name], errors) for name, errors in roundings.items()},
        coordinates=facts.coordinates,
        masked=facts.masked,
    )
    if plan.fields != {cache.IMAGES: meta.field(cache.IMAGES)}:
        meta = meta.model_copy(update={"fields": dict(plan.fields)})
    # Defaults are left out so that older versions can read a cache of one file of pixels.
    with _complete(folder / cache.META) as file:
        file.write((meta.model_dump_json(indent=2, exclude_defaults=True) + "\n").encode())
    sync(folder)


def _moments(records: Sequence[Record], name: str) -> Moments:
    """Return the moments of a field over all files."""
    return merged(np.array([record.moments[name] for record in records if name in record.moments]))


def _shares(values: Moments, errors: Moments) -> Numbers:
    """Return the RMS of errors by channel as a share of the values' standard deviation; 0 where that is 0."""
    count, mean, squares, *_ = errors
    total = squares + count * mean**2
    shares = np.sqrt(np.divide(total, values[2], out=np.zeros_like(total), where=values[2] > 0))
    return tuple(shares.tolist())
