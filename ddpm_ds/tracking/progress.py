"""Progress line of a run, and the summary at its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO, cast

from tqdm import tqdm

from ddpm_ds.ground.units import rounded
from ddpm_ds.tracking.tracker import RunLink

if TYPE_CHECKING:
    from ddpm_ds.observe.observer import Pauses

SECONDS_BETWEEN_UPDATES = 0.2
TICK_SECONDS = 0.5  # how often the clock of an activity moves on a terminal
QUIET_SECONDS = 5.0  # longest silence without a terminal while a run is young; later a sixtieth of its age
BEFORE, BAR = "{desc}", "{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} images{postfix}"
"""Forms of tqdm's bar before the first step and from then on."""


def duration(seconds: float) -> str:
    """Return a duration as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def activity(line: ProgressLine | None, what: str) -> contextlib.AbstractContextManager[None]:
    """Show an activity on the line, if there is one; see :meth:`ProgressLine.doing`."""
    return contextlib.nullcontext() if line is None else line.doing(what)


class LinesAbove:
    """Terminal on which this process prints lines above its progress line; bars and forked processes write at once."""

    def __init__(self, line: ProgressLine, stream: TextIO) -> None:
        self._line, self._stream, self._begun, self._process = line, stream, "", os.getpid()

    def write(self, text: str) -> int:
        of_a_bar = text.startswith(("\r", "\x1b") if self._begun else ("\r", "\x1b", "\n"))
        if of_a_bar or os.getpid() != self._process:  # a forked process may have inherited a lock that nobody releases
            return self._stream.write(text)
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._line.log(line)
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class ProgressLine:
    """Progress of a run, for any thread: a bar on a terminal, lines elsewhere. A thread of its own moves its clock.

    While there is a bar, lines that this process prints on the terminal appear above it.
    """

    def __init__(
        self, total_images: int, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._stream, self._clock = total_images, stream or sys.stderr, clock
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._images: int | None = None
        self._loss: float | None = None
        self._scale: float | None = None
        self._activity: tuple[str, float] | None = None
        self._first: tuple[int, float] | None = None
        """Images and time of the first step, from which the rate counts until a log point has one."""
        self._rate, self._point = 0.0, 0  # images per second; images at the last log point
        self._timed_images, self._timed_seconds = 0, 0.0  # since the first log point, before which the run starts
        self._pauses: dict[str, tuple[float, int | None]] = {}
        self._began = self._wrote = clock()
        self._bar: tqdm[NoReturn] | None = None
        self._outputs, self._terminal = (sys.stdout, sys.stderr), self._stream
        if self._stream.isatty():
            self._terminal = cast(TextIO, LinesAbove(self, self._stream))
            self._bar = tqdm(total=total_images, file=self._terminal, bar_format=BEFORE, nrows=24)
            sys.stdout, sys.stderr = (self._terminal if output.isatty() else output for output in self._outputs)

        def keep_ticking() -> None:
            while not self._closed.wait(TICK_SECONDS):
                self.tick()

        threading.Thread(target=keep_ticking, daemon=True).start()

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show an activity of the run and its duration inside this context: ``building the pipeline``."""
        outer = self._activity
        self._enter((what, self._clock()))
        try:
            yield
        finally:
            self._enter(outer)

    def step(self, images_seen: int) -> None:
        """Show that a step has ended, at most a few times per second. Reads nothing from the device."""
        with self._lock:
            now, self._images = self._clock(), images_seen
            begins, self._first = self._first is None, self._first or (images_seen, now)
            images, seconds = images_seen - self._first[0], now - self._first[1]
            if not self._point and images > 0 and seconds > 0:
                self._rate = images / seconds
            if self._bar is not None and (begins or now - self._wrote >= SECONDS_BETWEEN_UPDATES):
                self._show()

    def first_loss(self, loss: float) -> None:
        """Show the first step's loss, until a log point has the mean of several."""
        with self._lock:
            self._loss = loss
            self._show()

    def log_point(
        self, images_seen: int, *, loss: float, images_per_second: float, loss_scale: float | None = None
    ) -> None:
        """Show the values of a log point; ``loss_scale`` is None if the loss is not scaled."""
        with self._lock:
            if images_seen > self._point > 0:  # not after a rollback
                self._timed_images += images_seen - self._point
                self._timed_seconds += (images_seen - self._point) / images_per_second
            self._images, self._rate, self._point = images_seen, images_per_second, images_seen
            self._loss, self._scale = loss, loss_scale
            self._show()

    def paused(self, kind: str, seconds: float, every_images: int | None) -> None:
        """Count later pauses of this kind, one in ``every_images`` and one at the end, in the time left."""
        with self._lock:
            self._pauses[kind] = seconds, every_images

    def seconds_left(self) -> float:
        """Return the predicted seconds to the end of the run, with pauses of the kinds that have occurred."""
        seen = self._images or 0
        rate = self._timed_images / self._timed_seconds if self._timed_images else self._rate
        left = max(self._total - seen, 0) / rate
        for seconds, every in self._pauses.values() if left else ():
            left += seconds * (-(-self._total // every) - seen // every if every else 1)
        return left

    def log(self, line: str) -> None:
        """Print a line above the progress line."""
        with self._lock:
            self._write(line)

    def close(self) -> None:
        """End the progress line, so that later output begins on a new one."""
        self._closed.set()
        with self._lock, contextlib.suppress(OSError):
            if self._bar is not None:
                sys.stdout, sys.stderr = self._outputs
                self._bar.leave = self._images is not None
                self._bar.close()
                self._bar = None

    def _enter(self, activity: tuple[str, float] | None) -> None:
        with self._lock:
            self._activity = activity
            if self._bar is not None or (activity is not None and self._clock() - self._wrote >= QUIET_SECONDS):
                self._show()

    def tick(self) -> None:
        """Redraw a terminal's line; elsewhere write one if there has been none for long."""
        with self._lock:
            now = self._clock()
            quiet = max(QUIET_SECONDS, (now - self._began) / 60)
            if not self._closed.is_set() and (self._bar is not None or now - self._wrote >= quiet):
                self._show()

    def _show(self) -> None:
        activity = ""
        if self._activity is not None:
            seconds = int(self._clock() - self._activity[1])
            activity = self._activity[0] + (f", {seconds} s" if seconds else "")
        if self._bar is None:
            seen, parts = self._images, list[str]()
            if seen is not None:
                parts = [f"{seen:,}/{self._total:,} images ({seen / self._total:.0%})", *self._numbers()]
            if line := "  ".join(filter(None, (*parts, activity))):
                self._write(line)
            return
        with contextlib.suppress(OSError):  # the terminal has gone; the run ends in order all the same
            self._bar.bar_format = BEFORE if self._images is None else BAR
            self._bar.n, self._bar.ncols = self._images or 0, shutil.get_terminal_size().columns - 1
            self._bar.set_postfix_str("  ".join(filter(None, (*self._numbers(), activity))), refresh=False)
            self._bar.set_description_str(activity, refresh=False)
            self._bar.refresh()
        self._wrote = self._clock()

    def _numbers(self) -> list[str]:
        """Return the parts of the line that have a value; an activity takes the room of rate and scale."""
        parts = [] if self._loss is None else [f"loss {self._loss:.4f}"]
        if self._rate and self._activity is None:
            parts.append(f"{rounded(self._rate, 4)} images/s")
        if self._rate and (left := duration(self.seconds_left())) != duration(0):
            parts.append(f"{left} left")
        if self._scale is not None and self._activity is None:
            parts.append(f"loss scale {self._scale:g}")
        return parts

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError), tqdm.external_write_mode(self._terminal):  # nobody may read it any more
            print(line, file=self._stream, flush=True)
        self._wrote = self._clock()


def summary(
    *,
    loss: float,
    images: int,
    images_per_second: float,
    pauses: Pauses,
    steps: int,
    skipped_steps: int,
    run_dir: Path,
    link: RunLink,
) -> str:
    """Return the summary at the end of a run, in a few lines.

    ``loss`` is the mean over the last log interval, ``images_per_second`` the mean of the run
    (:func:`~ddpm_ds.tracking.run_folder.mean_of_points`).
    """
    parts = f"sampling and validation {pauses.sampling_share:.1%}", f"checkpoints {pauses.checkpoint_share:.1%}"
    shares = ", ".join(part for part in parts if not part.endswith(" 0.0%"))
    rows = {
        "final loss": f"{loss:.4f}",
        "trained": f"{images:,} images in {duration(pauses.seconds)}" + f"; {shares} of the time" * bool(shares),
        "speed": f"{rounded(images_per_second, 4)} images/s, without pauses and the first log interval",
        "skipped steps": f"{skipped_steps:,} of {steps:,}" if skipped_steps else None,
        "run folder": str(run_dir),
        "MLflow run": link.run_id or f"not reached at {link.tracking_uri}",
        "serve it with": link.command,
        "open it at": link.url,
    }
    return "\n".join(f"{name:<26}{value}" for name, value in rows.items() if value is not None)
