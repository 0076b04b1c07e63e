"""Files that are complete or as they were, and their checksums. No torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from tqdm import tqdm

CHUNK_BYTES = 2**20


def write_file(path: Path, content: bytes) -> None:
    """Write a small file so that it holds either all of ``content`` or what it held before, and make it last."""
    replace_file(path, content)
    sync(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file so that it holds either all of ``content`` or what it held before.

    Once it is there, nothing can fail any more.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sync(path: Path) -> None:
    """Make a file, or a folder's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path, bar: tqdm[Any] | None = None) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces; advances ``bar`` by its bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            if bar is not None:
                bar.update(len(chunk))
    return digest.hexdigest()
