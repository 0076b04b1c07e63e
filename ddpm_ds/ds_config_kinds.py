"""Rows of the table of DeepSpeed keys: what a value has to be, and what becomes of a key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise


class Effect(Enum):
    """What becomes of a key. One that is accepted is checked and changes nothing."""

    TAKES_EFFECT = "takes effect"
    FROM_SPEC = "from the spec"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(frozen=True)
class Kind:
    """What a value has to be: in words, and as a test."""

    words: str
    accepts: Callable[[object], bool]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object, least: int) -> bool:
    return _number(value) and value == int(value) and value >= least  # type: ignore[call-overload,operator]


def same(value: object, other: object) -> bool:
    """Equality of JSON values, in which true is not 1."""
    return type(value) is type(other) and value == other


def one_of(*choices: object) -> Kind:
    """One of some JSON values."""
    words = " or ".join(json.dumps(choice) for choice in choices)
    return Kind(words, lambda value: any(same(value, choice) for choice in choices))


SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number >= 0", lambda value: _whole(value, 0))
POSITIVE = Kind("a whole number > 0", lambda value: _whole(value, 1))
EVEN = Kind("an even whole number > 0", lambda value: _whole(value, 1) and value % 2 == 0)  # type: ignore[operator]
DEPTH = Kind("a whole number >= -1", lambda value: _whole(value, -1))
AMOUNT = Kind("a number >= 0", lambda value: _number(value) and value >= 0)  # type: ignore[operator]
TEXT_OR_NULL = Kind("text or null", lambda value: value is None or isinstance(value, str))
TEXTS = Kind("a list of texts", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value))
PAIR = Kind(
    "a list of two numbers", lambda value: isinstance(value, list) and len(value) == 2 and all(map(_number, value))
)
CUTS = Kind(
    '"flops", "measured", "parameters", "uniform" or a rising list of whole numbers > 0',
    lambda value: (
        value in ("flops", "measured", "parameters", "uniform")
        or (
            isinstance(value, list)
            and all(_whole(cut, 1) for cut in value)
            and all(low < high for low, high in pairwise(value))
        )
    ),
)
BLOCK = Kind("a block {...}", lambda value: isinstance(value, dict))
ANY = Kind("anything", lambda value: True)


@dataclass(frozen=True)
class Key:
    """One row: the dotted keys it is about and what becomes of them."""

    names: str
    """Dotted keys, separated by spaces."""
    effect: Effect
    kind: Kind
    note: str
    """What it does; for a refused key, why, and what to write instead."""
    auto: str = ""
    """What "auto" stands for; empty where "auto" is not possible."""
    why: str = ""
    """Why other values than `kind` are not possible, where that needs saying."""
    inert: tuple[object, ...] = ()
    """Values of a refused key that ask for nothing and are let through."""
    zero_only: bool = False
    """Without ZeRO (stage 0) DeepSpeed ignores it."""
