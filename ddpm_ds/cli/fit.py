"""``ddpm-ds fit``: find the largest micro-batch that fits this machine's devices, and the one to train with."""

import argparse
import json
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ddpm_ds.command_line import (
    GIB,
    Verbs,
    add_config_option,
    add_overwrite,
    add_spec_options,
    aligned,
    batch,
    check_outputs,
    counted,
    file_path,
    gib,
    memory_size,
    positive,
    processes,
    seconds,
    take_files,
    writing,
)
from ddpm_ds.config.ds_config import check_ds_config, divisors, read_ds_config, tensor_split
from ddpm_ds.config.spec_file import DEFAULT_SPEC, spec_overrides
from ddpm_ds.errors import LayoutError, SpecError
from ddpm_ds.fit import KNEE, Found, Task, search, try_size
from ddpm_ds.processes.ranks import HANG_SECONDS, set_environment

USABLE = 0.9
"""Maximum share of a host's available memory that its processes may take together by default."""

DESCRIPTION = """\
Find the largest micro-batch that fits, by trying. Each layout (stages x replicas) is trained for a few steps, with the
micro-batch that the planner expects to be the largest, then with larger or smaller ones until the limit is known, and
then with halves of it as long as they are as fast. It names the layout and micro-batch to train with: the smallest
micro-batch within 5 % of its layout's best images/s.

The batch stays train.batch_images, so only micro-batches are tried that divide a replica's share of it, with at least
as many of them as the schedule needs. With --accumulation their number stays the same and the batch grows.
"""

EXAMPLES = """\
examples
  ddpm-ds fit --spec launch/specs/cifar10.yaml --deepspeed_config ds_configs/zero2_fp16.json --processes 8 \\
      --out fit.json
      1x8, 2x4, 4x2 and 8x1 on eight GPUs; write the JSON to train with
  ddpm-ds fit --deepspeed_config ds_configs/zero0_fp32.json --layouts 1x1,2x1 --memory-budget 1GiB
      digits on a CPU, no process larger than 1 GiB
  ddpm-ds fit --deepspeed_config ds_configs/zero2_bf16.json --processes 2 -p 2 --accumulation 8
      the largest batch that 8 micro-batches can make

exit codes
  0 done   2 bad input, or not even the smallest micro-batch fits   130 interrupted   otherwise that of the trial
"""


def layout_list(text: str) -> list[tuple[int, int]]:
    """Parse layouts such as ``1x1,2x2``, each stages x replicas.

    Raises:
        argparse.ArgumentTypeError: a layout has another form.
    """
    found: dict[tuple[int, int], None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"{part!r} is no layout; write STAGESxREPLICAS, such as 2x1")
        found[int(match[1]), int(match[2])] = None
    return list(found)


def size_list(text: str) -> list[int]:
    """Parse micro-batches such as ``4,8,12``; return them ascending.

    Raises:
        argparse.ArgumentTypeError: one of them is not a positive number.
    """
    return sorted({batch(part.strip()) for part in text.split(",")})


def add_fit(verbs: Verbs) -> None:
    """Add the verb ``fit``."""
    about = "find the largest micro-batch that fits the devices, and the one to train with"
    parser = verbs.add_parser("fit", help=about, description=DESCRIPTION, epilog=EXAMPLES)
    add_spec_options(parser)
    add_config_option(parser)
    parser.add_argument(
        "--processes", type=processes, metavar="N", help="processes to lay out (default: one for each GPU, else 1)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-p", "--pipeline-stages", type=processes, metavar="STAGES", help="try this layout alone")
    tried = "try these layouts, stages x replicas, each stage on pipeline.tensor.size processes (default: all)"
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
    hang = f"time without a step after which a trial of several processes has failed (default {HANG_SECONDS:g})"
    parser.add_argument("--hang-seconds", type=seconds, default=HANG_SECONDS, metavar="S", help=hang)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA if any")
    parser.add_argument("--out", type=file_path, metavar="FILE", help="write the DeepSpeed JSON to train with")
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write every number")
    add_overwrite(parser)
    parser.set_defaults(run=_fit)


