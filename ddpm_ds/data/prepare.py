"""Preparation of a source into a data-set cache, once, by all cores. A cache is complete or does not exist.

Images are decoded by processes, some at a time, and written in order to files of bounded size, in a folder beside the
cache. A finished file has a record of its labels, and is kept when preparation is killed: the next one goes on there.
Processes and hosts that see the same folder share the work: each takes the next file that no other works on.
"""

from __future__ import annotations

import fcntl
import math
import multiprocessing
import os
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from hashlib import sha256
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias
from uuid import uuid4

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm import tqdm

from ddpm_ds.command_line import gib
from ddpm_ds.config.spec import DataSpec, RunSpec
from ddpm_ds.data.cache import (
    FORMAT,
    LABELS,
    META,
    OFFSETS,
    SKIPPED,
    CacheMeta,
    DatasetCache,
    Kind,
    shard_name,
)
from ddpm_ds.data.decoding import decoded
from ddpm_ds.data.latents import Coder, autoencoder_of, encoded, pixels_learned, pixels_of, sources_of
from ddpm_ds.data.sources import Source, UnreadableImage, identity, open_source
from ddpm_ds.errors import DataError
from ddpm_ds.files import read_bytes, replace_file, sha256_of, sync

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2**28
"""Most bytes of a file of images, about so many where they are encoded."""
LARGE_BYTES = 2**36
"""Size of a cache from which ``data.store: auto`` keeps images encoded, where that is less than half."""
VERIFIED_BYTES = 2**34
"""Size of a cache up to which training compares its checksums; ``ddpm-ds prepare`` always does."""
CHUNK_BYTES, CHUNK_IMAGES = 2**22, 64
"""Bytes of pixels, and images, up to which images are decoded by one process at a time."""
FEW_IMAGES = 256
"""Number of images that this process decodes by itself: to start others takes as long."""
SAMPLED_IMAGES = 64
"""Number of images whose encoded size is looked at."""
PLAN, CLAIMS = "plan.json", "claims"
MOST_RECORD_BYTES = 2**27


class Plan(BaseModel):
    """Content of ``plan.json`` in the folder of an unfinished cache: what its files have to fit."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Kind
    shape: tuple[int, int, int]  # (C, H, W)
    images: int
    """Images of the source, the unreadable ones among them."""
    image_bytes: float
    """Bytes that an image takes, on average."""
    shard_images: int
    """Images of the source that a file is made of."""
    origin: str
    """Hash of the source's names and labels."""

    @property
    def shards(self) -> int:
        """Number of files."""
        return math.ceil(self.images / self.shard_images)

    def images_of(self, number: int) -> range:
        """Return the images of the source that file ``number`` is made of."""
        return range(number * self.shard_images, min(self.images, (number + 1) * self.shard_images))


class Record(BaseModel):
    """Record of a finished file of images."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    labels: tuple[int, ...]
    sizes: tuple[int, ...]
    """Bytes of each encoded image."""
    skipped: tuple[tuple[str, str], ...]
    """Names of unreadable images, and the reasons."""
    sha256: str


class Chunk(NamedTuple):
    """Some images that follow one another in the source."""

    images: Sequence[bytes]
    """Each as it is written: pixels or latents (C, H, W), or an encoded file."""
    labels: Sequence[int]
    skipped: Sequence[tuple[str, str]]


Chunks: TypeAlias = Callable[[range], Iterator[Chunk]]
"""Yields the images of a range of the source, in order, the unreadable ones among the skipped."""


def cache_path(spec: DataSpec) -> Path:
    """Return the folder of the cache: a function of everything that a source reads, of size and channels, and of
    ``data.store``, where "auto" means the one that exists; that of latents also of the autoencoder.

    Raises:
        DataError: the autoencoder can't be used.
    """
    if (autoencoder := autoencoder_of(spec)) is not None:
        pixels = cache_path(pixels_of(spec).model_copy(update={"store": "pixels"}))
        return pixels.with_name(f"{pixels.name}-latents-{autoencoder.digest[:8]}")
    name = f"{spec.source}-{spec.stored_size}px-{spec.channels}ch"
    if (hashed := identity(spec)) is not None:
        name += f"-{hashed}"
    pixels, encoded = spec.store_root / name, spec.store_root / f"{name}-encoded"
    if spec.store == "auto":
        return encoded if encoded.exists() and not pixels.exists() else pixels
    return encoded if spec.store == "encoded" else pixels


def class_names(spec: RunSpec) -> Sequence[str]:
    """Return the names of the U-Net's classes, none where it has none; their numbers where no cache names as many."""
    numbers = [str(label) for label in range(spec.unet.classes or 0)]
    try:
        names = CacheMeta.model_validate_json(read_bytes(cache_path(spec.data) / META)).classes
    except (OSError, ValueError, DataError):  # DataError of an autoencoder that is gone
        return numbers
    return names if len(names) == len(numbers) else numbers


