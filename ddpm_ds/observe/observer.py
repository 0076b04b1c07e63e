"""What watches a training run: told where a step begins, and what is done between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
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