def _fit(options: argparse.Namespace) -> int:
    take_files(options, DEFAULT_SPEC)
    check_outputs(options, "out", "json")
    if options.layouts and options.processes:
        raise SpecError("--layouts has the processes of each layout; leave it or --processes out")
    set_environment()
    given = os.environ.get("DS_ACCELERATOR", "auto") if options.device == "auto" else options.device
    import torch

    devices = torch.cuda.device_count() if given != "cpu" else 0  # counting takes no memory of a device
    device = "cuda" if devices or given == "cuda" else "cpu"
    os.environ["DS_ACCELERATOR"] = device  # read by DeepSpeed
    config = read_ds_config(options.deepspeed_config, options.overrides)
    tensor = tensor_split(check_ds_config(config, options.deepspeed_config)).size
    tasks = _tasks(options, _layouts(options, devices or 1, tensor), device, tensor)
    from ddpm_ds.data.held_out import prepare_all

    spec, first = tasks[0].plan(tasks[0].sizes[0]).spec, tasks[0]
    prepare_all(spec.data, progress=True, group=spec.bucket_group or 1)  # before any trial, whose memory it is not
    budget = "the device's memory" if first.budget_bytes is None else f"{gib(first.budget_bytes)} a process"
    batch = f"{counted(first.accumulation, 'micro-batch')} a step" if first.accumulation else "the spec's batch"
    print(f"{spec.name} on {device}, {budget}, {batch}; {first.steps} timed steps a trial", flush=True)
    found = []
    with tempfile.TemporaryDirectory(prefix="ddpm-ds-fit-") as folder:
        for task in tasks:
            print(f"layout {task.name}", flush=True)
            found.append(search(task, partial(try_size, task, Path(folder))))
    if not (fitting := [one for one in found if one.fitting]):
        raise _nothing_fits(found)
    _report(options, fitting)
    return 0


