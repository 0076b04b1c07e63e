"""Requests to a training run from outside: to save, or to save and stop.

    SIGTERM, SIGUSR1, SIGINT to any rank     finish the step, save, leave; a second one, or one before the first step
                                             has ended, leaves at once
    RUN_DIR/save, RUN_DIR/save_and_stop      files that a person touches; rank 0 looks once a second
    checkpoint.every_minutes                 rank 0's clock
    a launcher that is gone                  save, leave, since nobody would end this rank or read its output

Requests are combined once a step, and read a step later, so that all ranks do the same at the same step. In a grid of
ranks (:func:`ddpm_ds.pipeline.messages.value_groups`) they take two steps: one along its rows, one along its columns.
"""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddpm_ds.pipeline.messages import value_groups
from ddpm_ds.processes.ranks import TRAINING, Launcher, record, record_exit
from ddpm_ds.processes.signals import SAME_SIGNAL_SECONDS, SignalThread

FILES = ("save", "save_and_stop")
LOOK_SECONDS = 1.0
"""Time between two looks for these files, by a thread: a shared file system may answer slowly."""


class SaveOrStop(NamedTuple):
    """Requests that all ranks have agreed on; ``abandoned`` is the name of a rank whose launcher is gone."""

    save: bool = False
    stop: bool = False
    abandoned: str | None = None


class Requests:
    """Listener to a run's requests until :meth:`close`, and from :meth:`listen` on to signals; collective."""

    def __init__(self, run_dir: Path, every_minutes: float | None, names: Sequence[str]) -> None:
        self._run_dir, self._names = run_dir, names
        self._launcher = Launcher()
        self._seconds, self._saved_at = 60 * every_minutes if every_minutes else None, time.monotonic()
        self._files: tuple[str, ...] = ()  # of the last poll
        self._found: tuple[str, ...] = ()  # of the last look
        self._changing_files = threading.Lock()
        self._closed = threading.Event()

        def look() -> None:
            while not self._closed.is_set():
                with self._changing_files:
                    # False where the file system fails for a moment; Path.exists would end the thread
                    self._found = tuple(name for name in FILES if os.path.exists(run_dir / name))
                self._closed.wait(LOOK_SECONDS)

        self._looking = threading.Thread(target=look, name="requests", daemon=True)
        if dist.get_rank() == 0:
            self._looking.start()
        self._signalled_at: float | None = None
        self._signals: SignalThread | None = None
        self._groups = value_groups()
        self._under_way: list[tuple[dist.Work, torch.Tensor]] = []  # what each group combines

    def listen(self) -> None:
        """Let signals ask to stop, once there is something to save; before, they end the process."""

        def receive(number: int) -> None:
            if self._signalled_at is not None and time.monotonic() - self._signalled_at > SAME_SIGNAL_SECONDS:
                os._exit(record_exit(128 + number))
            self._signalled_at = time.monotonic()

        self._signals = SignalThread(receive)
        record(TRAINING)

    def poll(self) -> SaveOrStop:
        """Return the requests that all ranks agree on; call it once a step on every rank."""
        self._files = self._found
        late = self._seconds is not None and time.monotonic() - self._saved_at >= self._seconds
        save = dist.get_rank() == 0 and (late or "save" in self._files)
        stop = self._signalled_at is not None or "save_and_stop" in self._files
        abandoned = 1 + dist.get_rank() if self._launcher.is_gone() else 0
        wishes, before = torch.tensor([save, stop, abandoned], dtype=torch.int32), iter(self._under_way)
        self._under_way = []
        for group in self._groups:
            reduction = dist.all_reduce(wishes, op=dist.ReduceOp.MAX, group=group, async_op=True)
            assert reduction is not None
            self._under_way.append((reduction, wishes))
            if (combined := next(before, None)) is None:
                return SaveOrStop()
            combined[0].wait()
            wishes = combined[1]
        save, stop, abandoned = wishes.tolist()
        return SaveOrStop(bool(save), bool(stop or abandoned), self._names[abandoned - 1] if abandoned else None)

    def saved(self) -> None:
        """Clear the requests to save, after the run has been saved."""
        self._saved_at = time.monotonic()
        with self._changing_files:
            for name in self._files:
                (self._run_dir / name).unlink(missing_ok=True)
            self._found = ()
        for work, wishes in self._under_way:  # which still have the request to save
            work.wait()
            wishes[0] = False

    def close(self, *, leaving: bool = False) -> None:
        """Stop listening; with ``leaving`` signals are ignored from now on, since the process is about to end."""
        for work, _ in self._under_way:
            work.wait()
        if self._signals is not None:
            self._signals.close(leaving=leaving)
        self._closed.set()
        if self._looking.is_alive():
            self._looking.join(LOOK_SECONDS)
