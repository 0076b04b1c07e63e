"""Preparation of a source into a data-set cache, once, on all cores.

::

    source ──decode──▶ pixels ──autoencoder──▶ latents          each arrow is a :class:`Preparation`, which is written
       │                  └──────captions────▶ encoded text     to a cache of its own (:mod:`ddpm_ds.data.writing`)
       └────read─────▶ fields ──regression───▶ residuals
"""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddpm_ds.data import buckets, cache, captions
from ddpm_ds.data.decoding import Decoding, Size
from ddpm_ds.data.fields import (
    REGRESSION,
    SAMPLED,
    Regression,
    check_fields,
    fields_of,
    made_of,
    open_fields,
    residuals,
)
from ddpm_ds.data.latents import Coder, autoencoder_of, encoded, pixels_of, sources_of
from ddpm_ds.data.sources import open_source
from ddpm_ds.data.sources.base import Source, captions_of, files_below, printable
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.data.text import TextEncoders
from ddpm_ds.data.writing import CachePlan, Chunk, Chunks, Facts, lock_of, write_cache
from ddpm_ds.ground.errors import DataError
from ddpm_ds.ground.files import replace_file
from ddpm_ds.ground.host import processors
from ddpm_ds.ground.units import gib

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

SHARD_BYTES = 2**28
"""Maximum bytes of a file of images."""
VERIFIED_BYTES = 2**34
"""Maximum size of a cache whose checksums are compared before training; ``ddpm-ds prepare`` always compares them."""
SAMPLED_IMAGES, SMALL_BYTES = 64, 2**25
"""Number of images that a source is recognised by, and size of a source that is recognised by all."""
LOOKED_AT = 10_000
"""Number of a source's folders, and of its files, whose sizes and times are compared before training; below its double
all are. A look at 100,000 files takes 0.3 s on a local disk, but may take minutes over a network.
"""


class Preparation(NamedTuple):
    """Plan and facts of a cache, and the function that makes its images."""

    plan: CachePlan
    facts: Facts
    chunks: Chunks


def cache_path(spec: DataSpec) -> Path:
    """Return the folder of the cache, named after all that decides its images; raises DataError."""
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
    """Return the end of a cache's name: a hash of the source's keys and path, empty if its pixels never change."""
    keys = {key: getattr(spec, key) for key in ("name", "split", "image_column", "label_column")}
    keys |= spec.named_arrays | {"captions": None if spec.text is None else spec.text.captions}
    if (beside := keys.pop("data.condition.path", None)) is not None:
        keys["data.condition.path"] = os.path.realpath(beside)
    keys["data.buckets"] = spec.sizes if isinstance(spec, buckets.BucketData) else None
    named = {key: value for key, value in keys.items() if value is not None}
    path = b"" if spec.path is None else os.fsencode(os.path.realpath(spec.path))  # resolve() fails on a loop of links
    if not (path or named):  # the source has pixels, and no files to decode
        return ""
    read = path + (json.dumps(named).encode() if named else b"")
    return f"-{sha256(read).hexdigest()[:8]}"


