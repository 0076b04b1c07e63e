"""What is shown and written down about a run, on rank 0; on other ranks nothing happens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from ddpm_ds.data.pictures import grid, write_png
from ddpm_ds.train.progress import ProgressLine
from ddpm_ds.train.run_folder import EVALUATIONS, METRICS, OBSERVATIONS, RunFolder
from ddpm_ds.train.tracking import RunLink, Tracker

SAMPLES_KEY = "samples_ema"
"""Under which MLflow keeps the pictures, with a slider over steps."""


class Recorder:
    """The progress line, MLflow and the run's folder, fed together; ``None`` in each on ranks other than 0.

    A resumed run repeats steps: what an earlier process has written into the folder is not logged again.
    """

    def __init__(
        self, line: ProgressLine | None = None, tracker: Tracker | None = None, folder: RunFolder | None = None
    ) -> None:
        self.line, self.tracker, self.folder = line, tracker, folder
        self._logged = {
            name: folder.logged_step(name) if folder else 0 for name in (METRICS, EVALUATIONS, OBSERVATIONS)
        }

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
        self._write(METRICS, values, step)

    def checkpoint(self, seconds: float, step: int) -> None:
        """A checkpoint was begun, and held training up for ``seconds``."""
        if self.tracker is not None and step > self._logged[METRICS]:
            self.tracker.metrics({"perf/checkpoint_seconds": seconds}, step)

    def samples(self, images: Tensor | None, seconds: float, images_seen: int, step: int) -> None:
        """A picture was drawn, which took ``seconds``; one that is there was logged before the run was resumed."""
        if self.tracker is None or self.folder is None or images is None:
            return
        path = self.folder.samples(images_seen)
        if path.exists():
            return
        try:
            path.parent.mkdir(exist_ok=True)
            write_png(grid(images), path)
        except OSError as error:
            self.say(f"{path} can't be written ({error.strerror}); training goes on")
            return
        self.tracker.image(path, SAMPLES_KEY, step)
        self.tracker.metrics({"perf/samples_seconds": seconds}, step)

    def evaluation(self, values: Mapping[str, float], step: int) -> None:
        """The held-out loss, by the names of :meth:`ddpm_ds.train.held_out.HeldOutLoss.measure`."""
        if "eval/loss" in values:
            self.say(f"held-out loss {values['eval/loss']:.4f}")
        self._write(EVALUATIONS, values, step)

    def observed(self, values: Mapping[str, float], step: int) -> None:
        """What an observer of steps has measured."""
        self._write(OBSERVATIONS, values, step)

    def artifact(self, path: Path, folder: str = "") -> None:
        """A file or folder to be kept with the run, in ``folder``."""
        if self.tracker is not None:
            self.tracker.artifact(path, folder)

    def tags(self, values: Mapping[str, str]) -> None:
        """What the run is found by in MLflow."""
        if self.tracker is not None:
            self.tracker.tags(values)

    def rewound(self, what: str, times: int, images_seen: int, step: int) -> None:
        """The run went back to ``step``; the points from there on are of a new course, and are logged again."""
        self.say(what)
        self._logged = {name: min(last, step) for name, last in self._logged.items()}
        if self.folder is not None:
            self.folder.forget_samples(images_seen)
        if self.tracker is not None:
            self.tracker.text(what + "\n", f"rewinds/{times}.txt")
            self.tracker.metrics({"train/rewinds": float(times)}, step)

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> RunLink | None:
        """End the line and the MLflow run; where the run is, on rank 0."""
        if self.line is None or self.tracker is None:
            return None
        self.line.close()
        return self.tracker.finish(status)

    def _write(self, name: str, values: Mapping[str, float], step: int) -> None:
        if self.tracker is None or self.folder is None or step <= self._logged[name]:
            return
        try:
            self.folder.append(name, values, step)  # first: a process that dies now won't log the point again
        except OSError as error:
            self.say(f"{name} can't be written ({error.strerror}); training goes on")
        self.tracker.metrics(values, step)
