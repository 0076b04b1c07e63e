"""Arrays of a Zarr folder of format 2 or 3, read by zarr: by their path in the group, such as ``era5/t2m``."""

from pathlib import Path
from typing import Any

from ddpm_ds.config.spec import DataSpec
from ddpm_ds.data.sources.variables import Variable, Variables

PACKED = ("scale_factor", "add_offset")
"""Attributes of packed numbers, which xarray unpacks and zarr does not."""


def open_zarr(path: Path, spec: DataSpec) -> Variables:
    """Open all arrays of a Zarr group with at least one dimension; a single array is named images."""
    import zarr

    opened = zarr.open(path, mode="r")
    members: Any = opened.members(max_depth=None) if isinstance(opened, zarr.Group) else [("images", opened)]
    return {name: _variable(name, array) for name, array in members if isinstance(array, zarr.Array) and array.shape}


def _variable(name: str, array: Any) -> Variable:
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
