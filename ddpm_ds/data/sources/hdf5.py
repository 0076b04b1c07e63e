"""Arrays of an HDF5 file, read by h5py: data sets by their path in the file, such as ``era5/t2m``."""

from pathlib import Path
from typing import Any

from ddpm_ds.config.spec import DataSpec
from ddpm_ds.data.sources.variables import Variable, Variables


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
