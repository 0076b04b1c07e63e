"""Child process that may run out of memory, started for one trial by each rank of a layout, and its answer.

Light to import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from ddpm_ds.command_line import gib
from ddpm_ds.errors import UserError
from ddpm_ds.fit.task import Task


@dataclass(frozen=True)
class Answer:
    """Result of one process."""

    kind: Literal["done", "memory", "refused", "failed", "hung", "lost"]
    """``memory``: ran out of it, or was killed; ``refused``: a UserError; ``hung``: took no step for too long;
    ``lost``: ended because another process had.
    """
    words: str = ""
    """Reason, unless it is done."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of each timed step."""
    peak_bytes: int = 0
    checkpoint_interval: int = 0


@dataclass(frozen=True)
class TriedSize:
    """Result of all processes of a layout with one micro-batch."""

    micro_batch_images: int
    micro_batches: int
    batch_images: int
    fits: bool
    why: str
    """Reason why it does not fit; empty where it does."""
    step_seconds: list[float]
    """Seconds of each timed step, of the slowest process."""
    rank_peak_bytes: list[int]
    checkpoint_interval: int
    hung: bool = False
    """Whether it took no step for too long, which says nothing about memory; larger sizes are not tried either."""

    @property
    def median_seconds(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.step_seconds)

    @property
    def images_per_second(self) -> float:
        """Images per second by the median step."""
        return self.batch_images / self.median_seconds

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the fullest process."""
        return max(self.rank_peak_bytes)


class TrialError(Exception):
    """Error: a trial failed for another reason than memory."""

    def __init__(self, words: str, *, refused: bool = False) -> None:
        super().__init__(words)
        self.refused = refused


def judge(answers: Sequence[Answer], sizes: tuple[int, int, int], budget_bytes: int | None) -> TriedSize:
    """Combine the answers of all ranks; ``sizes``: images of a micro-batch, micro-batches, images of a batch.

    ``budget_bytes`` is the most that a process may hold; None where the device sets the limit.

    Raises:
        TrialError: a process was refused or failed.
    """
    peaks = [answer.peak_bytes for answer in answers]
    first = {answer.kind: rank for rank, answer in reversed(list(enumerate(answers)))}
    if "memory" in first:  # what others lose by that fails, too
        why = f"rank {first['memory']} {answers[first['memory']].words}"
        return TriedSize(*sizes, False, why, [], peaks, 0)
    if "refused" in first:
        raise TrialError(answers[first["refused"]].words, refused=True)
    if "hung" in first:
        return TriedSize(*sizes, False, f"failed: {answers[first['hung']].words}", [], peaks, 0, hung=True)
    if set(first) != {"done"}:
        raise TrialError("\n".join(f"rank {rank}: {one.words or one.kind}" for rank, one in enumerate(answers)))
    over = budget_bytes is not None and max(peaks) > budget_bytes
    return TriedSize(
        *sizes,
        fits=not over,
        why=f"rank {peaks.index(max(peaks))} took {gib(max(peaks))}" if over else "",
        step_seconds=[max(step) for step in zip(*(answer.seconds for answer in answers), strict=True)],
        rank_peak_bytes=peaks,
        checkpoint_interval=answers[0].checkpoint_interval,
    )


def answer_trial(
    task: Task,
    size: int,
    budget_bytes: int | None,
    folder: Path,
    port: int,
    library_bytes: int,
    pipe: Connection[Any, Any],
) -> None:
    """Take part in a trial; the process ends here. Sends None after each step, and finally the answer.

    The output is logged in ``folder``; the ranks find each other at ``port``; ``library_bytes`` are added to the peak:
    libraries that a process holds that has loaded them itself, and a fork does not.
    """
    with (folder / "log").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["MASTER_PORT"] = str(port)
    with contextlib.suppress(OSError):  # the kernel's first victim
        Path("/proc/self/oom_score_adj").write_text("1000")
    from ddpm_ds.fit import measure

    try:
        told = budget_bytes, task.steps, task.hang_seconds, lambda: pipe.send(None)
        answer = measure.measure(task.plan(size, folder), task.device, *told)
        answer = dataclasses.replace(answer, peak_bytes=answer.peak_bytes + library_bytes)
    except UserError as error:
        answer = Answer("refused", str(error))
    except Exception as error:
        if measure.is_out_of_memory(error):
            answer = Answer("memory", "ran out of memory")
        else:
            answer = Answer("failed", traceback.format_exc())
    pipe.send(answer)
    os._exit(0)  # without what leaving in order would wait for
