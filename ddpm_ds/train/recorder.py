"""What is shown and written down about a run, on rank 0; on other ranks nothing happens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddpm_ds.train.progress import ProgressLine
from ddpm_ds.train.resume import RunFolder
from ddpm_ds.train.tracking import RunLink, Tracker


@dataclass
class Recorder:
    """The progress line, MLflow and ``metrics.jsonl``, fed together; ``None`` in each on ranks other than 0.

    ``logged_step`` is the last step that an earlier process of this run has logged: a resumed run repeats steps, and
    no point is logged twice.
    """

    line: ProgressLine | None = None
    tracker: Tracker | None = None
    folder: RunFolder | None = None
    logged_step: int = 0

    def step(self, images_seen: int) -> None:
        """A step has ended."""
        if self.line is not None:
            self.line.step(images_seen)

    def say(self, line: str) -> None:
        """Show a line of its own."""
        if self.line is not None:
            self.line.say(line)

    def point(self, values: Mapping[str, float], step: int, *, fp16: bool) -> None:
        """A log point, by the names of :func:`ddpm_ds.train.meters.metrics`."""
        if self.line is not None:
            self.line.log_point(
                int(values["progress/images"]),
                loss=values["train/loss"],
                images_per_second=values["perf/images_per_second"],
                loss_scale=values["train/loss_scale"] if fp16 else None,
            )
        self._write(values, step)

    def checkpoint(self, seconds: float, step: int) -> None:
        """A checkpoint was begun, and held training up for ``seconds``."""
        if self.tracker is not None and step > self.logged_step:
            self.tracker.metrics({"perf/checkpoint_seconds": seconds}, step)

    def rewound(self, what: str, times: int, step: int) -> None:
        """The run went back to ``step``; the points from there on are of a new course, and are logged again."""
        self.say(what)
        self.logged_step = min(self.logged_step, step)
        if self.tracker is not None:
            self.tracker.text(what + "\n", f"rewinds/{times}.txt")
            self.tracker.metrics({"train/rewinds": float(times)}, step)

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"], artifacts: Iterable[Path] = ()) -> RunLink | None:
        """End the line and the MLflow run, with those of ``artifacts`` that exist; where the run is, on rank 0."""
        if self.line is None or self.tracker is None:
            return None
        self.line.close()
        for path in artifacts:
            if path.exists():
                self.tracker.artifact(path)
        return self.tracker.finish(status)

    def _write(self, values: Mapping[str, float], step: int) -> None:
        if self.tracker is None or self.folder is None or step <= self.logged_step:
            return
        try:
            self.folder.append_metrics(values, step)  # first: a process that dies now won't log the point again
        except OSError as error:
            self.say(f"metrics.jsonl can't be written ({error.strerror}); training goes on")
        self.tracker.metrics(values, step)
