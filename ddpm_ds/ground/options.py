"""Shared parts of command lines: options as fields, their types, units (80GiB, 400Gbit/s), output files, tables.

Does not import torch.
"""

import errno
import math
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

from ddpm_ds.ground import units
from ddpm_ds.ground.errors import OptionError
from ddpm_ds.ground.files import expanded, path_fault
from ddpm_ds.ground.formats import MOST_DIGITS

HIDDEN = ""  # help of an option that --help leaves out


def option(
    about: str | None = None, metavar: str | None = None, kind: Callable[[str], object] | None = None, **more: Any
) -> Any:
    """Return a field of a frozen dataclass that is an option of a command line; ``about`` is its help.

    ``kind`` parses a value. Without it the field's type does: a path, the choices of a Literal, or text. ``more`` are
    ``default``, ``names`` such as ``-p`` (the field's by default; without dashes it is a positional argument),
    ``group`` (title and description), ``either`` (name of a group of exclusive options), and arguments of
    ``add_argument``.
    """
    given = {name: value for name, value in (("metavar", metavar), ("type", kind)) if value is not None}
    return field(default=more.pop("default", None), metadata={"help": about, **given, **more})


def flag(about: str, **more: Any) -> Any:
    """Return a field as :func:`option` that is true if the option is given."""
    return option(about, default=False, action="store_true", **more)


def split_option(words: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Return the last value of an option of a command line, such as ``--resume``, and the other words."""
    value, others, before = None, list[str](), ""
    for word in words:
        if word == name or word.startswith(f"{name}="):
            value = word[len(name) + 1 :] or None
        elif before == name and not word.startswith("-"):
            value = word
        else:
            others.append(word)
        before = word
    return value, others


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


positive = partial(whole, lowest=1, highest=units.MOST_COUNT, what="a whole number from 1 to 1,000,000")
natural = partial(whole, lowest=0, highest=units.MOST_COUNT, what="a whole number from 0 to 1,000,000")
process_count = partial(whole, lowest=1, highest=units.MOST_PROCESSES, what="a whole number from 1 to 65,536")
"""Option type: number of processes, stages or hosts."""
batch = partial(whole, lowest=1, highest=units.MOST_BATCH, what="a whole number from 1 to 1,048,576")
image_number = partial(whole, lowest=0, highest=units.MOST_IMAGE, what="a whole number from 0 to 2^48")
"""Option type: number of an image among all those drawn from one seed."""
port = partial(whole, lowest=1, highest=2**16 - 1, what="a port, which is a whole number from 1 to 65,535")
seed = partial(whole, lowest=0, highest=units.MOST_SEED, what="a number from 0 to 2^32 - 1")


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
seconds = partial(number, lowest=0.001, highest=math.inf, what="a time in seconds of 0.001 or more, such as 30, or inf")
grace_seconds = partial(number, lowest=0.0, highest=1e6, what="a time in seconds from 0 to 1,000,000, such as 30")


def step_range(text: str) -> range:
    """Parse a range of optimizer steps, counted from 1: ``20-22``, ``20``, or ``none`` for no step."""
    if text == "none":
        return range(0)
    first, _, last = text.partition("-")
    begin, end = (whole(step, 1, units.MOST_IMAGES, "a number of a step, from 1 on") for step in (first, last or first))
    if end < begin:
        raise OptionError(f"{text!r} ends before it begins; write FIRST-LAST, FIRST or none")
    return range(begin, end + 1)


def valid_text(text: str) -> str:
    """Parse text that will be written to files, and so must be UTF-8."""
    if text.encode(errors="replace").decode() != text:
        raise OptionError(f"{text!r} is not UTF-8 text")
    return text


_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_PREFIXES = _DECIMAL | {f"{prefix}i": 2.0 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(.*)")


def quantity(text: str, factors: Mapping[str, float], what: str, most: float) -> float:
    """Parse a number with a unit of ``factors`` into the unit of factor 1, from 1 to ``most``.

    Another text raises OptionError, which says ``what`` to give.
    """
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= MOST_DIGITS else None
    if match is None or float(match[1]) == 0:
        raise OptionError(f"{text!r} is not {what}")
    if match[2] not in factors:
        near = [unit for unit in factors if unit.lower() == match[2].lower()]
        fix = f"; write {match[1]}{near[0]}" if near else ""
        unit = f"unknown unit {match[2]!r}" if match[2] else "no unit"
        raise OptionError(f"{text!r} has {unit}{fix}; give {what}")
    found = float(match[1]) * factors[match[2]]
    if not 1 <= found <= most:
        raise OptionError(f"{text!r} is out of range; give {what}")
    return found


def memory_size(text: str) -> int:
    """Parse a size such as ``80GiB`` or ``24GB`` into bytes."""
    sizes = {f"{prefix}B": size for prefix, size in _PREFIXES.items()}
    return int(quantity(text, sizes, "a size such as 80GiB or 24GB", units.MOST_BYTES))


link_speed = partial(
    quantity,
    factors={f"{prefix}B/s": size for prefix, size in _PREFIXES.items()}
    | {f"{prefix}bit/s": size / 8 for prefix, size in _DECIMAL.items()},
    what="a speed such as 300GB/s or 400Gbit/s",
    most=units.MOST_BANDWIDTH,
)
"""Option type: bytes per second."""
teraflops = partial(quantity, factors={"": 1e12}, what="a number of TFLOP/s such as 120", most=units.MOST_FLOPS)
"""Option type: flops per second."""
