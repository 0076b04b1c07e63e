"""Sources of images: each kind of data set behind one protocol.

A source of pictures knows the class of each image and reads it as stored; :mod:`ddpm_ds.data.decoding` converts it to
the size and colours of the spec. A source of fields is a file of named arrays; :mod:`ddpm_ds.data.fields`
reads the ones in the spec. docs/add_a_source.md shows how to add one. All sources are imported with this package,
so they import the libraries of extras in functions.
"""

from pathlib import Path

from ddpm_ds.data.sources.arrays import open_arrays, open_cifar10, open_digits, open_numpy
from ddpm_ds.data.sources.base import Opener, Source, captions_of
from ddpm_ds.data.sources.files import open_folder
from ddpm_ds.data.sources.huggingface import open_huggingface
from ddpm_ds.data.sources.variables import Opener as VariablesOpener
from ddpm_ds.data.sources.variables import open_stored
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError

OPENERS: dict[str, Opener] = {
    "digits": open_digits,
    "cifar10": open_cifar10,
    "folder": open_folder,
    "arrays": open_arrays,
    "huggingface": open_huggingface,
}
"""Functions that open sources of pictures, by `data.source`; `schema/choices.py` has their words."""
FIELD_OPENERS: dict[str, VariablesOpener] = {
    "arrays": open_numpy,
    **dict.fromkeys(("hdf5", "zarr", "netcdf"), open_stored),
}
"""Functions that open files of named arrays, by `data.source`."""


def open_source(spec: DataSpec, progress: bool = False) -> Source:
    """Open the source of ``spec``; ``progress`` shows bars. Raises DataError, and OSError of ``store_root``."""
    try:
        source = OPENERS[spec.source](spec, progress)
        if spec.text is not None and spec.text.missing == "empty" and (captions := captions_of(source)) is not None:
            captions.fill()
        return source
    except OSError as error:
        if not any(Path(error.filename or "").is_relative_to(each.path) for each in spec.folders):
            raise
        raise DataError(
            f"data.path: {error.filename} can't be read ({error.strerror}); mend it or choose another with "
            "--set data.path=PATH"
        ) from error
