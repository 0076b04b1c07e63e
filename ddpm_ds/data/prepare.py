"""Preparation of a source into a data-set cache, once, on all cores.

::

    source ──decode──▶ pixels ──autoencoder──▶ latents          each arrow makes the :class:`Content` of a cache of its
       │                  └──────captions────▶ encoded text     own, which :mod:`ddpm_ds.data.writing` writes
       └────read─────▶ fields ──regression───▶ residuals

A :class:`Recipe` is decided before: the folder of a cache, and the source of its images.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_ds.data import cache, captions
from ddpm_ds.data.buckets import Bucket, Shapes, filled_buckets, kept_sizes, moved, own_sizes, sizes_of
from ddpm_ds.data.decoding import Decoding, Size
from ddpm_ds.data.fields import REGRESSION, Regression, check_fields, fields_of, made_of, residuals
from ddpm_ds.data.latents import (
    Autoencoder,
    Coder,
    autoencoder_of,
    encoded,
    latent_fields,
    pixels_behind,
    sources_of,
)
from ddpm_ds.data.origin import LazySource, sampled
from ddpm_ds.data.sources.base import beside_of, parts_of
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.data.text import TextEncoders
from ddpm_ds.data.writing import Chunk, Content, lock_of, write_cache
from ddpm_ds.ground.errors import DataError
from ddpm_ds.ground.host import processes_on_host, processors
from ddpm_ds.ground.units import gib

if TYPE_CHECKING:
    import torch

VERIFIED_BYTES = 2**34
"""Maximum size of a cache whose checksums are compared before training; ``ddpm-ds prepare`` always compares them."""


@dataclass(frozen=True)
class Recipe:
    """Folder of a cache whose images have one size, and the source of these images."""

    path: Path
    data: DataSpec
    """Section of the spec, with the size of the bucket."""
    source: LazySource
    bucket: Bucket | None = None
    """Bucket of aspect; None takes all images of the source."""
    base: Recipe | None = None
    """Recipe for the pixels behind latents, or the fields behind residuals."""
    autoencoder: Autoencoder | None = None


@dataclass(frozen=True)
class How:
    """How caches are opened and made."""

    progress: bool = False
    """Whether bars and notes are shown."""
    verify: bool | None = None
    """Whether checksums of an existing cache, and its source, are compared; None compares checksums up to 16 GiB."""
    encode_on: torch.device | None = None
    """Device for latents and text; None makes neither."""
    regression: Regression | None = None
    """Regression whose residuals are made; None makes none."""


class Recipes:
    """Recipes of the caches of ``data``. The autoencoder is opened, the source not yet; raises DataError."""

    def __init__(self, data: DataSpec, progress: bool = False) -> None:
        self._data, self._progress = data, progress
        self._source, self._autoencoder = LazySource(data, progress), autoencoder_of(data)
        self._factor = 1 if self._autoencoder is None else self._autoencoder.factor

    def all(self, group: int = 1, sizes: Sequence[Size] | None = None) -> list[Recipe]:
        """Return the only recipe, or one for each bucket of aspect that has images; raises DataError.

        The nearest to ``data.image_size`` is first. Buckets have the given ``sizes``, or at least ``group`` training
        images.
        """
        data, source, found = self._data, self._source, list[Recipe]()
        if data.buckets is None:
            return [self.of()]
        if (shapes := source.known_shapes) is not None:
            with suppress(DataError):  # of images that have been replaced
                found = self._of_buckets(shapes, group, sizes)
        if shapes is None or not any(recipe.path.exists() for recipe in found):  # else the source may be gone
            with _written_below(data.store_root):
                shapes = source.shapes
            found = self._of_buckets(shapes, group, sizes)
        chosen = [recipe.bucket for recipe in found if recipe.bucket is not None]
        if (
            self._progress
            and sizes is None
            and (line := moved(self._sizes_for(shapes, group), shapes, chosen, group)) is not None
        ):
            print(line, file=sys.stderr)
        return found

    def known(self, group: int | None) -> Recipe:
        """Return the first recipe, without opening the source."""
        shapes = None if group is None else self._source.known_shapes
        return self.of() if group is None or shapes is None else self._of_buckets(shapes, group)[0]

    def shares(self, group: int, *, counted: bool) -> tuple[tuple[Size, float], ...]:
        """Return the size of each bucket, as ``data.image_size`` counts it, and its share of the images.

        Shares are equal unless ``counted`` is set and an earlier run has counted the images. Raises DataError.
        """
        if counted and (shapes := self._source.known_shapes) is not None:
            buckets = [each.bucket for each in self._of_buckets(shapes, group) if each.bucket is not None]
            found = [(bucket.pixels, len(bucket.members_of(shapes))) for bucket in buckets]
        else:
            found = [(size, 1) for size in self._sizes]
        total = sum(count for _, count in found)
        return tuple((self._counted(size), count / total) for size, count in found)

    def of(self, bucket: Bucket | None = None) -> Recipe:
        """Return the recipe for a bucket's images, or for all; its folder's name has all that decides the images."""
        data, source, autoencoder = self._data, self._source, self._autoencoder
        if bucket is not None:
            data = data.model_copy(update={"image_size": self._counted(bucket.pixels)})
        whole = fields_of(data) if autoencoder is None else pixels_behind(data, self._factor)
        name = f"{data.source}-{'x'.join(map(str, dict.fromkeys(whole.stored_size)))}px-{whole.channels}ch"
        path = data.store_root / (name + source.key(None if bucket is None else bucket.key))
        base = Recipe(path, whole, source, bucket)
        if autoencoder is not None:
            path = path.with_name(f"{path.name}-latents-{autoencoder.digest[:8]}{_ways_key(data)}")
        elif data.residual_of is not None:
            of_run = sha256(os.fsencode(os.path.realpath(data.residual_of))).hexdigest()[:8]
            path = path.with_name(f"{path.name}-residual-{of_run}")
        else:
            return base
        return Recipe(path, data, source, bucket, base, autoencoder)

    def _counted(self, pixels: Size) -> Size:
        """Return height and width as ``data.image_size`` counts them: in pixels, or in latents."""
        return pixels[0] // self._factor, pixels[1] // self._factor

    @cached_property
    def _sizes(self) -> tuple[Size, ...]:
        """Heights and widths in pixels of all buckets."""
        return sizes_of(self._data, self._factor)

    def _of_buckets(self, shapes: Shapes, group: int, kept: Sequence[Size] | None = None) -> list[Recipe]:
        """Return the recipe of each bucket that has images of these ``shapes``."""
        data, sizes = self._data, self._sizes_for(shapes, group)
        own, held_out = data.buckets is not None and data.buckets.no_upscale, data.held_out_images
        if kept is None:
            kept = kept_sizes(sizes, shapes, group, held_out if data.held_out_path is None else 0, own)
        sizes = tuple(dict.fromkeys((*sizes, *kept)))  # a held-out source has those of the training images
        return [self.of(bucket) for bucket in filled_buckets(sizes, kept, shapes, own)]

    def _sizes_for(self, shapes: Shapes, group: int) -> tuple[Size, ...]:
        """Return heights and widths of all buckets for images of these ``shapes``, small images' own included."""
        buckets, sizes = self._data.buckets, self._sizes
        if buckets is None or not buckets.no_upscale:
            return sizes
        return (*sizes, *(each for each in own_sizes(shapes, sizes[0], buckets, group) if each not in sizes))


