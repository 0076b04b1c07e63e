"""Preparation of a source into a data-set cache, once, on all cores.

Worker processes decode images in chunks, while this process writes them (:mod:`ddpm_ds.data.writing`).
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ddpm_ds.command_line import gib
from ddpm_ds.config.spec import DataSpec, RunSpec
from ddpm_ds.data.buckets import (
    BucketData,
    Members,
    Shapes,
    filled_buckets,
    image_sizes,
    kept_sizes,
    moved,
    read_shapes,
    shapes_of,
    sizes_of,
    write_shapes,
)
from ddpm_ds.data.cache import (
    BUCKETS,
    CAPTIONS,
    IMAGES,
    META,
    SIZES,
    CacheMeta,
    DatasetCache,
    Kind,
    Look,
    Origin,
    StoredField,
    bucket_prefix,
    damaged,
    field_of,
)
from ddpm_ds.data.captions import (
    encoded_texts,
    findings,
    image_fields,
    known_captions,
    text_fields,
    text_path,
    text_sources,
    texts_of,
    without_text,
    written,
)
from ddpm_ds.data.decoding import ALONE, Size, decoded
from ddpm_ds.data.fields import (
    REGRESSION,
    SAMPLED,
    FieldSource,
    Regression,
    check_fields,
    fields_of,
    made_of,
    open_fields,
    residuals,
)
from ddpm_ds.data.latents import Coder, autoencoder_of, encoded, pixels_learned, pixels_of, sources_of
from ddpm_ds.data.sources import open_source
from ddpm_ds.data.sources.base import Source, UnreadableImage, captions_of, files_below, printable
from ddpm_ds.data.text import TextEncoders
from ddpm_ds.data.writing import CachePlan, Chunk, Chunks, Facts, locked, tidy, write_cache
from ddpm_ds.errors import DataError
from ddpm_ds.files import processors

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2**28
"""Maximum bytes of a file of images."""
VERIFIED_BYTES = 2**34
"""Maximum size of a cache whose checksums are compared before training; ``ddpm-ds prepare`` always compares them."""
CHUNK_BYTES, CHUNK_IMAGES = 2**22, 64
"""Maximum bytes of pixels, and images, in a chunk that one process decodes."""
FEW_IMAGES = 256
"""Number of images that this process decodes alone, since starting others would take as long."""
SAMPLED_IMAGES, SMALL_BYTES = 64, 2**25
"""Number of images by which a source is recognised; and size of a source of which all images count."""
LOOKED_AT = 10_000
"""Number of a source's folders, and of its files, whose sizes and times are compared before training; below its double
all are. A look at 100,000 files takes 0.3 s on a local disk, but may take minutes over a network.
"""


def cache_path(spec: DataSpec) -> Path:
    """Return the folder of the cache, a function of everything that the source reads, size, channels and, for latents,
    the autoencoder; for residuals, the folder of the regression; for a bucket of aspect, the sizes among which it has
    the images that it crops least.

    Raises:
        DataError: the autoencoder can't be used.
    """
    if (autoencoder := autoencoder_of(spec)) is not None:
        pixels = cache_path(pixels_of(spec))
        return pixels.with_name(f"{pixels.name}-latents-{autoencoder.digest[:8]}")
    if spec.residual_of is not None:
        fields = cache_path(fields_of(spec))
        of_run = sha256(os.fsencode(os.path.realpath(spec.residual_of))).hexdigest()[:8]
        return fields.with_name(f"{fields.name}-residual-{of_run}")
    name = f"{spec.source}-{'x'.join(map(str, dict.fromkeys(spec.stored_size)))}px-{spec.channels}ch"
    return spec.store_root / (name + _source_key(spec))


def _source_key(spec: DataSpec) -> str:
    """Return the end of a cache's name: a hash of what the source reads, empty if it always has the same pixels."""
    keys = {key: getattr(spec, key) for key in ("name", "split", "image_column", "label_column")}
    keys |= spec.named_arrays | {"captions": None if spec.text is None else spec.text.captions}
    if (beside := keys.pop("data.condition.path", None)) is not None:
        keys["data.condition.path"] = os.path.realpath(beside)
    keys["data.buckets"] = spec.sizes if isinstance(spec, BucketData) else None
    named = {key: value for key, value in keys.items() if value is not None}
    path = b"" if spec.path is None else os.fsencode(os.path.realpath(spec.path))  # resolve() fails on a loop of links
    if not (path or named):  # the source has pixels, and no files to decode
        return ""
    read = path + (json.dumps(named).encode() if named else b"")
    return f"-{sha256(read).hexdigest()[:8]}"


