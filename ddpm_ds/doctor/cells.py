"""The cells of the doctor's table, and how hosts are compared. Pure."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "warning", "bad"]
LISTED = 3
DIGEST_DIGITS = 8


@dataclass(frozen=True)
class Cell:
    """One check of one host. Whatever is not good has a reason and a fix."""

    text: str
    level: Level = "good"
    why: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        if self.level != "good" and not (self.why and self.fix):
            raise ValueError(f"{self} says no reason or no fix")


@dataclass(frozen=True)
class Row:
    """One check of all hosts."""

    name: str
    cells: dict[str, Cell]
    """By host; one that could not be asked is left out."""


@dataclass(frozen=True)
class Usual:
    """What most hosts have, and the first host that has it."""

    value: str
    host: str


def usual(values: Mapping[str, str]) -> Usual | None:
    """The value of most hosts; of equally many the one that comes first. None where there is no host."""
    if not values:
        return None
    counts = Counter(values.values())
    value = max(counts, key=lambda one: counts[one])
    return Usual(value, next(host for host, one in values.items() if one == value))


def compared(text: str, wanted: Usual, fix: str, level: Level = "bad") -> Cell:
    """The cell of a host that has ``text`` where the others have ``wanted``."""
    if text == wanted.value:
        return Cell(text)
    return Cell(text, level, f"{text}, {wanted.host} has {wanted.value}", fix)


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Keys that have another value on the other side, or none."""
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def listed(names: Iterable[str]) -> str:
    """The first few, and how many more there are."""
    names = list(names)
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def digest(values: Mapping[str, str]) -> str:
    """A checksum of texts by their keys, to be looked at."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:DIGEST_DIGITS]
