"""torchvision's data sets of images with one class each, downloaded by it or put by hand."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import os
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from ddpm_ds.config.spec import DataSpec
from ddpm_ds.data.sources.arrays import ArraySource
from ddpm_ds.data.sources.base import (
    NETWORK_TIMEOUT_SECONDS,
    UNLABELLED,
    Names,
    Source,
    labelled,
    network_limit,
    one_line,
)
from ddpm_ds.data.sources.files import FolderSource
from ddpm_ds.errors import DataError


def open_cifar10(spec: DataSpec, progress: bool) -> Source:
    """Open the 50,000 training images of CIFAR-10, RGB of 32x32 pixels."""
    return _open(spec, "CIFAR10", "data.source = cifar10", progress)


def open_torchvision(spec: DataSpec, progress: bool) -> Source:
    """Open split ``data.split`` of the data set ``data.name`` in ``torchvision.datasets``."""
    assert spec.name is not None  # the run spec checks it
    return _open(spec, spec.name, f"data.name = {spec.name}", progress)


def _open(spec: DataSpec, name: str, key: str, progress: bool) -> Source:
    from torchvision import datasets  # imports torch

    kind: Any = getattr(datasets, name, None) if name in datasets.__all__ else None
    known = inspect.isclass(kind)
    if not known:
        near = difflib.get_close_matches(name, datasets.__all__, 1, 0.0)[0]
        raise DataError(f"{key} is no data set of torchvision; did you mean {near}?")
    folder = spec.store_root / "downloads"
    options = _options(kind, spec, key)
    # torchvision's progress bar has no switch of its own
    silent = contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO())
    try:
        with network_limit(NETWORK_TIMEOUT_SECONDS), silent:
            opened = kind(str(folder), download=True, **options)
    except (OSError, HTTPException, RuntimeError) as error:
        url, file = getattr(kind, "url", None), getattr(kind, "filename", None)
        by_hand = (
            f"get {url} by hand and put it at {folder / file}" if url and file else f"put its files below {folder}"
        )
        raise DataError(f"{key} can't be downloaded ({one_line(error)}); {by_hand}") from error
    except (TypeError, ValueError) as error:
        raise DataError(f"{key} with data.split = {spec.split}: {one_line(error)}") from error
    except ImportError as error:
        raise DataError(f"{key} needs another package ({one_line(error)}); install it with pip") from error
    return _source(opened, key)


def _options(kind: type, spec: DataSpec, key: str) -> dict[str, Any]:
    """Return the constructor arguments that choose a data set's split; raises DataError."""
    parameters = inspect.signature(kind).parameters
    if "download" not in parameters and "kwargs" not in parameters:
        raise DataError(f"{key} is not downloaded by torchvision; use source folder for files that you have")
    if "split" in parameters:
        return {} if spec.split is None else {"split": spec.split}
    if "train" not in parameters and spec.split is not None:
        raise DataError(f"data.split = {spec.split}: {key} has no parts; remove it")
    if spec.split not in (None, "train", "test"):
        raise DataError(f"data.split = {spec.split}: the parts of {key} are train and test")
    return {"train": spec.split != "test"} if "train" in parameters else {}


def _source(opened: Any, key: str) -> Source:
    """Return the source of an opened data set.

    Pixels or files, and labels, come from attributes of torchvision's classes, so that no image is decoded for a label.
    """
    found = vars(opened)
    pairs: Any = next((found[name] for name in ("samples", "_samples", "imgs") if name in found), [])
    images: Any = next((found[name] for name in ("data", "_image_files", "_images") if name in found), None)
    labels: Any = next((found[name] for name in ("targets", "labels", "_labels") if name in found), None)
    if images is None and pairs:
        images, labels = zip(*pairs, strict=True)
    try:
        numbers = np.array([UNLABELLED if label is None else int(label) for label in labels], np.int64)
        files = isinstance(images, list | tuple) and all(isinstance(image, str | os.PathLike) for image in images)
        pixels = None if files else np.asarray(images)
        if len(images) != len(numbers) or not len(numbers) or numbers.min() < 0 <= numbers.max():
            raise ValueError
        if pixels is not None and pixels.dtype != np.uint8:
            raise ValueError
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor that is not a number
        raise DataError(f"{key} is no data set of images with one class each; use one such as CIFAR100") from None
    names = getattr(opened, "classes", None)
    named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    classes, numbers = labelled(numbers, names if named else None)
    if pixels is None:
        return FolderSource(classes, numbers, Path("/"), Names(os.path.abspath(image).lstrip("/") for image in images))
    return ArraySource(classes, numbers, pixels)
