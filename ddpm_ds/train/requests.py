"""What is asked of a run from outside while it trains: to save, or to save and stop.

    SIGTERM, SIGUSR1, SIGINT to any rank     finish the step, save, leave; a second signal leaves at once
    RUN_DIR/save, RUN_DIR/save_and_stop      files that a person touches
    checkpoint.every_minutes                 rank 0's clock

All ranks must do the same at the same step, so what each has heard is combined once a step; the answer is read one
step later, when it has long arrived.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class Asked:
    """What all ranks agree on."""

    save: bool = False
    stop: bool = False


class Requests:
    """Listens from its construction to :meth:`close`; collective over all ranks."""

    def __init__(self, run_dir: Path, every_minutes: float | None) -> None:
        self._run_dir = run_dir
        self._seconds = 60 * every_minutes if every_minutes else None
        self._saved_at = time.monotonic()
        self._signalled = False
        self._group: Any = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._under_way: tuple[dist.Work, torch.Tensor] | None = None
        self._handlers = {number: signal.signal(number, self._hear) for number in SIGNALS}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        for again in SIGNALS:
            signal.signal(again, signal.SIG_DFL)

    def poll(self) -> Asked:
        """Once a step, on every rank: what was asked, agreed by all."""
        mine = torch.tensor([self._wants_save(), self._wants_stop()], dtype=torch.uint8)
        if self._group is None:
            return Asked(*(bool(wish) for wish in mine.tolist()))
        answer = Asked()
        if self._under_way is not None:
            work, wishes = self._under_way
            work.wait()
            answer = Asked(*(bool(wish) for wish in wishes.tolist()))
        reduction = dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert reduction is not None
        self._under_way = (reduction, mine)
        return answer

    def _wants_save(self) -> bool:
        if dist.get_rank() != 0:
            return False
        late = self._seconds is not None and time.monotonic() - self._saved_at >= self._seconds
        return late or (self._run_dir / "save").exists()

    def _wants_stop(self) -> bool:
        return self._signalled or (dist.get_rank() == 0 and (self._run_dir / "save_and_stop").exists())

    def saved(self) -> None:
        """The run has been saved: forget what asked for it."""
        self._saved_at = time.monotonic()
        if dist.get_rank() == 0:
            for name in ("save", "save_and_stop"):
                (self._run_dir / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Listen no more."""
        if self._under_way is not None:
            self._under_way[0].wait()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
