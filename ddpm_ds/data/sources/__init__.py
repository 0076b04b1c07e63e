"""Sources of images: each kind of data set is a module of this package behind one protocol.

A source knows the class of each image and reads it as stored; :mod:`ddpm_ds.data.decoding` converts it to the size and
colours of the spec. docs/add_a_source.md shows how to add one. The run spec reads the entries of SOURCES without numpy
and Pillow, so a source imports these libraries in its functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddpm_ds.data.sources.arrays import open_arrays, open_digits
from ddpm_ds.data.sources.base import Pixels, Source, SourceKind, UnreadableImage, network_limit
from ddpm_ds.data.sources.folder import open_folder
from ddpm_ds.data.sources.huggingface import open_huggingface
from ddpm_ds.data.sources.torchvision import open_cifar10, open_torchvision
from ddpm_ds.data.sources.webdataset import open_webdataset
from ddpm_ds.data.sources.zip import open_zip
from ddpm_ds.errors import DataError

if TYPE_CHECKING:
    from ddpm_ds.config.spec import DataSpec

__all__ = ["SOURCES", "Pixels", "Source", "SourceKind", "UnreadableImage", "network_limit", "open_source"]

SOURCES = {
    "digits": SourceKind("scikit-learn's, 8x8 pixels", open_digits),
    "cifar10": SourceKind("torchvision's, downloaded", open_cifar10),
    "folder": SourceKind(
        "image files, `path` names their folder",
        open_folder,
        path="FOLDER",
        labels="folders in data.path are classes, so move the images of each class to a folder of its own",
    ),
    "zip": SourceKind(
        "image files in the zip archive `path`, as EDM's tools write",
        open_zip,
        path="FILE",
        labels="its dataset.json has them, or else its folders are classes",
    ),
    "arrays": SourceKind(
        "`path` is a .npy or .npz of images", open_arrays, path="FILE", labels="they are the array labels of a .npz"
    ),
    "webdataset": SourceKind(
        "`path` is a .tar file or a folder of them", open_webdataset, path="PATH", labels="KEY.cls has that of KEY.jpg"
    ),
    "huggingface": SourceKind(
        "a data set of the datasets library, of parquet or of arrow files at `path`, or on the hub by `name`",
        open_huggingface,
        path="PATH",
        name="OWNER/NAME",
        labels="name their column with --set data.label_column=COLUMN",
        keys=("split", "image_column", "label_column"),
    ),
    "torchvision": SourceKind(
        "one of torchvision's by `name`, downloaded", open_torchvision, name="CIFAR100", keys=("split",)
    ),
}
"""Sources by `data.source`."""


def open_source(spec: DataSpec, progress: bool = False) -> Source:
    """Open the source that ``spec.source`` names; ``progress`` shows bars while it is downloaded or listed.

    Raises:
        DataError: the data set is missing, damaged or without images, or can't be read or downloaded.
        OSError: ``store_root`` can't be written.
    """
    try:
        return SOURCES[spec.source].open(spec, progress)
    except OSError as error:
        if spec.path is None or not Path(error.filename or "").is_relative_to(spec.path):
            raise
        raise DataError(
            f"data.path: {error.filename} can't be read ({error.strerror}); mend it or choose another with "
            "--set data.path=PATH"
        ) from error
