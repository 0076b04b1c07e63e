"""Variables and trials of a sweep; a trial is a spec, a DeepSpeed JSON and a number of processes."""

import argparse
import contextlib
import copy
import difflib
import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ddpm_ds.command_line import processes as number_of_processes
from ddpm_ds.config.ds_config import check_ds_config, leaves_layout_open, set_key
from ddpm_ds.config.ds_model import ZERO_ONLY_KEYS
from ddpm_ds.config.spec_file import JSON_PREFIX
from ddpm_ds.errors import UserError
from ddpm_ds.planning import RunPlan, plan_run
from ddpm_ds.processes.ranks import set_environment
from ddpm_ds.tracking.runs import ExperimentError

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
