"""Sweep: trials for all combinations of some values, which ``ddpm-ds train`` trains one after another.

::

    RUNS/sweep-digits-1a2b3c4d/                    the sweep: a run of its own in MLflow, the parent of its trials
        comparison.txt                             the trials side by side
    RUNS/sweep-digits-1a2b3c4d.processes-2/        a trial: the folder of a run like any other, and
        asked_ds_config.json                       the JSON that the trial starts with
        output.log                                 output of all its processes
"""

import contextlib
import itertools
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from ddpm_ds.config.ds_config import read_ds_config
from ddpm_ds.config.spec_file import JSON_PREFIX
from ddpm_ds.ground.errors import UserError, explanation
from ddpm_ds.ground.files import open_regular, replace_file
from ddpm_ds.ground.options import process_count
from ddpm_ds.planning.run_plan import RunDraft, choose, lay_out, read_run
from ddpm_ds.tracking.run_folder import ASKED_CONFIG, EVENTS, SPEC, ending, write_labels
from ddpm_ds.tracking.runs import VARIED_TAG, ExperimentError
from ddpm_ds.training.from_python import TRAIN

PROCESSES, CONFIG = "processes", "deepspeed_config"
OPTIONS = {PROCESSES: "derived.world_size", CONFIG: "derived.precision"}
"""Variables that are options of ``ddpm-ds train``, and the settings of a run that show their values."""
MOST_TRIALS, NAME_CHARACTERS, POLL_SECONDS = 1000, 80, 0.5
LOG = "output.log"


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    values: Mapping[str, str]  # values of all variables, as typed
    run_dir: Path  # beside the sweep's folder, since MLflow's store is in the folder above a run's
    draft: RunDraft

    @property
    def label(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items())

    @property
    def done(self) -> bool:
        return ending(self.run_dir / EVENTS) == "FINISHED"

    def prepare(self, overrides: Sequence[str]) -> None:
        """Create the trial's folder with the files that it starts from; ``overrides`` are the sweep's."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        config = read_ds_config(self.draft.ds_path, _overrides(self.values, overrides))
        spec = self.draft.spec.model_dump(mode="json")
        replace_file(self.run_dir / SPEC, yaml.safe_dump(spec, sort_keys=False).encode())
        replace_file(self.run_dir / ASKED_CONFIG, json.dumps(config, indent=2).encode() + b"\n")
        keys = [OPTIONS.get(name) or re.sub(f"^{re.escape(JSON_PREFIX)}", "ds_config.", name) for name in self.values]
        write_labels(self.run_dir, {"sweep.values": self.label, VARIED_TAG: " ".join(keys)})

    def command(self, parent: str, options: Sequence[str]) -> list[str]:
        """Return the command that starts the trial as a child of the run with the identity ``parent``."""
        where = ["--run-dir", self.run_dir, "--processes", len(self.draft.grid.hosts), "--parent-run", parent]
        files = ["--spec", self.run_dir / SPEC, "--deepspeed_config", self.run_dir / ASKED_CONFIG]
        return [sys.executable, *TRAIN, *map(str, [*where, *files]), *options]


def parse_variables(items: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse variables into values by name: an option of :data:`OPTIONS`, a key of the spec, or ``ds.`` and a JSON key.

    ``items`` are ``NAME=VALUE,VALUE``; commas inside brackets belong to a value. ExperimentError if an item has another
    form, a name is unknown, or a name or a value occurs twice.
    """
    variables: dict[str, tuple[str, ...]] = {}
    for item in items:
        name, equals, text = item.partition("=")
        values = tuple(value.strip() for value in re.split(r",(?![^\[{]*[\]}])", text))
        if not (equals and name.strip() and all(values)):
            raise ExperimentError(f"--vary {item}: write NAME=VALUE,VALUE, such as unet.channels=32,64")
        if len(set(values)) < len(values) or (name := name.strip()) in variables:
            raise ExperimentError(f"--vary {item}: a value or {name} comes twice; write each value once, in one list")
        if (name not in OPTIONS and "." not in name) or name == "logging.experiment":
            known = f"{', '.join(OPTIONS)}, a key of the spec (unet.channels) or the JSON ({JSON_PREFIX}fp16.enabled)"
            raise ExperimentError(f"--vary {item}: {name} can't be varied; use {known}")
        variables[name] = values
    return variables


def make_trials(
    variables: Mapping[str, Sequence[str]],
    folder: Path,
    spec: Path,
    ds_config: Path,
    overrides: Sequence[str],
    *,
    processes: int,
    stages: int | None,
    device: str,
) -> list[Trial]:
    """Return a trial for each combination of values, planned as training would plan it; ``folder`` is the sweep's.
    ExperimentError if there are too many, or one can't run: with its values and training's message.
    """
    if (count := math.prod(map(len, variables.values()))) > MOST_TRIALS:
        raise ExperimentError(f"--vary makes {count:,} trials, and {MOST_TRIALS:,} are the most; give fewer values")
    made: dict[Path, Trial] = {}
    for combination in itertools.product(*variables.values()):
        values = dict(zip(variables, combination, strict=True))
        label = " ".join(f"{name}={value}" for name, value in values.items())
        short = re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-.")[:NAME_CHARACTERS]
        again = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        paths = (folder.with_name(f"{folder.name}.{short}{number}") for number in again)
        run_dir = next(path for path in paths if path not in made)
        try:
            count, config = process_count(values.get(PROCESSES, str(processes))), values.get(CONFIG, ds_config)
            files, hosts = read_run(spec, _overrides(values, overrides), Path(config)), ("localhost",) * count
            draft = lay_out(files, hosts, count, stages, choose(files, hosts, count, stages, device))
        except UserError as error:
            raise ExperimentError(*(f"trial {label}: {fault}" for fault in error.args)) from None
        made[run_dir] = Trial(values, run_dir, draft)
    return list(made.values())


def _overrides(values: Mapping[str, str], overrides: Sequence[str]) -> list[str]:
    """Return the changes of spec and JSON: the sweep's, then the trial's."""
    return [*overrides, *(f"{name}={value}" for name, value in values.items() if name not in OPTIONS)]


def run_command(command: Sequence[str], log: Path, received: Sequence[signal.Signals]) -> tuple[int, tuple[str, ...]]:
    """Run a trial's command to its end, and pass on the signals in ``received``; return its exit code and error lines.

    The command gets a session of its own, so that Ctrl-C in a terminal reaches it only once, from here.
    """
    passed, nothing = 0, subprocess.DEVNULL
    with open_regular(log, "ab") as output:
        begin = output.tell()
        process = subprocess.Popen(command, stdin=nothing, stdout=output, stderr=output, start_new_session=True)
        try:
            while process.poll() is None:
                for number in received[passed:]:
                    process.send_signal(number)
                passed = len(received)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    with open_regular(log) as file:
        file.seek(begin)
        return process.returncode, explanation(file.read().decode(errors="replace")) if process.returncode else ()