def _layouts(options: argparse.Namespace, devices: int, tensor: int) -> list[tuple[int, int]]:
    """Return the layouts to search: by default every layout of the processes, those with few stages first; ``tensor``
    processes have each stage.
    """
    if options.layouts:
        return list(options.layouts)
    processes, stages = options.processes or devices, options.pipeline_stages
    if processes % tensor:
        raise LayoutError(
            f"pipeline.tensor.size = {tensor} does not divide {processes} processes; use --processes "
            f"{-(-processes // tensor) * tensor}"
        )
    dividing = divisors(processes // tensor)
    if stages is not None and stages not in dividing:
        fitting = " or ".join(map(str, dividing))
        raise LayoutError(f"-p {stages} does not divide --processes {processes}; use -p {fitting}")
    return [(number, processes // tensor // number) for number in ([stages] if stages else dividing)]


def _tasks(options: argparse.Namespace, layouts: Sequence[tuple[int, int]], device: str, tensor: int) -> list[Task]:
    """Return the search tasks; a line says why a layout is left out.

    Raises:
        UserError: all layouts are left out; the message is the first one's reason.
    """
    tasks: list[Task] = []
    refusals: list[LayoutError] = []
    for stages, replicas in layouts:
        task = Task(
            spec=options.spec,
            given=tuple(options.overrides),
            ds_config=options.deepspeed_config,
            stages=stages,
            replicas=replicas,
            accumulation=options.accumulation,
            device=device,
            budget_bytes=_budget(options, stages * tensor * replicas, device),
            steps=options.steps,
            hang_seconds=options.hang_seconds,
            tensor=tensor,
        )
        try:
            tasks.append(task.choosing_from(options.micro_batch))
        except LayoutError as error:
            refusals.append(error)
            if len(layouts) > 1:
                print(f"{task.name} is left out: {error}")
    if not tasks:
        raise refusals[0]
    return tasks


def _budget(options: argparse.Namespace, processes: int, device: str) -> int | None:
    """Return the bytes that each of so many processes may hold; None if a GPU sets the limit."""
    budget: int | None = options.memory_budget
    if device != "cpu":
        return budget
    most = int(USABLE * psutil.virtual_memory().available / processes)
    if budget is not None and budget > most:
        raise LayoutError(
            f"--memory-budget {gib(budget)} for each of {processes} processes is more than the {gib(most)} that this "
            "host can give; use a smaller one or fewer processes"
        )
    return budget or most


def _nothing_fits(found: Sequence[Found]) -> LayoutError:
    """Return the error to raise if not even the smallest micro-batch fits any layout."""
    one = min(found, key=lambda one: one.trials[0].peak_bytes or math.inf)
    smallest, budget = one.trials[0], one.task.budget_bytes
    where = f"{gib(budget)} a process" if budget else "the device"
    need = f" (layout {one.task.name} needs {gib(smallest.peak_bytes)})" if smallest.peak_bytes else ""
    return LayoutError(
        f"micro-batch {smallest.micro_batch_images} does not fit {where} in any layout{need}; use more memory, more "
        'stages, "activation_checkpoint_interval": 1, a higher ZeRO stage or a smaller U-Net'
    )


def _report(options: argparse.Namespace, found: Sequence[Found]) -> None:
    """Print the results, and write the requested files."""
    task, size = winner(found).task, winner(found).knee.micro_batch_images
    print(f"\n{table(found)}\n")
    config, changes = task.config(size), task.overrides(size)
    if options.out is not None:
        with writing(options.out, overwrite=options.overwrite) as file:
            file.write(f"{json.dumps(config, indent=2)}\n".encode())
        changes = tuple(spec_overrides(changes))
    command = ["ddpm-ds", "train", "--processes", str(task.processes)]
    command += [] if task.spec == DEFAULT_SPEC else ["--spec", str(task.spec)]
    command += ["--deepspeed_config", str(options.out or task.ds_config)]
    command += [word for change in changes for word in ("--set", change)]
    print(f"train with it: {shlex.join(command)}")
    if options.json is not None:
        about = {"command": shlex.join(["ddpm-ds", *sys.argv[1:]]), "spec": str(task.spec), "ds_config": config}
        with writing(options.json, overwrite=options.overwrite) as file:
            file.write(f"{json.dumps(numbers(found, **about), indent=2)}\n".encode())


def winner(found: Sequence[Found]) -> Found:
    """Return the trials of the layout whose knee has the most images per second."""
    return max(found, key=lambda one: one.knee.images_per_second)


def table(found: Sequence[Found]) -> str:
    """Return a table with a line for each trial, with marks at each layout's knee, its largest and the winner."""
    rows = [("layout", "micro-batch", "micro-batches", "images/s", "GiB/process", "recompute", "")]
    best = winner(found)
    for one in found:
        for trial in one.trials:
            sizes = one.task.name, str(trial.micro_batch_images), str(trial.micro_batches)
            if not trial.fits:
                rows.append((*sizes, "-", "-", "-", f"does not fit: {trial.why}"))
                continue
            largest = "largest that could be tried" if one.is_limit else "largest that fits"
            marks = [f"within {KNEE:.0%} of the fastest"] * (trial is one.knee) + [largest] * (trial is one.largest)
            recompute = f"every {trial.checkpoint_interval}" if trial.checkpoint_interval else "-"
            star = "* " if one is best and trial is one.knee else ""
            measured = f"{trial.images_per_second:,.4g}", f"{trial.peak_bytes / GIB:.3f}", recompute
            rows.append((*sizes, *measured, star + ", ".join(marks)))
    return "\n".join(aligned(rows, left={len(rows[0]) - 1}))


def numbers(found: Sequence[Found], **about: Any) -> dict[str, Any]:
    """Return all results for ``--json``, after the facts ``about`` the search."""

    def layout(one: Found) -> dict[str, int]:
        return {"stages": one.task.stages, "replicas": one.task.replicas}

    best = winner(found)
    return {
        **about,
        "layouts": [
            {
                "layout": layout(one),
                "largest_micro_batch_images": one.largest.micro_batch_images,
                "knee_micro_batch_images": one.knee.micro_batch_images,
                "ended_by_memory": not one.is_limit,
                "trials": [
                    {"fits": trial.fits, **asdict(trial)}
                    | ({"images_per_second": trial.images_per_second} if trial.fits else {})
                    for trial in one.trials
                ],
            }
            for one in found
        ],
        "best": {"layout": layout(best), "micro_batch_images": best.knee.micro_batch_images},
    }