def class_names(spec: RunSpec) -> Sequence[str]:
    """Return the names of the U-Net's classes, or their numbers if no cache names them; empty without classes."""
    numbers = [str(label) for label in range(spec.unet.classes or 0)]
    with suppress(OSError, ValueError, DataError):  # DataError if the autoencoder is missing
        first, group = spec.data, spec.bucket_group
        if group is not None and (shapes := _known_shapes(first)) is not None:
            first = _buckets_of(first, shapes, group, None)[0]
        names = CacheMeta.read(cache_path(first)).classes
        if len(names) == len(numbers):
            return names
    return numbers


def prepare(
    spec: DataSpec,
    progress: bool = False,
    *,
    together: int = 1,
    verify: bool | None = None,
    encode_on: torch.device | None = None,
    regression: Regression | None = None,
    learned: Mapping[str, str] | None = None,
    group: int = 1,
    sizes: Sequence[Size] | None = None,
) -> DatasetCache:
    """Return the data-set cache of ``spec`` with its encoded captions, if it has some, making what is missing;
    ``progress`` shows bars. With ``data.buckets`` it is that of the bucket nearest to ``data.image_size`` with those of
    all others that have images: each ``group`` or more to train on, or any number in buckets of given ``sizes``.

    An existing cache is used as it is, also if its source has gone. Several processes and hosts may
    call this at once and share the work; ``together`` of them share this host's cores. Unreadable images are skipped
    and listed in ``skipped.txt``. ``verify`` compares the checksums of an existing cache; None does so up to 16 GiB.
    Latents and text are made on the device ``encode_on`` only, and residuals with a ``regression`` only. ``learned``
    are the checksums of the images that a checkpoint was trained on, whose cache is used though its source has changed.

    Raises:
        DataError: the source fails or can't be normalised as the spec says, has changed since it was prepared (unless
            ``learned`` is given or ``verify`` is False), too many images are unreadable, ``store_root`` is not writable
            or full, the cache is damaged, the autoencoder or an encoder of text can't be used, images have no captions,
            latents or residuals are of other pixels, fields or weights, what is made without ``encode_on`` or
            ``regression`` is missing, or there are fewer images than ``group``.
    """
    is_whole = spec.buckets is not None and not isinstance(spec, BucketData)
    parts = buckets_of(spec, group, sizes, progress) if is_whole else [spec]
    encoders = None
    if spec.text is not None:
        encoders = TextEncoders.open(spec.text, encode_on)
        if encode_on is not None:
            _ = encoders.tokenizers, encoders.models if spec.text.stored != "ids" else ()  # before hours of preparation
    texts: dict[Path, DatasetCache] = {}  # one, of all buckets
    caches = []
    for part in parts:
        of_part = None if learned is None else without_text(_of_part(learned, part, is_first=part is parts[0]))
        images = prepare_images(
            part,
            progress,
            together=together,
            verify=verify,
            encode_on=encode_on,
            regression=regression,
            learned=of_part,
        )
        if encoders is not None:
            path = text_path(images, encoders)
            if path not in texts:
                texts[path] = _text(images, encoders, part, progress, verify)
            images = images.with_text(texts[path])
        caches.append(images)
    first, *others = caches
    return first.with_buckets(others) if others else first


