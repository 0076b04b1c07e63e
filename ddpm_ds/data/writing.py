"""Writing of a data-set cache by all processes of a run, which share its folder.

Images and their other fields are written in order to files of bounded size, in a folder beside the cache. Each host
begins with its own share of the files, and then helps the others; each of its processes takes the next file that no
other has locked. A finished file has a record and survives if its process is killed. A cache is complete or does not
exist.
"""

import glob
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias
from uuid import uuid4

import filelock
import numpy as np
from pydantic import Field
from tqdm import tqdm

from ddpm_ds.data import cache
from ddpm_ds.data.statistics import Kept, Moments, Numbers, Statistics, merged, rounding_of, shares_of_spread
from ddpm_ds.ground.errors import DataError, one_line
from ddpm_ds.ground.files import read_bytes, sha256_of, sync
from ddpm_ds.ground.host import processes_on_host
from ddpm_ds.ground.units import gib

SHARD_BYTES = 2**28
"""Maximum bytes of a file of images."""
MOST_RECORD_BYTES = 2**27


class Record(Kept):
    """Record of a finished file of images."""

    labels: tuple[int, ...]
    skipped: tuple[tuple[str, str], ...]
    """Names of unreadable images, with reasons."""
    sha256: dict[str, str]
    """Checksum of the file of each field."""
    moments: dict[str, tuple[Numbers, ...]] = Field(default={})
    """Moments (5, C) of fields."""


class Chunk(NamedTuple):
    """Consecutive images of the source."""

    images: Sequence[bytes | memoryview]
    """Stored values of each image: pixels, latents or fields (C, H, W)."""
    labels: list[int]
    skipped: list[tuple[str, str]]
    others: Mapping[str, Sequence[bytes | memoryview]] = {}
    """Stored values of each image in other fields."""
    moments: Mapping[str, Moments] = {}
    """Moments of fields, of all images in the chunk."""


Chunks: TypeAlias = Callable[[range], Iterator[Chunk]]
"""Function that yields the images of a range of the source in order, listing unreadable ones as skipped."""


@dataclass(frozen=True)
class Content:
    """Content of a cache, and the function that makes its images."""

    meta: cache.CacheMeta
    """Known facts: ``count`` includes unreadable images, and ``sha256`` has the checksums of their sources."""
    chunks: Chunks
    state: str = ""
    """State of the source; processes that find another state write a cache of their own."""
    constants: cache.Images | None = None
    """Fields that all images share, float32 (C, H, W)."""
    captions: bytes | None = None
    """Content of the file of distinct captions."""
    max_bad_fraction: float = 0.0

    @property
    def image_bytes(self) -> int:
        """Bytes per image, of all fields together."""
        return sum(stored.nbytes for stored in self.meta.stored.values())

    @property
    def shards(self) -> list[range]:
        """Images of the source in each file."""
        count, step = self.meta.count, max(1, SHARD_BYTES // self.image_bytes)
        return [range(first, min(count, first + step)) for first in range(0, count, step)]

    @property
    def digest(self) -> str:
        """Hash of all facts that the processes which write a cache must agree on."""
        meta = self.meta
        agreed = (meta.kind, meta.stored, meta.count, SHARD_BYTES, self.state, sorted(meta.sha256.items()))
        return sha256(repr(agreed).encode()).hexdigest()


def lock_of(path: Path, name: str = "list") -> filelock.FileLock:
    """Return lock ``name`` of a cache among this host's processes; not all shared file systems have locks."""
    file = _lock_file(path, name)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    return filelock.FileLock(file)


def _lock_file(path: Path, name: str) -> Path:
    of_path = sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"ddpm-ds-{os.getuid()}", f"{of_path}.{name}.lock")


