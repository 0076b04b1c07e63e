"""Named arrays of a file: found by name, checked, and read when they are needed.

The first dimension of an array counts images; ``constants`` have no such dimension. Openers return the arrays of a file
as :class:`Variable` by name, without reading them::

    Zarr     folders of format 2 or 3, by zarr: arrays by their path in the group, such as ``era5/t2m``
    HDF5     by h5py, and so NetCDF 4: data sets by their path in the file

Attributes are applied alike: packed numbers are unpacked, missing values become NaN, and time becomes the first
dimension.
"""

import base64
import difflib
import errno
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ddpm_ds.data.sources.base import BROKEN, MOST_CLASSES, UNLABELLED, Labels, files_below, one_line
from ddpm_ds.data.spec import ConditionSpec, DataSpec
from ddpm_ds.ground.errors import DataError
from ddpm_ds.ground.files import open_regular, read_bytes
from ddpm_ds.ground.formats import parse_json
from ddpm_ds.ground.units import rounded
from ddpm_ds.schema.choices import SOURCES
from ddpm_ds.schema.types import written

Array: TypeAlias = npt.NDArray[Any]
Selection: TypeAlias = Any  # range of the first dimension, or a tuple of slices

STACKS = ("(N, H, W)", "(N, C, H, W)")  # shapes of images and of conditions
USUAL_IMAGES, USUAL_CONDITION = ("images", "image", "arr_0"), ("condition",)
"""Names that are tried if the spec has none."""
SMALL_BYTES = 2**22  # bytes of small images that are read together
MOST_BYTES = 2**26  # maximum bytes that are read together, of all arrays
MOST_WASTE, WASTE_BYTES = 64, 10**8
"""Chunks are refused above so many times an image's bytes, if they also have so many bytes."""
MOST_NAMED = 12  # maximum arrays that an error names
MOST_COORDINATES = 2**16  # maximum positions of a coordinate that a cache keeps
MOST_SIDE = 2**16  # maximum channels, height or width of an image
MOST_IMAGES = 10**9  # maximum images of a source, so that a forged number takes no memory
PACKED, MISSING = ("scale_factor", "add_offset"), ("_FillValue", "missing_value")
ATTRIBUTES = (*PACKED, *MISSING, "_Unsigned", "units")  # attributes of an array that are read
ZARR: dict[str, Literal[2, 3]] = {".zarray": 2, "zarr.json": 3}  # Zarr's format, by its metadata file
NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"
"""Beginning of the attribute NAME of a data set that only stands for a dimension."""
TIME, OTHER, PLACE = range(3)  # roles of dimensions, in their order
TIMES = {"time", "valid_time", "times", "date", "datetime"}
PLACES = {
    *("lat", "latitude", "nlat", "rlat", "y", "yc", "south_north", "projection_y_coordinate"),
    *("lon", "longitude", "nlon", "rlon", "x", "xc", "west_east", "projection_x_coordinate"),
}
CODECS = (
    *("adler32", "bitround", "blosc", "bytes", "bz2", "crc32", "crc32c", "delta", "endian", "fixedscaleoffset"),
    *("fletcher32", "gzip", "jenkins_lookup3", "lz4", "lzma", "packbits", "quantize", "sharding_indexed", "shuffle"),
    *("transpose", "vlen-utf8", "zlib", "zstd"),
)
"""Codecs, filters and compressors of Zarr that only compress and rearrange; others, such as pickle, are refused."""


@dataclass(frozen=True)
class Variable:
    """Array of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[Selection], Array] = field(repr=False)
    chunks: tuple[int, ...] | None = None
    """Shape of the chunks that are read whole; None if every byte can be read alone."""
    dimensions: tuple[str, ...] = ()  # names of the dimensions; empty or "" where they have none
    attributes: Mapping[str, object] = field(default_factory=dict, repr=False)
    fault: str = ""  # why it can't be read, and the fix; follows its name in an error

    @property
    def units(self) -> str:
        return _text(self.attributes.get("units", ""))

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
        return math.prod(self.shape[1:]) * self.dtype.itemsize


Variables: TypeAlias = dict[str, Variable]  # arrays of a file by name
Opener: TypeAlias = Callable[[Path, DataSpec], Variables]
"""Function that opens a file or folder, and may unpack into the spec's ``store_root``. May raise any error."""


