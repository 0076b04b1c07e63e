"""``ddpm-ds fit``: find the largest micro-batch that fits this machine's devices, and the one to train with."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ddpm_ds.command_line import (
    add_overwrite,
    add_spec_options,
    batch,
    check_outputs,
    counted,
    file_path,
    gib,
    memory_size,
    positive,
    processes,
    seconds,
    writing,
)
from ddpm_ds.config.ds_config import divisors
from ddpm_ds.config.spec_file import DEFAULT_SPEC, JSON_PREFIX
from ddpm_ds.errors import LayoutError, SpecError
from ddpm_ds.fit.report import Found, draw, numbers, table, why, winner
from ddpm_ds.fit.task import Task, TrialLayout
from ddpm_ds.fit.trial import search
from ddpm_ds.processes.ranks import HANG_SECONDS, set_environment

USABLE = 0.9
"""Maximum share of a host's available memory that its processes may take together by default."""
EVERYTHING = 2**50
"""Number of bytes larger than any device's memory, which means no limit."""

DESCRIPTION = """\
Find the largest micro-batch that fits, by trying. Each layout (stages x replicas) takes a few real optimizer steps with
micro-batches of 1, 2, 4, ... images until its processes run out of memory, then with sizes between the last that fitted
and the first that did not. It names the layout and micro-batch to train with, the knee of the fastest curve: the
smallest micro-batch within 5 % of its best images/s.

The batch stays train.batch_images, so only micro-batches are tried that divide a replica's share of it, with at least
as many of them as the schedule needs. With --accumulation their number stays the same and the batch grows.
"""

EXAMPLES = """\
examples
  ddpm-ds fit --spec launch/specs/cifar10.yaml --deepspeed_config ds_configs/zero2_fp16.json --processes 8 \\
      --out fit.json --plot fit.png
      1x8, 2x4, 4x2 and 8x1 on eight GPUs; write the JSON to train with and draw the curves
  ddpm-ds fit --deepspeed_config ds_configs/zero0_fp32.json --layouts 1x1,2x1 --memory-budget 1GiB
      digits on a CPU, no process larger than 1 GiB
  ddpm-ds fit --deepspeed_config ds_configs/zero2_bf16.json --processes 2 -p 2 --accumulation 8
      the largest batch that 8 micro-batches can make

exit codes
  0 done   2 bad input, or not even the smallest micro-batch fits or takes a step   130 interrupted   1 a bug
"""


def layout_list(text: str) -> list[TrialLayout]:
    """Parse layouts such as ``1x1,2x2``, each stages x replicas.

    Raises:
        argparse.ArgumentTypeError: a layout has another form.
    """
    found: dict[TrialLayout, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"{part!r} is no layout; write STAGESxREPLICAS, such as 2x1")
        found[TrialLayout(int(match[1]), int(match[2]))] = None
    return list(found)


def size_list(text: str) -> list[int]:
    """Parse micro-batches such as ``4,8,12``; return them ascending.

    Raises:
        argparse.ArgumentTypeError: one of them is not a positive number.
    """
    return sorted({batch(part.strip()) for part in text.split(",")})