def write_cache(path: Path, content: Content, progress: bool, beginnings: int = 3) -> None:
    """Write the cache at ``path`` unless it exists, together with other processes that do the same.

    If the unfinished folder is removed, writing begins again, ``beginnings`` times in all. Raises DataError if the disk
    is too small or too many images are unreadable. Raises OSError if the disk fails, and keeps the finished files.
    """
    if path.exists():
        return
    folder = path.with_name(f".{path.name}.{content.digest[:8]}.preparing")
    needed, free = content.meta.count * content.image_bytes, shutil.disk_usage(path.parent).free
    if needed > free and not folder.exists():
        raise DataError(
            f"data.store_root = {path.parent} has {gib(free)} free, and the "
            f"{'texts' if content.meta.kind == 'text' else 'images'} need {gib(needed)}; free some, or "
            "choose another folder with --set data.store_root=FOLDER"
        )
    folder.mkdir(exist_ok=True)
    try:
        with tqdm(total=content.meta.count, desc=f"preparing {path.name}", disable=not progress) as bar:
            records = _Shards(path, folder, content, bar).write()
        _describe(folder, content, records)
        folder.rename(path)
    except OSError as error:
        if not path.exists():
            if beginnings == 1 or not isinstance(error, FileNotFoundError):
                raise
            # Another process gave up and removed the folder: retry, to hit the same error and report it.
            write_cache(path, content, progress, beginnings - 1)
    except DataError:
        shutil.rmtree(folder, ignore_errors=True)  # a source file that the user mends keeps its name
        raise
    sync(path.parent)
    locks = _lock_file(path, "[0-9]*")
    for left in (*path.glob(_record_name("*")), *path.glob(".????????"), *locks.parent.glob(locks.name)):
        left.unlink(missing_ok=True)
    for others in path.parent.glob(f".{glob.escape(path.name)}.*preparing"):
        shutil.rmtree(others, ignore_errors=True)


def _record_name(number: int | str) -> str:
    return f"shard.{number}.json"


