"""What the processes of a run leave behind about how they ended, for ``ddpm-ds run``.

DeepSpeed's launcher ends the other ranks when one has left, reports the code of whichever it looked at first, and
exits with 0 when a part of it was killed. So the ranks say themselves how they ended, each in one line of a file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EXIT_FILE_VARIABLE = "DDPM_DS_EXIT_FILE"
"""Names the file in the environment of every process of the run; without it nothing is recorded."""

STARTED = "started"


def record_exit(code: int) -> int:
    """Say that this rank leaves, as intended, with ``code``; returns the code. Never fails."""
    _append(str(code))
    return code


def recorded(main: Callable[[], int]) -> int:
    """Run a rank's ``main`` and record that it started and the code it ends with; exceptions record nothing."""
    _append(STARTED)
    try:
        return record_exit(main())
    except SystemExit as leaving:  # argparse leaves like this after --help
        if leaving.code is None or isinstance(leaving.code, int):
            record_exit(leaving.code or 0)
        raise


@dataclass(frozen=True)
class ExitRecord:
    """What the ranks of one start have recorded."""

    failure: int | None
    """The first code other than 0."""
    unfinished: tuple[str, ...]
    """Ranks that started and have not said how they ended."""


def read_exits(path: Path) -> ExitRecord:
    """Read what ``record_exit`` and ``recorded`` have written to ``path``."""
    lines = [line.split() for line in path.read_text().splitlines()]
    ended = [(rank, int(word)) for rank, word in lines if word != STARTED]
    unfinished = {rank for rank, word in lines if word == STARTED} - {rank for rank, _ in ended}
    return ExitRecord(
        failure=next((code for _, code in ended if code != 0), None),
        unfinished=tuple(sorted(unfinished, key=int)),
    )


def _append(word: str) -> None:
    path = os.environ.get(EXIT_FILE_VARIABLE)
    if path is None:
        return
    with contextlib.suppress(OSError):  # the file is gone with its supervisor, or its disk is full
        file = os.open(path, os.O_WRONLY | os.O_APPEND)  # one write, so that lines of several ranks don't mix
        try:
            os.write(file, f"{os.environ.get('RANK', '0')} {word}\n".encode())
        finally:
            os.close(file)
