"""A change of a run, and what it is predicted to save."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ddpm_ds.verdict.facts import Facts
from ddpm_ds.verdict.whatif import Model, Way


@dataclass(frozen=True)
class Change:
    """A change of one setting, and what it is predicted to save."""

    words: str
    """What it does."""
    gain: float
    """Share of an image's time."""
    options: tuple[str, ...] = ()
    """Of launch/train.py."""
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of the DeepSpeed JSON with their new values."""

    @property
    def edit(self) -> str:
        """As it is typed."""
        keys = json.dumps(self.config)[1:-1]
        return " and in the DeepSpeed JSON ".join(part for part in (" ".join(self.options), keys) if part)


Candidates = Iterator[Change]


def saved(facts: Facts, model: Model, way: Way) -> float:
    """Share of an image's time that another way saves, pauses counted in."""
    return stepping(facts) * model.gain(way)


def stepping(facts: Facts) -> float:
    """Share of the run's time in which steps are taken."""
    return 1 - facts.pauses.checkpoint_share - facts.pauses.inspection_share


def counted(number: int, what: str) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{number:,} {what}{'s' * (number != 1)}"
