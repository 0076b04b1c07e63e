"""Sources of images: data sets as users have them, each a file of this package behind one protocol.

A source knows the class of each image and reads it as it is stored; :mod:`ddpm_ds.data.decoding` gives it the size and
the colours of the spec. docs/add_a_source.md shows how to add one. The run spec reads the entries of SOURCES without
numpy and Pillow, so a source imports such libraries where it uses them.
"""

from __future__ import annotations

import os
from hashlib import sha256
from typing import TYPE_CHECKING

from ddpm_ds.data.sources.arrays import open_arrays
from ddpm_ds.data.sources.base import Pixels, Source, SourceKind, UnreadableImage, network_limit
from ddpm_ds.data.sources.cifar10 import open_cifar10
from ddpm_ds.data.sources.digits import open_digits
from ddpm_ds.data.sources.folder import open_folder
from ddpm_ds.data.sources.zip import open_zip

if TYPE_CHECKING:
    from ddpm_ds.config.spec import DataSpec

__all__ = ["SOURCES", "Pixels", "Source", "SourceKind", "UnreadableImage", "identity", "network_limit", "open_source"]

SOURCES = {
    "digits": SourceKind("scikit-learn's, 8x8 pixels", open_digits),
    "cifar10": SourceKind("torchvision's, downloaded", open_cifar10),
    "folder": SourceKind("image files, `path` names their folder", open_folder, path="FOLDER"),
    "zip": SourceKind("image files in the zip archive `path`, as EDM's tools write", open_zip, path="FILE"),
    "arrays": SourceKind("`path` is a .npy or .npz of images", open_arrays, path="FILE"),
}
"""Sources by `data.source`."""


def open_source(spec: DataSpec, progress: bool = False) -> Source:
    """Open the source that ``spec.source`` names; ``progress`` shows bars while it is downloaded or listed.

    Raises:
        DataError: what it reads is missing, damaged or holds no images, or can't be downloaded.
    """
    return SOURCES[spec.source].open(spec, progress)


def identity(spec: DataSpec) -> str | None:
    """Return a short hash of what ``spec`` names besides the source itself, and so of which images it gives; None where
    it names nothing more. The path counts as an absolute one.
    """
    if spec.path is None:
        return None
    return sha256(os.fsencode(spec.path.resolve())).hexdigest()[:8]
