"""Training images and held-out images of a run, of one source or of two.

::

    data.path ──────────prepared──▶ cache ──────────────▶ training
                                      │ statistics
    data.held_out_path ─prepared──▶ cache ──────────────▶ held-out loss, pictures, scores
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddpm_ds.data.buckets import shares_of
from ddpm_ds.data.cache import CAPTIONS, CONSTANTS, IMAGES, DatasetCache, Indices, StoredField
from ddpm_ds.data.decoding import Size
from ddpm_ds.data.loader import split
from ddpm_ds.data.prepare import buckets_of, prepare
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError, SpecError

HELD_OUT = "held-out/"
"""Prefix of a held-out source's files in the checksums of a run's images."""


class Subset(NamedTuple):
    """Images of a cache, all buckets of aspect included, at rising positions."""

    cache: DatasetCache
    positions: Indices


def held_out_of(data: DataSpec) -> DataSpec | None:
    """Return the spec of the source of held-out images; None if these are among the others.

    It normalises nothing: the statistics of the training images do.
    """
    if data.held_out_path is None:
        return None
    changes: dict[str, Any] = {"path": data.held_out_path, "held_out_path": None, "normalise": None}
    if (asked := data.condition) is not None:
        own = {"path": asked.held_out_path or asked.path, "held_out_path": None, "normalise": None}
        changes["condition"] = asked.model_copy(update=own)
    return data.model_copy(update=changes)


def prepare_all(
    data: DataSpec, progress: bool = False, *, learned: Mapping[str, str] | None = None, group: int = 1, **how: Any
) -> tuple[DatasetCache, DatasetCache]:
    """Return the caches of the training images and of the held-out ones, which may be one; a missing one is made.

    A held-out source is prepared first: it is the smaller one, and its faults are found before hours of preparation.
    Its images are in the buckets of the training images. ``learned`` are the checksums of a checkpoint's images; the
    rest is passed to :func:`ddpm_ds.data.prepare.prepare`. Raises DataError also if the two don't fit each other.
    """
    trained_on, held_out = (None, None) if learned is None else training_and_held_out(learned)
    if data.held_out_path is None:
        cache = prepare(data, progress, learned=trained_on, group=group, **how)
        return cache, cache
    sizes = sizes_trained(data, group, progress)
    other = prepare_held_out(data, progress, learned=held_out or None, sizes=sizes, **how)
    cache = prepare(data, progress, learned=trained_on, sizes=sizes, **how)
    given = f"data.held_out_path = {data.held_out_path}"
    for name in {IMAGES, *cache.meta.fields} - {CAPTIONS}:  # there may be more captions of an image
        if name == IMAGES and data.buckets is not None:
            continue  # the first bucket may be of another size
        ours, theirs = cache.meta.field(name), other.meta.field(name)
        if ours.model_copy(update={"offset": theirs.offset}) != theirs:
            raise DataError(
                f"{given}: {name} is {_shown(theirs)} for each image, and {_shown(ours)} of data.path = {data.path}; "
                "give both the same"
            )
    if cache.meta.sha256.get(CONSTANTS) != other.meta.sha256.get(CONSTANTS):
        raise DataError(
            f"{given} has other data.condition.constants than data.path = {data.path}, and those are the same for all "
            "images; give both the same"
        )
    if cache.key == other.key:
        raise DataError(f"{given} has the images of data.path = {data.path}, which are trained on; name others")
    return cache, other.with_statistics(cache.meta.statistics)


def sizes_trained(data: DataSpec, group: int, progress: bool = False) -> list[Size] | None:
    """Return the sizes of the buckets of the training images, None without buckets; raises DataError."""
    return None if data.buckets is None else [one.pixels for one in buckets_of(data, group, progress=progress)]


def prepare_held_out(data: DataSpec, progress: bool = False, **how: Any) -> DatasetCache:
    """Return the cache with the held-out images of ``data``, with the statistics of their own source if they have one.

    ``how`` is passed to :func:`ddpm_ds.data.prepare.prepare`. Raises DataError also for images that are trained on.
    """
    source = held_out_of(data)
    if source is None or source.path is None or data.path is None:
        return prepare(data, progress, **how)
    here, there = (Path(os.path.realpath(path)) for path in (data.path, source.path))
    if here == there or here in there.parents or there in here.parents:
        raise DataError(
            f"data.held_out_path = {source.path} and data.path = {data.path} are one, or one is in the other, so that "
            "held-out images would be trained on; use two folders"
        )
    try:
        return prepare(source, progress, **how)
    except (DataError, SpecError) as error:
        message = str(error).replace("data.path", "data.held_out_path")
        if data.condition is not None and data.condition.held_out_path is not None:
            message = message.replace("data.condition.path", "data.condition.held_out_path")
        of_both = r"--set data\.\S*(image_size|channels|vector_size)=\S+"
        message = re.sub(of_both, r"\g<0> if data.path has that too, or name another", message)
        raise type(error)(message) from error


def parts(data: DataSpec, cache: DatasetCache, other: DatasetCache) -> tuple[Subset, Subset]:
    """Return training and held-out images in the caches of both; raises SpecError if there are too few."""
    if data.held_out_path is None:
        among, held_out = _split(cache, data)
        return Subset(cache, among), Subset(cache, held_out)
    count, asked = sum(other.counts), data.held_out_images
    if asked > count:
        raise SpecError(
            f"data.held_out_images = {asked:,}, but data.held_out_path = {data.held_out_path} has {count:,} images; "
            "--set data.held_out_images=0 takes all"
        )
    positions = _split(other, data)[1] if 0 < asked < count else np.arange(count)
    return Subset(cache, np.arange(sum(cache.counts))), Subset(other, positions)


def _split(cache: DatasetCache, data: DataSpec) -> tuple[Indices, Indices]:
    """Split a cache's images into training and held-out ones, by the same share in each bucket of aspect."""
    pairs, start = [], 0
    for count, share in zip(cache.counts, shares_of(cache.counts, data.held_out_images), strict=True):
        pairs.append([start + each for each in split(count, share, data.held_out)])
        start += count
    among, held_out = map(np.concatenate, zip(*pairs, strict=True))
    return among, held_out


def checksums_of(cache: DatasetCache, other: DatasetCache) -> dict[str, str]:
    """Return the checksums that a run keeps of its images."""
    others = {} if other is cache else other.meta.sha256
    return {**cache.meta.sha256, **{f"{HELD_OUT}{name}": value for name, value in others.items()}}


def training_and_held_out(checksums: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the checksums of a run's training images, and those of its held-out source, empty if it has none."""
    held_out = {name.removeprefix(HELD_OUT): value for name, value in checksums.items() if name.startswith(HELD_OUT)}
    return {name: value for name, value in checksums.items() if not name.startswith(HELD_OUT)}, held_out


def _shown(stored: StoredField) -> str:
    names = f" ({', '.join(stored.channels)})" if stored.channels else ""
    return f"{'x'.join(map(str, stored.shape))} {stored.values}{names}"
