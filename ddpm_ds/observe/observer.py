"""What watches a training run: told where a step begins, and what is done between steps.

How long checkpoints and inspections hold training up, over the whole run.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol


class Report(Protocol):
    """Where what was seen goes; on ranks other than 0 it goes nowhere."""

    def say(self, line: str) -> None:
        """Show a line to the user."""

    def observed(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics of an optimizer step."""

    def artifact(self, path: Path, folder: str = "") -> None:
        """Keep a file or folder with the run, in ``folder``."""


class Observer:
    """Watches some of a run's optimizer steps. All ranks have the same observers and call them at the same steps."""

    def begin_step(self, step: int) -> None:
        """The optimizer step of that number begins, counted from 1 over the whole run; a rewound run repeats some.

        What was seen of the steps before may be exchanged between the ranks and reported here.
        """

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Something between two steps' schedules takes place: ``EMA``, ``checkpoint`` or ``inspection``."""
        yield

    def finish(self) -> None:
        """No further step comes; as :meth:`begin_step`, on all ranks."""


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


FILE = Path("trace") / "pauses.json"
"""In a run's folder."""


@dataclass(frozen=True)
class Pauses:
    """Seconds from the first step's begin to the last step's end, and of them those in which no step was taken."""

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
    """Adds pauses up, and writes :data:`FILE` at the end; on ranks other than 0 ``run_dir`` is None.

    What comes after the last step is left out: every run is saved and inspected at its end, however rarely before.
    """

    def __init__(self, run_dir: Path | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._begin: float | None = None
        self._paused: Counter[str] = Counter()
        self._since_step: Counter[str] = Counter()

    def begin_step(self, step: int) -> None:
        if self._begin is None:
            self._begin = self._clock()
        self._paused += self._since_step
        self._since_step.clear()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self._clock()
        yield
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
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(pauses)) + "\n")


def read_pauses(run_dir: Path) -> Pauses:
    """Those of a run's folder; none where the file is missing, as after a run that was stopped.

    Raises:
        ValueError, TypeError: the file is damaged.
    """
    file = run_dir / FILE
    return Pauses(**json.loads(file.read_text())) if file.is_file() else Pauses()
