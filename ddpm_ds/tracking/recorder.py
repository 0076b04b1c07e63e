"""Recorder of a run on rank 0: feeds the progress line, the run's folder and its MLflow run."""

import contextlib
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.prepare import class_names
from ddpm_ds.ground.errors import Preempted, faults_logged
from ddpm_ds.ground.files import replace_file
from ddpm_ds.ground.version import __version__
from ddpm_ds.observe.observer import reported
from ddpm_ds.schema.section import flatten
from ddpm_ds.tracking.pictures import Drawn, grid_title, write_animation, write_png
from ddpm_ds.tracking.progress import ProgressLine
from ddpm_ds.tracking.run_folder import (
    ANIMATION,
    DERIVED,
    EVALUATIONS,
    METRICS,
    NOTE_TAG,
    OBSERVATIONS,
    POINTS,
    RATE,
    RESULT,
    RULE,
    SAMPLES_KEY,
    RunFolder,
    labels,
    mean_of_points,
)
from ddpm_ds.tracking.runs import VARIED_TAG
from ddpm_ds.tracking.tracker import RunLink, RunStart, Status, Tracker

PARAMETERS = (
    *("data.image_size", "unet.channels", "optimizer.learning_rate", "train.images", "train.batch_images"),
    "train.seed",
)
"""Settings that are parameters of a run. MLflow prints all of them above a picture, so more would leave it no room."""