def prepare_images(
    spec: DataSpec,
    progress: bool = False,
    *,
    together: int = 1,
    verify: bool | None = None,
    encode_on: torch.device | None = None,
    regression: Regression | None = None,
    learned: Mapping[str, str] | None = None,
) -> DatasetCache:
    """Return the cache of :func:`prepare` without encoded captions; of images of one size."""
    path = cache_path(spec)
    if os.path.exists(path):  # False if a folder above it can't be entered, which is reported below
        verify_source = verify is not False
        if verify is None:
            verify = sum(file.stat().st_size for file in path.glob("*.*")) <= VERIFIED_BYTES
        found = DatasetCache.open(path, verify, progress)
        if found.meta.shape != spec.stored_shape:
            raise damaged(path, f"{META} says images of {found.meta.shape}, the spec {spec.stored_shape}")
        with suppress(OSError):  # somebody else's folder
            tidy(path)
        if verify_source and found.meta.sha256 != learned:
            _check_source(spec, found, progress)
        if encode_on is not None and spec.autoencoder and cache_path(pixels := pixels_of(spec)).exists():
            now = prepare_images(pixels, progress)
            if now.meta.sha256 != pixels_learned(found.meta.sha256):
                raise DataError(f"{path} has latents of other pixels than are prepared now; delete it and encode again")
        if regression is not None:
            now = prepare(fields_of(spec), progress)
            if any(found.meta.sha256.get(name) != checksum for name, checksum in made_of(now, regression).items()):
                changed = "weights" if found.meta.sha256.get(REGRESSION) != regression.digest else "fields"
                raise DataError(f"{path} has residuals of other {changed} than there are now; delete it and try again")
        check_fields(spec, found.meta)
        return found
    if (autoencoder := autoencoder_of(spec)) is not None and encode_on is None:
        raise DataError(
            f"data.autoencoder = {autoencoder.name}: there are no latents at {path}; make them once with: "
            "ddpm-ds prepare --encode"
        )
    if spec.residual_of is not None and regression is None:
        raise DataError(
            f"data.residual_of = {spec.residual_of}: there are no residuals at {path}; make them once with: "
            f"ddpm-ds prepare --residual {spec.residual_of}"
        )
    try:
        spec.store_root.mkdir(parents=True, exist_ok=True)
        if autoencoder is not None and encode_on is not None:
            coder = Coder(autoencoder, encode_on)
            _ = coder.model  # finds a damaged one before hours of preparation
            _build_latents(path, coder, prepare_images(pixels_of(spec), progress, together=together), spec, progress)
        elif regression is not None:
            _build_residuals(path, regression, prepare(fields_of(spec), progress, together=together), spec, progress)
        else:
            _build(spec, path, progress, max(1, processors() // together))
    except OSError as error:
        raise _unwritable(spec, error) from error
    made = DatasetCache.open(path, verify=False)  # the checksums were just computed from the files
    if progress:
        for line in (made.summary, *made.rounding):
            print(f"{path.name}: {line}", file=sys.stderr)
    check_fields(spec, made.meta)
    return made


def _of_part(learned: Mapping[str, str], part: DataSpec, *, is_first: bool) -> dict[str, str]:
    """Return the checksums of a bucket, of those of all buckets; without buckets they are all."""
    if not isinstance(part, BucketData):
        return dict(learned)
    if is_first:
        return {name: checksum for name, checksum in learned.items() if not name.startswith(BUCKETS)}
    prefix = bucket_prefix(part.shape)
    return {name.removeprefix(prefix): checksum for name, checksum in learned.items() if name.startswith(prefix)}


def buckets_of(
    spec: DataSpec, group: int, sizes: Sequence[Size] | None = None, progress: bool = False
) -> list[BucketData]:
    """Return the buckets of :func:`prepare`; ``progress`` shows a bar, and says which have too few images.

    Raises:
        DataError: there are fewer images than ``group``, or the source fails.
    """
    buckets, known = list[BucketData](), _known_shapes(spec)
    with suppress(DataError):  # of images that have been replaced
        if known is not None:
            buckets = _buckets_of(spec, known, group, sizes)
    shapes = known
    if shapes is None or not any(cache_path(each).exists() for each in buckets):  # else the source may be gone
        try:
            spec.store_root.mkdir(parents=True, exist_ok=True)
            shapes = _shapes(spec, open_source(spec, progress), progress)
        except OSError as error:
            raise _unwritable(spec, error) from error
        buckets = _buckets_of(spec, shapes, group, sizes)
    if progress and sizes is None and (line := moved(spec, shapes, buckets, group)) is not None:
        print(line, file=sys.stderr)
    return buckets


def bucket_shares(spec: RunSpec, *, counted: bool) -> tuple[tuple[Size, float], ...]:
    """Return height and width of the images of each bucket, as ``data.image_size`` counts them, and the share of the
    images in it: equal ones, or of ``counted`` images their own if preparation has counted them; () without buckets.

    Raises:
        DataError: the autoencoder can't be used, or there are too few images.
    """
    data, group = spec.data, spec.bucket_group
    if group is None:
        return ()
    if counted and (shapes := _known_shapes(data)) is not None:
        found = [(bucket.size, len(bucket.members_of(shapes))) for bucket in _buckets_of(data, shapes, group, None)]
    else:
        found = [(size, 1) for size in image_sizes(data, sizes_of(data))]
    total = sum(count for _, count in found)
    return tuple((size, count / total) for size, count in found)


def _buckets_of(spec: DataSpec, shapes: Shapes, group: int, sizes: Sequence[Size] | None) -> list[BucketData]:
    return filled_buckets(spec, shapes, kept_sizes(spec, shapes, group) if sizes is None else sizes)


def _known_shapes(spec: DataSpec) -> Shapes | None:
    """Return the shapes of a source's images as they were found before, or None."""
    found = read_shapes(_shapes_path(spec))
    return None if found is None else found[1]


def _shapes_path(spec: DataSpec) -> Path:
    """Return the file of the shapes of a source's images, which all its buckets share."""
    source = DataSpec(**{name: value for name, value in spec if name in DataSpec.model_fields})
    return spec.store_root / f"{spec.source}-shapes{_source_key(source)}.npz"


def _shapes(spec: DataSpec, source: Source, progress: bool) -> Shapes:
    """Return the shapes of all images of an open source, from their file, which is made if it is of other images."""
    content, path = _sampled(source)[0], _shapes_path(spec)
    with locked(path):
        if (found := read_shapes(path)) is not None and found[0] == content:
            return found[1]
        shapes = shapes_of(source, progress)
        write_shapes(path, content, shapes)
    return shapes


def _opened(spec: DataSpec, progress: bool) -> Source:
    """Open the source of ``spec``, or of a bucket its images in it."""
    source = open_source(spec, progress)
    if not isinstance(spec, BucketData):
        return source
    return Members(source, spec.members_of(_shapes(spec, source, progress)))


def _unwritable(spec: DataSpec, error: OSError) -> DataError:
    return DataError(
        f"data.store_root = {spec.store_root} can't be written ({error.strerror or error}); "
        "choose another folder with --set data.store_root=FOLDER"
    )


def _text(
    images: DatasetCache, encoders: TextEncoders, spec: DataSpec, progress: bool, verify: bool | None
) -> DatasetCache:
    """Return the cache of the encoded captions of ``images``, made if the encoders have a device or need none."""
    path = text_path(images, encoders)
    sources = text_sources(images, encoders)
    if os.path.exists(path):
        size = sum(file.stat().st_size for file in path.glob("*.*"))
        found = DatasetCache.open(path, size <= VERIFIED_BYTES if verify is None else verify, progress)
        if any(found.meta.sha256.get(name) != checksum for name, checksum in sources.items()):
            raise damaged(path, "it has text of other captions or encoders")
        return found
    if encoders.device is None and encoders.spec.stored != "ids":
        raise DataError(
            f"data.text.encoders = {encoders.spec.encoders}: there is no encoded text at {path}; make it once with: "
            "ddpm-ds prepare --encode"
        )
    texts, fields = texts_of(images), text_fields(encoders)
    text_bytes = sum(stored.nbytes for stored in fields.values())
    if progress:
        free = shutil.disk_usage(path.parent).free
        print(
            f"{path.name}: {len(texts):,} distinct captions of {text_bytes:,} bytes ({encoders.spec.stored}) take "
            f"{gib(len(texts) * text_bytes)}, {gib(free)} are free",
            file=sys.stderr,
        )
    plan = _plan("text", fields, len(texts), text_bytes, _hash_of(sources))

    def chunks(numbers: range) -> Iterator[Chunk]:
        return encoded_texts(encoders, texts[numbers.start : numbers.stop])

    try:
        write_cache(path, plan, chunks, spec, Facts((".",), sources), progress)
    except OSError as error:
        raise _unwritable(spec, error) from error
    made = DatasetCache.open(path, verify=False)
    for line in findings(made) if progress else ():
        print(f"{path.name}: {line}", file=sys.stderr)
    return made


def _build(spec: DataSpec, path: Path, progress: bool, processes: int) -> None:
    """Make the cache of a source."""
    with locked(path):  # only one process of a host lists and downloads
        if path.exists():
            return
        decoding = decoding_of(spec, progress)
    chunking: AbstractContextManager[Chunks] = nullcontext(decoding.chunks)
    if isinstance(decoding, Decoding) and decoding.shareable and processes > 1:
        chunking = by_processes(decoding, processes)
    with chunking as chunks:
        write_cache(path, decoding.plan, chunks, spec, decoding.facts, progress)


def _build_latents(path: Path, coder: Coder, pixels: DatasetCache, spec: DataSpec, progress: bool) -> None:
    """Make the cache of the latents of all ``pixels``."""
    sources = sources_of(pixels, coder.autoencoder)
    beside = {name: pixels.meta.field(name) for name in pixels.others}
    fields = {IMAGES: field_of("latents", spec.shape), **beside}
    plan = _plan("latents", fields, len(pixels), sum(each.nbytes for each in fields.values()), _hash_of(sources))

    def chunks(numbers: range) -> Iterator[Chunk]:
        for part, latents in encoded(pixels, coder, numbers):
            others = {name: [row.data for row in stored[part]] for name, stored in pixels.others.items()}
            yield Chunk([latent.tobytes() for latent in latents], pixels.labels[part].tolist(), [], others)

    captions = written(texts_of(pixels)) if spec.text is not None else None
    facts = Facts(pixels.meta.classes, sources, pixels.meta.origin, captions=captions)
    write_cache(path, plan, chunks, spec, facts, progress)


def _build_residuals(path: Path, regression: Regression, fields: DatasetCache, spec: DataSpec, progress: bool) -> None:
    """Make the cache of the residuals of all ``fields``."""
    meta, sources = fields.meta, made_of(fields, regression)
    stored = {name: meta.field(name) for name in fields.fields}
    stored[IMAGES] = stored[IMAGES].model_copy(update={"offset": ()})
    image_bytes = sum(each.nbytes for each in stored.values())
    plan = _plan("fields", stored, len(fields), image_bytes, _hash_of(sources))
    facts = Facts(meta.classes, sources, meta.origin, fields.constants, meta.coordinates, meta.masked)
    write_cache(path, plan, lambda numbers: residuals(fields, regression, numbers), spec, facts, progress)


def _hash_of(sources: Mapping[str, str]) -> str:
    """Return a hash of the checksums that images are made of."""
    return sha256(repr(sorted(sources.items())).encode()).hexdigest()


def _plan(kind: Kind, fields: Mapping[str, StoredField], images: int, image_bytes: float, origin: str) -> CachePlan:
    return CachePlan(kind, fields, images, image_bytes, max(1, int(SHARD_BYTES / image_bytes)), origin)


def decoding_of(spec: DataSpec, progress: bool) -> Decoding | Reading:
    """Return what reads the source of ``spec``, with the plan of its cache, before anything is decoded or written.

    Raises:
        DataError: the source fails, or has other fields than the spec says.
    """
    beside = None if spec.condition is None else spec.condition.path
    looks, beside_looks = (  # before it is read
        {} if path is None else looks_of(path, spec.reads_arrays) for path in (spec.path, beside)
    )
    source: FieldSource | Source
    if spec.reads_arrays:
        source = fields = open_fields(spec).centred()
        content = fields.content(*_paths(spec))
        image_bytes = float(sum(stored.nbytes for stored in fields.fields.values()))
    else:
        source = _opened(spec, progress)
        captions = known_captions(source, spec)
        content, are_files = _sampled(source)
        image_bytes = float(math.prod(spec.stored_shape))
    images = len(source.labels)
    # A file's time counts while the cache is made; those of a folder may differ between hosts that share the work.
    of_files = [str(look) for path, look in ((spec.path, looks), (beside, beside_looks)) if path and path.is_file()]
    origin = None if spec.path is None else Origin(content=content, looks=looks, condition_looks=beside_looks)
    if isinstance(source, FieldSource):
        kind: Kind = "fields" if spec.are_fields else "pixels"
        plan = _plan(kind, source.fields, images, image_bytes, " ".join([content, *of_files]))
        masked = spec.mask is not None
        return Reading(
            plan, source.chunks, Facts(source.classes, {}, origin, source.constants, source.coordinates, masked)
        )
    facts, stored = Facts(source.classes, {}, origin), {IMAGES: field_of("pixels", spec.stored_shape)}
    if captions is not None:
        facts, stored = replace(facts, captions=written(captions.texts)), stored | image_fields(captions.table)
    plan = _plan("pixels", stored, images, image_bytes, " ".join([content, *of_files]))
    table = None if captions is None else captions.table
    return Decoding(source, plan, shareable=are_files, facts=facts, captions=table)


@dataclass(frozen=True)
class Reading:
    """Reading of a source's fields, by one process, since nothing is decoded."""

    plan: CachePlan
    chunks: Chunks
    facts: Facts


def _sampled(source: Source) -> tuple[str, bool]:
    """Return a hash of a source's names, labels and some images, or all if they are small, and whether they are
    files to decode.
    """
    digest = sha256(np.asarray(source.labels, np.int64).tobytes())
    for i in range(len(source.labels)):
        digest.update(os.fsencode(source.name(i)) + b"\0")
    if (captions := captions_of(source)) is not None:
        digest.update(written(captions.texts) + captions.table.tobytes())
    count, sizes, encoded = len(source.labels), list[int](), True
    some = np.linspace(0, count - 1, min(count, SAMPLED_IMAGES)).astype(int)
    for part in (some, np.setdiff1d(np.arange(count), some)):
        if part is not some and not 0 < sum(sizes) / max(1, len(sizes)) <= SMALL_BYTES / count:
            break
        for i in part.tolist():
            try:
                content = source.read(i)
            except Exception:  # decoding will report the reason
                continue
            encoded = isinstance(content, bytes)
            content = content if isinstance(content, bytes) else content.tobytes()
            digest.update(content)
            sizes.append(len(content))
    return digest.hexdigest(), encoded


def _paths(spec: DataSpec) -> list[Path]:
    """Return the paths of a source's images and of its condition."""
    return [path for path in (spec.path, None if spec.condition is None else spec.condition.path) if path is not None]


def looks_of(path: Path, whole: bool) -> dict[str, Look]:
    """Return the look of a path and, in a folder, of some of its folders and files, by their relative names; with
    ``whole`` one of the path with all of its files.
    """
    if whole:
        return {} if (look := _look(path, whole)) is None else {".": look}
    folders = (os.path.join(above, name) for above, names, _ in os.walk(path) for name in names)
    files = (os.path.join(above, name) for above, _, names in os.walk(path) for name in names)
    names = (os.path.relpath(each, path) for each in (str(path), *_thinned(folders), *_thinned(files)))
    found = ((name, _look(path / name)) for name in names if printable(name) == name)  # others are no JSON
    return {name: look for name, look in found if look is not None}


def _thinned(items: Iterable[str]) -> list[str]:
    """Return all items or, of many, at least :data:`LOOKED_AT` evenly spaced ones, and less than twice as many."""
    kept, step = list[str](), 1
    for number, item in enumerate(items):
        if number % step == 0:
            kept.append(item)
        if len(kept) == 2 * LOOKED_AT:
            kept, step = kept[::2], 2 * step
    return kept


def _look(path: Path, whole: bool = False) -> Look | None:
    """Return the size in bytes, 0 for a folder, and the time of the last change in ns; None if it can't be seen. Those
    of a ``whole`` folder are the sum of its files' sizes, and a number made of their names, sizes and times.
    """
    try:
        status = os.stat(path)
        if whole and stat.S_ISDIR(status.st_mode):
            files = files_below(path)
            made = sha256(repr([(name, each.st_size, each.st_mtime_ns) for name, each in files.items()]).encode())
            return sum(each.st_size for each in files.values()), int.from_bytes(made.digest()[:7])
    except OSError:
        return None
    return 0 if stat.S_ISDIR(status.st_mode) else status.st_size, status.st_mtime_ns


def _check_source(spec: DataSpec, found: DatasetCache, progress: bool) -> None:
    """Refuse a cache if ``data.path`` has other images now; it may be gone, and copies of it have other times.

    Raises:
        DataError: a file has another size or, if only times differ, the source has other names, labels or images.
    """
    if spec.path is None or (origin := found.meta.origin) is None:
        return
    looks = [
        (before, _look(path / name, spec.reads_arrays))
        for path, known in zip(_paths(spec), (origin.looks, origin.condition_looks), strict=False)
        for name, before in known.items()
    ]
    if all(before == now for before, now in looks):
        return
    if all(now is None or before[0] == now[0] for before, now in looks):
        try:
            whole = open_fields(spec).content(*_paths(spec)) if spec.reads_arrays else None
            if (whole or _sampled(_opened(spec, progress))[0]) == origin.content:
                if progress and whole and whole.startswith(SAMPLED):
                    print(
                        f"data.path = {spec.path} was written after {found.path} was made of it, and is compared by "
                        f"some images; if others have changed delete {found.path}",
                        file=sys.stderr,
                    )
                return
        except (DataError, OSError) as error:
            if progress and os.path.lexists(spec.path):
                print(f"{error}; the images in {found.path} are used", file=sys.stderr)
            return
    what = "images" if spec.text is None else "images or captions"
    raise DataError(
        f"data.path = {spec.path} has other {what} than {found.path} was prepared from; bring those back, or delete "
        f"{found.path} to prepare these"
    )


class Decoding:
    """Decoding of a source's images, shared by several processes."""

    def __init__(
        self,
        source: Source,
        plan: CachePlan,
        shareable: bool,
        facts: Facts,
        captions: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self.source, self.plan, self.facts = source, plan, facts
        self.captions = captions
        """Numbers of each image's captions, (N, most captions)."""
        self.shareable = shareable and plan.images > FEW_IMAGES
        """Whether several processes are faster than one."""
        self.chunk_images = min(CHUNK_IMAGES, max(1, CHUNK_BYTES // math.prod(plan.shape)))
        self.large: AbstractContextManager[object] = ALONE
        """Context in which a large image is decoded, by one process at a time."""

    def parts(self, numbers: range) -> Iterator[range]:
        """Yield the parts of a range of images that are decoded together."""
        return (numbers[first : first + self.chunk_images] for first in range(0, len(numbers), self.chunk_images))

    def chunks(self, numbers: range) -> Iterator[Chunk]:
        """Yield the images of a range of the source in chunks."""
        return map(self.chunk, self.parts(numbers))

    def chunk(self, numbers: range) -> Chunk:
        """Decode images; those that are unreadable are skipped."""
        images, labels, skipped = list[bytes](), list[int](), list[tuple[str, str]]()
        others: dict[str, list[bytes]] = {} if self.captions is None else {SIZES: [], CAPTIONS: []}
        channels, *size = self.plan.shape
        for i in numbers:
            try:
                pixels, sizes = decoded(self.source, i, (size[0], size[1]), channels, self.large)
            except UnreadableImage as error:
                skipped.append((error.name, error.reason))
                continue
            images.append(pixels.transpose(2, 0, 1).tobytes())
            labels.append(int(self.source.labels[i]))
            if self.captions is not None:
                others[SIZES].append(sizes.tobytes())
                others[CAPTIONS].append(self.captions[i].tobytes())
        return Chunk(images, labels, skipped, others)


QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"
"""Option of Python's helper process that frees semaphores of a killed process: to do so without a word."""
_decoding: Decoding
"""Decoding of this worker process."""


def _begin(file: str, large: Lock) -> None:
    """Initialise a worker process that decodes; it ends with its parent process. ``file`` holds the decoding."""
    global _decoding
    _decoding = ForkingPickler.loads(Path(file).read_bytes())
    _decoding.large = large
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
    """Yield a function that decodes images in ``count`` processes, a bounded number of chunks ahead."""
    context = multiprocessing.get_context("spawn")  # this process may have threads
    sys.warnoptions.append(QUIET)
    # A file in memory, since more than a pipe holds would be waited for even if the process has died at its start.
    with (
        os.fdopen(os.memfd_create("ddpm-ds-decoding"), "wb") as memory,
        ProcessPoolExecutor(
            count, context, _begin, (f"/proc/{os.getpid()}/fd/{memory.fileno()}", context.Lock())
        ) as pool,
    ):
        memory.write(ForkingPickler.dumps(decoding))
        memory.flush()

        def chunks(numbers: range) -> Iterator[Chunk]:
            ahead: deque[Future[Chunk]] = deque()
            for part in decoding.parts(numbers):
                # Processes that this starts leave Ctrl-C to their parent, with which they end.
                unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    ahead.append(pool.submit(_decode, part))
                except OSError as error:  # of a pipe that a broken pool has closed
                    raise BrokenProcessPool from error
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
                if len(ahead) > 2 * count:
                    yield ahead.popleft().result()
            yield from (future.result() for future in ahead)

        try:
            yield chunks
        except BrokenProcessPool as error:
            raise DataError(
                "a process that decoded images was ended, often for want of memory; what is done is kept: start again"
            ) from error
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():
                worker.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
