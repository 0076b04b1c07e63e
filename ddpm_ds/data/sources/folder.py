"""Image files of a folder and its subfolders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ddpm_ds.config.spec import DataSpec
from ddpm_ds.data.sources.base import (
    LABELS,
    Labels,
    Names,
    is_image,
    labelled,
    listed_labels,
    numbered,
    printable,
    read_file,
    read_path,
)
from ddpm_ds.errors import DataError


@dataclass
class FolderSource:
    """Image files sorted by their path relative to ``root``; the first folder of a path is the class, unless a
    ``dataset.json``, as the tools of EDM and StyleGAN write it, lists labels.

    Images directly in ``root`` have class ``.``. Names that begin with a dot are skipped.
    """

    classes: tuple[str, ...]
    labels: Labels = field(repr=False)
    root: Path
    files: Names = field(repr=False)

    def name(self, i: int, /) -> str:
        """Return the relative path."""
        return printable(self.files[i])

    def read(self, i: int, /) -> bytes:
        """Read an image file; raises OSError if it is not a regular file."""
        return read_file(self.root / self.files[i])


def open_folder(spec: DataSpec, progress: bool) -> FolderSource:
    """List the image files under the folder ``data.path``."""
    root = read_path(spec, "a folder of images", folder=True)
    files = [*_image_files(str(root))]
    if not files:
        raise DataError(
            f"data.path = {root} holds no image files (.png, .jpg, .webp, ...), nor do its subfolders; give a folder "
            "of images with --set data.path=FOLDER"
        )
    labels = None
    if os.path.exists(root / LABELS):
        labels = listed_labels(root, lambda: read_file(root / LABELS), files)
    classed = numbered(map(class_of, files)) if labels is None else labelled(labels)
    return FolderSource(*classed, root, Names(files))


def class_of(path: str) -> str:
    """Return the class of an image: the first folder of its path, or ``.``."""
    folder, inside, _ = path.partition("/")
    return printable(folder) if inside else "."


def _image_files(root: str) -> Iterator[str]:
    """Yield the relative paths of files under ``root`` with an extension that Pillow can decode, sorted."""
    visited: dict[str, str] = {}
    waiting = [""]  # the last one comes next; a folder ends with a slash
    while waiting:
        path = waiting.pop()
        if path and not path.endswith("/"):
            yield path
            continue
        folder = os.path.join(root, path)
        first = visited.setdefault(os.path.realpath(folder), path)
        if first != path and path.startswith(first):  # a link that leads back
            continue
        if first != path:
            raise DataError(
                f"data.path = {root}: {printable(path)} and {printable(first)} are the same folder; remove one of them"
            )
        try:
            with os.scandir(folder) as entries:
                found = [(entry.name, _is_folder(entry)) for entry in entries if not entry.name.startswith(".")]
        except OSError as error:
            raise DataError(
                f"data.path: {error.filename} can't be listed ({error.strerror}); allow it or move it elsewhere"
            ) from error
        found.sort(reverse=True)
        waiting += [path + name + "/" * is_folder for name, is_folder in found if is_folder or is_image(name)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
