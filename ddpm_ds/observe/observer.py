"""Interface of observers of a training run, what they share, and the clock of pauses.

An observer is told when each optimizer step begins and what is done between two steps. In the steps that it watches it
may wrap the engine's instructions; it costs nothing in all others.
"""

import contextlib
import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ddpm_ds.files import read_json, replace_file
from ddpm_ds.pipeline.schedule import Instruction


class Report(Protocol):
    """Destination of findings; on ranks other than 0 they are dropped."""

    def log(self, line: str) -> None:
        """Show a line to the user."""

    def observed(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics of an optimizer step."""

    def artifact(self, path: Path, folder: str = "") -> None:
        """Keep a file or folder with the run, in ``folder``."""


class Observer:
    """Observer of some of a run's optimizer steps; all ranks have the same ones, and call them at the same steps."""

    def begin_step(self, step: int) -> None:
        """Begin optimizer step ``step``, counted from 1 over the whole run; a rollback repeats some numbers.

        Findings of earlier steps may be gathered from the ranks and reported here.
        """

    def span(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Surround an activity between two steps: ``checkpoint`` or ``inspection``."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """End the run: no further step comes. Called on all ranks, like :meth:`begin_step`."""


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def begin_step(self, step: int) -> None:
        for observer in self._observers:
            observer.begin_step(step)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.span(name))
            yield

    def finish(self) -> None:
        for observer in self._observers:
            observer.finish()


@contextlib.contextmanager
def instructions_wrapped(engine: Any, around: Callable[[Instruction, Callable[[], None]], None]) -> Iterator[None]:
    """Call ``around(instruction, execute)`` for every instruction of the engine's program, instead of ``execute()``.

    Afterwards the engine is as before. If another observer has wrapped the same instruction in the meantime, its
    wrapper stays, and this one only passes the instruction on.
    """
    active = True

    def wrapped(execute: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
        def run(instruction: Instruction) -> None:
            if active:
                around(instruction, functools.partial(execute, instruction))
            else:
                execute(instruction)

        return run

    before = dict(engine.execute)
    ours = {name: wrapped(execute) for name, execute in before.items()}
    engine.execute.update(ours)
    try:
        yield
    finally:
        active = False
        engine.execute.update({name: before[name] for name in before if engine.execute[name] is ours[name]})


def keep(report: Report, folder: str, write: Callable[[], Sequence[Path]]) -> bool:
    """Write files and keep them with the run in ``folder``; if the disk refuses, log that and return False."""
    try:
        paths = write()
    except OSError as error:
        what = error.filename or f"a file of the run's folder {folder}".rstrip()  # without a name if a disk is full
        report.log(f"{what} can't be written ({error.strerror}); training continues")
        return False
    for path in paths:
        report.artifact(path, folder)
    return True


FILE = Path("trace", "pauses.json")  # in a run's folder


@dataclass(frozen=True)
class Pauses:
    """Seconds from the start of a run's first step to the end of its last, and how many of them were pauses."""

    seconds: float = 1.0
    checkpoint_seconds: float = 0.0
    inspection_seconds: float = 0.0

    @property
    def checkpoint_share(self) -> float:
        return self.checkpoint_seconds / self.seconds

    @property
    def inspection_share(self) -> float:
        return self.inspection_seconds / self.seconds


class PauseClock(Observer):
    """Clock that adds up the pauses of a run and writes :data:`FILE` at its end; ``run_dir`` is None on ranks other
    than 0.

    Pauses before the first step and after the last do not count: every run is saved and sampled at its end, however
    rarely before.
    """

    def __init__(self, run_dir: Path | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._begin: float | None = None
        self._paused: Counter[str] = Counter()
        self._since_step: Counter[str] = Counter()

    def begin_step(self, step: int) -> None:
        if self._begin is None:
            self._begin = self._clock()
            self._since_step.clear()
        self._paused += self._since_step
        self._since_step.clear()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self._clock()
        try:
            yield
        finally:
            self._since_step[name] += self._clock() - begin  # type: ignore[assignment]

    def finish(self) -> None:
        if self._run_dir is None or self._begin is None:
            return
        after = self._since_step["checkpoint"] + self._since_step["inspection"]
        pauses = Pauses(
            seconds=self._clock() - self._begin - after,
            checkpoint_seconds=self._paused["checkpoint"],
            inspection_seconds=self._paused["inspection"],
        )
        file = self._run_dir / FILE
        with contextlib.suppress(OSError):  # a full disk: the run ends all the same
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, (json.dumps(asdict(pauses)) + "\n").encode())


def read_pauses(run_dir: Path) -> Pauses:
    """Read the pauses of a run; none if the file is missing, as after a run that was killed.

    Raises:
        OSError, ValueError, TypeError: the file is damaged.
    """
    file = run_dir / FILE
    return Pauses(**read_json(file)) if file.is_file() else Pauses()