def class_names(data: DataSpec, group: int | None, classes: int | None) -> Sequence[str]:
    """Return the names of the U-Net's classes, or their numbers if no cache names them; empty without classes.

    ``group`` is the number of consecutive images that share a bucket of aspect, None without buckets.
    """
    numbers = [str(label) for label in range(classes or 0)]
    with suppress(OSError, ValueError, DataError):  # DataError if the autoencoder is missing
        if group is not None and (shapes := _known_shapes(data)) is not None:
            data = buckets.filled_buckets(data, shapes, group)[0]
        names = cache.CacheMeta.read(cache_path(data)).classes
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
) -> cache.DatasetCache:
    """Return the data-set cache of ``spec``, with its encoded captions if it has some, making all that is missing.

    With ``data.buckets`` it is the cache of the bucket nearest to ``data.image_size`` with those of all others that
    have images: each ``group`` or more to train on, or any number in buckets of given ``sizes``. An existing cache is
    used as it is, also if its source has gone. Several processes and hosts may call this at once and share the work;
    ``together`` of them share this host's cores. ``progress`` shows bars. ``verify`` compares the checksums of an
    existing cache; None does so up to 16 GiB. Latents and text are made only on a device ``encode_on``, residuals only
    with a ``regression``. ``learned`` are the checksums of a checkpoint's images: their cache is used though its source
    has changed, as it is if ``verify`` is False. Raises DataError.
    """
    is_whole = spec.buckets is not None and not isinstance(spec, buckets.BucketData)
    parts = buckets_of(spec, group, sizes, progress) if is_whole else [spec]
    encoders = None
    if spec.text is not None:
        encoders = TextEncoders.open(spec.text, encode_on)
        if encode_on is not None:
            _ = encoders.tokenizers, encoders.models if spec.text.stored != "ids" else ()  # before hours of preparation
    texts: dict[Path, cache.DatasetCache] = {}  # one, of all buckets
    caches = []
    for part in parts:
        known = learned
        if learned is not None:
            prefix = cache.bucket_prefix(part.shape) if part is not parts[0] else ""
            own = {name.removeprefix(prefix): value for name, value in learned.items() if name.startswith(prefix)}
            known = {name: value for name, value in own.items() if not name.startswith((cache.BUCKETS, cache.TEXTS))}
        images = prepare_images(
            part, progress, together=together, verify=verify, encode_on=encode_on, regression=regression, learned=known
        )
        if encoders is not None:
            name = f"text-{images.meta.sha256[cache.CAPTIONS_FILE][:8]}-{encoders.digest[:8]}"
            kind = encoders.spec.stored
            path = images.path.with_name(name if kind == "float16" else f"{name}-{kind}")
            if path not in texts:
                texts[path] = _text(path, images, encoders, part, progress, verify)
            images = images.with_others(texts[path])
        caches.append(images)
    first, *others = caches
    return first.with_others(None, others) if others else first


