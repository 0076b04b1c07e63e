"""Fields of a source of named arrays on their way into the cache: read one image after the other, checked, measured.

::

    t2m (N, H, W), u (N, C, H, W) ──joined along the channels──▶ images     float16 or float32, or bytes as they are
    condition, vector, mask       ──────────────────────────────▶ fields of their own, of the same image

Or residuals are learned, fields minus the predictions of a regression, and added to its predictions again::

    fields     (N, C, H, W) ──minus predictions, once──▶ residuals (N, C, H, W) ──▶ training
    condition, vector ──────┘                                 │ drawn by a sampler
    fields     (N, C, H, W) ◀──plus predictions───────────────┘

Other modules treat residuals as fields, with statistics of their own; condition, mask and vector are copied. Source:
Mardani et al. 2025, "Residual corrective diffusion modeling for km-scale atmospheric downscaling" (CorrDiff).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from ddpm_ds.data.cache import IMAGES, CacheMeta, Coordinate, DatasetCache, StoredField, StoredImages
from ddpm_ds.data.latents import PIXELS
from ddpm_ds.data.sources import FIELD_OPENERS
from ddpm_ds.data.sources.base import BROKEN, MOST_CLASSES, UNLABELLED, Labels, files_below, labelled, one_line
from ddpm_ds.data.sources.variables import (
    MOST_BYTES,
    Array,
    Arrays,
    Rows,
    Variable,
    channel_names,
    check_counts,
    condition_of,
    constants_of,
    images_of,
    mask_of,
    open_at,
    positions,
)
from ddpm_ds.data.spec import ConditionSpec, DataSpec
from ddpm_ds.data.statistics import Moments, merged, moments_of, rounding_of
from ddpm_ds.data.writing import Chunk
from ddpm_ds.ground.errors import DataError
from ddpm_ds.ground.files import sha256_of

CONDITION, MASK, VECTOR = "condition", "mask", "vector"
Values = Literal["uint8", "float16", "float32"]
TOGETHER_BYTES = 2**22
"""Bytes of the images in a chunk, at least one image."""
WHOLE_BYTES = 2**32
"""Maximum bytes of a source that is recognised by the checksums of its files."""
SAMPLED, SAMPLED_BYTES, MOST_SAMPLED = "sampled ", 2**25, 16
"""A larger one is recognised by so many bytes of so many images, at least one, and its hash begins so."""
REGRESSION = "regression"
"""Key of the regression's weights in the checksums of residuals; their fields have the prefix of pixels."""
PREDICTED_BYTES = 2**20
"""Bytes of fields that are predicted together, at least one field."""


@dataclass(frozen=True)
class JoinedField:
    """A field, and the arrays that are joined to it along the channels."""

    arrays: Arrays
    variables: Sequence[Variable]
    stored: StoredField


