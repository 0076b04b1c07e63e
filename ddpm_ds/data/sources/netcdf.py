"""Variables of a NetCDF file, or of a Zarr folder that xarray has written, read and unpacked by xarray."""

from pathlib import Path
from typing import Any

import numpy as np

from ddpm_ds.config.spec import DataSpec
from ddpm_ds.data.sources.variables import Variable, Variables


def open_netcdf(path: Path, spec: DataSpec) -> Variables:
    """Open all variables and coordinates with at least one dimension; their fill values are NaN."""
    import xarray

    opened = xarray.open_dataset(path, cache=False, decode_timedelta=False)
    return {str(name): _variable(str(name), each) for name, each in opened.variables.items() if each.shape}


def _variable(name: str, variable: Any) -> Variable:
    return Variable(
        name,
        variable.shape,
        np.dtype(variable.dtype),
        lambda part: variable[part].values,
        variable.encoding.get("chunksizes") or variable.encoding.get("chunks"),
        tuple(map(str, variable.dims)),
        str(variable.attrs.get("units", "")),
    )
