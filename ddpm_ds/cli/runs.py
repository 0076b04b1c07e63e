"""Verbs for recorded runs, without a GPU: ``compare``, ``note``, ``diagnose``, ``send`` and ``checkpoint``."""

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
from ddpm_ds.ground.units import aligned
from ddpm_ds.schema.layout import Precision
from ddpm_ds.tracking.run_folder import VERDICT, checkpoints_of
from ddpm_ds.tracking.runs import ExperimentError, find_run, open_run

COMPARE_DESCRIPTION = """\
Print a table of runs: settings that differ, losses, speed and flops of each stage, with ratios to the first run. The
folder of a sweep means its trials.

  ddpm-ds compare runs/digits-1 runs/digits-2
  ddpm-ds compare runs/digits-* --metrics train/loss,perf/bubble_fraction,stage0/wait_seconds
"""

NOTE_DESCRIPTION = """\
Add to the note of a run, which MLflow shows as its description, with the date; or print it, if no text is given.
"""

NOTE_EXAMPLES = """\
examples
  ddpm-ds note runs/digits-1 "the loss scale fell four times: try bf16"
  ddpm-ds note runs/digits-1
"""

DIAGNOSE_DESCRIPTION = """\
Show where the devices' time of a trained run went (useful work, bubble, communication, data wait and so on), what took
most of it, with numbers, and the one change to try next, with its predicted saving. A run prints the same at its end.
The run must have traced some steps; steps 20 to 22 are traced unless --trace-steps names others.
"""

DIAGNOSE_EXAMPLES = """\
examples
  ddpm-ds diagnose runs/digits

The verdict is printed, written to verdict.txt in the run's folder, and kept in MLflow as an artifact and as the tags
verdict.top, verdict.share and verdict.try. docs/diagnose.md explains it.
"""

SEND_DESCRIPTION = """\
Send what MLflow has not got of a run, and of its evaluations, exports and samples, since it was down. Sending again
changes nothing.
"""

SEND_EXAMPLES = """\
examples
  ddpm-ds send runs/digits-1

The exit code is 1 if something still could not be sent. docs/mlflow.md lists what is kept for it.
"""
EXAMPLES = """\
examples
  ddpm-ds checkpoint list runs/digits
  ddpm-ds checkpoint verify runs/digits
  ddpm-ds checkpoint describe runs/digits/checkpoints/images-000012800
  ddpm-ds checkpoint consolidate runs/digits/checkpoints/images-000012800 digits.safetensors --dtype fp16
"""

CHECKPOINT_DESCRIPTION = """\
Checkpoints of a run, one folder each in RUN_DIR/checkpoints. No verb needs a GPU or changes a checkpoint."""
VERIFY_DESCRIPTION = """\
Read every byte of a checkpoint, or of all of a run, and compare checksums. Exit code 2 if any is damaged."""
CONSOLIDATE_DESCRIPTION = """\
Write the whole weights of a checkpoint into one safetensors file, under their global names. One tensor at a time is in
memory."""


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
    run_dir: Path = option(metavar="RUN_DIR", names=("run_dir",))


@dataclass(frozen=True)
class NoteOptions(RunOptions):
    text: str | None = option("what was learned; may have several lines", names=("text",), nargs="?")


@Verb("compare settings and results of runs", COMPARE_DESCRIPTION)
def compare(options: CompareOptions) -> None:
    runs = [run for folder in options.run_dirs for run in find_compared(folder)]
    print(terminal(runs, options.metrics, shutil.get_terminal_size((120, 24)).columns))


@Verb("write down what was learned from a run", NOTE_DESCRIPTION, NOTE_EXAMPLES)
def note(options: NoteOptions) -> None:
    text = None if options.text is None else options.text.strip()
    if text == "":
        raise ExperimentError(f"the text for the note of {options.run_dir} is empty; write what was learned")
    run = find_run(options.run_dir)
    if text is None:
        print(run.note or f"{options.run_dir} has no note yet; write one: ddpm-ds note RUN_DIR TEXT")
        return
    run.add_note(text)
    print(f"{run.name}: noted")


@Verb("show where a run's time went and what to change next", DIAGNOSE_DESCRIPTION, DIAGNOSE_EXAMPLES)
def diagnose(options: RunOptions) -> None:
    folder = open_run(options.run_dir).folder
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed need not look for devices, since nothing is trained
    from ddpm_ds.planning.finished_run import facts_of
    from ddpm_ds.planning.verdict import tags, text, verdict  # imports deepspeed, whose schedules are simulated

    found = verdict(facts_of(folder))
    print(text(found, folder), end="")
    try:
        replace_file(folder / VERDICT, text(found, folder).encode())
    except OSError as error:
        print(f"ddpm-ds diagnose: {folder / VERDICT} can't be written ({error.strerror})", file=sys.stderr)
    try:
        find_run(folder).keep({VERDICT: text(found, folder)}, tags(found))
    except UserError as error:
        print(f"ddpm-ds diagnose: not kept in MLflow: {error}", file=sys.stderr)


@Verb("send what MLflow has not got of a run", SEND_DESCRIPTION, SEND_EXAMPLES)
def send(options: RunOptions) -> int:
    from ddpm_ds.tracking.sender import send_later

    return 0 if send_later(options.run_dir) else 1


@dataclass(frozen=True)
class ListOptions:
    run_dir: Path = option("folder of a run", "RUN_DIR", names=("run_dir",))


@dataclass(frozen=True)
class VerifyOptions:
    path: Path = option("folder of a checkpoint or of a run", "CHECKPOINT|RUN_DIR", names=("path",))


@dataclass(frozen=True)
class CheckpointOptions:
    path: Path = option(
        "folder of a checkpoint, or of a run for its newest good one", "CHECKPOINT|RUN_DIR", names=("path",)
    )


@dataclass(frozen=True)
class ConsolidateOptions(CheckpointOptions):
    out: Path = option("file to write", "OUT", names=("out",))
    overwrite: bool = flag(OVERWRITE)
    weights: str = option("averaged or as trained (default ema)", choices=KINDS, default="ema")
    dtype: Precision = option("default fp32", default="fp32")


@Verb("list the checkpoints of a run, oldest first")
def list_(options: ListOptions) -> None:
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


@Verb("read every byte and compare checksums", VERIFY_DESCRIPTION)
def verify_(options: VerifyOptions) -> None:
    alone = (options.path / MANIFEST).exists() or not checkpoints_of(options.path).exists()
    checkpoints = [options.path] if alone else _of_run(options.path)
    damaged: dict[Path, CheckpointError] = {}
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


@Verb("show when, how and from what a checkpoint was made")
def describe(options: CheckpointOptions) -> None:
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


@Verb("write the weights into one safetensors file", CONSOLIDATE_DESCRIPTION)
def consolidate(options: ConsolidateOptions) -> None:
    import torch

    from ddpm_ds.checkpoint import reader

    check_output(options.out, overwrite=options.overwrite)
    torch.set_num_threads(1)  # the disk limits the speed; on a busy host, more threads only wait for each other
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
    parser = verbs.add_parser("checkpoint", help=about, description=CHECKPOINT_DESCRIPTION, epilog=EXAMPLES)
    inner = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for each in (list_, verify_, describe, consolidate):
        each.add(inner)
