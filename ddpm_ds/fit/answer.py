"""What the processes of a trial answer, and what that means for the trial. No torch."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from ddpm_ds.command_line import gib

Kind = Literal["done", "memory", "refused", "failed", "hung", "lost"]
"""``memory``: ran out of it, or was killed; ``refused``: a UserError; ``hung``: took no step for too long; ``lost``:
ended because another process had."""


@dataclass(frozen=True)
class Answer:
    """Of one process."""

    kind: Kind
    words: str = ""
    """Why, unless it is done."""
    seconds: list[float] = field(default_factory=list)
    """Of each timed step."""
    peak_bytes: int = 0
    checkpoint_interval: int = 0

    def write(self, path: Path) -> None:
        """All of it at once: a reader that finds the file finds all."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        os.replace(part, path)

    @classmethod
    def read(cls, path: Path) -> Answer | None:
        """What was written; None if nothing has been."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None


@dataclass(frozen=True)
class TriedSize:
    """Of all processes of a layout with one micro-batch."""

    micro_batch_images: int
    micro_batches: int
    batch_images: int
    fits: bool
    why: str
    """It does not fit."""
    step_seconds: list[float]
    """Of each timed step, the slowest process."""
    rank_peak_bytes: list[int]
    checkpoint_interval: int
    hung: bool = False
    """It took no step for too long, which says nothing of memory; what is larger is not tried either."""

    @property
    def median_seconds(self) -> float:
        """Of a step."""
        return statistics.median(self.step_seconds)

    @property
    def images_per_second(self) -> float:
        """By the median step."""
        return self.batch_images / self.median_seconds

    @property
    def peak_bytes(self) -> int:
        """Of the fullest process."""
        return max(self.rank_peak_bytes)


class TrialError(Exception):
    """A trial failed for another reason than memory."""

    def __init__(self, words: str, *, refused: bool = False) -> None:
        super().__init__(words)
        self.refused = refused


def judge(answers: Sequence[Answer], sizes: tuple[int, int, int], budget_bytes: int | None) -> TriedSize:
    """What the answers of all ranks mean; ``sizes``: images of a micro-batch, micro-batches, images of a batch.

    ``budget_bytes`` is what a process may hold; None where the device itself says so.

    Raises:
        TrialError: a process was refused or failed.
    """
    for rank, answer in enumerate(answers):
        if answer.kind == "memory":  # what it loses by that fails, too
            return TriedSize(*sizes, False, f"rank {rank} {answer.words}", [], [one.peak_bytes for one in answers], 0)
    for answer in answers:
        if answer.kind == "refused":
            raise TrialError(answer.words, refused=True)
    for answer in answers:
        if answer.kind == "hung":
            peaks = [one.peak_bytes for one in answers]
            return TriedSize(*sizes, False, f"failed: {answer.words}", [], peaks, 0, hung=True)
    if any(answer.kind != "done" for answer in answers):
        raise TrialError("\n".join(f"rank {rank}: {one.words or one.kind}" for rank, one in enumerate(answers)))
    peaks = [answer.peak_bytes for answer in answers]
    over = budget_bytes is not None and max(peaks) > budget_bytes
    return TriedSize(
        *sizes,
        fits=not over,
        why=f"rank {peaks.index(max(peaks))} took {gib(max(peaks))}" if over else "",
        step_seconds=[max(step) for step in zip(*(answer.seconds for answer in answers), strict=True)],
        rank_peak_bytes=peaks,
        checkpoint_interval=answers[0].checkpoint_interval,
    )
