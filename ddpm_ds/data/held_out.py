"""Training images and held-out images of a run, of one source or of two.

::

    data.path ──────────prepared──▶ cache ──────────────▶ training
                                      │ statistics
    data.held_out_path ─prepared──▶ cache ──────────────▶ held-out loss, pictures, scores
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddpm_ds.data.buckets import shares_of
from ddpm_ds.data.cache import (
    CAPTIONS,
    CONSTANTS,
    IMAGES,
    SOURCE,
    DatasetCache,
    Indices,
    StoredField,
    Subset,
    by_field,
)
from ddpm_ds.data.prepare import How, Recipe, Recipes, prepared
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError, SpecError
from ddpm_ds.schema.types import HeldOut

MOST_RANGES = 10
"""Maximum ranges of neighbouring images that are held out: only the ends of a range resemble training images."""
HELD_OUT = "held-out/"
"""Prefix of a held-out source's files in the checksums of a run's images."""


def prepare_all(
    data: DataSpec, how: How, *, learned: Mapping[str, str] | None = None, group: int = 1
) -> tuple[DatasetCache, DatasetCache]:
    """Return the caches of the training and of the held-out images, which may be one; a missing cache is made.

    A held-out source is prepared first: it is smaller, so its faults show before hours of preparation. It has the
    buckets of the training images. ``learned`` has the checksums of a checkpoint's images; see
    :func:`ddpm_ds.data.prepare.prepared`. Raises DataError also if the two caches don't fit each other.
    """
    trained_on, held_out = (None, None) if learned is None else training_and_held_out(learned)
    recipes = Recipes(data, how.progress).all(group)
    if data.held_out_path is None:
        cache = prepared(recipes, how, trained_on)
        return cache, cache
    other = _prepare_other(data, recipes, how, held_out or None)
    cache = prepared(recipes, how, trained_on)
    given = f"data.held_out_path = {data.held_out_path}"
    for name in {IMAGES, *cache.meta.fields} - {CAPTIONS, SOURCE}:  # images may have different numbers of captions
        if name == IMAGES and data.buckets is not None:
            continue  # the first bucket may be of another size
        ours, theirs = cache.meta.stored[name], other.meta.stored[name]
        if ours.model_copy(update={"offset": theirs.offset}) != theirs:
            raise DataError(
                f"{given}: {name} is {_shown(theirs)} for each image, and {_shown(ours)} in {data.origin}; "
                "give both the same"
            )
    if cache.meta.sha256.get(CONSTANTS) != other.meta.sha256.get(CONSTANTS):
        raise DataError(
            f"{given} has other data.condition.constants than {data.origin}, and all images share them; "
            "give both the same"
        )
    if cache.key == other.key:
        raise DataError(f"{given} has the training images of {data.origin}; name others")
    return cache, other.with_statistics(cache.meta.statistics)


def prepare_held_out(data: DataSpec, group: int, learned: Mapping[str, str]) -> DatasetCache:
    """Return the cache that has the held-out images of ``data``; a held-out source has statistics of its own.

    ``learned`` has the checksums of this cache in a checkpoint. Raises DataError also for training images.
    """
    how = How(progress=True)
    recipes = Recipes(data, True).all(group) if data.held_out_path is None or data.buckets else []
    if data.held_out_path is None:
        return prepared(recipes, how, learned)
    return _prepare_other(data, recipes, how, learned)


def _prepare_other(
    data: DataSpec, trained: Sequence[Recipe], how: How, learned: Mapping[str, str] | None
) -> DatasetCache:
    """Return the cache of the held-out source, in the buckets of the ``trained`` images."""
    assert data.held_out_path is not None, "the caller asks for one"
    sizes = [recipe.bucket.pixels for recipe in trained if recipe.bucket is not None]
    here, *places = (
        Path(os.path.realpath(path)) for path in (data.held_out_path, *(each.path for each in data.folders))
    )
    if any(here == there or here in there.parents or there in here.parents for there in places):
        raise DataError(
            f"data.held_out_path = {data.held_out_path} and {data.origin} overlap, so held-out images would be trained "
            "on; use two separate paths"
        )
    changes: dict[str, Any] = {"path": data.held_out_path, "held_out_path": None, "normalise": None, "sources": ()}
    if (asked := data.condition) is not None:
        own = {"path": asked.held_out_path or asked.path, "held_out_path": None, "normalise": None}
        changes["condition"] = asked.model_copy(update=own)
    source = data.model_copy(update=changes)  # without normalise: the training images have the statistics
    try:
        return prepared(Recipes(source, how.progress).all(sizes=sizes or None), how, learned)
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
    return Subset.of(cache), Subset(other, positions)


def _split(cache: DatasetCache, data: DataSpec) -> tuple[Indices, Indices]:
    """Split a cache's images into training and held-out ones, the same share of each bucket of aspect."""
    pairs, start = [], 0
    for count, share in zip(cache.counts, shares_of(cache.counts, data.held_out_images), strict=True):
        pairs.append([start + each for each in split(count, share, data.held_out)])
        start += count
    among, held_out = map(np.concatenate, zip(*pairs, strict=True))
    return among, held_out


def checksums_of(cache: DatasetCache, other: DatasetCache) -> dict[str, str]:
    """Return the checksums that a run keeps of its images, one for each field; see :func:`by_field`."""
    others = {} if other is cache else by_field(other.meta.sha256)
    return {**by_field(cache.meta.sha256), **{f"{HELD_OUT}{name}": value for name, value in others.items()}}


def training_and_held_out(checksums: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the checksums of a run's training images, and those of its held-out source, empty if it has none."""
    held_out = {name.removeprefix(HELD_OUT): value for name, value in checksums.items() if name.startswith(HELD_OUT)}
    return {name: value for name, value in checksums.items() if not name.startswith(HELD_OUT)}, held_out


def _shown(stored: StoredField) -> str:
    names = f" ({', '.join(stored.channels)})" if stored.channels else ""
    return f"{'x'.join(map(str, stored.shape))} {stored.values}{names}"


def split(count: int, held_out: int, how: HeldOut = "random") -> tuple[Indices, Indices]:
    """Split a cache of ``count`` images into training images and ``held_out`` others; positions are int64 and rising.

    The split depends on these arguments alone, so runs of any seed are measured on the same images. ``how`` is
    ``data.held_out``; "ranges" are at most 10 stretches, in the middle of equal parts::

        count = 20, held_out = 4     ..h.. ..h.. ..h.. ..h..

    Raises:
        SpecError: no image would be left to train on.
    """
    if held_out >= count:
        raise SpecError(
            f"data.held_out_images = {held_out:,} leaves nothing of the {count:,} images; --set data.held_out_images="
            f"{count // 10}"
        )
    chosen = np.zeros(count, bool)
    if how == "random":
        chosen[shuffled(count)[:held_out]] = True
    elif how == "last":
        chosen[count - held_out :] = True
    else:
        ranges = min(MOST_RANGES, held_out)
        for number in range(ranges):
            begin, end = (count * edge // ranges for edge in (number, number + 1))
            length = held_out * (number + 1) // ranges - held_out * number // ranges
            first = begin + (end - begin - length) // 2
            chosen[first : first + length] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def shuffled(count: int) -> Indices:
    """Return the positions 0 to ``count - 1``, int64, shuffled in a fixed order."""
    return np.random.Generator(np.random.Philox(key=np.uint64(0))).permutation(count)
