"""A folder that is complete or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddpm_ds.checkpoint.folder import sync
from ddpm_ds.errors import OutputError


def check_new_folder(path: Path) -> None:
    """Refuse a folder that holds something or that can't be made; leaves nothing behind.

    Raises:
        OutputError: with what is in the way.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise OutputError(f"{path} exists and is {'not empty' if path.is_dir() else 'no folder'}; name a new folder")
    existing = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise OutputError(f"{path} can't be written ({error.strerror}: {existing}); name one that can") from None


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` that becomes ``path`` when the body ends, and is removed when it raises.

    Raises:
        OutputError: ``path`` holds something, or the file system refuses.
    """
    check_new_folder(path)
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.writing-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.replace(path)  # an empty folder of that name gives way
        sync(path.parent)
    except OSError as error:
        if error.strerror is None:
            raise
        raise OutputError(f"{path} can't be written ({error.strerror}); name one that can") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
