"""Atomic writes, reads within limits, and checksums of files. Does not import torch.

A path from a user may be a device, endless, or built to break its reader. So every text file is read by
:func:`read_bytes`, every JSON by :func:`read_json` or :func:`parse_json`, and a file that stays under its name is
written through :func:`open_regular`.
"""

import contextlib
import errno
import functools
import glob
import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn

import psutil
from tqdm import tqdm

from ddpm_ds.ground.errors import print_once

CHUNK_BYTES = 2**20
MOST_CONFIG_BYTES = 2**16
"""Maximum size of a file written by hand: run spec, DeepSpeed JSON, hostfile. Our largest has 2 KiB."""
MOST_RECORD_BYTES = 2**24
"""Maximum size of a file written by a program: checkpoint manifests and states, configurations, trace summaries."""
NEVER_FLUSHED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM)
"""Errors with which file systems refuse to flush a folder."""
LONGEST_NAME_BYTES, LONGEST_PATH_BYTES = 255, 4095
"""Linux's limits on the bytes of a file name and of a path."""


def open_regular(path: Path, mode: Literal["rb", "wb", "ab", "ab+"] = "rb") -> BinaryIO:
    """Open a regular file in a mode of Python's ``open``; raises OSError, whose ``strerror`` is the reason.

    Named pipes, which wait for the other end, and devices, which may be endless, are not opened.
    """
    if fault := path_fault(path.absolute()):
        raise OSError(errno.EINVAL, fault, str(path))
    with contextlib.suppress(FileNotFoundError):  # raised by opening it, unless that creates it
        kind = stat.S_IFMT(os.stat(path).st_mode)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if kind != stat.S_IFREG:
            kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
            raise OSError(errno.EINVAL, f"it is {kinds.get(kind, 'a device')}, not a file", str(path))
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666))


def append_line(path: Path, line: bytes) -> None:
    """Append a line in one write, after a line break if a full disk has cut off the last line; raises OSError."""
    with open_regular(path, "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        cut_off = size and os.pread(file.fileno(), 1, size - 1) != b"\n"
        line = b"\n" * bool(cut_off) + line + b"\n"
        if os.write(file.fileno(), line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def expanded(path: Path | str) -> Path:
    """Return a path from a user with the home folder in place of a leading ``~`` or ``~user``, if one is known."""
    with contextlib.suppress(RuntimeError, ValueError):  # no such home; a zero byte
        return Path(path).expanduser()
    return Path(path)


def path_fault(path: Path | str) -> str | None:
    """Return why no file can have this path, which has been :func:`expanded`; None for a possible path."""
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        return "it holds half of a surrogate pair, such as \\udcff"
    if name.startswith(b"~"):
        return "no home folder of this name is known; write it out"
    if b"\0" in name:
        return "a path can't hold a zero byte"
    if len(name) > LONGEST_PATH_BYTES or any(len(part) > LONGEST_NAME_BYTES for part in name.split(b"/")):
        return f"a name has {LONGEST_NAME_BYTES} bytes at most, a path {LONGEST_PATH_BYTES}"
    return None


def read_bytes(path: Path, most: int = MOST_RECORD_BYTES) -> bytes:
    """Return the content of a regular file; raises OSError, also if it is larger than ``most``."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def read_text(path: Path, most: int = MOST_RECORD_BYTES) -> str:
    """Return the text of a regular file; raises OSError as :func:`read_bytes`, and if it is not UTF-8."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"byte {error.start:,} is not UTF-8 text", str(path)) from None


def temporary_beside(path: Path) -> Path:
    """Return a temporary name beside ``path``, to be renamed to it; remove leftovers of killed processes."""
    prefix = f".{path.name}.writing-"
    with contextlib.suppress(OSError):
        for left in path.parent.glob(f"{glob.escape(prefix)}*"):
            owner = left.name.removeprefix(prefix)
            if owner.isdecimal() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return path.with_name(f"{prefix}{os.getpid()}")


def write_file(path: Path, content: bytes) -> None:
    """Write a small file atomically and durably: it holds either all of ``content`` or its old content."""
    replace_file(path, content)
    sync(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file atomically: it holds either all of ``content`` or its old content. The rename comes last."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open_regular(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk, so that it survives a power cut.

    Some file systems, of object stores for example, can't flush folders; the first such folder is named on stderr.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NEVER_FLUSHED or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
        print_once(f"this file system can't flush folders ({error.strerror}): a power cut may undo the last change")
    finally:
        os.close(descriptor)


def sha256_of(path: Path, bar: "tqdm[NoReturn] | None" = None) -> str:
    """Return the hexadecimal SHA-256 of a file, read in pieces; advances ``bar`` by its bytes."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            if bar is not None:
                bar.update(len(chunk))
    return digest.hexdigest()


def until_changed(work: Callable[[Path], str]) -> Callable[[Path], str]:
    """Return ``work`` on a file, with a cache: it runs again only when the file has changed; raises OSError."""
    kept = functools.lru_cache(maxsize=64)(lambda path, size, changed: work(path))

    @functools.wraps(work)
    def worked(path: Path) -> str:
        with open_regular(path) as file:
            facts = os.fstat(file.fileno())
        return kept(path, facts.st_size, facts.st_mtime_ns)

    return worked
