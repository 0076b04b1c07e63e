"""Fields of named arrays on their way into the cache: read image by image, checked and measured.

::

    t2m (N, H, W), u (N, C, H, W) ──joined along the channels──▶ images     float16 or float32, or bytes as they are
    condition, vector, mask       ──────────────────────────────▶ fields of their own, of the same image

Or residuals are learned, fields minus the predictions of a regression, which samples get back::

    fields     (N, C, H, W) ──minus predictions, once──▶ residuals (N, C, H, W) ──▶ training
    condition, vector ──────┘                                 │ drawn by a sampler
    fields     (N, C, H, W) ◀──plus predictions───────────────┘

Other modules treat residuals as fields, with statistics of their own; condition, mask and vector are copied. Source:
Mardani et al. 2025, "Residual corrective diffusion modeling for km-scale atmospheric downscaling" (CorrDiff).
"""

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from ddpm_ds.data.cache import (
    CONDITION,
    IMAGES,
    MASK,
    VECTOR,
    CacheMeta,
    Coordinate,
    DatasetCache,
    StoredField,
    StoredImages,
)
from ddpm_ds.data.latents import PIXELS
from ddpm_ds.data.sources import FIELD_OPENERS
from ddpm_ds.data.sources.base import BROKEN, Labels, files_below, labelled, one_line
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
    open_at,
    positions,
)
from ddpm_ds.data.spec import ConditionSpec, DataSpec
from ddpm_ds.data.statistics import Moments, merged, moments_of, rounding_of
from ddpm_ds.data.writing import Chunk
from ddpm_ds.ground.errors import DataError
from ddpm_ds.ground.files import sha256_of

Values = Literal["uint8", "float16", "float32"]
TOGETHER_BYTES = 2**22  # bytes of the images in a chunk, at least one image
WHOLE_BYTES = 2**32  # maximum bytes of a source that is recognised by the checksums of its files
SAMPLED, SAMPLED_BYTES, MOST_SAMPLED = "sampled ", 2**25, 16
"""Beginning of a larger source's hash, and the bytes and images, at least one, by which it is recognised."""
REGRESSION = "regression"
"""Key of the regression's weights in the checksums of residuals; the fields have the prefix of pixels there."""
PREDICTED_BYTES = 2**20  # bytes of fields that are predicted together, at least one field


@dataclass(frozen=True)
class JoinedField:
    """Field, and the arrays that are joined along the channels to make it."""

    arrays: Arrays
    variables: Sequence[Variable]
    stored: StoredField