def prepare(
    spec: DataSpec,
    progress: bool = False,
    *,
    together: int = 1,
    verify: bool | None = None,
    encode_on: torch.device | None = None,
) -> DatasetCache:
    """Return the data-set cache of ``spec``, made when it is missing; ``progress`` shows bars.

    An existing cache is used unchanged: delete it after changing a folder's images. Safe to call from several processes
    and hosts at once, which share the work; ``together`` of them share this host's cores. Unreadable images are left
    out and named in ``skipped.txt``. ``verify`` compares the checksums of a cache that exists; None means up to 16 GiB.
    Latents are made on the device ``encode_on`` alone.

    Raises:
        DataError: the source's own, too many unreadable images, ``store_root`` not writable or full, a damaged cache,
            an autoencoder that can't be used; latents are missing and ``encode_on`` is None, or of other pixels.
    """
    path = cache_path(spec)
    if path.exists():
        if verify is None:
            verify = sum(file.stat().st_size for file in path.glob("images*")) <= VERIFIED_BYTES
        found = DatasetCache.open(path, verify, progress)
        pixels = None if encode_on is None else pixels_of(spec)
        if (
            pixels is not None
            and cache_path(pixels).exists()
            and prepare(pixels, progress).meta.sha256 != pixels_learned(found.meta.sha256)
        ):
            raise DataError(f"{path} has latents of other pixels than are prepared now; delete it and encode again")
        return found
    if (autoencoder := autoencoder_of(spec)) is not None and encode_on is None:
        raise DataError(
            f"data.autoencoder = {autoencoder.name}: there are no latents at {path}; make them once with: "
            "ddpm-ds prepare --encode"
        )
    try:
        spec.store_root.mkdir(parents=True, exist_ok=True)
        if autoencoder is not None and encode_on is not None:
            coder = Coder(autoencoder, encode_on)
            coder.load()  # a damaged one is to be found before hours of preparation
            _build_latents(path, coder, prepare(pixels_of(spec), progress, together=together), spec, progress)
        else:
            path = _build(spec, progress, max(1, len(os.sched_getaffinity(0)) // together))
    except OSError as error:
        raise DataError(
            f"data.store_root = {spec.store_root} can't be written ({error.strerror or error}); "
            "choose another folder with --set data.store_root=FOLDER"
        ) from error
    return DatasetCache.open(path, verify=False)  # the checksums were taken from the files a moment ago


def _build(spec: DataSpec, progress: bool, processes: int) -> Path:
    """Make the cache of a source, and return its folder."""
    with one_at_a_time(cache_path(spec)):  # one lists, and downloads
        if (path := cache_path(spec)).exists():
            return path
        decoding = decoding_of(spec, progress)
        plan = decoding.plan
        path = cache_path(spec.model_copy(update={"store": plan.kind}))
        start(path, plan)
    if plan.kind == "encoded" and spec.store == "auto" and progress:
        kept, pixels = (f"{size / 1024:,.0f} KiB" for size in (plan.image_bytes, math.prod(plan.shape)))
        print(f"data.store: encoded, {kept} an image instead of {pixels}; data.workers decode them", file=sys.stderr)
    several = processes > 1 and decoding.shareable
    with by_processes(decoding, processes) if several else nullcontext(decoding.chunks) as chunks:
        write_cache(path, plan, chunks, spec, decoding.source.classes, progress)
    return path


def decoding_of(spec: DataSpec, progress: bool) -> Decoding:
    """Return the decoding of the source of ``spec``, with the plan of its cache; nothing is written or decoded yet.

    Raises:
        DataError: the source's own.
    """
    source = open_source(spec, progress)
    encoded_bytes = _encoded_bytes(source)
    return Decoding(source, _planned(spec, source, encoded_bytes), shareable=encoded_bytes is not None)


def _build_latents(path: Path, coder: Coder, pixels: DatasetCache, spec: DataSpec, progress: bool) -> None:
    """Make the cache of the latents of all ``pixels``."""
    shape = (spec.channels, spec.image_size, spec.image_size)
    made_of = sources_of(pixels, coder.autoencoder)
    image_bytes = 2 * math.prod(shape)
    plan = Plan(
        kind="latents",
        shape=shape,
        images=len(pixels),
        image_bytes=image_bytes,
        shard_images=max(1, SHARD_BYTES // image_bytes),
        origin=sha256(repr(sorted(made_of.items())).encode()).hexdigest(),
    )

    def chunks(numbers: range) -> Iterator[Chunk]:
        for part, latents in encoded(pixels, coder, numbers):
            yield Chunk([latent.tobytes() for latent in latents], pixels.labels[part].tolist(), [])

    with one_at_a_time(path):
        if path.exists():
            return
        start(path, plan)
    write_cache(path, plan, chunks, spec, pixels.meta.classes, progress, made_of)


def _encoded_bytes(source: Source) -> float | None:
    """Return the mean size in bytes of some encoded images, None where the source gives pixels."""
    count, sizes = len(source.labels), []
    for i in np.linspace(0, count - 1, min(count, SAMPLED_IMAGES)).astype(int).tolist():
        try:
            content = source.read(i)
        except Exception:  # whoever decodes it says why
            continue
        if not isinstance(content, bytes):
            return None
        sizes.append(len(content))
    return sum(sizes) / max(1, len(sizes))


def _planned(spec: DataSpec, source: Source, encoded_bytes: float | None) -> Plan:
    """Return what the cache of ``source`` will be.

    Raises:
        DataError: the source has no encoded images to keep.
    """
    shape = (spec.channels, spec.stored_size, spec.stored_size)
    images, image_bytes = len(source.labels), float(math.prod(shape))
    encoded = spec.store == "encoded"
    if encoded_bytes is None and encoded:
        raise DataError(f"data.store = encoded, but data.source = {spec.source} has pixels; --set data.store=pixels")
    if encoded_bytes is not None and spec.store == "auto":
        encoded = images * image_bytes > LARGE_BYTES and 2.0 * encoded_bytes < image_bytes
    image_bytes = max(1.0, encoded_bytes or 0.0) if encoded else image_bytes
    return Plan(
        kind="encoded" if encoded else "pixels",
        shape=shape,
        images=images,
        image_bytes=image_bytes,
        shard_images=max(1, int(SHARD_BYTES / image_bytes)),
        origin=_origin(spec, source),
    )


def _origin(spec: DataSpec, source: Source) -> str:
    """Return a hash of the source's names and labels, and of the size and age of the file that it is."""
    digest = sha256(np.asarray(source.labels, np.int64).tobytes())
    for i in range(len(source.labels)):
        digest.update(os.fsencode(source.name(i)) + b"\0")
    if spec.path is not None and spec.path.is_file():
        status = spec.path.stat()
        digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()


class Decoding:
    """Decoding of a source's images, in which processes share."""

    def __init__(self, source: Source, plan: Plan, shareable: bool) -> None:
        self.source, self.plan, self.encoded = source, plan, plan.kind == "encoded"
        self.shareable = shareable and plan.images > FEW_IMAGES
        """Whether several processes are faster than one."""
        self.channels, self.size, _ = plan.shape
        self.chunk_images = min(CHUNK_IMAGES, max(1, CHUNK_BYTES // math.prod(plan.shape)))
        self.large: AbstractContextManager[object] = nullcontext()
        """Context in which a large image is decoded, by one process at a time."""

    def ranges(self, numbers: range) -> Iterator[range]:
        """Yield a range of images in parts that are decoded at a time."""
        return (numbers[first : first + self.chunk_images] for first in range(0, len(numbers), self.chunk_images))

    def chunks(self, numbers: range) -> Iterator[Chunk]:
        """Yield the images of a range of the source."""
        return map(self.chunk, self.ranges(numbers))

    def chunk(self, numbers: range) -> Chunk:
        """Decode images, also those that are kept encoded: that shows that they can be."""
        images: list[bytes] = []
        labels: list[int] = []
        skipped: list[tuple[str, str]] = []
        for i in numbers:
            try:
                pixels = decoded(self.source, i, self.size, self.channels, self.large)
            except UnreadableImage as error:
                skipped.append((error.name, error.reason))
                continue
            content = self.source.read(i) if self.encoded else pixels.transpose(2, 0, 1).tobytes()
            assert isinstance(content, bytes)
            images.append(content)
            labels.append(int(self.source.labels[i]))
        return Chunk(images, labels, skipped)


_decoding: Decoding
"""What a process decodes."""


def _begin(decoding: Decoding, large: Lock) -> None:
    """Begin a process that decodes; it ends with the process that has started it."""
    global _decoding
    _decoding, decoding.large = decoding, large
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _decode(numbers: range) -> Chunk:
    return _decoding.chunk(numbers)


@contextmanager
def by_processes(decoding: Decoding, count: int) -> Iterator[Chunks]:
    """Yield a function that has images decoded by ``count`` processes, a bounded number of them ahead."""
    context = multiprocessing.get_context("spawn")  # this process may have threads
    with ProcessPoolExecutor(count, context, _begin, (decoding, context.Lock())) as pool:

        def chunks(numbers: range) -> Iterator[Chunk]:
            ahead: deque[Future[Chunk]] = deque()
            for part in decoding.ranges(numbers):
                ahead.append(pool.submit(_decode, part))
                if len(ahead) > 2 * count:
                    yield ahead.popleft().result()
            yield from (future.result() for future in ahead)

        try:
            yield chunks
        except BrokenProcessPool as error:
            raise DataError(
                "a process that decoded images was ended, often for want of memory; what is done is kept: start again"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def start(path: Path, plan: Plan) -> None:
    """Make the folder in which the cache at ``path`` is prepared, unless it is there already, for the same plan.

    Raises:
        DataError: the disk has too little space.
    """
    folder = _unfinished(path)
    with suppress(OSError, ValidationError):
        if Plan.model_validate_json(read_bytes(folder / PLAN)) == plan:
            return
    needed, free = plan.images * plan.image_bytes, shutil.disk_usage(path.parent).free
    if needed > free:
        raise DataError(
            f"data.store_root = {path.parent} has {gib(free)} free, and the images take {gib(needed)}; free some, or "
            "choose another folder with --set data.store_root=FOLDER"
        )
    if folder.exists():
        with _claimed(folder, None):  # waits for those who still work on another plan
            shutil.rmtree(folder)
    begun = folder.with_name(f"{folder.name}-{uuid4().hex[:8]}")
    begun.mkdir()
    replace_file(begun / PLAN, plan.model_dump_json().encode())
    try:
        begun.rename(folder)
    except OSError:
        shutil.rmtree(begun)
        if not folder.exists():  # else another process, which could not be locked out, was first
            raise


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.preparing")


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until no other process is in this context for the same cache, where the file system has locks."""
    with path.with_name(f".{path.name}.lock").open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _claimed(folder: Path, number: int | None, wait: bool = True) -> Iterator[bool]:
    """Claim file ``number``, or with None all of them; yields False, without ``wait``, where another process has it.

    Where the file system has no locks (some Lustre mounts) everybody writes everything, and the first to finish wins.
    """
    with (folder / CLAIMS).open("ab") as file:
        mine = True
        try:
            how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.lockf(file, how, 0 if number is None else 1, number or 0)
        except (BlockingIOError, PermissionError):
            mine = False
        except OSError:
            pass
        yield mine


def write_cache(
    path: Path,
    plan: Plan,
    chunks: Chunks,
    spec: DataSpec,
    classes: tuple[str, ...],
    progress: bool,
    made_of: Mapping[str, str] | None = None,
) -> None:
    """Write the cache at ``path``, which :func:`start` has begun, together with whoever else does.

    ``made_of`` are checksums of what the images were made of, by names of no file, which ``meta.json`` keeps too.

    Raises:
        DataError: too many images are unreadable; nothing is kept.
        OSError: the disk; what is finished is kept.
    """
    folder = _unfinished(path)
    try:
        with tqdm(total=plan.images, desc=f"preparing {path.name}", disable=not progress) as bar:
            records = _write_shards(folder, plan, chunks, spec.max_bad_fraction, bar)
        with one_at_a_time(path):
            if not path.exists():
                _describe(folder, plan, records, spec, classes, made_of or {})
                folder.rename(path)
                sync(path.parent)
                for name in (PLAN, CLAIMS, *map(_record_name, range(plan.shards))):
                    (path / name).unlink()
    except OSError:
        if not path.exists():  # else another process has finished
            raise
    except DataError:
        shutil.rmtree(folder, ignore_errors=True)  # a file that is mended keeps its name, and is to be read again
        raise


def _write_shards(folder: Path, plan: Plan, chunks: Chunks, max_bad_fraction: float, bar: tqdm[Any]) -> list[Record]:
    """Write the files that no other process writes, wait for those that others do, and return the records of all."""
    records: dict[int, Record] = {}
    wait = False
    while True:
        worked = False
        for number in range(plan.shards):
            if number in records:
                continue
            with _claimed(folder, number, wait) as mine:
                record = _read_record(folder, number)
                if mine and record is None:
                    skipped = [image for record in records.values() for image in record.skipped]
                    record = _write_shard(folder, plan, number, chunks, max_bad_fraction, skipped, bar)
                    worked = True
            if record is not None:
                records[number] = record
        if len(records) == plan.shards:
            bar.update(plan.images - bar.n)
            return [records[number] for number in range(plan.shards)]
        wait = not worked


def _record_name(number: int) -> str:
    return f"shard.{number}.json"


def _read_record(folder: Path, number: int) -> Record | None:
    with suppress(FileNotFoundError):
        return Record.model_validate_json(read_bytes(folder / _record_name(number), MOST_RECORD_BYTES))
    return None


def _write_shard(
    folder: Path,
    plan: Plan,
    number: int,
    chunks: Chunks,
    max_bad_fraction: float,
    skipped_before: Sequence[tuple[str, str]],
    bar: tqdm[Any],
) -> Record:
    """Write one file of images and its record; ``skipped_before`` are unreadable images of other files."""
    numbers, as_array = plan.images_of(number), plan.kind != "encoded"
    bar.update(numbers.start - bar.n if numbers.start > bar.n else 0)
    temporary = folder / f".{uuid4().hex[:8]}"
    labels: list[int] = []
    sizes: list[int] = []
    skipped: list[tuple[str, str]] = []
    try:
        with temporary.open("wb") as file:
            if as_array:
                _write_header(file, plan, len(numbers))
            for chunk in chunks(numbers):
                file.writelines(chunk.images)
                labels += chunk.labels
                sizes += [] if as_array else map(len, chunk.images)
                skipped += chunk.skipped
                bar.update(len(chunk.images) + len(chunk.skipped))
                if (bad := len(skipped_before) + len(skipped)) > max_bad_fraction * plan.images:
                    name, reason = (*skipped_before, *skipped)[0]
                    raise DataError(
                        f"data.max_bad_fraction = {max_bad_fraction:g} is passed: {bad} of {plan.images} images are "
                        f"unreadable so far, first {name}: {reason}; fix or remove them, or raise it to skip them"
                    )
            if as_array:
                file.seek(0)
                _write_header(file, plan, len(labels))
        sync(temporary)
        record = Record(labels=tuple(labels), sizes=tuple(sizes), skipped=tuple(skipped), sha256=sha256_of(temporary))
        temporary.replace(folder / shard_name(plan.kind, number))
        temporary.write_text(record.model_dump_json())
        sync(temporary)
        temporary.replace(folder / _record_name(number))
    finally:
        temporary.unlink(missing_ok=True)
    return record


def _write_header(file: BinaryIO, plan: Plan, count: int) -> None:
    """Start a ``.npy``. numpy pads the header so that the first dimension can change in place later."""
    descr = "<f2" if plan.kind == "latents" else "|u1"
    header = {"descr": descr, "fortran_order": False, "shape": (count, *plan.shape)}
    np.lib.format.write_array_header_1_0(file, header)


def _describe(
    folder: Path,
    plan: Plan,
    records: Sequence[Record],
    spec: DataSpec,
    classes: tuple[str, ...],
    made_of: Mapping[str, str],
) -> None:
    """Write what a cache has besides its images."""
    labels = [label for record in records for label in record.labels]
    skipped = [image for record in records for image in record.skipped]
    files = {LABELS: np.array(labels, np.int64)}
    if plan.kind == "encoded":
        files[OFFSETS] = np.cumsum([0, *(size for record in records for size in record.sizes)])
    for name, array in files.items():
        np.save(folder / name, array)
    if skipped:
        report = "".join(f"{name}\t{reason}\n" for name, reason in skipped)
        (folder / SKIPPED).write_text(report, encoding="utf-8", errors="backslashreplace")
    checksums = {shard_name(plan.kind, number): record.sha256 for number, record in enumerate(records)}
    meta = CacheMeta(
        format=FORMAT,
        source=spec.source,
        folder=None if spec.path is None else str(spec.path),
        count=len(labels),
        shape=plan.shape,
        classes=classes,
        skipped=len(skipped),
        sha256=checksums | {name: sha256_of(folder / name) for name in files} | dict(made_of),
        kind=plan.kind,
        shards=tuple(len(record.labels) for record in records) if len(records) > 1 else (),
    )
    # Without defaults: any version reads a cache of one file of pixels.
    (folder / META).write_text(meta.model_dump_json(indent=2, exclude_defaults=True) + "\n", encoding="utf-8")
    for name in (*files, META, *([SKIPPED] if skipped else [])):
        sync(folder / name)
    sync(folder)