class Recorder:
    """Recorder of a run on rank 0; on other ranks it has no arguments and does nothing.

    A resumed run repeats steps: points that the folder has are not logged again.
    """

    def __init__(
        self,
        line: ProgressLine | None = None,
        tracker: Tracker | None = None,
        folder: RunFolder | None = None,
        spec: RunSpec | None = None,
    ) -> None:
        self.line, self.tracker, self.folder, self._spec = line, tracker, folder, spec
        self._logged = {name: folder.logged_step(name) if folder else 0 for name in POINTS}

    def step(self, images_seen: int) -> None:
        """Show that a step has ended."""
        if self.line is not None:
            self.line.step(images_seen)

    def first_loss(self, loss: float) -> None:
        """Show the first step's loss."""
        if self.line is not None:
            self.line.first_loss(loss)

    def doing(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Show an activity of the run inside this context."""
        return self.line.doing(what) if self.line is not None else contextlib.nullcontext()

    def log(self, line: str) -> None:
        """Show a line above the progress line."""
        if self.line is not None:
            self.line.log(line)

    def point(self, values: Mapping[str, float], step: int, *, fp16: bool) -> None:
        """Record a log point: the values of :func:`ddpm_ds.training.meters.metrics`."""
        if self.line is not None:
            self.line.log_point(
                int(values["train/seen_images"]),
                loss=values["train/loss"],
                images_per_second=values[RATE],
                loss_scale=values["train/loss_scale"] if fp16 else None,
            )
        self._write(METRICS, values, step)

    def images_per_second(self) -> float:
        """Return the speed of the whole run without pauses; 0 on ranks other than 0."""
        points = self.folder.histories().get(RATE) if self.folder is not None else None
        return mean_of_points(RATE, points) if points else 0.0

    def checkpoint(self, seconds: float, step: int) -> None:
        """Record that saving a checkpoint held up training for ``seconds``."""
        if self.line is not None and self._spec is not None:
            self.line.paused("checkpoint", seconds, self._spec.checkpoint.every_images)
        if self.tracker is not None and step > self._logged[METRICS]:
            self.tracker.metrics({"usage/checkpoint_seconds": seconds}, step)

    def samples(self, drawn: Drawn | None, seconds: float, images_seen: int, step: int) -> None:
        """Record a picture that took ``seconds`` to draw; an existing one was logged before the run was resumed."""
        spec, tracker = self._spec, self.tracker
        if tracker is None or self.folder is None or spec is None or drawn is None or self.line is None:
            return
        self.line.paused("samples", seconds, spec.samples.every_images)
        with reported(self, path := self.folder.samples(images_seen)):
            if path.exists():
                return
            path.parent.mkdir(exist_ok=True)
            title = grid_title(self.folder.folder.resolve().name, images_seen, spec.sampler, spec.diffusion, "ema")
            names = drawn.prompts or class_names(spec.data, spec.bucket_group, spec.unet.classes)
            labels = [names[i % len(names)] for i in range(len(drawn.images)) if names]
            write_png(drawn.picture(title, labels), path)
            tracker.image(path, SAMPLES_KEY, step)
            tracker.metrics({"usage/samples_seconds": seconds}, step)

    def evaluation(self, values: Mapping[str, float], step: int) -> None:
        """Record the held-out loss: :meth:`ddpm_ds.training.held_out_loss.HeldOutLoss.values`."""
        if "eval/loss" in values:
            self.log(f"held-out loss {values['eval/loss']:.4f}")
        if self.line is not None and self._spec is not None:
            seconds = values.get("usage/evaluation_seconds", 0.0)
            self.line.paused("evaluation", seconds, self._spec.evaluation.every_images)
        self._write(EVALUATIONS, values, step)

    def observed(self, values: Mapping[str, float], step: int) -> None:
        """Record measurements that an observer makes once; MLflow gets them as one file, since they are no curves."""
        self._write(OBSERVATIONS, values, step)

    def artifact(self, path: Path, folder: str = "") -> None:
        """Keep a file or folder with the run, in ``folder``."""
        if self.tracker is not None:
            self.tracker.artifact(path, folder)

    def tags(self, values: Mapping[str, str]) -> None:
        """Set tags of the run in MLflow."""
        if self.tracker is not None:
            self.tracker.tags(values)

    def result(self, layout: str, loss: float, verdict: str) -> None:
        """Put layout, final loss and a verdict's conclusions on top of the run's description in MLflow."""
        lines = [f"{RESULT} {layout}", f"**Final loss:** {loss:.4f}"]
        if verdict:  # MLflow shows few lines at first, so without the table
            lines.append("**Verdict:** " + verdict.strip().rpartition("\n\n")[2])
        self.tags({NOTE_TAG: "  \n".join(lines) + RULE})

    def rolled_back(self, what: str, times: int, images_seen: int, step: int) -> None:
        """Record a rollback to ``step``; later points are logged again."""
        self.log(what)
        self._logged = {name: min(last, step) for name, last in self._logged.items()}
        if self.tracker is not None and self.folder is not None:
            with reported(self, self.folder.folder):
                self.folder.forget_samples(images_seen)
            self.tracker.text(what + "\n", f"rollbacks/{times}.txt")
            self.tracker.metrics({"train/rollbacks": times}, step)

    def finish(self, status: Status) -> RunLink | None:
        """End the progress line and the MLflow run; return the run's link, None on ranks other than 0."""
        if self.line is None or self.tracker is None or self.folder is None:
            return None

        path = self.folder.folder / ANIMATION
        with faults_logged(str(path), self.log):
            if len(files := self.folder.all_samples()) >= 2:  # all drawn from the same noise
                write_animation(files, path)
                self.tracker.artifact(path)
        with self.line.doing("sending the last numbers to MLflow"):
            link = self.tracker.finish(status)
        self.line.close()
        return link

    def _write(self, name: str, values: Mapping[str, float], step: int) -> None:
        if self.tracker is None or self.folder is None or step <= self._logged[name]:
            return
        file = self.folder.folder / name
        with reported(self, file):
            self.folder.append(name, values, step)  # first: a process that dies now does not log the point again
        if name == OBSERVATIONS:
            self.tracker.artifact(file)
        else:
            self.tracker.metrics(values, step)


@contextlib.contextmanager
def recorded(
    start: RunStart,
    line: ProgressLine,
    spec: RunSpec,
    *,
    files: Mapping[str, str | bytes],
    checkpoint: Path | None = None,
    changed: Sequence[str] = (),
    note: str | None = None,
    sender: subprocess.Popen[bytes] | None = None,
) -> Iterator[Recorder]:
    """Record a run in its folder and in MLflow, on rank 0; it ends as FAILED or KILLED if the body raises.

    ``start`` has all settings as ``params``; ``files``, by name, are kept in the folder. A run that resumes has its
    ``checkpoint`` and its ``changed`` settings, a new one perhaps a ``note``. ``sender`` is as in :class:`Tracker`.
    """
    folder = RunFolder(start.run_dir)
    folder.folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():  # a full disk must not damage the files of the last start
        replace_file(folder.folder / name, content.encode() if isinstance(content, str) else content)
    flat, tags = flatten(start.params), {**start.tags, **origin_tags(), **labels(folder.folder, note, line.log)}
    params = parameters(flat, tags)
    tags |= {name: value for name, value in flat.items() if name.startswith(DERIVED)}  # a resume changes tags alone
    if checkpoint is not None:
        tags["resume_count"] = str(folder.add_resume(checkpoint, changed))
    start = replace(start, params=params, tags=tags, identity=folder.identity(), system_metrics=True)
    tracker = Tracker(start, line.log, sender)
    for name in files:
        tracker.artifact(folder.folder / name)
    recorder = Recorder(line, tracker, folder, spec)
    try:
        yield recorder
    except BaseException as error:
        recorder.finish("KILLED" if isinstance(error, KeyboardInterrupt | Preempted) else "FAILED")
        raise


def parameters(settings: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that become parameters: keys that people vary, and the run's sweep."""
    keys = (*PARAMETERS, *tags.get(VARIED_TAG, "").split())
    return {name: value for name, value in settings.items() if any(f"{name}.".startswith(f"{key}.") for key in keys)}


def origin_tags() -> dict[str, str]:
    """Return tags for the origin of a run: code, host, versions."""
    command = ["git", "-C", str(Path(__file__).parents[1]), "describe", "--always", "--dirty", "--abbrev=40"]
    try:  # no tag is used, so it is the commit
        described = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, check=True).stdout
        commit, dirty, _ = described.strip().partition("-dirty")
        changed = str(bool(dirty)).lower()
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        commit = changed = "unknown"
    return {
        "git_commit": commit,
        "git_dirty": changed,
        "host": platform.node(),
        "mlflow.source.name": "launch/train.py",
        **{f"version.{name}": version(name) for name in ("torch", "deepspeed", "mlflow-skinny")},
        "version.ddpm_ds": __version__,
    }
