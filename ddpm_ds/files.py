"""Atomic writes, reads within limits, and checksums of files. Does not import torch.

A path from a user may be a device, endless, or built to break its reader. So every text file is read by
:func:`read_bytes`, every JSON by :func:`read_json` or :func:`parse_json`, and a file that stays under its name is
written through :func:`open_regular`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

import psutil
from tqdm import tqdm

from ddpm_ds.errors import SpecError

CHUNK_BYTES = 2**20
MOST_CONFIG_BYTES = 2**16
"""Maximum size of a file written by hand: run spec, DeepSpeed JSON, hostfile. Our largest has 2 KiB."""
MOST_RECORD_BYTES = 2**24
"""Maximum size of a file written by a program: checkpoint manifests and states, configurations, trace summaries."""
DEEPEST = 32
"""Maximum nesting of lists and blocks."""
_TOO_DEEP = f"lists or blocks are more than {DEEPEST} levels deep"
MOST_DIGITS = 40
"""Maximum characters of a number: enough for 64-bit integers and every digit of a float."""
LONGEST_NAME_BYTES, LONGEST_PATH_BYTES = 255, 4095
"""Linux's limits on the bytes of a file name and of a path."""


def open_regular(path: Path, mode: Literal["rb", "wb", "ab", "ab+"] = "rb") -> BinaryIO:
    """Open a regular file in a mode of Python's ``open``; raises OSError, whose ``strerror`` is the reason.

    Named pipes, which wait for the other end, and devices, which may be endless, are not opened.
    """
    if fault := path_fault(path.absolute()):
        raise OSError(errno.EINVAL, fault, str(path))
    with contextlib.suppress(FileNotFoundError):  # which opening it raises, unless it is made
        kind = stat.S_IFMT(os.stat(path).st_mode)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if kind != stat.S_IFREG:
            kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
            raise OSError(errno.EINVAL, f"it is {kinds.get(kind, 'a device')}, not a file", str(path))
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666))


