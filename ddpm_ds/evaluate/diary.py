"""What is made of a checkpoint, as a child of its run in MLflow: scores, samples, exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import ddpm_ds
from ddpm_ds.tracking.run_folder import RunFolder
from ddpm_ds.tracking.tracker import RunLink, Tracker, print_to_stderr

if TYPE_CHECKING:
    from ddpm_ds.evaluate.trained import Trained

Kind = Literal["evaluate", "export", "sample"]


class Child:
    """A child run. Leaving its context ends it: FINISHED, or FAILED or KILLED by the exception that leaves.

    Where there is no run to be a child of, because the weights don't lie in a run's folder, nothing is recorded and
    every method does nothing. What MLflow does not take is left in the run's folder, as in training.
    """

    def __init__(self, tracker: Tracker | None, step: int) -> None:
        self._tracker, self._step = tracker, step

    @classmethod
    def begin(
        cls, trained: Trained, kind: Kind, params: Mapping[str, object], say: Callable[[str], None] = print_to_stderr
    ) -> Child:
        """Begin a child of the run that ``trained`` was saved by, with ``params``, which may be nested.

        Begin it when the work is done: what takes long and is interrupted then leaves no run behind.
        """
        if trained.run_dir is None or trained.spec is None:
            say(f"{trained.origin} is not in the folder of a run, so nothing is recorded in MLflow")
            return cls(None, 0)
        try:
            parent = RunFolder(trained.run_dir).identity()
        except OSError as error:  # a copy that lacks it, on a read-only disk
            say(f"{error.filename} can't be written ({error.strerror}), so nothing is recorded in MLflow")
            return cls(None, 0)
        checkpoint = Path(trained.origin).name
        tracker = Tracker.start(
            trained.spec.logging.experiment,
            f"{kind} {checkpoint}",
            output_root=trained.run_dir.parent,
            run_dir=trained.run_dir,
            params=params,
            tags={
                "kind": kind,
                "checkpoint": checkpoint,
                "weights": trained.weights,
                "digest": trained.digest,
                "images_seen": str(trained.images_seen),
                "mlflow.source.name": f"ddpm-ds {kind}",
                "version.ddpm_ds": ddpm_ds.__version__,
            },
            parent=parent,
            log=say,
        )
        return cls(tracker, trained.images_seen or 0)

    @property
    def recorded(self) -> bool:
        """Whether there is a run to be a child of."""
        return self._tracker is not None

    def metrics(self, values: Mapping[str, float]) -> None:
        """Log values; their step is the images that the checkpoint has seen, which compares runs of any batch."""
        if self._tracker is not None:
            self._tracker.metrics(values, self._step)

    def artifact(self, path: Path, folder: str = "") -> None:
        """Log a file into ``folder``, or a folder, under its own name, into it."""
        if self._tracker is not None:
            self._tracker.artifact(path, folder)

    def text(self, text: str, name: str) -> None:
        """Log text as an artifact file."""
        if self._tracker is not None:
            self._tracker.text(text, name)

    def register(self, model_name: str, folder: str) -> None:
        """Make ``folder``, a folder of artifacts logged before, a version of a registered model. Says which."""
        if self._tracker is not None:
            self._tracker.register(model_name, folder)

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED") -> RunLink | None:
        """End the run and wait a while until all is sent; where it is."""
        return None if self._tracker is None else self._tracker.finish(status)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish("FINISHED" if error is None else "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