@dataclass(frozen=True)
class FieldSource:
    """Opened source of N images with their other fields."""

    parts: Mapping[str, JoinedField]
    """Fields by name, images first; a mask that is made of values that are NaN is not among them."""
    fields: Mapping[str, StoredField]
    """All fields that are stored."""
    nan: bool
    """Whether values that are NaN are masked, instead of refused."""
    constants: Array | None
    coordinates: tuple[Coordinate, ...]
    classes: tuple[str, ...]
    labels: Labels = field(repr=False)

    def _rows(self) -> dict[str, list[Rows]]:
        return {
            name: [Rows(variable, MOST_BYTES // len(part.variables)) for variable in part.variables]
            for name, part in self.parts.items()
        }

    def chunks(self, numbers: range) -> Iterator[Chunk]:
        """Yield a range of images in chunks; raises DataError for a value that can't be stored."""
        rows = self._rows()
        together = max(1, TOGETHER_BYTES // sum(stored.nbytes for stored in self.fields.values()))
        parts = (numbers[first : first + together] for first in range(0, len(numbers), together))
        return (self._chunk(rows, part) for part in parts)

    def content(self, *paths: Path) -> str:
        """Return a hash of names, shapes, labels and constants, and of the files at ``paths`` or, of large ones, of
        some images.
        """
        every = [(name, each) for name, part in self.parts.items() for each in part.variables]
        known = [(name, each.name, each.shape, str(each.dtype)) for name, each in every]
        constants = b"" if self.constants is None else self.constants.tobytes()
        digest = sha256(repr(known).encode() + self.labels.tobytes() + constants)
        found = [(path, files_below(path) if path.is_dir() else {"": path.stat()}) for path in paths]
        if sum(status.st_size for _, files in found for status in files.values()) <= WHOLE_BYTES:
            for path, files in found:
                for name in files:
                    digest.update(os.fsencode(name) + sha256_of(path / name).encode())
            return digest.hexdigest()
        for i in self._sampled:
            for _, each in every:
                with suppress(*BROKEN):  # its preparation reports it
                    digest.update(np.ascontiguousarray(each.read(slice(i, i + 1))).tobytes())
        return SAMPLED + digest.hexdigest()

    @property
    def _sampled(self) -> list[int]:
        """Some images that stand for all."""
        image_bytes = sum(each.image_bytes for part in self.parts.values() for each in part.variables)
        count = min(len(self.labels), MOST_SAMPLED, max(1, SAMPLED_BYTES // image_bytes))
        return np.linspace(0, len(self.labels) - 1, count).astype(int).tolist()

    def centred(self) -> FieldSource:
        """Return this source with offsets of its float16 fields: means of some images where they exceed the spread.

        They are whole for whole numbers; float16 arrays have none.
        """
        parts, rows = dict(self.parts), self._rows()
        halves = [name for name, part in parts.items() if part.stored.values == "float16"]
        seen: dict[str, list[Moments]] = {name: [] for name in halves}
        for i in self._sampled if halves else ():
            with suppress(*BROKEN):  # its preparation reports it
                for name, values in self._image(rows, i).items():
                    if name in seen:
                        seen[name].append(moments_of(values, masked=True))
        for name, moments in seen.items():
            if not moments:
                continue
            part, (count, mean, squares, *_) = parts[name], merged(np.stack(moments))
            kinds = [kind for each in part.variables for kind in [each.dtype] * each.channels]
            whole, half = np.array([(kind.kind in "iu", kind == np.float16 or kind.kind == "b") for kind in kinds]).T
            with np.errstate(invalid="ignore"):
                large = np.isfinite(squares) & ~half & (mean**2 * count > squares)
            if large.any():
                offset = np.where(large, np.where(whole, np.rint(mean), mean), 0.0).astype(np.float32)
                stored = part.stored.model_copy(update={"offset": tuple(offset.tolist())})
                parts[name] = replace(part, stored=stored)
        return replace(self, parts=parts, fields={**self.fields, **{name: parts[name].stored for name in halves}})

    def _image(self, rows: Mapping[str, Sequence[Rows]], i: int) -> dict[str, Array]:
        """Return the fields of an image, not yet rounded, with its uint8 mask, and NaN for masked floats."""
        found = {
            name: joined(self.parts[name].stored.wide, each, i) if name != MASK else np.asarray(each[0][i])
            for name, each in rows.items()
        }
        images = found[IMAGES]
        if self.nan:
            found[MASK] = (~np.isnan(images)).astype(np.uint8)
        elif MASK in found:
            mask = found[MASK]
            if not np.isin(mask, (0, 1)).all():
                (variable,), arrays = self.parts[MASK].variables, self.parts[MASK].arrays
                raise DataError(f"data.mask: {variable.name} of {arrays} has other values than 0 and 1 in image {i}")
            mask = found[MASK] = mask.astype(np.uint8).reshape(self.fields[MASK].shape)
            if images.dtype.kind == "f" and not mask.all():
                found[IMAGES] = np.where(mask, images, images.dtype.type(np.nan))
        return found

    def _chunk(self, rows: Mapping[str, Sequence[Rows]], numbers: range) -> Chunk:
        images: dict[str, list[memoryview]] = {name: [] for name in self.fields}
        moments: dict[str, list[Moments]] = {}
        labels, skipped = list[int](), list[tuple[str, str]]()
        for i in numbers:
            try:
                found = self._image(rows, i)
            except BROKEN as error:
                skipped.append((f"image {i}", one_line(error)))
                continue
            for name, values in found.items():
                stored = self.fields[name]
                rounded = stored.rounded(values)
                images[name].append(rounded.data)
                if name != MASK:
                    read, masked = stored.read(rounded), self._masks(name)
                    measured = moments_of(read, masked)
                    if not np.isfinite(measured).all():
                        raise self._unfit(name, rows[name], i)
                    moments.setdefault(name, []).append(measured)
                    if stored.values == "float16":
                        moments.setdefault(rounding_of(name), []).append(moments_of(read - values, masked))
            labels.append(int(self.labels[i]))
        others = {name: found for name, found in images.items() if name != IMAGES}
        kept = {name: merged(np.stack(parts)) for name, parts in moments.items() if name != VECTOR}
        return Chunk(images[IMAGES], labels, skipped, others, kept)

    def _masks(self, name: str) -> bool:
        """Whether values of a field that are NaN are masked."""
        return (name == IMAGES and MASK in self.fields) or (name in (IMAGES, CONDITION) and self.nan)

    def _unfit(self, name: str, rows: Sequence[Rows], i: int) -> DataError:
        """Return the error for a value of image ``i`` that is not finite, or not once it is stored."""
        part = self.parts[name]
        raw = np.concatenate([np.asarray(row[i]).reshape(row.variable.channels, -1) for row in rows])
        bad = ~np.isfinite(part.stored.rounded(raw)) & ~(np.isnan(raw) & self._masks(name))
        assert bad.any(), "the file has changed while it was read"
        channel, place = np.unravel_index(bad.argmax(), bad.shape)
        names, value = [row.variable.name for row in rows for _ in range(row.variable.channels)], raw[channel, place]
        where = f"{names[channel]} of {part.arrays} has {{}} in image {i}, channel {channel}"
        if math.isnan(value):
            fix = "leave out such images" if name == VECTOR else "--set data.mask=nan masks such values"
            return DataError(f"{where.format('NaN')}; {fix}")
        if math.isinf(value):
            return DataError(f"{where.format('infinity')}; replace it")
        kind = part.stored.values
        fix, limit = "--set data.values=float32" if kind == "float16" else "scale it down", np.finfo(kind).max
        return DataError(f"{where.format(f'{value:g}')}, and {kind} ends at {limit:g}; {fix}")


def open_fields(spec: DataSpec) -> FieldSource:
    """Open and check the arrays that ``spec`` names, reading constants and labels alone; raises DataError."""
    opener, asked = FIELD_OPENERS[spec.source], spec.condition or ConditionSpec()
    assert spec.path is not None, "the run spec checks it"
    main = open_at("data.path", spec.path, spec, opener)
    beside = main if asked.path is None else open_at("data.condition.path", asked.path, spec, opener)
    images = images_of(spec, main)
    parts = {IMAGES: _part(main, images, spec.values if spec.values != "bytes" else "uint8")}
    if asked.kind == "stored":
        found = condition_of(spec, asked, beside)
        kind: Values = "uint8" if all(variable.dtype == np.uint8 for variable in found) else "float32"
        parts[CONDITION] = _part(beside, found, spec.values if spec.values != "bytes" else kind)
    if asked.vector:
        counted = ("data.condition.vector_size", asked.vector_size)
        found = beside.taken("data.condition.vector", asked.vector, ("(N,)", "(N, K)"), counted)
        parts[VECTOR] = JoinedField(beside, found, StoredField(shape=(asked.vector_size,), values="float32"))
    count = check_counts([(part.arrays, part.variables) for part in parts.values()])
    if spec.mask is not None and spec.mask != "nan":
        mask = mask_of(spec, spec.mask, main)
        if len(mask.shape) == 2:  # one for all images
            values, every = main.read_all(mask), (count, *mask.shape)
            mask = replace(mask, shape=every, read=lambda part: np.broadcast_to(values, every)[part], chunks=None)
        parts[MASK] = _part(main, [mask], "uint8")
        check_counts([(main, images), (main, [mask])])
    fields = {name: part.stored for name, part in parts.items()}
    if spec.mask == "nan":
        fields[MASK] = StoredField(shape=spec.stored_shape, values="uint8")
    constants, coordinates = constants_of(spec, asked, beside), coordinates_of(images[0], main)
    return FieldSource(parts, fields, spec.mask == "nan", constants, coordinates, *labels_of(main, count))


def _part(arrays: Arrays, variables: Sequence[Variable], values: Values) -> JoinedField:
    """Return the part of arrays (N, H, W) or (N, C, H, W)."""
    names = channel_names(variables, arrays)
    stored = StoredField(shape=(len(names), *variables[0].shape[-2:]), values=values, channels=names)
    return JoinedField(arrays, variables, stored)


def joined(stored: StoredField, rows: Sequence[Rows], i: int) -> Array:
    """Return a field of image ``i``, of the type that is stored."""
    if len(rows) == 1:
        return stored.rounded(rows[0][i].reshape(stored.shape))
    found, first = np.empty(stored.shape, stored.dtype), 0
    for row in rows:
        last = first + row.variable.channels
        found[first:last] = stored.rounded(row[i].reshape(-1, *stored.shape[1:]), first)
        first = last
    return found


def coordinates_of(variable: Variable, arrays: Arrays) -> tuple[Coordinate, ...]:
    """Return names, positions and units of the dimensions of images."""
    found = list[Coordinate]()
    axes: tuple[tuple[Literal["image", "height", "width"], int], ...] = (("image", 0), ("height", -2), ("width", -1))
    for along, axis in axes:
        if variable.dimensions and (name := variable.dimensions[axis]):
            values = positions(variable, axis, arrays)
            units = arrays.found[name].units if values else ""
            found.append(Coordinate(along=along, name=name, values=values, units=units))
    return tuple(found)


def labels_of(arrays: Arrays, count: int) -> tuple[tuple[str, ...], Labels]:
    """Return classes and labels: whole numbers (N,) named labels or arr_1, else one class."""
    found = next((arrays.found[name] for name in ("labels", "arr_1") if name in arrays.found), None)
    if found is None or found.shape != (count,) or found.dtype.kind not in "iu":
        return labelled(np.full(count, UNLABELLED))
    labels = arrays.read_all(found).astype(np.int64)
    if not 0 <= labels.min() <= labels.max() < MOST_CLASSES:
        raise DataError(f"{found.name} of {arrays} has labels from {labels.min()} to {labels.max()}; number from 0")
    return labelled(labels)


def check_fields(spec: DataSpec, meta: CacheMeta) -> None:
    """Refuse fields of a cache that have other channels than the spec, or can't be normalised; raises DataError."""
    asked = spec.condition or ConditionSpec()
    counted = {
        "data.condition.channels": (asked.channels, meta.fields.get(CONDITION)),
        "data.condition.constant_channels": (asked.constant_channels, meta.constants),
        "data.condition.vector_size": (asked.vector_size, meta.fields.get(VECTOR)),
    }
    for key, (count, stored) in counted.items():
        if stored is not None and stored.shape[0] != count:
            raise DataError(f"{key} = {count}, but {stored.shape[0]} are prepared; --set {key}={stored.shape[0]}")
    ways = {IMAGES: ("data.normalise", spec.normalise), CONDITION: ("data.condition.normalise", asked.normalise)}
    for name, (key, way) in ways.items():
        if way is None or (found := meta.statistics.get(name)) is None:
            continue
        for channel, (low, high) in enumerate(zip(found.low, found.high, strict=True)):
            if low == high:
                names = meta.field(name).channels
                called = f" ({names[channel]})" if names else ""
                raise DataError(
                    f"{key} = {way}, but channel {channel}{called} of the {name} is {low:g} everywhere; leave it out, "
                    f"or --set {key}=null"
                )


class Regression(Protocol):
    """Trained regression."""

    @property
    def digest(self) -> str:
        """Checksum of its weights."""

    def predict(self, fields: DatasetCache, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the fields (n, C, H, W) that it predicts at ``positions`` (n,) of a cache, in their units."""


def fields_of(data: DataSpec) -> DataSpec:
    """Return the spec of the fields that residuals are made from; ``data`` itself if it is of fields."""
    return data if data.residual_of is None else data.model_copy(update={"residual_of": None})


def made_of(fields: DatasetCache, regression: Regression) -> dict[str, str]:
    """Return the checksums of regression and fields that a cache of residuals keeps."""
    return {REGRESSION: regression.digest, **{f"{PIXELS}{name}": value for name, value in fields.meta.sha256.items()}}


def residuals(fields: DatasetCache, regression: Regression, numbers: range) -> Iterator[Chunk]:
    """Yield a range of the residuals of all ``fields``, in chunks; raises DataError for one that can't be stored."""
    unfilled = fields.meta.model_copy(update={"masked": False})  # masked values stay NaN, for the statistics
    stored = {name: StoredImages(fields.path, unfilled, None, name=name) for name in fields.fields}
    together, dtype = max(1, PREDICTED_BYTES // fields.meta.field(IMAGES).nbytes), fields.meta.field(IMAGES).dtype
    for first in range(numbers.start, numbers.stop, together):
        positions = np.arange(first, min(first + together, numbers.stop))
        read = {name: images.read(positions) for name, images in stored.items()}
        predicted = regression.predict(fields, positions)
        with np.errstate(over="ignore"):
            found = (read[IMAGES] - predicted).astype(dtype)
        bad = ~np.isfinite(predicted) | np.isinf(found)
        if bad.any():
            number, channel = (int(place[0]) for place in bad.nonzero()[:2])
            raise DataError(
                f"data.residual_of predicts {predicted[bad][0]:g} in image {first + number}, channel {channel} of "
                f"{fields.path}, whose residual is beyond {found.dtype}; train that regression anew, or --set "
                "data.values=float32"
            )
        read[IMAGES] = found
        others = {
            name: [fields.meta.field(name).rounded(each).data for each in values]
            for name, values in read.items()
            if name != IMAGES
        }
        moments = {
            name: merged(np.stack([moments_of(values, fields.meta.masked) for values in read[name]]))
            for name in fields.meta.statistics
        }
        labels = fields.labels[positions].tolist()
        yield Chunk([each.data for each in found], labels, [], others, moments)
