"""Sweep: variables and the trials of their values, which ``ddpm-ds train`` trains one after another, with a record of
how each ended, to resume from. A trial is a spec, a DeepSpeed JSON and a number of processes.

::

    RUNS/vary-digits-1a2b3c4d/                    the sweep: a run of its own in MLflow, the parent of its trials
        grid.json                                 how each trial ended
        comparison.md                             the trials side by side
    RUNS/vary-digits-1a2b3c4d.baseline/           a trial: the folder of a run like any other, and
        asked_ds_config.json                      the JSON that the trial starts with
        output.log                                output of all its processes
    RUNS/vary-digits-1a2b3c4d.precision-fp16/
"""

import argparse
import contextlib
import copy
import difflib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from ddpm_ds.command_line import processes as number_of_processes
from ddpm_ds.config.ds_config import check_ds_config, leaves_layout_open, set_key
from ddpm_ds.config.ds_model import ZERO_ONLY_KEYS
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import JSON_PREFIX
from ddpm_ds.errors import EXIT_BAD_INPUT, EXIT_BAD_NUMBERS, EXIT_PREEMPTED, OutputError, UserError, explanation
from ddpm_ds.experiments.compare import ARTIFACT_FOLDER, FILE, comparison, markdown, terminal
from ddpm_ds.files import METRICS, SPEC, open_regular, read_json, replace_file, write_file
from ddpm_ds.planning import RunPlan, plan_run
from ddpm_ds.processes.ranks import set_environment
from ddpm_ds.processes.supervisor import MEANINGS
from ddpm_ds.tracking.run_folder import KIND_TAG, RunFolder, identity_of, labels, write_labels
from ddpm_ds.tracking.runs import SWEEP, VARIED_TAG, ExperimentError, Run, find_run
from ddpm_ds.tracking.tracker import Tracker

BASELINE = "baseline"
"""Name of the trial that has the first value of every variable."""
JSON_KEYS = {
    "stages": "pipeline.stages",
    "schedule": "pipeline.schedule",
    "zero": "zero_optimization.stage",
    "micro_batch_images": "train_micro_batch_size_per_gpu",
    "recompute": "pipeline.activation_checkpoint_interval",
    "partition": "pipeline.partition",
}
DERIVED = {"precision": "precision", "processes": "world_size"}
SHORTHANDS = (*DERIVED, *JSON_KEYS)
"""Short names of common variables."""
PRECISIONS = ("fp32", "fp16", "bf16")
DYNAMIC_FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 500,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
"""Block ``fp16`` for a trial whose JSON has none: a dynamic loss scale, as in ds_configs/zero2_fp16.json."""
EDITED_BLOCKS = ("fp16", "bf16", "data_types", "zero_optimization")
"""Blocks of the JSON that the variables ``precision`` and ``zero`` edit."""
NAME_CHARACTERS = 80
MOST_TRIALS = 1000
LONGEST_VARIABLE = 4096
"""Maximum number of characters of a variable with its values."""
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
class Trial:
    """One run of a sweep."""

    name: str
    """Name of the trial; its folder is named by the sweep and this."""
    values: dict[str, str]
    """Values of all variables, as typed."""
    changed: str
    """Difference from the baseline, such as ``precision=fp16``; empty for the baseline."""
    processes: int
    overrides: tuple[str, ...]
    """Overrides of the spec, as ``section.key=value``."""
    config: dict[str, Any]
    """Content of the DeepSpeed JSON."""

    @property
    def label(self) -> str:
        """Name of the trial in output."""
        return self.changed or BASELINE

    @property
    def settings(self) -> list[str]:
        """Names of the variables among the settings of a run."""
        return [_setting(name) for name in self.values]


