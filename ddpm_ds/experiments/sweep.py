"""Sweep: trials trained one after another by ``ddpm-ds train``, with a record of how each ended, to resume from.

::

    RUNS/vary-digits-1a2b3c4d/                    the sweep: a run of its own in MLflow, the parent of its trials
        grid.json                                 how each trial ended
        comparison.md                             the trials side by side
    RUNS/vary-digits-1a2b3c4d.baseline/           a trial: the folder of a run like any other, and
        asked_ds_config.json                      the JSON that the trial starts with
        output.log                                output of all its processes
    RUNS/vary-digits-1a2b3c4d.precision-fp16/
"""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.errors import EXIT_BAD_INPUT, EXIT_BAD_NUMBERS, EXIT_PREEMPTED, OutputError, UserError, explanation
from ddpm_ds.experiments.compare import ARTIFACT_FOLDER, FILE, comparison, markdown, terminal
from ddpm_ds.experiments.trials import BASELINE, Trial
from ddpm_ds.files import METRICS, SPEC, open_regular, read_json, replace_file, write_file
from ddpm_ds.processes.supervisor import MEANINGS
from ddpm_ds.tracking.run_folder import KIND_TAG, RunFolder, identity_of, labels, write_labels
from ddpm_ds.tracking.runs import SWEEP, VARIED_TAG, Run, find_run
from ddpm_ds.tracking.tracker import Tracker

TRAIN = ("-m", "ddpm_ds.cli.main", "train")
ENDINGS, ASKED_CONFIG, LOG = "grid.json", "asked_ds_config.json", "output.log"
POLL_SECONDS = 0.5
WHAT_CODES_MEAN = {
    **MEANINGS,
    EXIT_BAD_INPUT: "bad input",
    EXIT_BAD_NUMBERS: "the numbers went bad",
    EXIT_PREEMPTED: "stopped and saved",
}


@dataclass(frozen=True)
class Ending:
    """Outcome of the last start of a trial."""

    exit_code: int
    seconds: float
    said: tuple[str, ...] = ()
    """Errors of the program, or else the end of its output; empty if the trial is done."""

    @property
    def finished(self) -> bool:
        """Whether the trial is done."""
        return self.exit_code == 0

    @property
    def stopped(self) -> bool:
        """Whether the trial was stopped by request; it is resumed when the sweep is started again."""
        return self.exit_code == EXIT_PREEMPTED or self.exit_code < 0 or self.exit_code > 128

    def words(self) -> str:
        """Return how the trial ended, in a few words."""
        if self.finished:
            return "done"
        meaning = "ended at once by a signal" if self.stopped else "of the launcher"
        return f"exit code {self.exit_code} ({WHAT_CODES_MEAN.get(self.exit_code, meaning)})"


_ENDINGS = TypeAdapter(dict[str, Ending])