def class_names(data: DataSpec, group: int | None, classes: int | None) -> Sequence[str]:
    """Return the names of the U-Net's classes, or their numbers if no cache names them; empty without classes.

    ``group`` is the number of consecutive images in a bucket of aspect, None without buckets.
    """
    with suppress(OSError, ValueError, DataError):  # DataError if the autoencoder is missing
        names = cache.CacheMeta.read(Recipes(data).known(group).path).classes
        if len(names) == classes:
            return names
    return [str(label) for label in range(classes or 0)]


def prepare(
    spec: DataSpec, how: How = How(), *, learned: Mapping[str, str] | None = None, group: int = 1
) -> cache.DatasetCache:
    """Return the :func:`prepared` cache of ``spec``; buckets of aspect have at least ``group`` images."""
    return prepared(Recipes(spec, how.progress).all(group), how, learned)


def prepared(recipes: Sequence[Recipe], how: How, learned: Mapping[str, str] | None = None) -> cache.DatasetCache:
    """Return the cache of the first recipe, with the caches of the others and of the captions; raises DataError.

    Missing caches are made; several processes and hosts may call this at once and share the work. An existing cache is
    used also if its source is gone. A changed source is refused, but not for the images of a checkpoint, whose
    checksums are ``learned``, and not if ``how.verify`` is False.
    """
    encoders, text = None, recipes[0].data.text
    if text is not None:
        encoders = TextEncoders.open(text, how.encode_on)
        if how.encode_on is not None:
            _ = encoders.tokenizers, () if text.encoded_in_training else encoders.models  # before hours of preparation
    texts: dict[Path, cache.DatasetCache] = {}  # all buckets share one
    caches = []
    for recipe in recipes:
        known = learned
        if learned is not None:
            prefix = cache.bucket_prefix(recipe.data.shape) if recipe is not recipes[0] else ""
            own = {name.removeprefix(prefix): value for name, value in learned.items() if name.startswith(prefix)}
            known = {name: value for name, value in own.items() if not name.startswith((cache.BUCKETS, cache.TEXTS))}
        images = images_of(recipe, how, known)
        if encoders is not None and encoders.spec.stored == "text":
            images = captions.with_tokens(images, encoders)
        elif encoders is not None:
            name = f"text-{images.meta.sha256[cache.CAPTIONS_FILE][:8]}-{encoders.digest[:8]}"
            kind = encoders.spec.stored
            path = images.path.with_name(name if kind == "float16" else f"{name}-{kind}")
            if path not in texts:
                texts[path] = _text(path, images, encoders, how)
            images = images.with_others(texts[path])
        caches.append(images)
    first, *others = caches
    classes, count = len(first.meta.classes), sum(map(len, caches))
    if how.progress and (unlabelled := sum(int((each.labels == classes).sum()) for each in caches)):
        line = f"{unlabelled:,} images are in no folder, {count - unlabelled:,} in {classes:,} class folders"
        fate = f"with unet.classes the {unlabelled:,} are learned without a class"
        print(f"{recipes[0].data.origin}: {line}; {fate}", file=sys.stderr)
    return first.with_others(None, others) if others else first