@dataclass(frozen=True)
class FieldSource:
    """Opened source of N images with their other fields."""

    parts: Mapping[str, JoinedField]
    """Fields by name, images first, without a mask that is made from NaN."""
    nan: bool  # whether NaN is masked, instead of refused
    constants: Array | None
    coordinates: tuple[Coordinate, ...]
    classes: tuple[str, ...]
    labels: Labels = field(repr=False)

    @functools.cached_property
    def fields(self) -> dict[str, StoredField]:
        """Stored fields, by name."""
        mask = {MASK: StoredField(shape=self.parts[IMAGES].stored.shape, values="uint8")} if self.nan else {}
        return {name: part.stored for name, part in self.parts.items()} | mask

    def _rows(self) -> dict[str, list[Rows]]:
        return {
            name: [Rows(variable, MOST_BYTES // len(part.variables)) for variable in part.variables]
            for name, part in self.parts.items()
        }

    def chunks(self, numbers: range) -> Iterator[Chunk]:
        """Yield a range of images in chunks; raises DataError for a value that can't be stored."""
        rows = self._rows()
        together = max(1, TOGETHER_BYTES // sum(stored.nbytes for stored in self.fields.values()))
        for first in range(0, len(numbers), together):
            yield self._chunk(rows, numbers[first : first + together])

    def content(self, *paths: Path) -> str:
        """Return a hash of names, shapes, labels, constants and the files at ``paths``; of large files, some images."""
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
        """Numbers of some images that stand for all."""
        image_bytes = sum(each.image_bytes for part in self.parts.values() for each in part.variables)
        count = min(len(self.labels), MOST_SAMPLED, max(1, SAMPLED_BYTES // image_bytes))
        return np.linspace(0, len(self.labels) - 1, count).astype(int).tolist()

    def centred(self) -> Self:
        """Return this source with offsets of float16 fields whose mean exceeds their spread: the means of some images.

        Offsets of whole numbers are whole; float16 arrays have none.
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
        return replace(self, parts=parts)

    def _image(self, rows: Mapping[str, Sequence[Rows]], i: int) -> dict[str, Array]:
        """Return the fields of an image before rounding, with its uint8 mask, and NaN for masked floats."""
        found = dict[str, Array]()
        for name, each in rows.items():
            stored = self.parts[name].stored
            values = joined(stored.shape, each, i)
            found[name] = values if name == MASK else stored.wide.rounded(values)
        images = found[IMAGES]
        if self.nan:
            found[MASK] = (~np.isnan(images)).astype(np.uint8)
        elif MASK in found:
            mask = found[MASK]
            if not np.isin(mask, (0, 1)).all():
                (variable,), arrays = self.parts[MASK].variables, self.parts[MASK].arrays
                raise DataError(f"data.mask: {variable.name} of {arrays} has other values than 0 and 1 in image {i}")
            mask = found[MASK] = mask.astype(np.uint8)
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
        """Whether NaN in a field is masked."""
        return (name == IMAGES and MASK in self.fields) or (name in (IMAGES, CONDITION) and self.nan)

    def _unfit(self, name: str, rows: Sequence[Rows], i: int) -> DataError:
        """Return the error for a value of image ``i`` that is not finite, or is not once it is stored."""
        part = self.parts[name]
        raw = joined(part.stored.shape, rows, i).reshape(part.stored.shape[0], -1)
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
    """Open and check the arrays that ``spec`` names; only constants and labels are read. Raises DataError."""
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
        shapes = ("(H, W)", "(N, H, W)", "(N, C, H, W)")
        (mask,) = main.taken("data.mask", [spec.mask], shapes, size=spec.stored_size)
        if len(mask.shape) == 4 and mask.shape[1] not in (1, spec.channels):
            raise DataError(f"data.mask: {mask.name} of {main} has {mask.shape[1]} channels; use 1 or {spec.channels}")
        if len(mask.shape) == 2:  # all images share it
            values, every = main.read_all(mask), (count, *mask.shape)
            mask = replace(mask, shape=every, read=lambda part: np.broadcast_to(values, every)[part], chunks=None)
        parts[MASK] = _part(main, [mask], "uint8")
        check_counts([(main, images), (main, [mask])])
    constants, coordinates = constants_of(asked, beside, spec.stored_size), tuple(coordinates_of(images[0], main))
    return FieldSource(parts, spec.mask == "nan", constants, coordinates, *labelled(main.labels(count, strict=False)))


def _part(arrays: Arrays, variables: Sequence[Variable], values: Values) -> JoinedField:
    """Return the field that joins arrays (N, H, W) or (N, C, H, W)."""
    names = channel_names(variables, arrays)
    stored = StoredField(shape=(len(names), *variables[0].shape[-2:]), values=values, channels=names)
    return JoinedField(arrays, variables, stored)


def joined(shape: tuple[int, ...], rows: Sequence[Rows], i: int) -> Array:
    """Return a field of image ``i``, of ``shape``, joined from ``rows`` and not yet rounded."""
    parts = [np.asarray(row[i]).reshape(-1, *shape[1:]) for row in rows]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def coordinates_of(variable: Variable, arrays: Arrays) -> Iterator[Coordinate]:
    """Yield the coordinates along the dimensions of images."""
    axes: tuple[tuple[Literal["image", "height", "width"], int], ...] = (("image", 0), ("height", -2), ("width", -1))
    for along, axis in axes:
        if variable.dimensions and (name := variable.dimensions[axis]):
            values = positions(variable, axis, arrays)
            units = arrays.found[name].units if values else ""
            yield Coordinate(along=along, name=name, values=values, units=units)


def check_fields(spec: DataSpec, meta: CacheMeta) -> None:
    """Raise DataError if a cache's fields have other channels than the spec, or can't be normalised."""
    if not spec.reads_arrays:
        return
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
                names = meta.stored[name].channels
                called = f" ({names[channel]})" if names else ""
                raise DataError(
                    f"{key} = {way}, but channel {channel}{called} of the {name} is {low:g} everywhere; leave it out, "
                    f"or --set {key}=null"
                )


class Regression(Protocol):
    """Trained regression."""

    digest: str  # checksum of its weights

    def predict(self, fields: DatasetCache, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return predictions (n, C, H, W) for the images at ``positions`` (n,) of a cache, in the fields' units."""


def fields_of(data: DataSpec) -> DataSpec:
    """Return the spec of the fields behind residuals; ``data`` itself if fields are learned."""
    return data if data.residual_of is None else data.model_copy(update={"residual_of": None})


def made_of(fields: DatasetCache, regression: Regression) -> dict[str, str]:
    """Return the checksums of regression and fields, which a cache of residuals keeps."""
    return {REGRESSION: regression.digest, **{f"{PIXELS}{name}": value for name, value in fields.meta.sha256.items()}}


def residuals(fields: DatasetCache, regression: Regression, numbers: range) -> Iterator[Chunk]:
    """Yield a range of the residuals of ``fields`` in chunks; raises DataError for one that can't be stored."""
    unfilled = fields.meta.model_copy(update={"masked": False})  # masked values stay NaN, for the statistics
    stored, kinds = {name: StoredImages(fields.path, unfilled, None, name) for name in fields.fields}, unfilled.stored
    together = max(1, PREDICTED_BYTES // kinds[IMAGES].nbytes)
    for first in range(numbers.start, numbers.stop, together):
        positions = np.arange(first, min(first + together, numbers.stop))
        read = {name: images.read(positions) for name, images in stored.items()}
        predicted = regression.predict(fields, positions)
        with np.errstate(over="ignore"):
            found = (read[IMAGES] - predicted).astype(kinds[IMAGES].dtype)
        bad = ~np.isfinite(predicted) | np.isinf(found)
        if bad.any():
            number, channel = (int(place[0]) for place in bad.nonzero()[:2])
            raise DataError(
                f"data.residual_of predicts {predicted[bad][0]:g} in image {first + number}, channel {channel} of "
                f"{fields.path}, so that the residual exceeds {found.dtype}; train the regression again, or --set "
                "data.values=float32"
            )
        copied = {name: values for name, values in read.items() if name != IMAGES}
        others = {name: [kinds[name].rounded(each).data for each in values] for name, values in copied.items()}
        read[IMAGES] = found
        moments = {
            name: merged(np.stack([moments_of(values, fields.meta.masked) for values in read[name]]))
            for name in fields.meta.statistics
        }
        yield Chunk([each.data for each in found], fields.labels[positions].tolist(), [], others, moments)
