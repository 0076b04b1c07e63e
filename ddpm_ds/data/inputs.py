"""Conditions in a user's file or folder, for which images are drawn; they are read as the run read its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ddpm_ds.data.cache import CONDITION, IMAGES, VECTOR, FieldFacts, Indices
from ddpm_ds.data.cache import Images as Values
from ddpm_ds.data.decoding import decode, upright_size
from ddpm_ds.data.fields import joined
from ddpm_ds.data.origin import looks_of
from ddpm_ds.data.sources import FIELD_OPENERS, open_source
from ddpm_ds.data.sources.base import BROKEN, Source, one_line, read_file
from ddpm_ds.data.sources.files import FolderSource
from ddpm_ds.data.sources.variables import (
    MOST_BYTES,
    USUAL_CONDITION,
    USUAL_IMAGES,
    Arrays,
    Rows,
    Variable,
    check_counts,
    open_at,
)
from ddpm_ds.data.spec import ConditionSpec, DataSpec
from ddpm_ds.ground.errors import DataError, SpecError

OPTION = "--conditions"
HOLE, MASK_FILE = "hole", "-masklabel.png"
"""Field of the pixels that are cut out of pictures, if the user gives them."""
SOURCES = {
    **dict.fromkeys((".npy", ".npz"), "arrays"),
    **dict.fromkeys((".h5", ".hdf5", ".he5"), "hdf5"),
    **dict.fromkeys((".nc", ".nc4"), "netcdf"),
    ".zarr": "zarr",
}
"""Sources by the suffix of a path; other paths have the run's own source, or are folders of pictures."""


class Reading(NamedTuple):
    """Field that a function of positions (n,) reads."""

    read: Callable[[Indices], Values]


@dataclass(frozen=True)
class GivenInputs:
    """Opened conditions."""

    count: int
    key: str
    """Text that changes with the files."""
    fields: Mapping[str, Reading]
    """Fields from which the conditions are made."""
    truths: Callable[[Indices], Values | None]
    """Function that returns the true images (n, C, H, W) at positions (n,), None if they are unknown."""


def open_inputs(data: DataSpec, facts: FieldFacts | None, path: Path) -> GivenInputs:
    """Open conditions for samples of a run on ``data``, pixels behind latents, with these ``facts`` of fields; raises
    DataError.
    """
    if not path.exists():
        raise DataError(f"{OPTION} {path} does not exist; name a file or folder, or held-out")
    mask = path.with_name(f"{path.stem}{MASK_FILE}")
    looks = [looks_of(each, facts is not None) for each in (path, mask) if each.exists()]
    key = f"{path.absolute()} {[sorted(each.items()) for each in looks]}"
    if facts is None:
        return _pictures(data, path, key)
    source = "zarr" if path.is_dir() else SOURCES.get(path.suffix.lower(), data.source)
    if source not in FIELD_OPENERS:
        raise DataError(f"{OPTION} {path} has pictures, and the run learned named arrays; name a file of arrays")
    arrays = open_at(OPTION, path, data.model_copy(update={"source": source}), FIELD_OPENERS[source])
    condition = data.condition or ConditionSpec()
    parts: dict[str, list[Variable]] = {}
    if condition.kind == "stored":
        parts[CONDITION] = _named(arrays, "data.condition.variables", condition.variables, USUAL_CONDITION)
    elif condition.kind is not None:
        parts[IMAGES] = _named(arrays, "data.variables", data.variables, USUAL_IMAGES)
    if condition.vector:
        parts[VECTOR] = arrays.named("data.condition.vector", condition.vector)
    names = data.variables or next(((name,) for name in USUAL_IMAGES if name in arrays.found), ())
    if condition.kind == "stored" and len(arrays.found) > 1 and names and all(name in arrays.found for name in names):
        parts.setdefault(IMAGES, arrays.named("data.variables", names))
    count = check_counts([(arrays, variables) for variables in parts.values()])
    readers = {name: _reader(arrays, variables, name, facts, data) for name, variables in parts.items()}
    images = readers.get(IMAGES)
    if condition.kind == "stored":
        readers.pop(IMAGES, None)
    return GivenInputs(count, key, readers, lambda positions: None if images is None else images.read(positions))


def _named(arrays: Arrays, key: str, names: tuple[str, ...], usual: tuple[str, ...]) -> list[Variable]:
    """Return the arrays with these names; a file's single array needs no name. Without names a usual one is taken."""
    if len(arrays.found) == 1 and len(names) <= 1:
        return arrays.checked([*arrays.found.values()])
    names = names or next(((name,) for name in usual if name in arrays.found), usual[:1])
    return arrays.named(key, names)