def images_of(recipe: Recipe, how: How, learned: Mapping[str, str] | None = None) -> cache.DatasetCache:
    """Return the :func:`prepared` cache of one recipe, without encoded captions."""
    path, data, base, autoencoder = recipe.path, recipe.data, recipe.base, recipe.autoencoder
    if (found := _opened(path, how)) is not None:
        if found.meta.shape != data.stored_shape:
            raise cache.damaged(path, f"{cache.META} says images of {found.meta.shape}, the spec {data.stored_shape}")
        if how.verify is not False and cache.by_field(found.meta.sha256) != learned:
            recipe.source.check_unchanged(found.meta.origin, recipe.bucket, path)
        if base is not None and base.path.exists() and (how.encode_on is not None or how.regression is not None):
            now = images_of(base, How(how.progress))
            if autoencoder is not None:
                _check_made_of(found, sources_of(now, autoencoder), "latents", "pixels")
            elif how.regression is not None:
                _check_made_of(found, made_of(now, how.regression), "residuals", "fields")
    elif autoencoder is not None and how.encode_on is None:
        raise _missing(f"data.autoencoder = {autoencoder.name}: there are no latents at {path}; make them")
    elif data.residual_of is not None and how.regression is None:
        run = data.residual_of
        raise _missing(f"data.residual_of = {run}: there are no residuals at {path}; make them", f"residual {run}")
    else:
        content = partial(source_content, recipe)
        if base is not None and autoencoder is not None and how.encode_on is not None:
            coder = Coder(autoencoder, how.encode_on)
            _ = coder.model  # finds a damaged file before hours of preparation
            content = partial(latents_content, images_of(base, How(how.progress)), coder, data)
        elif base is not None and how.regression is not None:
            content = partial(residuals_content, images_of(base, How(how.progress)), how.regression)
        found = _made(path, content, how.progress)
        for line in (found.summary, *found.rounding) if how.progress else ():
            print(f"{path.name}: {line}", file=sys.stderr)
    check_fields(data, found.meta)
    return found


