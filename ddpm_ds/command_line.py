"""Shared parts of command lines: options as fields, their types, units (80GiB, 400Gbit/s), output files, tables.

Does not import torch.
"""

import contextlib
import errno
import io
import math
import os
import re
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

from ddpm_ds.errors import OptionError, OutputError
from ddpm_ds.files import MOST_DIGITS, expanded, path_fault, write_file

MOST_PROCESSES, MOST_BATCH = 2**16, 2**20
"""Most processes of a run, and most images of a step."""
MOST_IMAGES, MOST_COUNT = 10**15, 10**6
"""Most images or optimizer steps of a run, and most of anything else that is counted, such as images to draw."""
MOST_IMAGE, MOST_SEED = 2**48, 2**32 - 1
"""Highest number of an image among all those drawn from one seed, and highest such seed."""
MOST_MEMBERS = 4096
"""Most images that are drawn for one input."""
MOST_BYTES, MOST_BANDWIDTH, MOST_FLOPS = 2**60, 1e18, 1e21
"""Most memory of a device in bytes, bytes per second of a link, and flops per second."""


HIDDEN = ""
"""Help of an option that --help leaves out."""


def option(
    about: str | None = None, metavar: str | None = None, kind: Callable[[str], object] | None = None, **more: Any
) -> Any:
    """Return a field of a frozen dataclass that is an option of a command line; ``about`` is its help.

    ``kind`` parses a value. Without it the field's type does: a path, the choices of a Literal, or text. ``more`` are
    ``default``, ``names`` such as ``-p`` (that of the field, by default; without dashes it is a positional argument),
    ``group`` (title and description), ``either`` (name of a group of exclusive options), and arguments of
    ``add_argument``.
    """
    default, given = more.pop("default", None), {"metavar": metavar, "type": kind}
    given = {name: value for name, value in given.items() if value is not None}
    return field(default=default, metadata={"help": about, **given, **more})


def flag(about: str, **more: Any) -> Any:
    """Return a field as :func:`option` that is true if the option is given."""
    return option(about, default=False, action="store_true", **more)