class Rows:
    """Images of an array, read one after the other, several at once if chunks and memory allow it."""

    def __init__(self, variable: Variable, most_bytes: int) -> None:
        self.variable = variable
        chunk, image_bytes = (variable.chunks or (1,))[0], max(1, variable.image_bytes)
        small, most = (max(1, size // image_bytes) for size in (min(SMALL_BYTES, most_bytes), most_bytes))
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

    def read_all(self, variable: Variable) -> Array:
        """Return all of an array; raises DataError."""
        try:
            return np.asarray(variable.read(slice(None)))
        except BROKEN as error:
            raise DataError(f"{variable.name} of {self} can't be read ({one_line(error)}); write it again") from error

    def named(self, key: str, names: Sequence[str]) -> list[Variable]:
        """Return the arrays with these ``names``, which ``key`` of the spec lists; raises DataError."""
        if missing := next((name for name in names if name not in self.found), None):
            near = sorted(self.found, key=lambda name: -difflib.SequenceMatcher(None, missing, name).ratio())
            raise DataError(f"{key} has {missing}, which is no array of {self}; it holds {_listed(near)}")
        return self.checked([self.found[name] for name in names])

    def checked(self, found: list[Variable]) -> list[Variable]:
        """Return the arrays, which can be read; raises DataError."""
        for variable in found:
            if variable.fault:
                raise DataError(f"{variable.name} of {self} {variable.fault}")
        return found

    def labels(self, count: int, strict: bool) -> Labels:
        """Return the array labels or arr_1, whole numbers (N,) from 0, or UNLABELLED without one; raises DataError.

        An array of another kind is refused if ``strict``, and else ignored.
        """
        found = next((self.found[name] for name in ("labels", "arr_1") if name in self.found), None)
        misfits = found is not None and (found.shape != (count,) or found.dtype.kind not in "iu")
        if found is None or (misfits and not strict):
            return np.full(count, UNLABELLED)
        what = f"{self} holds {found.name}"
        if misfits:
            raise DataError(
                f"{what} of {found.dtype} {found.shape} for {count:,} images; use one whole number for each"
            )
        labels = self.read_all(found).astype(np.int64)
        if not 0 <= labels.min() <= labels.max() < MOST_CLASSES:
            raise DataError(f"{what} from {labels.min()} to {labels.max()}; number classes from 0")
        return labels

    def taken(
        self,
        key: str,
        names: Sequence[str],
        shapes: Sequence[str],
        counted: tuple[str, int] | None = None,
        size: tuple[int, int] | None = None,
        usual: Sequence[str] = (),
        fits: Callable[[Variable], bool] | None = None,
    ) -> list[Variable]:
        """Return the checked arrays with the ``names`` that ``key`` of the spec lists; raises DataError.

        Without names an array with a ``usual`` name is taken, or the only one that ``fits``. Each letter of ``shapes``
        is a dimension; C or K counts channels. ``counted`` has the key for the number of all channels, and its value.
        ``size`` is the required height and width.
        """
        found, has = self.named(key, names) if names or fits is None else self._only(key, usual, fits), 0
        for variable in found:
            name, shape = f"{variable.name} of {self}", variable.shape
            kinds = {len(letters): letters for letters in (re.findall(r"\w", each) for each in shapes)}
            if len(shape) not in kinds:
                raise DataError(f"{name} is {_size(shape)}, and should be {' or '.join(shapes)}")
            if max(shape[1:], default=0) > MOST_SIDE:
                raise DataError(f"{name} is {_size(shape)}, and a side of an image may have {MOST_SIDE:,}; cut it")
            if variable.dtype.kind not in "fiub":
                raise DataError(f"{name} holds {variable.dtype}, and should hold floats or whole numbers")
            if size is not None and variable.size != size:
                sizes = f"{written(variable.size)}, and the images are {written(size)}"
                raise DataError(f"{name} is {sizes}; bring it to their size")
            has += math.prod(side for side, letter in zip(shape, kinds[len(shape)], strict=True) if letter in "CK")
        if counted is not None and has != counted[1]:
            together, have = ", ".join(variable.name for variable in found), "has" if len(found) == 1 else "have"
            raise DataError(
                f"{counted[0]} = {counted[1]}, but {together} of {self} {have} {has}; --set {counted[0]}={has}"
            )
        return found

    def _only(self, key: str, usual: Sequence[str], fits: Callable[[Variable], bool]) -> list[Variable]:
        fitting = [variable for variable in self.found.values() if fits(variable)]
        chosen = [self.found[name] for name in usual if name in self.found][:1] or fitting
        if len(chosen) == 1:
            return self.checked(chosen)
        holds = [f"{each.name} {_size(each.shape)}" for each in fitting or self.found.values()]
        raise DataError(f"{key} is empty, and {self} holds {_listed(holds)}; name arrays with --set {key}=[NAME,...]")


def open_at(key: str, path: Path, spec: DataSpec, opener: Opener) -> Arrays:
    """Open the file or folder that ``key`` names with an opener; raises DataError."""
    if not path.exists():
        raise DataError(f"{key} = {path} does not exist; give it with --set {key}={SOURCES[spec.source].path}")
    try:
        if not path.is_dir():
            open_regular(path).close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries warn programmers, not users
            found = {name: each for name, each in opener(path, spec).items() if each.shape}
    except ImportError as error:
        raise DataError(
            f"data.source = {spec.source} needs a package ({one_line(error)}): pip install 'ddpm_ds[fields]'"
        ) from error
    except Exception as error:  # a library may raise anything on a damaged file
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # the disk of store_root is full
        raise DataError(f"{key} = {path} can't be read by source {spec.source} ({one_line(error)})") from error
    before = path.stat().st_size
    watched = {name: _watched(each, path, before) for name, each in found.items()}
    found = {name: _opened(name, partial(_finished, each, watched)) for name, each in watched.items()}
    return Arrays(key, path, found)


def _watched(variable: Variable, path: Path, before: int) -> Variable:
    """Return an array whose reads raise OSError for any fault, and DataError after its file was cut."""

    def check() -> None:  # HDF5 reads zeros beyond the end, and a mapped file ends the process
        if (size := path.stat().st_size) < before and not path.is_dir():
            raise DataError(f"{path} was cut from {before:,} to {size:,} bytes while it was read; bring it back")

    def read(part: Selection) -> Array:
        check()
        try:
            values = np.asarray(variable.read(part))
        except Exception as error:
            raise OSError(errno.EIO, one_line(error)) from error
        check()
        return values

    return replace(variable, read=read)


def images_of(spec: DataSpec, arrays: Arrays) -> list[Variable]:
    """Return the arrays that are the images, checked; raises DataError."""

    def fits(variable: Variable) -> bool:
        return len(variable.shape) in (3, 4) and variable.size == spec.stored_size

    counted = ("data.channels", spec.channels)
    found = arrays.taken("data.variables", spec.variables, STACKS, counted, usual=USUAL_IMAGES, fits=fits)
    for variable in found:
        if not spec.are_fields and variable.dtype != np.uint8:
            holds = f"{variable.name} of {arrays} holds {variable.dtype}"
            raise DataError(f"data.values = bytes, but {holds}; --set data.values=float32")
        if variable.size != spec.stored_size:
            key, has = "data.image_size" if spec.crop_from is None else "data.crop_from", written(variable.size)
            raise DataError(
                f"{key} = {written(spec.stored_size)}, but {variable.name} of {arrays} is {has}, and fields are not "
                f"scaled; --set {key}={has}"
            )
    return found


def condition_of(spec: DataSpec, asked: ConditionSpec, arrays: Arrays) -> list[Variable]:
    """Return the arrays that are the stored condition, checked; raises DataError."""

    def fits(variable: Variable) -> bool:
        return arrays.key == "data.condition.path" and len(variable.shape) in (3, 4)

    key, counted = "data.condition.variables", ("data.condition.channels", asked.channels)
    found = arrays.taken(key, asked.variables, STACKS, counted, usual=USUAL_CONDITION, fits=fits)
    for variable in found:
        if variable.size != found[0].size:
            sizes = [f"{each.name} is {written(each.size)}" for each in (found[0], variable)]
            raise DataError(f"{key}: {' and '.join(sizes)} in {arrays}; bring them to one size")
        if spec.crop_from is not None and variable.size != spec.stored_size:
            raise DataError(
                f"data.crop_from = {written(spec.stored_size)} crops images and condition alike, and {variable.name} "
                f"of {arrays} is {written(variable.size)}; use null, or a condition of the images' size"
            )
    return found


def constants_of(asked: ConditionSpec, arrays: Arrays, size: tuple[int, int]) -> Array | None:
    """Return the constant fields, float32 (C, H, W), of height and width ``size``; None without. Raises DataError."""
    if not asked.constants:
        return None
    key, parts = "data.condition.constants", list[Array]()
    counted = ("data.condition.constant_channels", asked.constant_channels)
    for variable in arrays.taken(key, asked.constants, ("(H, W)", "(C, H, W)"), counted, size):
        values = arrays.read_all(variable).astype(np.float32).reshape(-1, *size)
        finite = np.isfinite(values).all(axis=(1, 2))
        if not finite.all():
            where = f"{variable.name} of {arrays} has NaN or infinity in channel {finite.argmin()}"
            raise DataError(f"{key}: {where}; replace it")
        parts.append(values)
    return np.concatenate(parts)


def check_counts(groups: Sequence[tuple[Arrays, Sequence[Variable]]]) -> int:
    """Return the number of images; raises DataError if arrays differ in it, or have chunks that waste much."""
    every = [(arrays, variable) for arrays, variables in groups for variable in variables]
    where, first = every[0]
    count = first.shape[0]
    for arrays, variable in every:
        name, shape, image = f"{variable.name} of {arrays}", variable.shape, variable.image_bytes
        if shape[0] != count:
            both = f"{first.name} of {where} has {count:,} images and {name} {shape[0]:,}"
            raise DataError(f"{both}; each image needs its own")
        chunks = variable.chunks or (1, *shape[1:])
        sides = (chunk * -(-side // chunk) for chunk, side in zip(chunks[1:], shape[1:], strict=True))
        read = chunks[0] * math.prod(sides) * variable.dtype.itemsize
        if read > MOST_WASTE * image and read >= WASTE_BYTES:
            raise DataError(
                f"{name} has chunks of {_size(chunks)}, so reading one image of {rounded(image / 1e6)} MB reads "
                f"{read / 1e6:,.0f} MB; write it again in chunks of {_size((1, *shape[1:]))}"
            )
    if not count:
        raise DataError(f"{first.name} of {where} has no image; name another with --set data.variables=[NAME,...]")
    if count > MOST_IMAGES:
        raise DataError(f"{first.name} of {where} has {count:,} images, more than {MOST_IMAGES:,}; split it")
    return count


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "one number"


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    return f"{', '.join(words[:MOST_NAMED]) or 'no array'}{more}"


def channel_names(found: Sequence[Variable], arrays: Arrays) -> tuple[str, ...]:
    """Return the names of channels: t2m of (N, H, W); u.850 of (N, C, H, W), with a coordinate or number."""
    names = list[str]()
    for variable in found:
        if len(variable.shape) == 3:
            names.append(variable.name)
            continue
        labels = positions(variable, 1, arrays) or range(variable.channels)
        names += [f"{variable.name}.{f'{label:g}' if isinstance(label, float) else label}" for label in labels]
    return tuple(names)


def positions(variable: Variable, axis: int, arrays: Arrays) -> tuple[float, ...] | tuple[str, ...]:
    """Return the coordinate of a dimension, as floats or texts; () without one, or if it is large."""
    dimension = variable.dimensions[axis] if variable.dimensions else ""
    along = arrays.found.get(dimension)
    if along is not None and along.fault:
        raise DataError(f"{along.name} of {arrays} {along.fault}")
    if along is None or along.shape != (variable.shape[axis],) or along.shape[0] > MOST_COORDINATES:
        return ()
    values = arrays.read_all(along)
    if values.dtype.kind in "fiub":
        return tuple(values.astype(float).tolist()) if np.isfinite(values.astype(float)).all() else ()
    return tuple(map(_text, values))


def open_stored(path: Path, spec: DataSpec) -> Variables:
    """Open a Zarr folder or an HDF5 file, such as NetCDF 4; the content decides which."""
    if path.is_dir():
        import zarr

        if not any((path / each).exists() for each in (".zarray", ".zgroup", "zarr.json")):
            count = len(os.listdir(path))
            raise ValueError(f"it is a folder of {count:,} files, no Zarr; join them into one file")
        arrays: Variables = {}
        for folder, _, kind in (file.rpartition("/") for file in files_below(path)):
            name = _text(folder or "images")  # of a single array
            if kind in ZARR:
                each = _opened(name, partial(_zarr_array, zarr.open_array, path, folder, kind, name))
                arrays |= {name: each} if each.shape else {}
        return arrays
    with open_regular(path) as file:
        first = file.read(64)
    import h5py

    if not h5py.is_hdf5(path):
        hints = {b"<": ", as web pages do; download the file itself", b"CDF": ", as NetCDF 3: nccopy -k nc4 OLD NEW"}
        hint = next((text for start, text in hints.items() if first.lstrip().startswith(start)), "")
        raise ValueError(f"it is no HDF5, NetCDF 4 or Zarr, and begins with {first[:16]!r}{hint}")
    with suppress(ImportError):
        import hdf5plugin  # noqa: F401  # registers more filters

    opened, names = h5py.File(path, "r"), list[str]()
    opened.visit(names.append)  # which follows no links
    return {_text(name): _opened(_text(name), partial(_hdf5_array, name, opened)) for name in names}


def _variable(name: str, array: Any, dimensions: Iterable[object], attributes: Mapping[str, object]) -> Variable:
    """Return a library's ``array`` as a variable."""
    known = {key: value for key in ATTRIBUTES if (value := attributes.get(key)) is not None}
    return Variable(
        name, array.shape, array.dtype, array.__getitem__, array.chunks, tuple(map(_text, dimensions)), known
    )


def _opened(name: str, make: Callable[[], Variable]) -> Variable:
    """Return an array, or a placeholder with its fault: an array that nobody needs may be broken."""
    try:
        found = make()
        if min(found.chunks or (1,)) < 1:
            raise ValueError(f"its chunks are {_size(found.chunks or ())}")
        return found
    except Exception as error:  # a library may raise anything on forged metadata
        return _nothing(name, (0,), f"can't be read ({one_line(error)})")


def _nothing(name: str, shape: tuple[int, ...] = (), fault: str = "") -> Variable:
    return Variable(name, shape, np.dtype(float), lambda part: np.empty(0), fault=fault)


def _zarr_array(open_array: Callable[..., Any], path: Path, folder: str, kind: str, name: str) -> Variable:
    """Return the array in a folder, nothing for a group; ``kind`` is its metadata file."""
    metadata, version = parse_json(read_bytes(path / folder / kind)), ZARR[kind]
    if version == 3 and metadata["node_type"] == "group":
        return _nothing(name)
    _check_codecs(metadata, version)
    array = open_array(path / folder, mode="r", zarr_format=version)
    names = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS") or ()
    above, attributes = folder.rpartition("/")[0], dict(array.attrs)
    if version == 2 and names:
        attributes.setdefault("_FillValue", array.fill_value)  # as xarray writes and reads it

    dimensions = (_text(f"{above}/{each}").lstrip("/") if each else "" for each in names)
    return _variable(name, array, dimensions, attributes)


def _check_codecs(given: Mapping[str, Any], version: Literal[2, 3]) -> None:
    """Raise ValueError for unknown codecs, filters and compressors in an array's metadata, or inside of a codec."""
    for key in ("filters", "compressor") if version == 2 else ("codecs", "index_codecs"):
        listed = given.get(key) or ()
        for each in [listed] if isinstance(listed, str | dict) else listed:
            name = each if isinstance(each, str) else str(each["id" if version == 2 else "name"])
            if name.removeprefix("numcodecs.") not in CODECS:
                raise ValueError(f"it is stored with {name}, which may run code; write it again with blosc or zstd")
            if isinstance(each, dict):
                _check_codecs(each.get("configuration") or {}, version)


def _hdf5_array(name: str, file: Any) -> Variable:
    """Return a data set of an HDF5 file, nothing for a group or a mere dimension."""
    import h5py

    item = file[name]
    if not isinstance(item, h5py.Dataset) or _text(item.attrs.get("NAME", "")).startswith(NO_VARIABLE):
        return _nothing(name)
    made = item.id.get_create_plist()
    for code, _, _, called in map(made.get_filter, range(made.get_nfilters())):
        if not h5py.h5z.filter_avail(code):
            named = _text(called) or "without a name"
            raise ValueError(f"it needs HDF5's filter {code}, {named}: pip install hdf5plugin")
    if item.external or item.is_virtual:
        raise ValueError("its values are in other files; write it again into one file")

    dimensions = (_text(each[0].name if len(each) else each.label).lstrip("/") for each in item.dims)
    return _variable(name, item, dimensions, item.attrs)


def _text(value: object) -> str:
    """Return a name or an attribute as text that every file can hold."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text.encode("utf-8", "backslashreplace").decode()


def _unpacked(variable: Variable) -> Variable:
    """Return an array unpacked by its attributes; raises ValueError for attributes that are no numbers."""
    given, kind = variable.attributes, variable.dtype
    if variable.fault or kind.kind not in "fiu" or not given.keys() & {*PACKED, *MISSING, "_Unsigned"}:
        return variable
    if kind.kind == "i" and _text(given.get("_Unsigned", "")).lower() == "true":
        kind = np.dtype(kind.str.replace("i", "u"))
    missing = np.concatenate([_numbers(key, given[key]) for key in MISSING if key in given] or [np.empty(0)])
    with np.errstate(invalid="ignore", over="ignore"):
        missing = missing[np.isfinite(missing)].astype(variable.dtype).view(kind)
    scale, offset = (_numbers(key, given.get(key, usual))[0].item() for key, usual in zip(PACKED, (1, 0), strict=True))
    packed = (scale, offset) != (1, 0)
    wide = np.dtype(float) if packed or (kind.kind != "f" and len(missing)) else kind

    def read(part: Selection) -> Array:
        raw = np.asarray(variable.read(part))
        raw = raw if kind == variable.dtype else raw.view(kind)
        values = raw.astype(wide)
        if len(missing):
            values[np.isin(raw, missing)] = np.nan
        return values * scale + offset if packed else values

    return replace(variable, dtype=wide, read=read)


def _numbers(key: str, value: object) -> Array:
    """Return the numbers in an attribute, (n,)."""
    if isinstance(value, str) and key in MISSING:  # in JSON: NaN, or 8 bytes as xarray writes them
        for read in (float, lambda text: np.frombuffer(base64.b64decode(text, validate=True), "<f8")):
            with suppress(ValueError):
                value = read(value) if isinstance(value, str) else value
    found = np.asarray(value).reshape(-1)
    if found.dtype.kind not in "fiu" or not len(found) or (key in PACKED and not np.isfinite(found).all()):
        raise ValueError(f"its attribute {key} is {_text(value)!r} and no number; write it again")
    return found


def _finished(variable: Variable, found: Variables) -> Variable:
    """Return an unpacked array whose first dimension is time, and whose last two are places."""
    variable = _unpacked(variable)
    if variable.fault or len(variable.shape) < 2:
        return variable
    folder, names = variable.name.rpartition("/")[0], [*variable.dimensions]
    if not any(names) or len(names) != len(variable.shape):
        near = [name for name in found if name.rpartition("/")[0] == folder and _role(name, found) != OTHER]
        fits = [[name for name in near if found[name].shape == (side,)] for side in variable.shape]
        names = [own[0] if len(own) == 1 and fits.count(own) == 1 else "" for own in fits]
    roles, order = [_role(name, found) for name in names], [*range(len(names))]
    if roles.count(PLACE) == 2:
        order.sort(key=roles.__getitem__)
    elif TIME in roles:
        order.sort(key=lambda axis: axis != roles.index(TIME))
    if order == sorted(order):
        return replace(variable, dimensions=tuple(names))
    if roles.count(OTHER) > 1 and TIME not in roles:
        raise ValueError(f"its dimensions are {', '.join(names)}; write it again with the one first that counts images")

    def read(part: Selection) -> Array:
        which: list[Selection] = [slice(None)] * len(order)
        which[order[0]] = part
        return np.asarray(variable.read(tuple(which))).transpose(order)

    shape, chunks, dimensions = (
        tuple(each[axis] for axis in order) for each in (variable.shape, variable.chunks or variable.shape, names)
    )
    return replace(variable, shape=shape, chunks=chunks, dimensions=dimensions, read=read)


def _role(name: str, found: Variables) -> int:
    """Return the role of a dimension, by the units of its coordinate or by its name."""
    units, short = found[name].units if name in found else "", name.rpartition("/")[2].lower()
    if " since " in units or short in TIMES:
        return TIME
    return PLACE if units.startswith(("degrees_north", "degrees_east")) or short in PLACES else OTHER