def prepare_images(
    spec: DataSpec,
    progress: bool = False,
    *,
    together: int = 1,
    verify: bool | None = None,
    encode_on: torch.device | None = None,
    regression: Regression | None = None,
    learned: Mapping[str, str] | None = None,
) -> cache.DatasetCache:
    """Return the cache of :func:`prepare` without encoded captions; of images of one size."""
    path, autoencoder = cache_path(spec), autoencoder_of(spec)
    base = pixels_of(spec) if autoencoder is not None else fields_of(spec) if spec.residual_of is not None else None
    if (found := _opened(path, verify, progress)) is not None:
        if found.meta.shape != spec.stored_shape:
            raise cache.damaged(path, f"{cache.META} says images of {found.meta.shape}, the spec {spec.stored_shape}")
        if verify is not False and found.meta.sha256 != learned:
            _check_source(spec, found, progress)
        if autoencoder is not None and encode_on is not None and base is not None and cache_path(base).exists():
            _check_made_of(found, sources_of(prepare_images(base, progress), autoencoder), "latents", "pixels")
        if regression is not None and base is not None:
            _check_made_of(found, made_of(prepare(base, progress), regression), "residuals", "fields")
    elif autoencoder is not None and encode_on is None:
        raise _missing(f"data.autoencoder = {autoencoder.name}: there are no latents at {path}; make them")
    elif spec.residual_of is not None and regression is None:
        run = spec.residual_of
        raise _missing(f"data.residual_of = {run}: there are no residuals at {path}; make them", f"residual {run}")
    else:
        make = partial(source_preparation, spec, progress, max(1, processors() // together))
        if autoencoder is not None and encode_on is not None:
            coder = Coder(autoencoder, encode_on)
            _ = coder.model  # finds a damaged one before hours of preparation
            pixels = prepare_images(pixels_of(spec), progress, together=together)
            make = partial(latents_preparation, pixels, coder, spec)
        elif regression is not None:
            fields = prepare(fields_of(spec), progress, together=together)
            make = partial(residuals_preparation, fields, regression)
        found = _made(path, spec, progress, make)
        for line in (found.summary, *found.rounding) if progress else ():
            print(f"{path.name}: {line}", file=sys.stderr)
    check_fields(spec, found.meta)
    return found


def _text(
    path: Path, images: cache.DatasetCache, encoders: TextEncoders, spec: DataSpec, progress: bool, verify: bool | None
) -> cache.DatasetCache:
    """Return the cache of the encoded captions of ``images``, made if the encoders have a device or need none."""
    if (found := _opened(path, verify, progress)) is not None:
        if not found.meta.sha256.items() >= captions.text_sources(images, encoders).items():
            raise cache.damaged(path, "it has text of other captions or encoders")
        return found
    if encoders.device is None and encoders.spec.stored != "ids":
        raise _missing(f"data.text.encoders = {encoders.spec.encoders}: there is no encoded text at {path}; make it")
    work = text_preparation(images, encoders)
    if progress:
        plan, free = work.plan, shutil.disk_usage(path.parent).free
        print(
            f"{path.name}: {plan.images:,} distinct captions of {plan.image_bytes:,} bytes ({encoders.spec.stored}) "
            f"take {gib(plan.images * plan.image_bytes)}, {gib(free)} are free",
            file=sys.stderr,
        )
    made = _made(path, spec, progress, lambda: work)
    for line in captions.warnings_of(made) if progress else ():
        print(f"{path.name}: {line}", file=sys.stderr)
    return made


def _opened(path: Path, verify: bool | None, progress: bool) -> cache.DatasetCache | None:
    """Open the cache at ``path``; None if there is none."""
    if not os.path.exists(path):  # also if a folder above it can't be entered, which making it reports
        return None
    if verify is None:
        verify = sum(file.stat().st_size for file in path.glob("*.*")) <= VERIFIED_BYTES
    return cache.DatasetCache.open(path, verify, progress)


def _made(path: Path, spec: DataSpec, progress: bool, make: Callable[[], Preparation]) -> cache.DatasetCache:
    """Make the cache at ``path`` together with other processes, and open it."""
    try:
        spec.store_root.mkdir(parents=True, exist_ok=True)
        with lock_of(path):  # only one process of a host lists and downloads
            work = None if path.exists() else make()
        if work is not None:
            write_cache(path, work.plan, work.chunks, spec, work.facts, progress)
    except OSError as error:
        raise _unwritable(spec, error) from error
    return cache.DatasetCache.open(path, verify=False)  # the checksums were just computed from the files


def _check_made_of(found: cache.DatasetCache, sources: Mapping[str, str], what: str, base: str) -> None:
    """Refuse latents or residuals that were made of another ``base`` than there is now."""
    changed = {name for name, checksum in sources.items() if found.meta.sha256.get(name) != checksum}
    if changed:
        base = "weights" if REGRESSION in changed else base
        raise DataError(f"{found.path} has {what} of other {base} than there are now; delete it and try again")


def _missing(what: str, option: str = "encode") -> DataError:
    return DataError(f"{what} once with: ddpm-ds prepare --{option}")


def buckets_of(
    spec: DataSpec, group: int, sizes: Sequence[Size] | None = None, progress: bool = False
) -> list[buckets.BucketData]:
    """Return the buckets of :func:`prepare`; ``progress`` shows a bar, and which are too small. Raises DataError."""
    found, shapes = list[buckets.BucketData](), _known_shapes(spec)
    with suppress(DataError):  # of images that have been replaced
        found = [] if shapes is None else buckets.filled_buckets(spec, shapes, group, sizes)
    if shapes is None or not any(cache_path(each).exists() for each in found):  # else the source may be gone
        try:
            spec.store_root.mkdir(parents=True, exist_ok=True)
            shapes = _shapes(spec, open_source(spec, progress), progress)
        except OSError as error:
            raise _unwritable(spec, error) from error
        found = buckets.filled_buckets(spec, shapes, group, sizes)
    if progress and sizes is None and (line := buckets.moved(spec, shapes, found, group)) is not None:
        print(line, file=sys.stderr)
    return found


def bucket_shares(data: DataSpec, group: int | None, *, counted: bool) -> tuple[tuple[Size, float], ...]:
    """Return the size of each bucket, as ``data.image_size`` counts it, and its share of the images; () without
    buckets. Shares are equal unless they are to be ``counted`` and images have been. Raises DataError.
    """
    if group is None:
        return ()
    if counted and (shapes := _known_shapes(data)) is not None:
        filled = buckets.filled_buckets(data, shapes, group)
        found = [(bucket.size, len(bucket.members_of(shapes))) for bucket in filled]
    else:
        found = [(size, 1) for size in buckets.image_sizes(data, buckets.sizes_of(data))]
    total = sum(count for _, count in found)
    return tuple((size, count / total) for size, count in found)


def _known_shapes(spec: DataSpec) -> buckets.Shapes | None:
    """Return the shapes of a source's images as they were found before, or None."""
    found = buckets.read_shapes(_shapes_path(spec))
    return None if found is None else found[1]


def _shapes_path(spec: DataSpec) -> Path:
    """Return the file of the shapes of a source's images, which all its buckets share."""
    source = DataSpec(**{name: value for name, value in spec if name in DataSpec.model_fields})
    return spec.store_root / f"{spec.source}-shapes{_source_key(source)}.npz"


def _shapes(spec: DataSpec, source: Source, progress: bool) -> buckets.Shapes:
    """Return the shapes of a source's images, from their file, which is made again for other images."""
    content, path = _sampled(source)[0], _shapes_path(spec)
    with lock_of(path):
        if (found := buckets.read_shapes(path)) is not None and found[0] == content:
            return found[1]
        shapes, file = buckets.shapes_of(source, progress), io.BytesIO()
        np.savez_compressed(file, content=np.array(content), shapes=shapes)
        replace_file(path, file.getvalue())
    return shapes


def _opened_source(spec: DataSpec, progress: bool) -> Source:
    """Open the source of ``spec``, or of a bucket its images in it."""
    source = open_source(spec, progress)
    if not isinstance(spec, buckets.BucketData):
        return source
    return buckets.Members(source, spec.members_of(_shapes(spec, source, progress)))


def _unwritable(spec: DataSpec, error: OSError) -> DataError:
    return DataError(
        f"data.store_root = {spec.store_root} can't be written ({error.strerror or error}); "
        "choose another folder with --set data.store_root=FOLDER"
    )


def text_preparation(images: cache.DatasetCache, encoders: TextEncoders) -> Preparation:
    """Return the encoding of the distinct captions of ``images``."""
    texts, sources = captions.texts_of(images), captions.text_sources(images, encoders)

    def chunks(numbers: range) -> Iterator[Chunk]:
        return captions.encoded_texts(encoders, texts[numbers.start : numbers.stop])

    return Preparation(
        _plan("text", captions.text_fields(encoders), len(texts), sources), Facts((".",), sources), chunks
    )


def latents_preparation(pixels: cache.DatasetCache, coder: Coder, spec: DataSpec) -> Preparation:
    """Return the encoding of all ``pixels`` to latents."""
    sources = sources_of(pixels, coder.autoencoder)
    beside = {name: pixels.meta.field(name) for name in pixels.others}
    texts = captions.written(captions.texts_of(pixels)) if spec.text is not None else None

    def chunks(numbers: range) -> Iterator[Chunk]:
        for part, latents in encoded(pixels, coder, numbers):
            others = {name: [row.data for row in stored[part]] for name, stored in pixels.others.items()}
            yield Chunk([latent.tobytes() for latent in latents], pixels.labels[part].tolist(), [], others)

    plan = _plan("latents", {cache.IMAGES: cache.field_of("latents", spec.shape), **beside}, len(pixels), sources)
    return Preparation(plan, Facts(pixels.meta.classes, sources, pixels.meta.origin, captions=texts), chunks)


def residuals_preparation(fields: cache.DatasetCache, regression: Regression) -> Preparation:
    """Return the subtraction of predictions from all ``fields``."""
    meta, sources = fields.meta, made_of(fields, regression)
    stored = {name: meta.field(name) for name in fields.fields}
    stored[cache.IMAGES] = stored[cache.IMAGES].model_copy(update={"offset": ()})
    facts = Facts(meta.classes, sources, meta.origin, fields.constants, meta.coordinates, meta.masked)
    plan = _plan("fields", stored, len(fields), sources)
    return Preparation(plan, facts, lambda numbers: residuals(fields, regression, numbers))


def source_preparation(spec: DataSpec, progress: bool, threads: int) -> Preparation:
    """Open the source of ``spec``, before ``threads`` decode its image files; raises DataError."""
    paths = _paths(spec)
    looks = [looks_of(path, spec.reads_arrays) for path in paths]  # before it is read
    # A file's time counts while the cache is made; those of a folder may differ between hosts that share the work.
    of_files = [str(look) for path, look in zip(paths, looks, strict=True) if path.is_file()]

    def origin_of(content: str) -> cache.Origin | None:
        known = dict(zip(("looks", "condition_looks"), looks, strict=False))
        return None if spec.path is None else cache.Origin(content=content, **known)

    if spec.reads_arrays:
        fields = open_fields(spec).centred()
        content = fields.content(*paths)
        kind: cache.Kind = "fields" if spec.are_fields else "pixels"
        plan = _plan(kind, fields.fields, len(fields.labels), " ".join([content, *of_files]))
        masked = spec.mask is not None
        facts = Facts(fields.classes, {}, origin_of(content), fields.constants, fields.coordinates, masked)
        return Preparation(plan, facts, fields.chunks)
    source = _opened_source(spec, progress)
    known = captions.known_captions(source, spec)
    content, are_files = _sampled(source)
    facts, stored = (
        Facts(source.classes, {}, origin_of(content)),
        {cache.IMAGES: cache.field_of("pixels", spec.stored_shape)},
    )
    if known is not None:
        facts = replace(facts, captions=captions.written(known.texts))
        stored[cache.SIZES] = cache.StoredField(shape=(6,), values="float32")
        stored[cache.CAPTIONS] = cache.StoredField(shape=(known.table.shape[1],), values="int32")
    plan = _plan("pixels", stored, len(source.labels), " ".join([content, *of_files]))
    decoding = Decoding(source, plan.shape, None if known is None else known.table, threads if are_files else 1)
    return Preparation(plan, facts, decoding.chunks)


def _plan(
    kind: cache.Kind, fields: Mapping[str, cache.StoredField], images: int, origin: str | Mapping[str, str]
) -> CachePlan:
    """Return the plan of a cache; ``origin`` are the checksums of its images' origins, or a hash of them."""
    if not isinstance(origin, str):
        origin = sha256(repr(sorted(origin.items())).encode()).hexdigest()
    image_bytes = sum(stored.nbytes for stored in fields.values())
    return CachePlan(kind, fields, images, image_bytes, max(1, SHARD_BYTES // image_bytes), origin)


def _sampled(source: Source) -> tuple[str, bool]:
    """Return a hash of names, labels and some images, or all of a small source, and whether images are files."""
    digest = sha256(np.asarray(source.labels, np.int64).tobytes())
    for i in range(len(source.labels)):
        digest.update(os.fsencode(source.name(i)) + b"\0")
    if (known := captions_of(source)) is not None:
        digest.update(captions.written(known.texts) + known.table.tobytes())
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


def looks_of(path: Path, whole: bool) -> dict[str, cache.Look]:
    """Return the looks of a path and some folders and files in it, by name; of a ``whole`` folder only one."""
    folders, files = [str(path)], list[str]()
    for above, folders_here, files_here in () if whole else os.walk(path):
        folders += (os.path.join(above, name) for name in folders_here)
        files += (os.path.join(above, name) for name in files_here)
    names = (
        os.path.relpath(each, path) for some in (folders, files) for each in some[:: max(1, len(some) // LOOKED_AT)]
    )
    found = ((name, _look(path / name, whole)) for name in names if printable(name) == name)  # others are no JSON
    return {name: look for name, look in found if look is not None}


def _look(path: Path, whole: bool = False) -> cache.Look | None:
    """Return size and time as :data:`Look`, or those of all files of a ``whole`` folder; None if it can't be seen."""
    try:
        status = os.stat(path)
        if whole and stat.S_ISDIR(status.st_mode):
            files = files_below(path)
            made = sha256(repr([(name, each.st_size, each.st_mtime_ns) for name, each in files.items()]).encode())
            return sum(each.st_size for each in files.values()), int.from_bytes(made.digest()[:7])
    except OSError:
        return None
    return 0 if stat.S_ISDIR(status.st_mode) else status.st_size, status.st_mtime_ns


def _check_source(spec: DataSpec, found: cache.DatasetCache, progress: bool) -> None:
    """Refuse a cache if its source has other sizes now, or other times and content; it may be gone."""
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
            if (whole or _sampled(_opened_source(spec, progress))[0]) == origin.content:
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
