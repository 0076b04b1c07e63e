"""Output of a run: the progress line while it trains, and the summary at its end."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ddpm_ds.tracking.tracker import RunLink

SECONDS_BETWEEN_UPDATES = 0.2


def duration(seconds: float) -> str:
    """Return a duration as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressLine:
    """One line about a run: rewritten in place on a terminal, printed at each log point elsewhere."""

    def __init__(
        self, total_images: int, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total_images
        self._stream = stream or sys.stderr
        self._clock = clock
        self._terminal = self._stream.isatty()
        self._lock = threading.Lock()
        self._images_per_second = 0.0
        self._values: list[str] = []
        self._scale: list[str] = []
        self._shown = ""
        self._shown_at = -SECONDS_BETWEEN_UPDATES

    def step(self, images_seen: int) -> None:
        """Show on a terminal, a few times per second, that training progresses. Reads nothing from the device."""
        if self._terminal and self._clock() - self._shown_at >= SECONDS_BETWEEN_UPDATES:
            self._show(images_seen)

    def log_point(
        self, images_seen: int, *, loss: float, images_per_second: float, loss_scale: float | None = None
    ) -> None:
        """Show the values of a log point; ``loss_scale`` is None where the loss is not scaled."""
        self._images_per_second = images_per_second
        self._values = [f"loss {loss:.4f}", f"{images_per_second:,.4g} images/s"]
        self._scale = [] if loss_scale is None else [f"loss scale {loss_scale:g}"]
        self._show(images_seen)

    def log(self, line: str) -> None:
        """Print a line above the progress line. May be called from any thread."""
        with self._lock:
            self._write(f"\r\x1b[K{line}\n{self._shown}" if self._shown else f"{line}\n")

    def close(self) -> None:
        """End the progress line, so that what is printed next begins on a new one."""
        with self._lock:
            if self._shown:
                self._write("\n")
                self._shown = ""

    def _show(self, images_seen: int) -> None:
        line = self._line(images_seen)
        with self._lock:
            if self._terminal:
                self._shown = line[: shutil.get_terminal_size().columns - 1]  # a line that wraps can't be rewritten
                self._shown_at = self._clock()
                self._write(f"\r\x1b[K{self._shown}")
            else:
                self._write(f"{line}\n")

    def _line(self, images_seen: int) -> str:
        parts = [f"{images_seen:,}/{self._total:,} images ({images_seen / self._total:.0%})", *self._values]
        if self._images_per_second:
            parts.append(f"{duration(max(self._total - images_seen, 0) / self._images_per_second)} left")
        return "  ".join(parts + self._scale)

    def _write(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody reads it any more; the run ends in order all the same
            self._stream.write(text)
            self._stream.flush()


def summary(
    *,
    loss: float,
    images: int,
    seconds: float,
    validation_seconds: float,
    steps: int,
    skipped_steps: int,
    run_dir: Path,
    link: RunLink,
) -> str:
    """Return the summary at the end of a run, in a few lines.

    ``loss`` is the mean over the last log interval; ``validation_seconds`` of all ``seconds`` were spent on sampling
    and validation.
    """
    rows = {
        "final loss": f"{loss:.4f}",
        "trained": f"{images:,} images in {duration(seconds)}, {images / seconds:,.4g} images/s",
        "sampling and validation": f"{duration(validation_seconds)} ({validation_seconds / seconds:.1%} of the time)",
        "skipped steps": f"{skipped_steps:,} of {steps:,}",
        "run folder": str(run_dir),
        "MLflow run": link.run_id or f"not reached at {link.tracking_uri}",
        "serve it with": link.command,
        "open it at": link.url,
    }
    return "\n".join(f"{name:<26}{value}" for name, value in rows.items() if value is not None)