def parse_variables(items: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse variables into values by name: a shorthand, a dotted spec key, or ``ds.`` and a path in the JSON.

    ``items`` are ``NAME=VALUE,VALUE``; commas inside brackets belong to a value.

    Raises:
        ExperimentError: an item has another form, a name is unknown, or a name or a value occurs twice.
    """
    variables: dict[str, tuple[str, ...]] = {}
    for item in items:
        name, equals, text = item.partition("=")
        name = name.strip()
        if len(item) > LONGEST_VARIABLE:
            raise ExperimentError(f"--vary {name[:40]}: more than {LONGEST_VARIABLE:,} characters; give fewer values")
        values = tuple(value.strip() for value in re.split(r",(?![^\[{]*[\]}])", text))
        if not (equals and name and all(values)):
            raise ExperimentError(f"--vary {item}: write NAME=VALUE,VALUE, such as precision=fp32,fp16")
        if len(set(values)) < len(values):
            raise ExperimentError(f"--vary {item}: a value comes twice; leave one out")
        if name not in SHORTHANDS and "." not in name:
            near = difflib.get_close_matches(name, SHORTHANDS, n=1)
            others = f"spec keys (unet.channels), JSON keys ({JSON_PREFIX}fp16.loss_scale)"
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(SHORTHANDS)}, {others}"
            raise ExperimentError(f"--vary {item}: {name} is unknown; {hint}")
        if name == "logging.experiment":
            raise ExperimentError(f"--vary {item}: a sweep is one experiment; vary something else")
        if name in variables:
            raise ExperimentError(f"--vary {name} is given twice; write its values in one list")
        for other in variables:
            if both := _sets(name) & _sets(other):
                raise ExperimentError(f"--vary {other} and --vary {name} both set {min(both)}; leave one out")
        variables[name] = values
    return variables


def make_trials(
    variables: Mapping[str, Sequence[str]],
    config: dict[str, Any],
    overrides: Sequence[str],
    processes: int,
    *,
    full: bool,
) -> list[Trial]:
    """Return the baseline first, then a trial for each other value alone, or with ``full`` for each combination.

    ``config``, ``overrides`` and ``processes`` apply unless a variable changes them.

    Raises:
        ExperimentError: a shorthand does not accept a value.
    """
    first = {name: values[0] for name, values in variables.items()}
    count = math.prod(map(len, variables.values())) if full else sum(map(len, variables.values()))
    if count > MOST_TRIALS:
        raise ExperimentError(f"--vary makes {count:,} trials, and {MOST_TRIALS:,} are the most; give fewer values")
    if full:
        chosen = [dict(zip(variables, values, strict=True)) for values in itertools.product(*variables.values())]
    else:
        chosen = [first, *(first | {name: value} for name, values in variables.items() for value in values[1:])]
    made: dict[str, Trial] = {}
    for values in chosen:
        changed = " ".join(f"{name}={value}" for name, value in values.items() if value != first[name])
        folder = re.sub(r"[^A-Za-z0-9.]+", "-", changed).strip("-.")[:NAME_CHARACTERS] or BASELINE
        numbered = (f"{folder}-{number}" for number in itertools.count(2))
        name = next(name for name in itertools.chain([folder], numbered) if name not in made)
        edited, also = copy.deepcopy(config), list(overrides)
        for variable, value in values.items():
            also += _edit(edited, variable, value)
        if {"precision", "zero"} & set(variables):
            _leave_out_what_zero_reads(edited)
        made[name] = Trial(name, values, changed, int(values.get("processes", processes)), tuple(also), edited)
    return list(made.values())


def plan_trials(
    trials: Sequence[Trial], spec: Path, ds_config: Path, *, stages: int | None, device: str = "auto"
) -> list[RunPlan]:
    """Plan every trial's run; ``ds_config`` is the file that the JSONs were made from, which messages name.

    If the planner chooses stages or tensor groups, it runs in another process, since it opens the devices, and this
    process must hold none of their memory while the trials run.

    Raises:
        ExperimentError: a trial can't run; the message is the trial's name and what training would say.
    """
    plans: list[RunPlan] = []
    with contextlib.ExitStack() as stack:
        pool: ProcessPoolExecutor | None = None
        for trial in trials:
            try:
                config = check_ds_config(trial.config, ds_config)
                if leaves_layout_open(config, trial.processes, stages):
                    pool = pool or stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
                    plans.append(pool.submit(_plan_as_a_rank, trial, spec, ds_config, device).result())
                else:
                    plans.append(_plan(trial, spec, ds_config, stages, device))
            except UserError as error:
                raise ExperimentError(*(f"trial {trial.label}: {fault}" for fault in error.args)) from None
    return plans


def _plan(trial: Trial, spec: Path, ds_config: Path, stages: int | None, device: str) -> RunPlan:
    with tempfile.TemporaryDirectory(prefix="ddpm-ds-") as folder:
        file = Path(folder) / "ds_config.json"
        file.write_text(json.dumps(trial.config))
        try:
            return plan_run(spec, trial.overrides, file, world_size=trial.processes, stages=stages, device=device)
        except UserError as error:
            said = str(error).replace(str(file), str(ds_config))
            raise ExperimentError(*said.splitlines()) from None


def _plan_as_a_rank(trial: Trial, spec: Path, ds_config: Path, device: str) -> RunPlan:
    """Plan a trial in a separate process, which the planner treats as the trial's first rank."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(trial.processes)
    set_environment()
    return _plan(trial, spec, ds_config, None, device)


def _setting(name: str) -> str:
    """Return the name that a variable has among the settings of a run."""
    if name in DERIVED:
        return f"derived.{DERIVED[name]}"
    path = _json_path(name)
    return f"ds_config.{path}" if path else name


def _sets(name: str) -> set[str]:
    """Return the keys that a variable sets: of the spec, or of the JSON with its prefix."""
    if name == "precision":
        return {f"{JSON_PREFIX}fp16.enabled", f"{JSON_PREFIX}bf16.enabled"}
    path = _json_path(name)
    keys = {f"{JSON_PREFIX}{path}" if path else name}
    if name == "micro_batch_images":
        keys |= {f"{JSON_PREFIX}gradient_accumulation_steps", "train.accumulation"}
    return keys


def _json_path(name: str) -> str | None:
    """Return the variable's path in the JSON; None if it is not in the JSON."""
    return JSON_KEYS.get(name) or (name.removeprefix(JSON_PREFIX) if name.startswith(JSON_PREFIX) else None)


def _edit(config: dict[str, Any], name: str, value: str) -> list[str]:
    """Set a variable's value in the JSON; return the changes of the spec, as overrides."""
    if name == "precision":
        _set_precision(config, value)
    elif name == "processes":
        try:
            number_of_processes(value)
        except argparse.ArgumentTypeError as error:
            raise ExperimentError(f"--vary processes={value}: {error}") from None
    elif path := _json_path(name):
        set_key(config, path, value, f"--vary {name}={value}")
        if path in EDITED_BLOCKS and not isinstance(config[path], dict):
            raise ExperimentError(f"--vary {name}={value}: {path} should be a block {{...}}; vary one of its keys")
        if name == "micro_batch_images":  # the number of micro-batches adapts, so that the batch stays the same
            config["gradient_accumulation_steps"] = "auto"
            return ["train.accumulation=auto"]
    else:
        return [f"{name}={value}"]
    return []


def _set_precision(config: dict[str, Any], value: str) -> None:
    if value not in PRECISIONS:
        raise ExperimentError(f"--vary precision={value}: use {', '.join(PRECISIONS)}")
    blocks = {"fp16": config.pop("fp16", DYNAMIC_FP16), "bf16": config.pop("bf16", {})}
    if value in blocks:
        config[value] = {**blocks[value], "enabled": True}
    else:
        config.get("data_types", {}).pop("grad_accum_dtype", None)  # the key is refused in fp32


def _leave_out_what_zero_reads(config: dict[str, Any]) -> None:
    """Remove keys that DeepSpeed ignores without ZeRO and that training refuses."""
    if config.get("zero_optimization", {}).get("stage", 0) != 0:
        return
    config.get("fp16", {}).pop("hysteresis", None)
    for block, _, name in (key.partition(".") for key in ZERO_ONLY_KEYS):
        if isinstance(config.get(block), dict):
            config[block].pop(name, None)


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
