"""Types of command-line options: one line says what is wrong with a number. No torch."""

from __future__ import annotations

import argparse
import math


def whole(text: str, lowest: int, highest: int, what: str) -> int:
    """A whole number of a range that ``what`` describes.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not (text.isdecimal() and lowest <= int(text) <= highest):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


def positive(text: str) -> int:
    """1, 2, ..."""
    return whole(text, 1, 2**40, "a positive number")


def natural(text: str) -> int:
    """0, 1, 2, ..."""
    return whole(text, 0, 2**62, "0 or a positive number")


def seed(text: str) -> int:
    """The key of a random generator, 32 bits."""
    return whole(text, 0, 2**32 - 1, "a number from 0 to 2^32 - 1")


def seconds(text: str) -> float:
    """Some time, such as ``0.5``; ``inf`` is for ever.

    Raises:
        argparse.ArgumentTypeError: it is no time.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not found > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write seconds, such as 30, or inf")
    return found


def step_range(text: str) -> range:
    """``20-22`` or ``20``: optimizer steps, counted from 1; ``none`` is no step at all."""
    if text == "none":
        return range(0)
    first, _, last = text.partition("-")
    begin, end = positive(first), positive(last or first)
    if end < begin:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins; write FIRST-LAST, FIRST or none")
    return range(begin, end + 1)