def _reader(arrays: Arrays, variables: list[Variable], name: str, facts: FieldFacts, data: DataSpec) -> Reading:
    """Return the reader of a field, whose arrays must have the shapes and types that the run learned."""
    stored = facts.fields[name]
    channels = sum(variable.channels for variable in variables)
    shapes = {(channels, *variable.shape[2 if len(variable.shape) in (2, 4) else 1 :]) for variable in variables}
    names, at = ", ".join(variable.name for variable in variables), f"{OPTION} {arrays.path}"
    if shapes != {stored.shape}:
        there, learned = ("x".join(map(str, shape)) for shape in (sorted(shapes)[0], stored.shape))
        raise DataError(f"{at}: {names} is {there} for each image, and the run learned {learned}")
    for variable in variables:
        if variable.dtype.kind not in ("u" if stored.values == "uint8" else "fiub"):
            raise DataError(f"{at}: {variable.name} has {variable.dtype}, and the run learned {stored.values}")
    rows = [Rows(variable, MOST_BYTES // len(variables)) for variable in variables]
    means = facts.statistics[name].mean if data.mask == "nan" and name in facts.statistics else None

    def read_one(i: int) -> Values:
        try:
            return stored.read(stored.rounded(joined(stored.shape, rows, i)))
        except BROKEN as error:
            raise DataError(f"{at}: {names} can't be read at input {i} ({one_line(error)})") from error

    def read(positions: Indices) -> Values:
        found = np.stack([read_one(i) for i in positions.tolist()])
        if means is not None:
            found = np.where(np.isnan(found), np.array(means, found.dtype)[:, None, None], found)
        if not np.isfinite(found).all():
            image = positions[int(np.isfinite(found).reshape(len(found), -1).all(axis=1).argmin())]
            raise DataError(f"{at}: {names} is not finite in input {image}; replace such values")
        return found

    return Reading(read)


def _pictures(data: DataSpec, path: Path, key: str) -> GivenInputs:
    """Open the pictures from which conditions are made: whole ones or, to be enlarged, small ones."""
    condition = data.condition or ConditionSpec()
    factor = condition.factor if condition.kind == "reduced" else 1
    small = (data.size[0] // factor, data.size[1] // factor)
    kind = SOURCES.get(path.suffix.lower(), "folder" if path.is_dir() else "")
    source: Source = FolderSource((".",), np.zeros(1, np.int64), path.parent, [path.name])
    if kind in ("hdf5", "netcdf", "zarr"):
        raise DataError(f"{OPTION} {path} has fields, and the run learned pictures; name a folder of pictures")
    if kind:
        try:
            others = dict.fromkeys(("name", "text", "mask", "condition", "buckets"))
            source = open_source(data.model_copy(update={"source": kind, "path": path, "sources": (), **others}))
        except (DataError, SpecError) as error:
            raise DataError(str(error).replace("data.path =", OPTION, 1)) from None

    def read_one(i: int) -> tuple[Values, bool]:
        """Return pixels (C, H, W), and whether they are the true image."""
        try:
            content = source.read(i)
            if factor > 1 and upright_size(content) == small:
                pixels = decode(content, small, data.channels).transpose(2, 0, 1)
                return pixels.repeat(factor, axis=1).repeat(factor, axis=2), False  # reduced to the small one again
            pixels = decode(content, data.size, data.channels).transpose(2, 0, 1)
        except Exception as error:  # a decoder may raise anything on broken bytes
            raise DataError(f"{OPTION} {path}: {source.name(i)} can't be read ({one_line(error)})") from error
        known = condition.kind != "stored" and (condition.kind != "grey" or bool((pixels != pixels[:1]).any()))
        return pixels, known

    def read(positions: Indices) -> Values:
        return np.stack([read_one(i)[0] for i in positions.tolist()])

    holes = None
    if condition.kind == "cut_out":
        holes = _beside(source, data) if isinstance(source, FolderSource) else _holes(data, path, len(source.labels))

    def truths(positions: Indices) -> Values | None:
        found = [read_one(i) for i in positions.tolist()]
        return np.stack([pixels for pixels, _ in found]) if holes is None and all(known for _, known in found) else None

    fields = {IMAGES: Reading(read)}
    if holes is not None:
        fields[HOLE] = Reading(holes)
    return GivenInputs(len(source.labels), key, fields, truths)


def _beside(source: FolderSource, data: DataSpec) -> Callable[[Indices], Values] | None:
    """Return the reader of the masks beside pictures, ``1-masklabel.png`` beside ``1.png``, white where pixels are cut
    out; None if there is none.
    """
    pictures = [source.root / name for name in source.files]
    masks = [picture.with_name(f"{picture.stem}{MASK_FILE}") for picture in pictures]
    missing = [mask for mask in masks if not mask.exists()]
    if len(missing) == len(masks):
        return None
    if missing:
        raise DataError(f"{OPTION}: {missing[0]} is missing, and other pictures have a mask; add it, white to cut out")

    def read_one(i: int) -> Values:
        try:
            content = read_file(masks[i])
            if upright_size(content) != upright_size(source.read(i)):
                raise ValueError("its picture has another size")
            return decode(content, data.size, 1).transpose(2, 0, 1) >= 128
        except Exception as error:  # a decoder may raise anything on broken bytes
            raise DataError(f"{OPTION}: {masks[i]}, a mask, can't be read ({one_line(error)})") from error

    return lambda positions: np.stack([read_one(i) for i in positions.tolist()])


def _holes(data: DataSpec, path: Path, count: int) -> Callable[[Indices], Values] | None:
    """Return the reader of the array ``mask`` in a ``.npz``, (H, W) or (N, H, W), 1 where pixels are cut out."""
    if path.suffix.lower() != ".npz":
        return None
    arrays = open_at(OPTION, path, data, FIELD_OPENERS["arrays"])
    if "mask" not in arrays.found:
        return None
    mask = arrays.read_all(arrays.found["mask"])
    if mask.shape not in (data.size, (count, *data.size)) or not np.isin(mask, (0, 1)).all():
        raise DataError(
            f"{OPTION} {path}: mask should be 0 or 1, {data.size} or {(count, *data.size)}, not {mask.shape}"
        )
    whole = np.broadcast_to(mask.astype(bool), (count, *data.size))
    return lambda positions: whole[positions][:, None]
