"""Files that a user names for output, written whole or not at all, and the folder of cached measurements."""

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddpm_ds.ground.errors import OutputError
from ddpm_ds.ground.files import expanded, write_file


def cache_folder() -> Path:
    """Return the folder of cached measurements in the user's cache (``XDG_CACHE_HOME``); it may not exist yet."""
    home = os.path.expanduser("~")  # stays "~" if the user has no home, as in some containers
    own = Path(home, ".cache") if home != "~" else Path(tempfile.gettempdir(), f"cache-{os.getuid()}")
    return expanded(os.environ.get("XDG_CACHE_HOME") or own) / "ddpm_ds"


def check_outputs(*, overwrite: bool, **paths: Path | None) -> None:
    """Check in advance the files that options name, such as ``out`` for ``--out``; see :func:`check_output`."""
    for name, path in paths.items():
        if path is not None:
            check_output(path, overwrite=overwrite, called=f"--{name} ", stream=_is_stream(path))


def check_output(path: Path, *, overwrite: bool, called: str = "", stream: bool = False) -> None:
    """Check that a file of the user's can be written: there is none of this name, or it may be overwritten.

    A link, even a broken one, is never followed or replaced. A ``stream``, such as a pipe, is written to directly.
    ``called`` is the option that names the path. Raises OutputError.
    """
    folder = path.absolute().parent
    if path.is_symlink() and not stream:
        raise OutputError(f"{called}{path} is a link, which is not written through; name the file itself, or another")
    replaceable = stream or path.is_file() or not path.exists()
    if not (replaceable and folder.is_dir() and os.access(path if stream else folder, os.W_OK)):
        raise OutputError(f"{called}{path} can't be written; name a file in a folder that exists and is yours")
    if path.exists() and not (overwrite or stream):
        raise OutputError(f"{called}{path} exists; name another file, or replace it with --overwrite")


def _is_stream(path: Path) -> bool:
    """Return whether a path is a device or a pipe, as ``/dev/stdout`` may be."""
    return path.exists() and not path.is_dir() and not path.is_file()


@contextlib.contextmanager
def writing(path: Path, *, overwrite: bool) -> Iterator[io.BytesIO]:
    """Yield a buffer for a file of the user's, which is written, whole or not at all, when the body ends.

    Raises OutputError as :func:`check_output`, and if the file can't be written, such as on a full disk.
    """
    content = io.BytesIO()
    yield content
    stream = _is_stream(path)
    check_output(path, overwrite=overwrite, stream=stream)
    try:
        if stream:
            path.write_bytes(content.getvalue())
        else:
            write_file(path, content.getvalue())
    except OSError as error:
        raise OutputError(f"{path} can't be written ({error.strerror}); name a file in another folder") from None
