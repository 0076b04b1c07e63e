"""Verbs for recorded runs, none of which needs a GPU: ``compare``, ``diagnose``, ``send``, ``checkpoint``."""

import math
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from ddpm_ds.checkpoint.folder import checkpoint_at, names
from ddpm_ds.checkpoint.manifest import KINDS, MANIFEST, read_manifest, verify
from ddpm_ds.cli.options import OVERWRITE, Verb, Verbs
from ddpm_ds.experiments.compare import find_compared, terminal
from ddpm_ds.ground.errors import CheckpointError, OptionError, UserError, print_to_stderr
from ddpm_ds.ground.files import replace_file
from ddpm_ds.ground.options import file_path, flag, option
from ddpm_ds.ground.outputs import check_output
from ddpm_ds.ground.units import Precision, aligned
from ddpm_ds.tracking.run_folder import VERDICT, checkpoints_of
from ddpm_ds.tracking.runs import find_run, open_run


def metric_names(text: str) -> tuple[str, ...]:
    """Parse names of metrics, separated by commas."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise OptionError(f"{text!r} has an empty name; write A,B,C")
    return names


@dataclass(frozen=True)
class CompareOptions:
    run_dirs: tuple[Path, ...] = option(
        "folder of a run or of a sweep", "RUN_DIR", file_path, names=("run_dirs",), nargs="+"
    )
    metrics: tuple[str, ...] | None = option("the metrics to compare", "A,B,C", metric_names)


@dataclass(frozen=True)
class RunOptions:
    run_dir: Path = option("folder of a run", "RUN_DIR", names=("run_dir",))


@Verb
def compare(options: CompareOptions) -> None:
    """Compare settings and results of runs.

    Prints a table of settings that differ, losses, speed and flops of each stage, with ratios to the first run. The
    folder of a sweep stands for its trials.

      ddpm-ds compare runs/digits-* --metrics train/loss,perf/bubble_fraction,stage0/wait_seconds
    """
    runs = [run for folder in options.run_dirs for run in find_compared(folder)]
    print(terminal(runs, options.metrics, shutil.get_terminal_size((120, 24)).columns))


@Verb
def diagnose(options: RunOptions) -> None:
    """Show a run's verdict: where its time went and what to change next.

    Prints where the devices' time went, what took most of it, and the one change to try next, with its predicted
    saving. Keeps this in verdict.txt and in MLflow, as every run does at its end (docs/diagnose.md). The run must have
    traced some steps: 20 to 22, unless --trace-steps named others.
    """
    folder = open_run(options.run_dir).folder
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed need not look for devices, since nothing is trained
    from ddpm_ds.planning.finished_run import facts_of
    from ddpm_ds.planning.verdict import tags, text, verdict  # imports deepspeed, whose schedules are simulated

    found = verdict(facts_of(folder))
    shown = text(found, folder)
    print(shown, end="")
    try:
        replace_file(folder / VERDICT, shown.encode())
    except OSError as error:
        print(f"ddpm-ds diagnose: {folder / VERDICT} can't be written ({error.strerror})", file=sys.stderr)
    try:
        with find_run(folder) as (client, run):
            client.log_text(run.info.run_id, shown, VERDICT)
            for name, value in tags(found).items():
                client.set_tag(run.info.run_id, name, value)
    except UserError as error:
        print(f"ddpm-ds diagnose: not kept in MLflow: {error}", file=sys.stderr)


@Verb
def send(options: RunOptions) -> int:
    """Send MLflow the events of a run that it lacks.

    A tracking server that was down also gets the run's evaluations, exports and samples. Sending twice changes nothing.
    The exit code is 1 if something still could not be sent.
    """
    from ddpm_ds.tracking.sender import send_later

    return 0 if send_later(options.run_dir) else 1


@dataclass(frozen=True)
class CheckpointOptions:
    path: Path = option("folder of a checkpoint or of a run", "CHECKPOINT|RUN_DIR", names=("path",))


@dataclass(frozen=True)
class ConsolidateOptions(CheckpointOptions):
    out: Path = option("file to write", "OUT", names=("out",))
    overwrite: bool = flag(OVERWRITE)
    weights: str = option("averaged or as trained (default ema)", choices=KINDS, default="ema")
    dtype: Precision = option("default fp32", default="fp32")


@Verb
def list_(options: RunOptions) -> None:
    """List the checkpoints of a run, oldest first."""
    rows = [("checkpoint", "images", "steps", "written (UTC)", "MB", "holds")]
    for checkpoint in _of_run(options.run_dir):
        try:
            manifest = read_manifest(checkpoint)
        except CheckpointError as error:
            rows.append((checkpoint.name, "-", "-", "-", "-", str(error)))
            continue
        when, size = f"{manifest.created:%Y-%m-%d %H:%M:%S}", f"{manifest.total_bytes / 1e6:,.1f}"
        counts = f"{manifest.images:,}", f"{manifest.step:,}"
        rows.append((checkpoint.name, *counts, when, size, ", ".join(manifest.kinds)))
    print("\n".join(aligned(rows, left={0, 5})))


@Verb
def verify_(options: CheckpointOptions) -> None:
    """Read every byte of a checkpoint, or of a run's, and compare checksums; exit code 2 if one is damaged."""
    alone = (options.path / MANIFEST).exists() or not checkpoints_of(options.path).exists()
    checkpoints = [options.path] if alone else _of_run(options.path)
    damaged = dict[Path, CheckpointError]()
    for checkpoint in checkpoints:
        try:
            manifest = read_manifest(checkpoint)
            verify(checkpoint, manifest, progress=True)
            print(f"{checkpoint.name}: good, {manifest.total_bytes:,} bytes in {len(manifest.files)} files")
        except CheckpointError as error:
            damaged[checkpoint] = error
    if len(damaged) == 1:
        raise next(iter(damaged.values()))
    if damaged:
        which = ", ".join(map(str, damaged))
        raise CheckpointError(f"{len(damaged)} of {len(checkpoints)} checkpoints are damaged, verify each: {which}")


