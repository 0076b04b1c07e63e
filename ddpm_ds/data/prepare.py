"""Preparation of a source into a data-set cache, once. A cache is complete or does not exist."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from uuid import uuid4

import numpy as np
from tqdm import tqdm

from ddpm_ds.config.spec import DataSpec, RunSpec
from ddpm_ds.data.cache import FORMAT, IMAGES, LABELS, META, SKIPPED, CacheMeta, DatasetCache, checksums
from ddpm_ds.data.latents import autoencoder_of, encoded, pixels_of, sources_of
from ddpm_ds.data.sources import Pixels, Source, UnreadableImage, open_source
from ddpm_ds.errors import DataError
from ddpm_ds.files import read_bytes, sync

if TYPE_CHECKING:
    import torch

READ_AHEAD = 256
"""Number of images that the threads decode before they are written."""


def cache_path(spec: DataSpec) -> Path:
    """Return the folder of the cache: a function of everything that a source reads, which is the spec's source, stored
    size, channels and, where there is one, absolute path.
    """
    if (autoencoder := autoencoder_of(spec)) is not None:
        pixels = cache_path(pixels_of(spec))
        return pixels.with_name(f"{pixels.name}-latents-{autoencoder.digest[:8]}")
    name = f"{spec.source}-{spec.stored_size}px-{spec.channels}ch"
    if spec.path is not None:
        name += f"-{sha256(os.fsencode(spec.path.resolve())).hexdigest()[:8]}"
    return spec.store_root / name


def class_names(spec: RunSpec) -> Sequence[str]:
    """Return the names of the U-Net's classes, none where it has none; their numbers where no cache names as many."""
    numbers = [str(label) for label in range(spec.unet.classes or 0)]
    try:
        names = CacheMeta.model_validate_json(read_bytes(cache_path(spec.data) / META)).classes
    except (OSError, ValueError, DataError):  # or its autoencoder is gone
        return numbers
    return names if len(names) == len(numbers) else numbers


def prepare(spec: DataSpec, progress: bool = False, encode: torch.device | None = None) -> DatasetCache:
    """Return the verified data-set cache of ``spec``, made when it is missing; ``progress`` shows bars.

    An existing cache is used unchanged: delete it after changing a folder's images. Safe to call from several processes
    and nodes at once; one prepares, the others wait. Unreadable images are left out and named in ``skipped.txt``.

    Raises:
        DataError: the source's own, too many unreadable images, ``store_root`` not writable, a damaged cache.
    """
    path = cache_path(spec)
    if path.exists():
        return DatasetCache.open(path, progress=progress)
    pixels = None
    if spec.autoencoder is not None:
        if encode is None:
            raise DataError(
                f"there are no latents of data.autoencoder = {spec.autoencoder} at {path}; make them with: "
                "ddpm-ds prepare --encode"
            )
        pixels = prepare(pixels_of(spec), progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path) as alone:
            if alone:
                for stale in path.parent.glob(f".{path.name}.preparing-*"):  # of a process that was killed
                    shutil.rmtree(stale)
            if not path.exists():
                _build(spec, path, progress, pixels, encode)
    except OSError as error:
        raise DataError(
            f"data.store_root = {spec.store_root} can't be written ({error.strerror or error}); "
            "choose another folder with --set data.store_root=FOLDER"
        ) from error
    return DatasetCache.open(path, verify=False)  # the checksums were taken from the files a moment ago


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Wait until no other process prepares ``path``.

    Yields False where the file system has no locks (some Lustre mounts): then several may build at once, and the first
    to finish wins.
    """
    with path.with_name(f".{path.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _build(spec: DataSpec, path: Path, progress: bool, pixels: Any, encode: Any) -> None:
    source = open_source(spec, progress) if pixels is None else None
    temporary = path.with_name(f".{path.name}.preparing-{uuid4().hex[:8]}")
    temporary.mkdir()
    try:
        if source is None:
            _write_latents(temporary, pixels, spec, path.name, progress, encode)
        else:
            _write(temporary, source, spec, f"preparing {path.name}", progress)
        try:
            temporary.rename(path)
        except OSError:
            if not path.exists():  # else another process, that we could not lock out, was first
                raise
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(folder: Path, source: Source, spec: DataSpec, title: str, progress: bool) -> None:
    """Write and flush all files of a cache."""
    shape = (spec.channels, spec.stored_size, spec.stored_size)
    labels: list[int] = []
    skipped: list[UnreadableImage] = []
    with (folder / IMAGES).open("wb") as file, tqdm(total=len(source), desc=title, disable=not progress) as bar:
        _write_header(file, (len(source), *shape))
        for image in _read(source):
            bar.update()
            if isinstance(image, UnreadableImage):
                skipped.append(image)
                if len(skipped) > spec.max_bad_fraction * len(source):
                    raise DataError(
                        f"data.max_bad_fraction = {spec.max_bad_fraction:g} is passed: {len(skipped)} of "
                        f"{len(source)} images are unreadable so far, first {skipped[0]}; fix or remove them, or raise "
                        "it to skip them"
                    )
                continue
            pixels, label = image
            file.write(pixels.transpose(2, 0, 1).tobytes())  # (C, H, W)
            labels.append(label)
        file.seek(0)
        _write_header(file, (len(labels), *shape))
    np.save(folder / LABELS, np.array(labels, np.int64))
    if skipped:
        report = "".join(f"{image.name}\t{image.reason}\n" for image in skipped)
        (folder / SKIPPED).write_text(report, encoding="utf-8", errors="backslashreplace")
    meta = CacheMeta(
        format=FORMAT,
        source=spec.source,
        folder=None if spec.path is None else str(spec.path),
        count=len(labels),
        shape=shape,
        classes=source.classes,
        skipped=len(skipped),
        sha256=checksums(folder, progress),
    )
    (folder / META).write_text(meta.model_dump_json(indent=2) + "\n", encoding="utf-8")
    for written in folder.iterdir():
        sync(written)
    sync(folder)


def _write_latents(folder: Path, pixels: Any, spec: DataSpec, title: str, progress: bool, device: Any) -> None:
    autoencoder = autoencoder_of(spec)
    assert autoencoder is not None
    np.save(folder / IMAGES, np.concatenate(list(encoded(pixels, autoencoder, device, f"encoding {title}", progress))))
    np.save(folder / LABELS, pixels.labels)
    meta = pixels.meta.model_copy(
        update={
            "kind": "latents",
            "shape": (spec.channels, spec.image_size, spec.image_size),
            "sha256": checksums(folder, progress) | sources_of(pixels, autoencoder),
        }
    )
    (folder / META).write_text(meta.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _write_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    """Start a uint8 ``.npy``. numpy pads the header so that the first dimension can change in place later."""
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})


def _read(source: Source) -> Iterator[tuple[Pixels, int] | UnreadableImage]:
    """Yield all images in order, decoded by threads: Pillow releases the interpreter while it decodes and scales."""

    def read(i: int) -> tuple[Pixels, int] | UnreadableImage:
        try:
            return source[i]
        except UnreadableImage as error:
            return error

    with ThreadPoolExecutor() as threads:
        for first in range(0, len(source), READ_AHEAD):
            yield from threads.map(read, range(first, min(first + READ_AHEAD, len(source))))
