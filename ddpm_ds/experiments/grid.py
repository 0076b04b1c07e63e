"""What is varied, and the cells that follow: each a spec, a DeepSpeed JSON and a number of processes."""

from __future__ import annotations

import argparse
import contextlib
import copy
import difflib
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ddpm_ds.command_line import positive
from ddpm_ds.config.ds_config import check_ds_config, leaves_stages_open
from ddpm_ds.config.ds_keys import KEYS
from ddpm_ds.errors import UserError
from ddpm_ds.predict.plan import RunPlan, plan_run
from ddpm_ds.processes.ranks import set_environment
from ddpm_ds.tracking.runs import ExperimentError

BASELINE = "baseline"
"""Name of the cell that has the first value of every variable."""
JSON_PREFIX = "ds."
PRECISIONS = ("fp32", "fp16", "bf16")
DYNAMIC_FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 500,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
"""The fp16 block of a cell whose JSON brings none: a dynamic loss scale, as in ds_configs/zero2_fp16.json."""
NAME_CHARACTERS = 80


@dataclass(frozen=True)
class Variable:
    """What is varied: a shorthand, a dotted spec key, or a path of the JSON after ``ds.``; and its values as typed."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """One run of a grid."""

    name: str
    """Of its folder, beside the grid's."""
    values: dict[str, str]
    """Every variable, as typed."""
    changed: str
    """``precision=fp16``: what differs from the baseline; empty for the baseline itself."""
    processes: int
    overrides: tuple[str, ...]
    """``section.key=value`` of the spec."""
    config: dict[str, Any]
    """The DeepSpeed JSON."""


@dataclass
class _Draft:
    """A cell while its values are put in, one after another."""

    config: dict[str, Any]
    overrides: list[str]
    processes: int


def parse_variable(item: str) -> Variable:
    """``NAME=VALUE,VALUE``; commas inside brackets belong to a value.

    Raises:
        ExperimentError: it is written otherwise, the name is unknown, or a value comes twice.
    """
    name, equals, text = item.partition("=")
    name = name.strip()
    values = tuple(value.strip() for value in re.split(r",(?![^\[{]*[\]}])", text))
    if not (equals and name and all(values)):
        raise ExperimentError(f"--vary {item}: write NAME=VALUE,VALUE, such as precision=fp32,fp16")
    if len(set(values)) < len(values):
        raise ExperimentError(f"--vary {item}: a value comes twice; leave one out")
    if name not in SHORTHANDS and "." not in name:
        near = difflib.get_close_matches(name, SHORTHANDS, n=1)
        known = (
            f"known are {', '.join(SHORTHANDS)}, spec keys (unet.channels), JSON keys ({JSON_PREFIX}fp16.loss_scale)"
        )
        raise ExperimentError(f"--vary {item}: {name} is unknown; {f'did you mean {near[0]}?' if near else known}")
    if name == "logging.experiment":
        raise ExperimentError(f"--vary {item}: a grid is one experiment; vary something else")
    return Variable(name, values)


def cells(
    variables: Sequence[Variable],
    config: dict[str, Any],
    overrides: Sequence[str],
    processes: int,
    *,
    full: bool,
) -> list[Trial]:
    """The baseline, and then every other value alone; or with ``full`` every combination. The baseline comes first.

    ``config``, ``overrides`` and ``processes`` are what holds where no variable says otherwise.

    Raises:
        ExperimentError: a variable is given twice, or a value is none that its shorthand takes.
    """
    names = [variable.name for variable in variables]
    for name in names:
        if names.count(name) > 1:
            raise ExperimentError(f"--vary {name} is given twice; write its values in one list")
    first = tuple(variable.values[0] for variable in variables)
    combinations = itertools.product(*(variable.values for variable in variables)) if full else _alone(variables, first)
    made: list[Trial] = []
    for values in combinations:
        draft = _Draft(copy.deepcopy(config), list(overrides), processes)
        for name, value in zip(names, values, strict=True):
            _put(draft, name, value)
        if {"precision", "zero"} & set(names):
            _leave_out_what_zero_reads(draft.config)
        changed = " ".join(f"{n}={v}" for n, v, was in zip(names, values, first, strict=True) if v != was)
        made.append(
            Trial(
                _folder_name(changed, made),
                dict(zip(names, values, strict=True)),
                changed,
                draft.processes,
                tuple(draft.overrides),
                draft.config,
            )
        )
    return made