def add_fit(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb ``fit``."""
    about = "find the largest micro-batch that fits the devices, and the one to train with"
    parser = verbs.add_parser("fit", help=about, description=DESCRIPTION, epilog=EXAMPLES)
    add_spec_options(parser, DEFAULT_SPEC)
    parser.add_argument("--deepspeed_config", type=file_path, required=True, metavar="JSON", help="JSON to train with")
    parser.add_argument(
        "--processes", type=processes, metavar="N", help="processes to lay out (default: one for each GPU, else 1)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-p", "--pipeline-stages", type=processes, metavar="STAGES", help="try this layout alone")
    tried = "try these layouts, stages x replicas (default: every layout of the processes)"
    which.add_argument("--layouts", type=layout_list, metavar="PxR,...", help=tried)
    parser.add_argument(
        "--micro-batch", type=size_list, default=[], metavar="N,...", help="try only these (default: all)"
    )
    parser.add_argument(
        "--accumulation", type=batch, metavar="M", help="keep M micro-batches a step, and let the batch grow"
    )
    budget = "memory of a process, such as 4GiB (default: the GPU's memory; on a CPU its share of what is free)"
    parser.add_argument("--memory-budget", type=memory_size, metavar="SIZE", help=budget)
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="timed steps of a trial (default 3)")
    hang = f"time without a step after which a trial has failed (default {HANG_SECONDS:g})"
    parser.add_argument("--hang-seconds", type=seconds, default=HANG_SECONDS, metavar="S", help=hang)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA if any")
    parser.add_argument("--out", type=file_path, metavar="FILE", help="write the DeepSpeed JSON to train with")
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write every number")
    parser.add_argument("--plot", type=file_path, metavar="PNG", help="draw images/s and memory against micro-batch")
    add_overwrite(parser)
    parser.set_defaults(run=_fit)


def _fit(options: argparse.Namespace) -> int:
    check_outputs(options, "out", "json", "plot")
    if options.layouts and options.processes:
        raise SpecError("--layouts has the processes of each layout; leave it or --processes out")
    set_environment()
    given = os.environ.get("DS_ACCELERATOR", "auto") if options.device == "auto" else options.device
    import torch

    devices = torch.cuda.device_count() if given != "cpu" else 0  # counting takes no memory of a device
    device = "cuda" if devices or given == "cuda" else "cpu"
    os.environ["DS_ACCELERATOR"] = device  # read by DeepSpeed, here and in the trials' processes
    with tempfile.TemporaryDirectory(prefix="ddpm-ds-fit-") as folder:
        from ddpm_ds.data.prepare import prepare
        from ddpm_ds.train.session import check_store

        tasks, left_out = _tasks(options, _layouts(options, devices or 1), device, Path(folder))
        first = tasks[0]
        plan = first.plan(first.candidates[0], Path(folder))
        check_store(prepare(plan.spec.data, progress=True), plan)  # before any process needs the images
        budget = "the device's memory" if first.budget_bytes is None else f"{gib(first.budget_bytes)} a process"
        batch = f"{counted(first.accumulation, 'micro-batch')} a step" if first.accumulation else "the spec's batch"
        print(f"{plan.spec.name} on {device}, {budget}, {batch}; {first.steps} timed steps a trial", flush=True)
        for layout, reason in left_out.items():
            print(f"{layout} is left out: {reason}")
        found, needs = _search(tasks, Path(folder))
    if not found:
        raise _nothing_fits(tasks, needs)
    _report(options, found)
    return 0


def _layouts(options: argparse.Namespace, devices: int) -> list[TrialLayout]:
    """Return the layouts to search: by default every layout of the processes, those with few stages first."""
    if options.layouts:
        return list(options.layouts)
    processes, stages = options.processes or devices, options.pipeline_stages
    dividing = divisors(processes)
    if stages is not None and stages not in dividing:
        fitting = " or ".join(map(str, dividing))
        raise LayoutError(f"-p {stages} does not divide --processes {processes}; use -p {fitting}")
    return [TrialLayout(number, processes // number) for number in ([stages] if stages else dividing)]


def _tasks(
    options: argparse.Namespace, layouts: Sequence[TrialLayout], device: str, folder: Path
) -> tuple[list[Task], dict[TrialLayout, LayoutError]]:
    """Return the search tasks, and for each layout that is left out the reason.

    Raises:
        UserError: all layouts are left out; the message is the first one's reason.
    """
    tasks: list[Task] = []
    reasons: dict[TrialLayout, LayoutError] = {}
    for layout in layouts:
        budget, most = _limits(options, layout, device)
        task = Task(
            spec=options.spec,
            overrides=tuple(options.overrides),
            ds_config=options.deepspeed_config,
            layout=layout,
            accumulation=options.accumulation,
            device=device,
            budget_bytes=budget,
            most_bytes=most,
            steps=options.steps,
            hang_seconds=options.hang_seconds,
        )
        try:
            task = task.choosing_from(options.micro_batch)
            task.plan(task.candidates[0], folder)  # raises if the U-Net can't be cut this way
            tasks.append(task)
        except LayoutError as error:
            reasons[layout] = error
    if not tasks:
        raise next(iter(reasons.values()))
    return tasks, reasons


def _limits(options: argparse.Namespace, layout: TrialLayout, device: str) -> tuple[int | None, int | None]:
    """Return ``budget_bytes`` and ``most_bytes`` of a :class:`~ddpm_ds.fit.task.Task` with this layout."""
    budget, most = options.memory_budget, EVERYTHING
    if device == "cpu":
        most = int(USABLE * psutil.virtual_memory().available / layout.processes)
        if budget is not None and budget > most:
            raise LayoutError(
                f"--memory-budget {gib(budget)} for each of {layout.processes} processes is more than the {gib(most)} "
                f"that this host can give; use a smaller one or fewer processes"
            )
        budget = budget or most
    return budget, None if budget in (None, most) else most


def _search(tasks: Sequence[Task], folder: Path) -> tuple[list[Found], dict[TrialLayout, int]]:
    """Search each layout; return the results, and the bytes that the smallest micro-batch needs if it does not fit."""
    found, needs = [], {}
    for task in tasks:
        print(task.layout.words(), flush=True)
        tried, needed = search(task, folder / str(task.layout))
        trials = sorted(tried, key=lambda trial: trial.micro_batch_images)
        if trials[0].fits:
            found.append(Found(task, tuple(trials)))
        elif needed is not None:
            needs[task.layout] = needed
            print(f"  micro-batch {trials[0].micro_batch_images} needs {gib(needed)}", flush=True)
    return found, needs


def _nothing_fits(tasks: Sequence[Task], needs: dict[TrialLayout, int]) -> LayoutError:
    """Return the error to raise if not even the smallest micro-batch fits any layout."""
    task = next((task for task in tasks if task.layout in needs), tasks[0])
    budget = "the device" if task.budget_bytes is None else gib(task.budget_bytes)
    if not needs:
        return LayoutError(
            f"micro-batch {task.candidates[0]} does not fit {budget} in any layout; use more stages, "
            f'"activation_checkpoint_interval": 1, a higher ZeRO stage or a smaller U-Net'
        )
    layout = min(needs, key=lambda one: needs[one])
    return LayoutError(
        f"--memory-budget {budget} is too little: micro-batch {task.candidates[0]} needs {gib(needs[layout])} "
        f"in layout {layout}; use --memory-budget {-(-int(1.02 * needs[layout]) // 2**20)}MiB or more, or more stages"
    )


def _report(options: argparse.Namespace, found: Sequence[Found]) -> None:
    """Print the results, and write the requested files."""
    task, size = winner(found).task, winner(found).knee.micro_batch_images
    print(f"\n{table(found)}\n\n{textwrap.fill(why(found), 112, break_on_hyphens=False)}\n")
    config = task.config(size)
    changes = list(task.changes(size))
    if options.out is not None:
        with writing(options.out, overwrite=options.overwrite) as file:
            file.write(f"{json.dumps(config, indent=2)}\n".encode())
    else:
        keys = {key: config[key] for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
        keys["pipeline.stages"] = task.layout.stages
        if task.accumulation is not None:
            keys["train_batch_size"] = config["train_batch_size"]
        changes += [change for change in task.overrides if change.startswith(JSON_PREFIX)]
        changes += [f"{JSON_PREFIX}{key}={value}" for key, value in keys.items()]
    command = ["ddpm-ds", "train", "--processes", str(task.layout.processes)]
    command += [] if task.spec == DEFAULT_SPEC else ["--spec", str(task.spec)]
    command += ["--deepspeed_config", str(options.out or task.ds_config)]
    command += [word for change in changes for word in ("--set", change)]
    print(f"train with it: {shlex.join(command)}")
    if options.json is not None:
        about = {"command": shlex.join(["ddpm-ds", *sys.argv[1:]]), "spec": str(task.spec), "ds_config": config}
        with writing(options.json, overwrite=options.overwrite) as file:
            file.write(f"{json.dumps(numbers(found, **about), indent=2)}\n".encode())
    if options.plot is not None:
        with writing(options.plot, overwrite=options.overwrite) as file:
            draw(found, f"{task.spec.stem}: {task.ds_config.name}", options.memory_budget, file)
        print(f"{options.plot}: images/s and memory against micro-batch")
