"""Sizes and speeds as people write them: 80GiB, 300GB/s, 400Gbit/s."""

from __future__ import annotations

import argparse
import re

_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(.*)")
GIB = 2**30


def memory_size(text: str) -> int:
    """Bytes of such as ``80GiB`` or ``24GB``.

    Raises:
        argparse.ArgumentTypeError: not a positive number, or a unit other than B with a prefix.
    """
    sizes = {f"{prefix}B": size for prefix, size in (_PREFIXES | _BINARY).items()}
    return int(_quantity(text, sizes, "a size such as 80GiB or 24GB"))


def bandwidth(text: str) -> float:
    """Bytes per second of such as ``300GB/s`` or ``400Gbit/s``.

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


def gib(size: float) -> str:
    """Bytes for a reader, in GiB or, below a tenth of one, in MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