class _Shards:
    """Files of a cache that is being written."""

    def __init__(self, path: Path, folder: Path, content: Content, bar: "tqdm[Any]") -> None:
        self.path, self.folder, self.content, self.bar = path, folder, content, bar
        self.shards = content.shards
        self.found = {number for number in range(len(self.shards)) if (folder / _record_name(number)).exists()}
        """Numbers of an earlier start's files, whose checksums this process has not compared yet."""
        self.records: dict[int, Record] = {}

    def write(self) -> list[Record]:
        """Write the files that no other process writes, wait for those of this host, and return all records."""
        rank, world = (int(os.environ.get(name, 1)) for name in ("RANK", "WORLD_SIZE"))
        local = processes_on_host()
        hosts, every = max(1, world // local), range(len(self.shards))
        own = every[rank // local % hosts :: hosts]
        # After its own files this host takes the other hosts' files, which they reach last.
        missing, seconds = [*own, *sorted({*every} - {*own}, reverse=True)], 0
        while missing:
            for number in missing:
                with suppress(filelock.Timeout), lock_of(self.path, str(number)).acquire(timeout=seconds):
                    self.records[number] = self._read_record(number) or self._write_shard(number)
            missing, seconds = [number for number in missing if number not in self.records], -1  # as long as it takes
        self._check_skipped()  # of all processes
        self.bar.update(self.content.meta.count - self.bar.n)
        return [self.records[number] for number in every]

    def _check_skipped(self, now: Sequence[tuple[str, str]] = ()) -> None:
        """Raise DataError if more images, ``now`` included, are unreadable than ``data.max_bad_fraction`` allows."""
        skipped = [image for number in sorted(self.records) for image in self.records[number].skipped] + [*now]
        most, images = self.content.max_bad_fraction, self.content.meta.count
        if len(skipped) > most * images:
            name, reason = skipped[0]
            raise DataError(
                f"data.max_bad_fraction = {most:g}, but {len(skipped)} of {images} images are unreadable so far, "
                f"first {name}: {reason}; fix or remove them, or raise it to skip them"
            )

    def _read_record(self, number: int) -> Record | None:
        """Return the record of a file; None without one, or if an earlier start left a damaged record or file."""
        with suppress(OSError, ValueError):
            record = Record.model_validate_json(read_bytes(self.folder / _record_name(number), MOST_RECORD_BYTES))
            whole = len(record.labels) + len(record.skipped) == len(self.shards[number])
            for name, checksum in record.sha256.items() if number in self.found else ():
                whole = whole and sha256_of(self.folder / cache.shard_name(number, name)) == checksum
            self.found.discard(number)
            return record if whole else None
        return None

    def _write_shard(self, number: int) -> Record:
        """Write one file of each field and their record; padding lets a header's count change."""
        numbers = self.shards[number]
        labels, skipped, moments = list[int](), list[tuple[str, str]](), dict[str, Moments]()
        with ExitStack() as stack:
            names = {name: self.folder / cache.shard_name(number, name) for name in self.content.meta.stored}
            files = {name: stack.enter_context(_complete(path)) for name, path in names.items()}
            self._write_headers(files, len(numbers))
            for chunk in self.content.chunks(numbers):
                files[cache.IMAGES].writelines(chunk.images)
                for name, images in chunk.others.items():
                    files[name].writelines(images)
                for name, found in chunk.moments.items():
                    moments[name] = merged(np.stack([moments[name], found])) if name in moments else found
                labels += chunk.labels
                skipped += chunk.skipped
                self.bar.update(len(chunk.images) + len(chunk.skipped))
                if chunk.skipped:
                    self._check_skipped(skipped)
                del chunk  # an image may take 200 MB, and the next is about to be read
            self._write_headers(files, len(labels))
            for file in files.values():
                file.flush()
            checksums = {name: sha256_of(Path(file.name)) for name, file in files.items()}
        record = Record(
            labels=tuple(labels),
            skipped=tuple(skipped),
            sha256=checksums,
            moments={name: tuple(map(tuple, found.tolist())) for name, found in moments.items()},
        )
        with _complete(self.folder / _record_name(number)) as file:
            file.write(record.model_dump_json().encode())
        return record

    def _write_headers(self, files: Mapping[str, BinaryIO], count: int) -> None:
        for name, file in files.items():
            stored = self.content.meta.stored[name]
            header = {"descr": stored.dtype.str, "fortran_order": False, "shape": (count, *stored.shape)}
            file.seek(0)
            np.lib.format.write_array_header_1_0(file, header)


@contextmanager
def _complete(path: Path) -> Iterator[BinaryIO]:
    """Yield a file, and move it to ``path`` once the body has ended without an error."""
    temporary = path.with_name(f".{uuid4().hex[:8]}")
    try:
        with temporary.open("wb") as file:
            yield file
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _describe(folder: Path, content: Content, records: Sequence[Record]) -> None:
    """Write the files of a cache beside its fields."""
    labels = [label for record in records for label in record.labels]
    skipped = [image for record in records for image in record.skipped]
    constants, fields = content.constants, sorted(content.meta.stored)
    contents = {cache.LABELS: _saved(np.array(labels, np.int64))}
    if constants is not None:
        contents[cache.CONSTANTS] = _saved(constants)
    if content.captions is not None:
        contents[cache.CAPTIONS_FILE] = content.captions
    checksums = {
        cache.shard_name(number, name): checksum
        for number, record in enumerate(records)
        for name, checksum in record.sha256.items()
    }
    checksums |= {name: sha256(each).hexdigest() for name, each in contents.items()}
    if skipped:
        report = "".join(f"{one_line(name)}\t{reason}\n" for name, reason in skipped)
        contents[cache.SKIPPED] = report.encode(errors="backslashreplace")
    measured = {
        name: merged(np.array([each.moments[name] for each in records if name in each.moments]))
        for name in {name: None for record in records for name in record.moments}
    }
    roundings = {name: measured[key] for name in fields if (key := rounding_of(name)) in measured}
    found: dict[str, object] = {
        "count": len(labels),
        "skipped": len(skipped),
        "sha256": checksums | content.meta.sha256,
        "shards": tuple(len(record.labels) for record in records) if len(records) > 1 else (),
        "constants": None if constants is None else cache.StoredField(shape=constants.shape, values="float32"),
        "statistics": {name: Statistics.of(measured[name]) for name in fields if name in measured},
        "rounding": {name: shares_of_spread(measured[name], errors) for name, errors in roundings.items()},
    }
    meta = content.meta.model_copy(update=found)
    contents[cache.META] = (meta.model_dump_json(indent=2, exclude_defaults=True) + "\n").encode()
    for name, each in contents.items():
        with _complete(folder / name) as file:
            file.write(each)
    sync(folder)


def _saved(array: cache.Images) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()