def append_line(path: Path, line: bytes) -> None:
    """Append a line in one write, after the end of a line that was cut off, as by a full disk; raises OSError."""
    with open_regular(path, "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        cut_off = size and os.pread(file.fileno(), 1, size - 1) != b"\n"
        line = b"\n" * bool(cut_off) + line + b"\n"
        if os.write(file.fileno(), line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def presets(folder: str) -> Path:
    """Return a folder of presets, such as ``launch/specs``, of the clone, or its copy in an installed package."""
    package = Path(str(resources.files("ddpm_ds"))).resolve()
    clone = package.parent / folder
    return clone if clone.is_dir() else package / "presets" / Path(folder).name


def preset(path: Path | str, folder: Path) -> Path:
    """Return a path that a user gave, or the preset in ``folder`` that it means if there is no such file.

    ``digits``, ``digits.yaml`` and ``launch/specs/digits.yaml`` mean the preset, wherever the program is started.
    Raises SpecError if the package was installed without its presets.
    """
    given = expanded(path)
    if os.path.exists(given) or given.parent.name not in ("", folder.name):
        return given
    if not folder.is_dir():
        raise SpecError(f"{folder} is missing: ddpm_ds was installed without its data; reinstall it from a whole wheel")
    return next((found for found in folder.glob("*.*") if given.name in (found.name, found.stem)), given)


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


def read_json(path: Path, most: int = MOST_RECORD_BYTES) -> Any:
    """Return the value of a JSON file; raises OSError as :func:`read_text`, ValueError as :func:`parse_json`."""
    return parse_json(read_text(path, most))


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, limiting the digits of numbers and the depth of nesting.

    Raises ValueError with one line if it is not JSON, has a duplicate key or exceeds a limit. A ``JSONDecodeError``
    has the line of the fault, not the one where the parser noticed it.
    """

    def block(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
            raise ValueError(f"{twice} is given twice in one block")
        return dict(pairs)

    try:
        value = json.loads(
            text,
            object_pairs_hook=block,
            parse_int=lambda number: int(check_digits(number)),
            parse_float=lambda number: float(check_digits(number)),
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except json.JSONDecodeError as error:
        before, found = error.doc[: error.pos].rstrip(), error.doc[error.pos : error.pos + 1]
        if "trailing comma" in error.msg:  # since Python 3.13 the comma's place
            before, found = error.doc[: error.pos + 1], error.doc[error.pos + 1 :].lstrip()[:1]
        if found in ("", "}", "]") or "delimiter" in error.msg:  # the fault stands before it
            comma = found and before.endswith(",")
            message = f"a comma before {found}; remove it" if comma else error.msg
            raise json.JSONDecodeError(message, error.doc, max(len(before) - 1, 0)) from None
        raise
    level = [value]
    for _ in range(DEEPEST + 1):
        blocks = [block for block in level if isinstance(block, dict | list)]
        level = [item for block in blocks for item in (block.values() if isinstance(block, dict) else block)]
    if level:
        raise ValueError(_TOO_DEEP)
    return value


def open_tensors(path: Path, framework: str = "pt") -> Any:
    """Open a safetensors file for PyTorch or ``"numpy"``, reading names, shapes and types; raises OSError.

    The library checks the header's offsets and sizes against the file; the header's length is limited here.
    """
    from safetensors import SafetensorError, safe_open

    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
    try:
        if length > MOST_RECORD_BYTES:
            raise SafetensorError
        return safe_open(path, framework)
    except SafetensorError:
        raise OSError(errno.EINVAL, "it is no safetensors file", str(path)) from None


def check_digits(text: str) -> str:
    """Return the text of a number; raises ValueError for too many digits, which could take long to parse."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"the number {text[:8]}... has more than {MOST_DIGITS} digits")
    return text


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
    """Flush a file, or a folder's entries, to disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Linux's limits of control groups, such as a container's, and the groups of this process."""


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the folder of this process's control group, in both versions of them, and the folders above it."""
    with contextlib.suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                inside = (CGROUPS / controller if controllers else CGROUPS) / group.lstrip("/")
                yield from (inside, *inside.parents)


def processors() -> int:
    """Return the number of processors that this process may use, by its affinity and its control group's quota."""
    most = len(os.sched_getaffinity(0))
    for folder in control_groups("cpu"):
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                most = min(most, -(-quota // period)) if quota > 0 else most
    return most


def sha256_of(path: Path, bar: tqdm[NoReturn] | None = None) -> str:
    """Return the hexadecimal SHA-256 of a file, read in pieces; advances ``bar`` by its bytes."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            if bar is not None:
                bar.update(len(chunk))
    return digest.hexdigest()


def until_changed(work: Callable[[Path], str]) -> Callable[[Path], str]:
    """Return ``work`` on a file with a cache: it is done again only when the file has changed; raises OSError."""

    @functools.lru_cache(maxsize=64)
    def kept(path: Path, size: int, changed: int) -> str:
        return work(path)

    @functools.wraps(work)
    def worked(path: Path) -> str:
        with open_regular(path) as file:
            facts = os.fstat(file.fileno())
        return kept(path, facts.st_size, facts.st_mtime_ns)

    return worked


SPEC, DS_CONFIG, STAGES, MACHINE = "spec.yaml", "ds_config.json", "stages.txt", "machine.json"
"""Files in a run's folder: the spec, the DeepSpeed JSON, the table of stages and the machine that was planned for."""
METRICS, EVALUATIONS, OBSERVATIONS = "metrics.jsonl", "evaluations.jsonl", "observations.jsonl"
"""Files in a run's folder with log points, held-out losses and observers' measurements."""
VERDICT, REHEARSAL = "verdict.txt", "rehearsal.json"
"""Files in a run's folder: where its time went, and for ``train --steps`` seconds of steps and memory of ranks."""


def read_points(path: Path) -> list[dict[str, float]]:
    """Return the points of a JSON-lines file in order, each a ``step`` and numbers; empty if there is no file.

    Damaged lines, such as one cut off by a full disk, are skipped. Raises OSError if the file can't be read.
    """
    found = []
    if path.is_file():
        with open_regular(path) as file:
            while line := file.readline(CHUNK_BYTES):
                try:
                    point = parse_json(line)
                except ValueError:
                    continue
                if isinstance(point, dict) and all(type(value) in (int, float) for value in point.values()):
                    step = point.get("step", math.nan)
                    if 0 <= step < math.inf and step == int(step):
                        found.append(point)
    return found
