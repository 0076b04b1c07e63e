"""CIFAR-10, downloaded by torchvision or put by hand."""

from __future__ import annotations

import contextlib
import io
from http.client import HTTPException
from typing import TYPE_CHECKING

from ddpm_ds.data.sources.arrays import ArraySource, in_file
from ddpm_ds.data.sources.base import NETWORK_TIMEOUT_SECONDS, network_limit, one_line
from ddpm_ds.errors import DataError

if TYPE_CHECKING:
    from ddpm_ds.config.spec import DataSpec


def open_cifar10(spec: DataSpec, progress: bool) -> ArraySource:
    """Open the 50,000 training images, RGB of 32x32 pixels."""
    import numpy as np
    from torchvision.datasets import CIFAR10  # imports torch

    folder = spec.store_root / "downloads"
    # torchvision's progress bar has no switch of its own
    silent = contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO())
    try:
        with network_limit(NETWORK_TIMEOUT_SECONDS), silent:
            cifar = CIFAR10(str(folder), train=True, download=True)
    except (OSError, HTTPException, RuntimeError) as error:
        raise DataError(
            f"data.source = cifar10 can't be downloaded ({one_line(error)}); "
            f"get {CIFAR10.url} by hand and put it at {folder / CIFAR10.filename}"
        ) from error
    images, file = in_file(cifar.data, spec.store_root)
    return ArraySource(tuple(cifar.classes), np.array(cifar.targets, np.int64), images, file=file)