def split_option(words: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Return the last value of an option of a command line, such as ``--resume``, and the other words."""
    value, begun, others = None, False, list[str]()
    for word in words:
        if word == name or word.startswith(f"{name}="):
            value, begun = word[len(name) + 1 :] or None, word == name
        elif begun and not word.startswith("-"):
            value, begun = word, False
        else:
            begun = False
            others.append(word)
    return value, others


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

    A link, even a broken one, is never followed or replaced. A ``stream``, such as a pipe, is written to as it is.
    ``called`` is the option that names the path.

    Raises:
        OutputError: it exists or can't be replaced, its folder is missing, or permissions forbid it.
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


def file_path(text: str) -> Path:
    """Option type: path of a file or folder, which need not exist; ``~`` is the home folder.

    Impossible paths, loops of links and folders without permission raise OptionError.
    """
    path = expanded(text)
    fault = path_fault(path) if text else "a path can't be empty"
    if fault is None:
        try:
            if stat.S_ISDIR(path.stat().st_mode) and not os.access(path, os.X_OK):
                fault = os.strerror(errno.EACCES)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            fault = error.strerror
    if fault is not None:
        raise OptionError(f"{text!r} can't be used ({fault})")
    return path


def whole(text: str, lowest: int, highest: int, what: str) -> int:
    """Parse a whole number from ``lowest`` to ``highest``, or raise OptionError with ``what`` it is."""
    if not (text.isdecimal() and len(text) <= MOST_DIGITS and lowest <= int(text) <= highest):
        raise OptionError(f"{text!r} is not {what}")
    return int(text)


positive = partial(whole, lowest=1, highest=MOST_COUNT, what="a whole number from 1 to 1,000,000")
natural = partial(whole, lowest=0, highest=MOST_COUNT, what="a whole number from 0 to 1,000,000")
process_count = partial(whole, lowest=1, highest=MOST_PROCESSES, what=f"a whole number from 1 to {MOST_PROCESSES:,}")
"""Option type: number of processes, stages or hosts."""
batch = partial(whole, lowest=1, highest=MOST_BATCH, what=f"a whole number from 1 to {MOST_BATCH:,}")
image_number = partial(whole, lowest=0, highest=MOST_IMAGE, what="a whole number from 0 to 2^48")
"""Option type: number of an image among all those drawn from one seed."""
port = partial(whole, lowest=1, highest=2**16 - 1, what="a port, which is a whole number from 1 to 65,535")
seed = partial(whole, lowest=0, highest=MOST_SEED, what="a number from 0 to 2^32 - 1")


def number(text: str, lowest: float, highest: float, what: str) -> float:
    """Parse a number from ``lowest`` to ``highest``, or raise OptionError with ``what`` it is."""
    try:
        found = float(text) if len(text) <= MOST_DIGITS else math.nan
    except ValueError:
        found = math.nan
    if not lowest <= found <= highest:
        raise OptionError(f"{text!r} is not {what}")
    return found


limited_seconds = partial(
    number, lowest=0.001, highest=1e6, what="a time in seconds from 0.001 to 1,000,000, such as 30"
)
grace_seconds = partial(number, lowest=0.0, highest=1e6, what="a time in seconds from 0 to 1,000,000, such as 30")


def seconds(text: str) -> float:
    """Parse a time in seconds, such as ``0.5``; ``inf`` means no limit."""
    found = number(text, 0.001, math.inf, "a time in seconds from 0.001 to 1,000,000, such as 30, or inf")
    return found if math.isinf(found) else limited_seconds(text)


def step_range(text: str) -> range:
    """Parse a range of optimizer steps, counted from 1: ``20-22``, ``20``, or ``none`` for no step."""
    if text == "none":
        return range(0)
    first, _, last = text.partition("-")
    begin, end = (whole(step, 1, MOST_IMAGES, "a number of a step, from 1 on") for step in (first, last or first))
    if end < begin:
        raise OptionError(f"{text!r} ends before it begins; write FIRST-LAST, FIRST or none")
    return range(begin, end + 1)


def valid_text(text: str) -> str:
    """Parse text that is written down, whose bytes must be UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OptionError(f"{text!r} is not UTF-8 text") from None
    return text


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Return the lines of a table with columns as wide as their widest cell, right-aligned except ``left`` ones."""
    columns = list(zip(*rows, strict=True))
    for number, column in enumerate(columns):
        width = max(map(len, column))
        columns[number] = tuple(cell.ljust(width) if number in left else cell.rjust(width) for cell in column)
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_PREFIXES = _DECIMAL | {f"{prefix}i": 2.0 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(.*)")
GIB = 2**30


def quantity(text: str, units: Mapping[str, float], what: str, most: float) -> float:
    """Parse a number with one of ``units`` into the unit of factor 1, from 1 to ``most``.

    Other texts raise OptionError, with ``what`` to give.
    """
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= MOST_DIGITS else None
    if match is None or float(match[1]) == 0:
        raise OptionError(f"{text!r} is not {what}")
    if match[2] not in units:
        near = [unit for unit in units if unit.lower() == match[2].lower()]
        fix = f"; write {match[1]}{near[0]}" if near else ""
        unit = f"unknown unit {match[2]!r}" if match[2] else "no unit"
        raise OptionError(f"{text!r} has {unit}{fix}; give {what}")
    found = float(match[1]) * units[match[2]]
    if not 1 <= found <= most:
        raise OptionError(f"{text!r} is out of range; give {what}")
    return found


def memory_size(text: str) -> int:
    """Parse a size such as ``80GiB`` or ``24GB`` into bytes."""
    sizes = {f"{prefix}B": size for prefix, size in _PREFIXES.items()}
    return int(quantity(text, sizes, "a size such as 80GiB or 24GB", MOST_BYTES))


link_speed = partial(
    quantity,
    units={f"{prefix}B/s": size for prefix, size in _PREFIXES.items()}
    | {f"{prefix}bit/s": size / 8 for prefix, size in _DECIMAL.items()},
    what="a speed such as 300GB/s or 400Gbit/s",
    most=MOST_BANDWIDTH,
)
"""Option type: bytes per second."""
teraflops = partial(quantity, units={"": 1e12}, what="a number of TFLOP/s such as 120", most=MOST_FLOPS)
"""Option type: flops per second."""


def limit(value: float) -> str:
    """Format the end of a range: ``512``, ``65,536``, or a long one as a power, ``10^15``."""
    powers = (f"{base}^{power}" for base in (10, 2) for power in range(6, 64) if base**power == value > 10**6)
    return next(powers, f"{value:,.15g}")


def counted(number: int, what: str) -> str:
    """Format a count with its noun: ``1 process``, ``2 stages``, ``2 micro-batches``."""
    plural = f"{what}es" if what.endswith(("ch", "ss")) else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def gib(size: float) -> str:
    """Format a size in GiB, or in MiB below 0.1 GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
