"""The software of a host, which ranks compare when they meet, and ``ddpm-ds doctor`` before they do."""

from __future__ import annotations

import contextlib
import hashlib
from importlib import metadata
from pathlib import Path

from ddpm_ds.version import __version__

PACKAGES = ("torch", "deepspeed", "mlflow", "pydantic", "numpy", "safetensors", "einops")
CHECKSUM_DIGITS = 12


def versions() -> dict[str, str]:
    """Return the versions of ddpm_ds and of each of :data:`PACKAGES`; a missing one is left out."""
    found = {"ddpm_ds": __version__}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def sources() -> dict[str, str]:
    """Return the beginning of the checksum of each of this package's files, by its path."""
    package = Path(__file__).parents[1]
    return {
        str(path.relative_to(package.parent)): hashlib.sha256(path.read_bytes()).hexdigest()[:CHECKSUM_DIGITS]
        for path in sorted(package.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }
