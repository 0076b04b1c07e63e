"""Fields and what belongs to them, from files of named arrays: which arrays a spec means, their checks, lazy reads.

The first dimension of an array counts images; ``constants`` have no such dimension. What opens a kind of file returns
its arrays as :class:`Variable` by name, and reads none of them::

    Zarr     folders of format 2 or 3, by zarr: arrays by their path in the group, such as ``era5/t2m``
    HDF5     by h5py: data sets by their path in the file
    NetCDF   by xarray, which unpacks them, as it does the Zarr folders that it has written
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ddpm_ds.config.choices import SOURCES
from ddpm_ds.config.spec import ConditionSpec, DataSpec, written
from ddpm_ds.data.sources.base import BROKEN, one_line
from ddpm_ds.errors import DataError

Array: TypeAlias = "npt.NDArray[Any]"

USUAL_IMAGES, USUAL_CONDITION = ("images", "image", "arr_0"), ("condition",)
"""Names of the arrays that are meant where the spec names none."""
SMALL_BYTES = 2**22
"""Bytes that are read together of arrays whose images are smaller."""
MOST_BYTES = 2**26
"""Maximum bytes that are read together, of all arrays, so that each chunk of a file is read once."""
MOST_WASTE, WASTE_BYTES = 64, 10**8
"""Chunks that hold more than so many times the bytes of the image that is asked for, and so many bytes, are refused."""
MOST_NAMED = 12
"""Maximum names of arrays in an error."""
MOST_COORDINATES = 2**16
"""Maximum positions of a coordinate that a cache keeps."""
PACKED = ("scale_factor", "add_offset")
"""Attributes of packed numbers, which xarray unpacks and zarr does not."""


@dataclass(frozen=True)
class Variable:
    """One array of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[slice], Array] = field(repr=False)
    """Reads a range of the first dimension."""
    chunks: tuple[int, ...] | None = None
    """Shape of the chunks that are read as a whole; None if every byte can be read alone."""
    dimensions: tuple[str, ...] = ()
    """Names of the dimensions; empty or "" where they have none."""
    units: str = ""
    fault: str = ""
    """Why it can't be read, with the fix, after its name."""

    @property
    def channels(self) -> int:
        """Channels of an array (N, H, W), (N, C, H, W), (N,) or (N, K)."""
        return self.shape[1] if len(self.shape) in (2, 4) else 1

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an array of fields."""
        return self.shape[-2], self.shape[-1]

    @property
    def image_bytes(self) -> int:
        """Bytes of one image."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the chunks that hold one image."""
        chunks = self.chunks or (1, *self.shape[1:])
        sides = [chunk * -(-side // chunk) for chunk, side in zip(chunks[1:], self.shape[1:], strict=True)]
        return chunks[0] * math.prod(sides) * self.dtype.itemsize


Variables: TypeAlias = "dict[str, Variable]"
"""Arrays of a file by name."""
Opener: TypeAlias = "Callable[[Path, DataSpec], Variables]"
"""Function that opens a file or folder; the spec says where it may unpack. May raise any error of its library."""


class Rows:
    """Images of an array, read one after the other, and together as far as chunks and memory allow."""

    def __init__(self, variable: Variable, most_bytes: int) -> None:
        self.variable = variable
        chunk = (variable.chunks or (1,))[0]
        small, most = (
            max(1, size // max(1, variable.image_bytes)) for size in (min(SMALL_BYTES, most_bytes), most_bytes)
        )
        self._step = max(small // chunk * chunk, min(chunk, most))
        self._first, self._block = 0, np.empty(0)

    def __getitem__(self, i: int) -> Array:
        """Return image ``i``, without the first dimension; raises the errors of the file's library."""
        if not self._first <= i < self._first + len(self._block):
            self._block = np.empty(0)  # frees the memory for the next one
            self._first = i // self._step * self._step
            self._block = np.asarray(self.variable.read(slice(self._first, self._first + self._step)))
        row: Array = self._block[i - self._first]
        return row


@dataclass(frozen=True)
class Arrays:
    """The arrays of one file, and the key of the spec that names it."""

    key: str
    path: Path
    found: Variables

    def __str__(self) -> str:
        return f"{self.key} = {self.path}"

    def whole(self, variable: Variable) -> Array:
        """Return all of an array; raises DataError."""
        try:
            return np.asarray(variable.read(slice(None)))
        except BROKEN as error:
            raise DataError(f"{variable.name} of {self} can't be read ({one_line(error)}); write it again") from error

    def named(self, key: str, names: Sequence[str]) -> list[Variable]:
        """Return the arrays with these ``names``, which ``key`` of the spec lists; raises DataError."""
        if missing := next((name for name in names if name not in self.found), None):
            near = sorted(self.found, key=lambda name: -difflib.SequenceMatcher(None, missing, name).ratio())
            more = f" and {len(near) - MOST_NAMED} more" if len(near) > MOST_NAMED else ""
            holds = f"it holds {', '.join(near[:MOST_NAMED])}{more}" if near else "it holds no array"
            raise DataError(f"{key} has {missing}, which {self} does not hold; {holds}")
        return [self.found[name] for name in names]

    def only(self, key: str, usual: Sequence[str], fits: Callable[[Variable], bool]) -> list[Variable]:
        """Return the array with a usual name, or the only one that fits; raises DataError."""
        fitting = [variable for name, variable in self.found.items() if fits(variable)]
        chosen = [self.found[name] for name in usual if name in self.found] or fitting
        if len(chosen) == 1 or (chosen and chosen[0].name in usual):
            return chosen[:1]
        holds = [f"{each.name} {_size(each.shape)}" for each in fitting or self.found.values()]
        more = f" and {len(holds) - MOST_NAMED} more" if len(holds) > MOST_NAMED else ""
        raise DataError(
            f"{key} is empty, and {self} holds {', '.join(holds[:MOST_NAMED]) or 'no array'}{more}; name those that "
            f"are meant with --set {key}=[NAME,...]"
        )


def open_arrays_of(spec: DataSpec, opener: Opener, condition: bool = False) -> Arrays:
    """Open ``data.path`` or, for the ``condition``, its own path; raises DataError."""
    key, path = "data.path", spec.path
    if condition and spec.condition is not None and spec.condition.path is not None:
        key, path = "data.condition.path", spec.condition.path
    assert path is not None, "the run spec checks it"
    if not path.exists():
        raise DataError(f"{key} = {path} does not exist; give it with --set {key}={SOURCES[spec.source].path}")
    return open_at(key, path, spec, opener)


def open_at(key: str, path: Path, spec: DataSpec, opener: Opener) -> Arrays:
    """Open the file or folder that ``key`` names, by the opener of ``spec.source``; raises DataError."""
    try:
        return Arrays(key, path, opener(path, spec))
    except ImportError as error:
        raise DataError(
            f"data.source = {spec.source} needs a package ({one_line(error)}): pip install 'ddpm_ds[fields]'"
        ) from error
    except (*BROKEN, TypeError) as error:
        raise DataError(f"{key} = {path} can't be read by source {spec.source} ({one_line(error)})") from error


def images_of(spec: DataSpec, arrays: Arrays) -> list[Variable]:
    """Return the arrays that are the images, checked; raises DataError."""

    def fits(variable: Variable) -> bool:
        return len(variable.shape) in (3, 4) and variable.size == spec.stored_size

    found = arrays.named("data.variables", spec.variables) if spec.variables else None
    found = found or arrays.only("data.variables", USUAL_IMAGES, fits)
    for variable in found:
        _check_kind(arrays, variable, spec, (3, 4), "(N, H, W) or (N, C, H, W)")
        if variable.size != spec.stored_size:
            key = "data.image_size" if spec.crop_from is None else "data.crop_from"
            has = variable.size
            raise DataError(
                f"{key} = {written(spec.stored_size)}, but {variable.name} of {arrays} is {written(has)}, and fields "
                f"are not scaled; --set {key}={written(has)}"
            )
    _check_channels(arrays, found, "data.channels", spec.channels)
    return found


def condition_of(spec: DataSpec, asked: ConditionSpec, arrays: Arrays) -> list[Variable]:
    """Return the arrays that are the stored condition, checked; raises DataError."""
    key = "data.condition.variables"
    own = arrays.key == "data.condition.path"
    found = (
        arrays.named(key, asked.variables)
        if asked.variables
        else arrays.only(key, USUAL_CONDITION, lambda variable: own and len(variable.shape) in (3, 4))
    )
    for variable in found:
        _check_kind(arrays, variable, spec, (3, 4), "(N, h, w) or (N, C, h, w)", pictures=False)
        if variable.size != found[0].size:
            sizes = [f"{each.name} is {written(each.size)}" for each in (found[0], variable)]
            raise DataError(f"{key}: {' and '.join(sizes)} in {arrays}; bring them to one size")
        if spec.crop_from is not None and variable.size != spec.stored_size:
            raise DataError(
                f"data.crop_from = {written(spec.stored_size)} crops images and condition alike, and {variable.name} "
                f"of {arrays} is {written(variable.size)}; use null, or a condition of the images' size"
            )
    _check_channels(arrays, found, "data.condition.channels", asked.channels)
    return found


def constants_of(spec: DataSpec, asked: ConditionSpec, arrays: Arrays) -> Array | None:
    """Return the constant fields, float32 (C, H, W), None if there are none; raises DataError."""
    if not asked.constants:
        return None
    parts = []
    for variable in arrays.named("data.condition.constants", asked.constants):
        _check_kind(arrays, variable, spec, (2, 3), "(H, W) or (C, H, W)", pictures=False)
        if variable.size != spec.stored_size:
            raise DataError(
                f"data.condition.constants: {variable.name} of {arrays} is {written(variable.size)}, and the "
                f"images are {written(spec.stored_size)}; bring it to their size"
            )
        values = arrays.whole(variable).astype(np.float32).reshape(-1, *spec.stored_size)
        if not np.isfinite(values).all():
            channel = int(np.isfinite(values).all(axis=(1, 2)).argmin())
            raise DataError(
                f"data.condition.constants: {variable.name} of {arrays} has NaN or infinity in channel {channel}; "
                "replace it"
            )
        parts.append(values)
    found = np.concatenate(parts)
    if len(found) != asked.constant_channels:
        raise _other_channels(
            arrays, asked.constants, "data.condition.constant_channels", asked.constant_channels, len(found)
        )
    return found


def vector_of(spec: DataSpec, asked: ConditionSpec, arrays: Arrays) -> list[Variable]:
    """Return the arrays that are the vector, checked; raises DataError."""
    found = arrays.named("data.condition.vector", asked.vector)
    for variable in found:
        _check_kind(arrays, variable, spec, (1, 2), "(N,) or (N, K)", pictures=False)
    _check_channels(arrays, found, "data.condition.vector_size", asked.vector_size)
    return found


def mask_of(spec: DataSpec, arrays: Arrays) -> Variable | None:
    """Return the array that is the mask, None if there is none or values that are NaN are masked; raises DataError."""
    if spec.mask in (None, "nan"):
        return None
    assert spec.mask is not None
    (found,) = arrays.named("data.mask", [spec.mask])
    _check_kind(arrays, found, spec, (2, 3, 4), "(N, H, W), (H, W) or (N, C, H, W)", pictures=False)
    if found.size != spec.stored_size or (len(found.shape) == 4 and found.shape[1] not in (1, spec.channels)):
        raise DataError(
            f"data.mask: {found.name} of {arrays} is {_size(found.shape)}, and the images are "
            f"{_size((spec.channels, *spec.stored_size))}; use a mask of their size, for all channels or for each"
        )
    return found


def check_counts(groups: Sequence[tuple[Arrays, Sequence[Variable]]]) -> int:
    """Return the number of images, which all arrays must have; raises DataError."""
    every = [(arrays, variable) for arrays, variables in groups for variable in variables]
    where, first = every[0]
    for arrays, variable in every:
        if variable.shape[0] != first.shape[0]:
            raise DataError(
                f"{first.name} of {where} has {first.shape[0]:,} images and {variable.name} of {arrays} "
                f"{variable.shape[0]:,}; each image needs its own"
            )
        _check_chunks(arrays, variable)
    if not first.shape[0]:
        raise DataError(f"{first.name} of {where} has no image; name another with --set data.variables=[NAME,...]")
    return first.shape[0]


def _check_chunks(arrays: Arrays, variable: Variable) -> None:
    """Refuse chunks of which much more is read than one image."""
    image, read = variable.image_bytes, variable.chunk_bytes
    if read > MOST_WASTE * image and read >= WASTE_BYTES:
        better = (1, *variable.shape[1:])
        raise DataError(
            f"{variable.name} of {arrays} has chunks of {_size(variable.chunks or ())}, so that one image of "
            f"{image / 1e6:,.3g} MB reads {read / 1e6:,.0f} MB; write it again in chunks of {_size(better)}"
        )


def _check_kind(
    arrays: Arrays, variable: Variable, spec: DataSpec, ranks: Sequence[int], shapes: str, pictures: bool = True
) -> None:
    """Refuse an array of other dimensions, or of other values than numbers; ``pictures`` may have to be bytes."""
    if variable.fault:
        raise DataError(f"{variable.name} of {arrays} {variable.fault}")
    if len(variable.shape) not in ranks:
        raise DataError(f"{variable.name} of {arrays} is {_size(variable.shape)}, and should be {shapes}")
    if variable.dtype.kind not in "fiub":
        raise DataError(f"{variable.name} of {arrays} holds {variable.dtype}, and should hold floats or whole numbers")
    if pictures and not spec.are_fields and variable.dtype != np.uint8:
        raise DataError(
            f"data.values = bytes, but {variable.name} of {arrays} holds {variable.dtype}; --set data.values=float32"
        )


def _check_channels(arrays: Arrays, found: Sequence[Variable], key: str, asked: int) -> None:
    if (has := sum(variable.channels for variable in found)) != asked:
        raise _other_channels(arrays, [variable.name for variable in found], key, asked, has)


def _other_channels(arrays: Arrays, names: Sequence[str], key: str, asked: int, has: int) -> DataError:
    have = "has" if len(names) == 1 else "have"
    return DataError(f"{key} = {asked}, but {', '.join(names)} of {arrays} {have} {has}; --set {key}={has}")


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "one number"


def channel_names(found: Sequence[Variable], arrays: Arrays) -> tuple[str, ...]:
    """Return the names of the channels of arrays (N, H, W) or (N, C, H, W): t2m, or u.850 with the coordinate of its
    dimension, or its number.
    """
    names = list[str]()
    for variable in found:
        if len(variable.shape) == 3:
            names.append(variable.name)
            continue
        labels = positions(variable, 1, arrays) or range(variable.channels)
        names += [f"{variable.name}.{f'{label:g}' if isinstance(label, float) else label}" for label in labels]
    return tuple(names)


def positions(variable: Variable, axis: int, arrays: Arrays) -> tuple[Any, ...]:
    """Return the coordinate of a dimension, as floats or texts; () if there is none, or it is large."""
    dimension = variable.dimensions[axis] if variable.dimensions else ""
    along = arrays.found.get(dimension)
    if along is None or along.shape != (variable.shape[axis],) or along.shape[0] > MOST_COORDINATES:
        return ()
    values = arrays.whole(along)
    if values.dtype.kind in "fiub":
        return tuple(values.astype(float).tolist()) if np.isfinite(values.astype(float)).all() else ()
    return tuple(value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values)


def open_zarr(path: Path, spec: DataSpec) -> Variables:
    """Open all arrays of a Zarr group with at least one dimension; a single array is named images."""
    import zarr

    opened = zarr.open(path, mode="r")
    members: Any = opened.members(max_depth=None) if isinstance(opened, zarr.Group) else [("images", opened)]
    return {
        name: _zarr_variable(name, array) for name, array in members if isinstance(array, zarr.Array) and array.shape
    }


def _zarr_variable(name: str, array: Any) -> Variable:
    names = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS") or ()
    packed = next((key for key in PACKED if key in array.attrs), None)
    folder = name.rpartition("/")[0]
    return Variable(
        name,
        array.shape,
        array.dtype,
        array.__getitem__,
        array.chunks,
        tuple(f"{folder}/{each}".lstrip("/") if each else "" for each in names),
        str(array.attrs.get("units", "")),
        fault="" if packed is None else f"is packed by {packed}, which --set data.source=netcdf unpacks",
    )


def open_hdf5(path: Path, spec: DataSpec) -> Variables:
    """Open all data sets of an HDF5 file with at least one dimension; their dimension scales are coordinates."""
    import h5py

    file = h5py.File(path, "r")
    found: Variables = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape:
            found[name] = Variable(
                name,
                item.shape,
                item.dtype,
                item.__getitem__,
                item.chunks,
                tuple(dimension[0].name.lstrip("/") if len(dimension) else dimension.label for dimension in item.dims),
                _text(item.attrs.get("units", "")),
            )

    file.visititems(visit)
    return found


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def open_netcdf(path: Path, spec: DataSpec) -> Variables:
    """Open all variables and coordinates with at least one dimension; their fill values are NaN."""
    import xarray

    opened = xarray.open_dataset(path, cache=False, decode_timedelta=False)
    return {str(name): _netcdf_variable(str(name), each) for name, each in opened.variables.items() if each.shape}


def _netcdf_variable(name: str, variable: Any) -> Variable:
    return Variable(
        name,
        variable.shape,
        np.dtype(variable.dtype),
        lambda part: variable[part].values,
        variable.encoding.get("chunksizes") or variable.encoding.get("chunks"),
        tuple(map(str, variable.dims)),
        str(variable.attrs.get("units", "")),
    )
