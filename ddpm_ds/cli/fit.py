"""``ddpm-ds fit``: find the largest micro-batch that fits this machine's devices."""

import json
import shlex
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil

from ddpm_ds.cli.options import OVERWRITE, ConfigOption, Device, SpecOptions, Verb, take_files
from ddpm_ds.config.ds_config import check_ds_config, leaves_layout_open, read_ds_config
from ddpm_ds.config.spec_file import DEFAULT_SPEC, JSON_PREFIX, spec_overrides
from ddpm_ds.experiments.fit import Task, search, try_size
from ddpm_ds.ground.errors import LayoutError
from ddpm_ds.ground.options import batch, flag, memory_size, option, positive, process_count
from ddpm_ds.ground.outputs import check_outputs, writing
from ddpm_ds.ground.units import gib
from ddpm_ds.planning.run_plan import choose, lay_out, machine_here, read_run
from ddpm_ds.processes.ranks import set_environment

USABLE = 0.9
"""Largest share of a host's available memory that its processes take together by default."""
ONE_IMAGE = [
    f"{JSON_PREFIX}train_micro_batch_size_per_gpu=1",
    f"{JSON_PREFIX}gradient_accumulation_steps=auto",
    "train.accumulation=auto",
]
"""Overrides that make every layout possible: micro-batches of one image."""


@dataclass(frozen=True)
class FitOptions(ConfigOption, SpecOptions):
    processes: int | None = option("default: one for each GPU, else 1", "N", process_count)
    pipeline_stages: int | None = option("as for training", "STAGES", process_count, names=("-p", "--pipeline-stages"))
    accumulation: int | None = option("keep M micro-batches a step, and let the batch grow", "M", batch)
    memory_budget: int | None = option("bytes of a process, such as 4GiB (default its device's)", "SIZE", memory_size)
    steps: int = option("timed steps of a trial (default 3)", "N", positive, default=3)
    device: Device = option("default: CUDA if any", default="auto")
    out: Path | None = option("write the DeepSpeed JSON to train with", "FILE")
    json: Path | None = option("write every number", "FILE")
    overwrite: bool = flag(OVERWRITE)


@Verb
def fit(options: FitOptions) -> None:
    """Find the largest micro-batch that fits the devices.

    A micro-batch is the images that go through a stage at one time. This trains a few steps with the one that the
    planner expects to be the largest, then with larger or smaller ones until the limit is known. The batch stays
    train.batch_images, so micro-batches must divide a replica's share; with --accumulation the batch grows instead. The
    exit code is 2 if not even the smallest micro-batch fits; other errors have the trial's.

      ddpm-ds fit --spec launch/specs/cifar10.yaml --deepspeed_config ds_configs/zero2_fp16.json --out fit.json
    """
    found = take_files(options, DEFAULT_SPEC)
    check_outputs(overwrite=options.overwrite, out=options.out, json=options.json)
    set_environment()
    import torch

    from ddpm_ds.ground.device import choose_device

    device, config = choose_device(options.device).type, found.deepspeed_config  # takes no memory of a device
    count = options.processes or (torch.cuda.device_count() if device == "cuda" else 1)
    checked, stages = check_ds_config(read_ds_config(config, found.overrides), config), options.pipeline_stages
    machine = machine_here(checked.precision, count)
    asked = [*found.overrides, *([] if leaves_layout_open(checked, count, stages) else ONE_IMAGE)]
    files, hosts = read_run(found.spec, asked, config), ("0",) * count
    layout = lay_out(files, hosts, count, stages, choose(files, hosts, count, stages, device)).ds.layout
    share, budget_bytes = options.accumulation, _budget(options.memory_budget, count, device)
    sizes = layout.stages, layout.replicas, count
    task = Task(found.spec, found.overrides, config, *sizes, share, machine, budget_bytes, options.steps)
    spec = task.draft(task.sizes()[0]).spec
    from ddpm_ds.data.held_out import prepare_all
    from ddpm_ds.data.prepare import How

    prepare_all(spec.data, How(progress=True), group=spec.bucket_group or 1)  # here, so that no trial counts its memory
    budget = "the device's memory" if task.budget_bytes is None else f"{gib(task.budget_bytes)} a process"
    print(f"{spec.name} on {device}, {layout.processes_words()}, {budget}; micro-batches x images:", flush=True)
    with tempfile.TemporaryDirectory(prefix="ddpm-ds-fit-") as folder:
        trials = search(task, partial(try_size, task, Path(folder)))
    fitting = [trial for trial in trials if trial.fits]
    if not fitting:
        peak = f" ({gib(trials[0].peak_bytes)} are needed)" if trials[0].peak_bytes else ""
        raise LayoutError(
            f"micro-batch {trials[0].micro_batch_images} does not fit {budget}{peak}; use more memory, more stages, "
            '"activation_checkpoint_interval": 1, a higher ZeRO stage or a smaller U-Net'
        )
    limit = "largest that fits" if len(fitting) < len(trials) else "largest that could be tried"
    best = max(fitting, key=lambda trial: trial.images_per_second).micro_batch_images
    print(f"{limit}: {fitting[-1].micro_batch_images}; fastest of these: {best}")
    filled, changes = task.config(best), task.overrides(best)
    if options.out is not None:
        with writing(options.out, overwrite=options.overwrite) as file:
            file.write(f"{json.dumps(filled, indent=2)}\n".encode())
        changes = tuple(spec_overrides(changes))
    command = ["ddpm-ds", "train", "--processes", str(task.processes), "--spec", str(task.spec)]
    command += ["--deepspeed_config", str(options.out or config)]
    print(f"train with it: {shlex.join([*command, *(word for change in changes for word in ('--set', change))])}")
    if options.json is not None:
        numbers = {"spec": str(task.spec), "ds_config": filled, "best": best, "trials": [asdict(one) for one in trials]}
        with writing(options.json, overwrite=options.overwrite) as file:
            file.write(f"{json.dumps(numbers, indent=2)}\n".encode())


def _budget(budget: int | None, processes: int, device: str) -> int | None:
    """Return the bytes that each process may take; None if a GPU sets the limit."""
    if device != "cpu":
        return budget
    most = int(USABLE * psutil.virtual_memory().available / processes)
    if budget is not None and budget > most:
        raise LayoutError(
            f"--memory-budget {gib(budget)} for each of {processes} processes is more than the {gib(most)} that this "
            "host can give; use a smaller one or fewer processes"
        )
    return budget or most