def _alone(variables: Sequence[Variable], first: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The baseline, and it with one value changed, variable by variable."""
    yield first
    for place, variable in enumerate(variables):
        for value in variable.values[1:]:
            yield (*first[:place], value, *first[place + 1 :])


def plan_cells(
    cells: Sequence[Trial], spec: Path, ds_config: Path, *, stages: int | None, device: str = "auto"
) -> list[RunPlan]:
    """Every cell's run on paper. ``ds_config`` is the file that their JSONs were made from, for messages.

    Where the number of stages is left to the planner, it is asked in another process: it looks at the devices, and
    this one is to hold none of their memory while the cells train.

    Raises:
        ExperimentError: a cell can't run; in the words of training, with the cell's name before.
    """
    plans: list[RunPlan] = []
    with contextlib.ExitStack() as stack:
        pool: ProcessPoolExecutor | None = None
        for cell in cells:
            try:
                check_ds_config(cell.config, ds_config)
                if stages is None and leaves_stages_open(cell.config, cell.processes):
                    if pool is None:
                        pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
                    plans.append(pool.submit(_plan_as_a_rank, cell, spec, ds_config, device).result())
                else:
                    plans.append(_plan(cell, spec, ds_config, stages, device))
            except UserError as error:
                raise ExperimentError(f"cell {cell.changed or BASELINE}: {error}") from None
    return plans


def _plan(cell: Trial, spec: Path, ds_config: Path, stages: int | None, device: str) -> RunPlan:
    with tempfile.TemporaryDirectory(prefix="ddpm-ds-") as folder:
        file = Path(folder) / "ds_config.json"
        file.write_text(json.dumps(cell.config))
        try:
            return plan_run(spec, cell.overrides, file, world_size=cell.processes, stages=stages, device=device)
        except UserError as error:
            raise ExperimentError(str(error).replace(str(file), str(ds_config))) from None


def _plan_as_a_rank(cell: Trial, spec: Path, ds_config: Path, device: str) -> RunPlan:
    """In a process of its own, which the planner takes for the first of the cell's."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(cell.processes)
    set_environment()
    return _plan(cell, spec, ds_config, None, device)


def _put(draft: _Draft, name: str, value: str) -> None:
    if name in SHORTHANDS:
        SHORTHANDS[name](draft, value)
    elif name.startswith(JSON_PREFIX):
        _set_path(draft.config, name.removeprefix(JSON_PREFIX), _json(value))
    else:
        draft.overrides.append(f"{name}={value}")


def _put_precision(draft: _Draft, value: str) -> None:
    if value not in PRECISIONS:
        raise ExperimentError(f"--vary precision={value}: use {', '.join(PRECISIONS)}")
    blocks = {"fp16": draft.config.pop("fp16", DYNAMIC_FP16), "bf16": draft.config.pop("bf16", {})}
    if value in blocks:
        draft.config[value] = {**blocks[value], "enabled": True}
    else:
        draft.config.get("data_types", {}).pop("grad_accum_dtype", None)  # which is refused in fp32


def _put_processes(draft: _Draft, value: str) -> None:
    try:
        draft.processes = positive(value)
    except argparse.ArgumentTypeError as error:
        raise ExperimentError(f"--vary processes={value}: {error}") from None


def _put_micro_batch(draft: _Draft, value: str) -> None:
    """The number of micro-batches follows, so that the batch stays what it is."""
    draft.config["train_micro_batch_size_per_gpu"] = _json(value)
    draft.config["gradient_accumulation_steps"] = "auto"
    draft.overrides.append("train.accumulation=auto")


def _json_key(path: str) -> Callable[[_Draft, str], None]:
    return lambda draft, value: _set_path(draft.config, path, _json(value))


SHORTHANDS: dict[str, Callable[[_Draft, str], None]] = {
    "precision": _put_precision,
    "processes": _put_processes,
    "stages": _json_key("pipeline.stages"),
    "schedule": _json_key("pipeline.schedule"),
    "zero": _json_key("zero_optimization.stage"),
    "micro_batch_images": _put_micro_batch,
    "recompute": _json_key("pipeline.activation_checkpoint_interval"),
    "partition": _json_key("pipeline.partition"),
}
"""Names for what is varied most."""


def _leave_out_what_zero_reads(config: dict[str, Any]) -> None:
    """Without ZeRO DeepSpeed ignores some keys, and training refuses them."""
    if config.get("zero_optimization", {}).get("stage", 0) != 0:
        return
    config.get("fp16", {}).pop("hysteresis", None)
    for dotted, key in KEYS.items():
        *blocks, name = dotted.split(".")
        block = config
        for part in blocks:
            block = block.get(part, {})
        if key.zero_only and isinstance(block, dict):
            block.pop(name, None)


def _set_path(config: dict[str, Any], path: str, value: Any) -> None:
    *blocks, name = path.split(".")
    for depth, block in enumerate(blocks, start=1):
        config = config.setdefault(block, {})
        if not isinstance(config, dict):
            raise ExperimentError(
                f"--vary {JSON_PREFIX}{path}: {'.'.join(blocks[:depth])} is no block of the JSON; name a key of a block"
            )
    config[name] = value


def _json(text: str) -> Any:
    """A JSON value; text that is none stands for itself, so that quotes can be left out."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _folder_name(changed: str, made: Sequence[Trial]) -> str:
    name = re.sub(r"[^A-Za-z0-9.]+", "-", changed).strip("-.")[:NAME_CHARACTERS] or BASELINE
    taken = {cell.name for cell in made}
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return name if name not in taken else next(other for other in numbered if other not in taken)
