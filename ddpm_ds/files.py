"""Files that are complete or as they were, and their checksums. No torch."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

CHUNK_BYTES = 2**20


def temporary_beside(path: Path) -> Path:
    """Return the name of a file or folder that this process writes and then renames to ``path``; removes what killed
    writers of ``path`` left.
    """
    prefix = f".{path.name}.writing-"
    with contextlib.suppress(OSError):
        for left in path.parent.glob(f"{glob.escape(prefix)}*"):
            owner = left.name.removeprefix(prefix)
            if owner.isdecimal() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return path.with_name(f"{prefix}{os.getpid()}")


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


METRICS, EVALUATIONS, OBSERVATIONS = "metrics.jsonl", "evaluations.jsonl", "observations.jsonl"
"""Files of a run's folder with log points, held-out losses, and observers' measurements."""


def read_points(path: Path) -> list[dict[str, Any]]:
    """Return the points of a file of JSON lines, each with its ``step``, in the order of the file; none without a file.

    A line that was cut off when the disk was full is left out.
    """
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            point = json.loads(line)
        except ValueError:
            continue
        if isinstance(point, dict) and "step" in point:
            found.append(point)
    return found