def _text(path: Path, images: cache.DatasetCache, encoders: TextEncoders, how: How) -> cache.DatasetCache:
    """Return the cache of the encoded captions; it is made if the encoders have a device or need none."""
    if (found := _opened(path, how)) is not None:
        if not found.meta.sha256.items() >= captions.text_sources(images, encoders).items():
            raise cache.damaged(path, "its text is from other captions or encoders")
        return found
    if encoders.device is None and encoders.spec.stored != "ids":
        raise _missing(f"data.text.encoders = {encoders.spec.encoders}: there is no encoded text at {path}; make it")
    content = text_content(images, encoders)
    made = _made(path, lambda: content, how.progress)
    for line in captions.warnings_of(made) if how.progress else ():
        print(f"{path.name}: {line}", file=sys.stderr)
    return made


def _opened(path: Path, how: How) -> cache.DatasetCache | None:
    """Open the cache at ``path``; None without one."""
    if not os.path.exists(path):  # also if a folder above it can't be entered, which is reported later
        return None
    verify = how.verify
    if verify is None:
        verify = sum(file.stat().st_size for file in path.glob("*.*")) <= VERIFIED_BYTES
    return cache.DatasetCache.open(path, verify, how.progress)


def _made(path: Path, make: Callable[[], Content], progress: bool) -> cache.DatasetCache:
    """Make the cache at ``path`` together with other processes, and open it."""
    with _written_below(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_of(path):  # only one process of a host lists and downloads
            content = None if path.exists() else make()
        if content is not None:
            if progress and content.meta.kind in ("latents", "text"):
                what = "images' latents" if content.meta.kind == "latents" else "distinct captions"
                needed, free = content.meta.count * content.image_bytes, shutil.disk_usage(path.parent).free
                each = f"{content.meta.count:,} {what} of {content.image_bytes:,} bytes"
                print(f"{path.name}: {each} need {gib(needed)}, {gib(free)} are free", file=sys.stderr)
            write_cache(path, content, progress)
    return cache.DatasetCache.open(path, verify=False)  # the checksums were just computed from the files


def _check_made_of(found: cache.DatasetCache, sources: Mapping[str, str], what: str, base: str) -> None:
    """Refuse latents or residuals whose ``base`` has changed."""
    if changed := {name for name, checksum in sources.items() if found.meta.sha256.get(name) != checksum}:
        base = "weights" if REGRESSION in changed else base
        raise DataError(f"{found.path} has {what} of other {base} than there are now; delete it and try again")


def _missing(what: str, option: str = "encode") -> DataError:
    return DataError(f"{what} once with: ddpm-ds prepare --{option}")


@contextlib.contextmanager
def _written_below(store_root: Path) -> Iterator[None]:
    """Turn OSErrors of this block into DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"data.store_root = {store_root} can't be written ({error.strerror or error}); "
            "choose another folder with --set data.store_root=FOLDER"
        ) from error


def text_content(images: cache.DatasetCache, encoders: TextEncoders) -> Content:
    """Return the content of a text cache: the encoded distinct captions of ``images``."""
    texts, sources = captions.texts_of(images), captions.text_sources(images, encoders)
    known = {"source": images.meta.source, "folder": images.meta.folder, "sha256": sources}
    meta = _meta_of("text", captions.text_fields(encoders), len(texts), **known)
    return Content(meta, lambda part: captions.encoded_texts(encoders, texts[part.start : part.stop]))


def latents_content(pixels: cache.DatasetCache, coder: Coder, data: DataSpec) -> Content:
    """Return the content of a cache of latents, encoded from all ``pixels``."""
    fields = latent_fields(pixels, data)
    kept = fields.keys() & pixels.others.keys() - {cache.CONDITION, cache.MASK}

    def chunks(numbers: range) -> Iterator[Chunk]:
        for part, found in encoded(pixels, coder, data, numbers):
            rows = {name: pixels.others[name][part] for name in kept} | found
            others = {name: [fields[name].rounded(row).data for row in each] for name, each in rows.items()}
            yield Chunk(others.pop(cache.IMAGES), pixels.labels[part].tolist(), [], others)

    made_from = {"fields": fields if len(fields) > 1 else {}, "sha256": sources_of(pixels, coder.autoencoder)}
    meta = pixels.meta.model_copy(update={"kind": "latents", "shape": data.shape, **made_from})
    return Content(meta, chunks, captions=captions.written(captions.texts_of(pixels)) if data.text else None)


def _ways_key(data: DataSpec) -> str:
    """Return the end of the name of a cache of latents: a hash of the keys that add others to those of images."""
    kept = {"kind", "scaled", "cut", "variants", "unmasked"}
    ways = {} if data.condition is None else data.condition.model_dump(include=kept)
    ways |= {"horizontal_flips": True} if data.horizontal_flips else {}
    return f"-{sha256(repr(ways).encode()).hexdigest()[:8]}" if ways else ""


def residuals_content(fields: cache.DatasetCache, regression: Regression) -> Content:
    """Return the content of a cache of residuals: all ``fields`` minus their predictions."""
    images = fields.meta.stored[cache.IMAGES].model_copy(update={"offset": ()})
    stored = {**fields.meta.fields, cache.IMAGES: images}
    meta = fields.meta.model_copy(update={"fields": stored, "sha256": made_of(fields, regression)})
    return Content(meta, lambda numbers: residuals(fields, regression, numbers), constants=fields.constants)


def source_content(recipe: Recipe) -> Content:
    """Open the source and return the content of its cache, before anything is decoded; raises DataError."""
    data, source = recipe.data, recipe.source
    folder = ", ".join(str(each.path) for each in data.folders) or data.name
    known: dict[str, Any] = {"source": data.source, "folder": folder}
    # The time of a file counts while the cache is made; times in a folder may differ between hosts.
    of_files = [str(look) for path, look in zip(source.paths, source.looks, strict=False) if path.is_file()]
    most = data.max_bad_fraction
    if data.reads_arrays:
        fields = source.fields.centred()
        content = fields.content(*source.paths)
        known |= {"classes": fields.classes, "coordinates": fields.coordinates, "masked": data.mask is not None}
        kind: cache.Kind = "fields" if data.are_fields else "pixels"
        meta = _meta_of(kind, fields.fields, len(fields.labels), origin=source.origin(content), **known)
        return Content(meta, fields.chunks, " ".join([content, *of_files]), fields.constants, max_bad_fraction=most)
    pictures = source.pictures(recipe.bucket)
    texts, count = captions.known_captions(pictures, data), len(pictures.labels)
    content, are_files = sampled(pictures)
    stored = {cache.IMAGES: cache.field_of("pixels", data.stored_shape)}
    rows = {cache.CAPTIONS: None if texts is None else texts.table, cache.SOURCE: parts_of(pictures)}
    others = {name: numbers for name, numbers in rows.items() if numbers is not None}
    stored |= {name: cache.StoredField(shape=(each.shape[1],), values="int32") for name, each in others.items()}
    if texts is not None:
        stored[cache.SIZES] = cache.StoredField(shape=(6,), values="float32")
    of_condition = data.channels if data.condition is not None and data.condition.kind == "stored" else 1
    beside = {name: of_condition if name == cache.CONDITION else 1 for name in beside_of(pictures)}
    for name, channels in beside.items():
        stored[name] = cache.StoredField(shape=(channels, *data.stored_size), values="uint8")
    threads = max(1, processors() // processes_on_host()) if are_files else 1
    decoding = Decoding(pictures, data.stored_shape, threads, others, beside)
    meta = _meta_of("pixels", stored, count, classes=pictures.classes, origin=source.origin(content), **known)
    kept = None if texts is None else captions.written(texts.texts)
    return Content(meta, decoding.chunks, " ".join([content, *of_files]), captions=kept, max_bad_fraction=most)


def _meta_of(kind: cache.Kind, fields: Mapping[str, cache.StoredField], count: int, **known: Any) -> cache.CacheMeta:
    """Return the facts of a cache before it is made, which keep ``fields`` if there are others than images."""
    channels, height, width = fields[cache.IMAGES].shape
    shape = (channels, height, width)
    kept = {} if fields == {cache.IMAGES: cache.field_of(kind, shape)} else dict(fields)
    empty: dict[str, Any] = {"classes": (".",), "skipped": 0, "sha256": {}}
    return cache.CacheMeta(**{**empty, **known}, format=cache.FORMAT, kind=kind, fields=kept, count=count, shape=shape)
