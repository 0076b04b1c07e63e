"""Parts that command lines share: a parser with one-line errors, option types, sizes and speeds (80GiB, 400Gbit/s),
tables. No torch.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ddpm_ds.errors import OutputError, SpecError


class OneLineParser(argparse.ArgumentParser):
    """A parser, with its verbs' parsers, that raises a SpecError where argparse would print its usage and leave.

    Descriptions are shown as they are written.
    """

    def __init__(self, **options: Any) -> None:
        written = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{**written, **options})

    def error(self, message: str) -> NoReturn:
        raise SpecError(f"{message}; {self.prog} --help explains")


def add_spec_options(parser: argparse.ArgumentParser, default: Path | None = None) -> None:
    """Add ``--spec``, which has to be given unless there is a ``default``, and ``--set``."""
    asked = "run spec, see launch/specs" if default is None else f"run spec (default: {default.stem})"
    parser.add_argument("--spec", type=Path, default=default, required=default is None, metavar="YAML", help=asked)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add ``--set``, which every program and verb has that takes a run spec."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change one value of the spec, or with ds.KEY=VALUE of the DeepSpeed JSON; may be repeated",
    )


def cache_folder() -> Path:
    """Return the folder of cached measurements, in the user's cache (``XDG_CACHE_HOME``); may not exist yet."""
    home = os.path.expanduser("~")  # as it is where the user has none, as in some containers
    own = Path(home, ".cache") if home != "~" else Path(tempfile.gettempdir(), f"cache-{os.getuid()}")
    return Path(os.environ.get("XDG_CACHE_HOME") or own) / "ddpm_ds"


def check_writable(option: str, path: Path) -> None:
    """Raise an error for a file that could not be written in the end.

    Raises:
        OutputError: it is a folder, or its folder is missing or not writable.
    """
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OutputError(f"{option} {path} can't be written; name a file in a folder that exists and is yours")


def whole(text: str, lowest: int, highest: int, what: str) -> int:
    """A whole number from ``lowest`` to ``highest``, a range that ``what`` describes.

    Raises:
        argparse.ArgumentTypeError: ``text`` is something else.
    """
    if not (text.isdecimal() and lowest <= int(text) <= highest):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return whole(text, 1, 2**40, "a positive number")


def natural(text: str) -> int:
    """A whole number from 0 on."""
    return whole(text, 0, 2**62, "0 or a positive number")


def seed(text: str) -> int:
    """A 32-bit key of a random generator."""
    return whole(text, 0, 2**32 - 1, "a number from 0 to 2^32 - 1")


def seconds(text: str) -> float:
    """A time in seconds, such as ``0.5``; ``inf`` is for ever.

    Raises:
        argparse.ArgumentTypeError: ``text`` is no time.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not found > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write seconds, such as 30, or inf")
    return found


def step_range(text: str) -> range:
    """A range of optimizer steps, counted from 1: ``20-22``, ``20``, or ``none`` for no step at all."""
    if text == "none":
        return range(0)
    first, _, last = text.partition("-")
    begin, end = positive(first), positive(last or first)
    if end < begin:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins; write FIRST-LAST, FIRST or none")
    return range(begin, end + 1)


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Return the lines of a table whose columns are as wide as their widest cell; those in ``left`` are aligned to the
    left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(.*)")
GIB = 2**30


def memory_size(text: str) -> int:
    """Bytes of a size such as ``80GiB`` or ``24GB``.

    Raises:
        argparse.ArgumentTypeError: not a positive number, or a unit other than B with a prefix.
    """
    sizes = {f"{prefix}B": size for prefix, size in (_PREFIXES | _BINARY).items()}
    return int(_quantity(text, sizes, "a size such as 80GiB or 24GB"))


def bandwidth(text: str) -> float:
    """Bytes per second of a speed such as ``300GB/s`` or ``400Gbit/s``.

    Raises:
        argparse.ArgumentTypeError: not a positive number, or a unit other than B/s or bit/s with a prefix.
    """
    bytes_ = {f"{prefix}B/s": float(size) for prefix, size in (_PREFIXES | _BINARY).items()}
    bits = {f"{prefix}bit/s": size / 8 for prefix, size in _PREFIXES.items()}
    return _quantity(text, bytes_ | bits, "a speed such as 300GB/s or 400Gbit/s")


def teraflops(text: str) -> float:
    """Flops per second of a number of TFLOP/s.

    Raises:
        argparse.ArgumentTypeError: not a positive number.
    """
    return _quantity(text, {"": 1e12}, "a number of TFLOP/s such as 120")


def _quantity(text: str, units: dict[str, float] | dict[str, int], what: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    if match[2] not in units:
        near = [unit for unit in units if unit.lower() == match[2].lower()]
        fix = f"; write {match[1]}{near[0]}" if near else ""
        unit = f"unknown unit {match[2]!r}" if match[2] else "no unit"
        raise argparse.ArgumentTypeError(f"{text!r} has {unit}{fix}; give {what}")
    return float(match[1]) * units[match[2]]


def counted(number: int, what: str) -> str:
    """A number of things: ``1 process``, ``2 stages``, ``2 micro-batches``."""
    plural = f"{what}es" if what.endswith(("ch", "ss")) else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def gib(size: float) -> str:
    """A size for a reader, in GiB or, below a tenth of one, in MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