@Verb
def describe(options: CheckpointOptions) -> None:
    """Show when, how and from what a checkpoint, or a run's newest, was made."""
    checkpoint = checkpoint_at(options.path, print_to_stderr)
    manifest = read_manifest(checkpoint)
    elements = sum(math.prod(shape) for shape in manifest.parameters.values())
    print(
        f"checkpoint   {checkpoint.name}, format {manifest.format}, by ddpm_ds {manifest.version}\n"
        f"written      {manifest.created:%Y-%m-%d %H:%M:%S} UTC\n"
        f"progress     {manifest.images:,} images, {manifest.step:,} steps\n"
        f"holds        {', '.join(manifest.kinds)} of {elements:,} parameters in {len(manifest.parameters)} tensors\n"
        f"size         {manifest.total_bytes / 1e6:,.1f} MB in {len(manifest.files)} files\n"
        f"layout       {', '.join(f'{key} {value}' for key, value in manifest.layout.items())}"
    )
    for title, values in (("spec", manifest.spec), ("ds_config", manifest.ds_config)):
        print(f"\n{title}\n" + yaml.safe_dump(values, sort_keys=False), end="")


@Verb
def consolidate(options: ConsolidateOptions) -> None:
    """Write a checkpoint's weights, or those of a run's newest, into one safetensors file."""
    import torch

    from ddpm_ds.checkpoint import reader

    check_output(options.out, overwrite=options.overwrite)
    torch.set_num_threads(1)  # the disk limits the speed; more threads would wait for each other
    checkpoint = checkpoint_at(options.path, print_to_stderr)
    reader.consolidate(checkpoint, options.out, KINDS[options.weights], options.dtype, progress=True)
    print(f"{options.out}: {options.weights} weights in {options.dtype}, {options.out.stat().st_size / 1e6:,.1f} MB")


def _of_run(run_dir: Path) -> list[Path]:
    folder = checkpoints_of(run_dir)
    if not (found := names(folder)):
        raise CheckpointError(f"there are no checkpoints in {folder}; name the folder of a run that has saved")
    return [folder / name for name in found]


def add_checkpoint(verbs: Verbs) -> None:
    """Add the verb ``checkpoint`` and its own verbs."""
    about = "list, verify, describe or consolidate checkpoints"
    more = "Checkpoints are folders in RUN_DIR/checkpoints. No verb needs a GPU or changes a checkpoint."
    parser = verbs.add_parser("checkpoint", help=about, description=more)
    inner = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for each in (list_, verify_, describe, consolidate):
        each.add(inner)