class Sweep:
    """Folders of a sweep and, beside it, of its trials."""

    def __init__(self, folder: Path, trials: Sequence[Trial]) -> None:
        self.folder, self.trials = folder, tuple(trials)
        file = folder / ENDINGS
        try:
            known = _ENDINGS.validate_python(read_json(file)) if file.exists() else {}
        except (OSError, ValueError):
            raise OutputError(f"{file} is damaged; delete it, and trials that are done are looked at again") from None
        self.endings = {trial.name: known[trial.name] for trial in trials if trial.name in known}
        """Endings of the trials that have been run, by name, in the trials' order."""

    def run_dir(self, trial: Trial) -> Path:
        """Return the folder of a trial's run: beside the sweep's, since MLflow's store is in the folder above
        a run's.
        """
        return self.folder.with_name(f"{self.folder.name}.{trial.name}")

    def log(self, trial: Trial) -> Path:
        """Return the file that collects a trial's output over all its starts."""
        return self.run_dir(trial) / LOG

    def finished(self, trial: Trial) -> bool:
        """Return whether a trial is done."""
        return trial.name in self.endings and self.endings[trial.name].finished

    def remember(self, trial: Trial, ending: Ending) -> None:
        """Record atomically how a trial ended."""
        self.endings[trial.name] = ending
        write_file(self.folder / ENDINGS, _ENDINGS.dump_json(self.endings, indent=2) + b"\n")

    def prepare(self, trial: Trial, spec: RunSpec) -> None:
        """Create a trial's folder with the files that it starts from."""
        run_dir = self.run_dir(trial)
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_file(run_dir / SPEC, yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False).encode())
        replace_file(run_dir / ASKED_CONFIG, json.dumps(trial.config, indent=2).encode() + b"\n")
        tags = {"vary.name": self.folder.name, "vary.changed": trial.label, VARIED_TAG: " ".join(trial.settings)}
        write_labels(run_dir, tags)

    def command(self, trial: Trial, parent: str, grace_seconds: float, options: Sequence[str]) -> list[str]:
        """Return the command that starts a trial as a child of the run with the identity ``parent``."""
        run_dir = self.run_dir(trial)
        where = ["--run-dir", str(run_dir), "--processes", str(trial.processes)]
        what = ["--spec", str(run_dir / SPEC), "--deepspeed_config", str(run_dir / ASKED_CONFIG)]
        how = ["--parent-run", parent, "--grace-seconds", f"{grace_seconds:g}"]
        return [sys.executable, *TRAIN, *where, *what, *how, *options]

    def progress(self, trial: Trial) -> int:
        """Return the number of images that a trial had seen at its last log point."""
        with contextlib.suppress(OSError):  # the file is being written
            for point in Run(self.run_dir(trial)).points(METRICS)[-1:]:
                return int(point.get("train/seen_images", 0))
        return 0

    def begin(
        self, experiment: str, params: Mapping[str, object], note: str | None, log: Callable[[str], None]
    ) -> tuple[Tracker, str]:
        """Begin or resume the sweep's run in MLflow; return it and its identity."""
        own = {KIND_TAG: SWEEP, "vary.name": self.folder.name, "mlflow.source.name": "ddpm-ds sweep"}
        tags = labels(self.folder, note, log) | own  # before identity(): a run that has one keeps its note
        identity = RunFolder(self.folder).identity()
        tracker = Tracker.start(
            experiment,
            self.folder.name,
            output_root=self.folder.parent,
            run_dir=self.folder,
            params=params,
            tags=tags,
            identity=identity,
            log=log,
        )
        return tracker, identity

    def compare(self, metrics: Sequence[str] | None, tracker: Tracker, log: Callable[[str], None]) -> str | None:
        """Compare the trials that MLflow knows; return a table of the terminal's width, or None if there is none.

        The comparison is also written to the sweep's folder and the artifacts of its run. If there is none, the reason
        is logged.
        """
        begun = [trial for trial in self.trials if identity_of(self.run_dir(trial))]
        try:
            runs = {trial.name: find_run(str(self.run_dir(trial))) for trial in begun}
            if not runs:
                return None
            compared = comparison(list(runs.values()), runs.get(BASELINE), metrics)
        except UserError as error:
            log(f"no comparison: {error}")
            return None
        replace_file(self.folder / FILE, markdown(compared).encode())
        tracker.artifact(self.folder / FILE, ARTIFACT_FOLDER)
        return terminal(compared, shutil.get_terminal_size((120, 24)).columns)


def run_command(command: Sequence[str], log: Path, heard: Sequence[signal.Signals], tick: Callable[[], None]) -> Ending:
    """Run a trial's command to its end, passing on every signal in ``heard``; ``tick`` is called while it runs.

    The command gets a session of its own, so that Ctrl-C in a terminal reaches it only once, from here.
    """
    started, passed = time.monotonic(), 0
    with open_regular(log, "ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while process.poll() is None:
                for number in heard[passed:]:
                    process.send_signal(number)
                passed = len(heard)
                tick()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    with open_regular(log) as file:
        file.seek(begin)
        said = explanation(file.read().decode(errors="replace")) if process.returncode else ()
    return Ending(process.returncode, round(time.monotonic() - started, 1), said)
