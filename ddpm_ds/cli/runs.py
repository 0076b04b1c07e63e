"""Verbs for recorded runs, without a GPU: ``compare``, ``note``, ``diagnose``, ``send`` and ``checkpoint``."""

import argparse
import math
import os
import shutil
import sys
from pathlib import Path

import yaml

from ddpm_ds.checkpoint.folder import checkpoint_at, names
from ddpm_ds.checkpoint.manifest import KINDS, MANIFEST, read_manifest, verify
from ddpm_ds.command_line import Verbs, add_overwrite, aligned, check_output, file_path
from ddpm_ds.errors import CheckpointError, UserError, print_to_stderr
from ddpm_ds.experiments.compare import find_compared, terminal
from ddpm_ds.files import VERDICT, replace_file
from ddpm_ds.tracking.run_folder import checkpoints_of
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
WHICH = "folder of a checkpoint, or of a run for its newest good one"


def add_compare(verbs: Verbs) -> None:
    """Add the verb ``compare``."""
    parser = verbs.add_parser("compare", help="compare settings and results of runs", description=COMPARE_DESCRIPTION)
    parser.add_argument("run_dirs", nargs="+", type=file_path, metavar="RUN_DIR", help="folder of a run or of a sweep")
    parser.add_argument("--metrics", type=metric_names, metavar="A,B,C", help="the metrics to compare")
    parser.set_defaults(run=_compare)


def metric_names(text: str) -> list[str]:
    """Parse names of metrics, separated by commas."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name; write A,B,C")
    return names


def _compare(options: argparse.Namespace) -> None:
    runs = [run for folder in options.run_dirs for run in find_compared(folder)]
    print(terminal(runs, options.metrics, shutil.get_terminal_size((120, 24)).columns))


def add_note(verbs: Verbs) -> None:
    """Add the verb ``note``."""
    about = "write down what was learned from a run"
    parser = verbs.add_parser("note", help=about, description=NOTE_DESCRIPTION, epilog=NOTE_EXAMPLES)
    parser.add_argument("run_dir", type=file_path, metavar="RUN_DIR")
    parser.add_argument("text", nargs="?", help="what was learned; may have several lines")
    parser.set_defaults(run=_note)


def _note(options: argparse.Namespace) -> None:
    text = None if options.text is None else options.text.strip()
    if text == "":
        raise ExperimentError(f"the text for the note of {options.run_dir} is empty; write what was learned")
    run = find_run(options.run_dir)
    if text is None:
        print(run.note or f"{options.run_dir} has no note yet; write one: ddpm-ds note RUN_DIR TEXT")
        return
    run.add_note(text)
    print(f"{run.name}: noted")


def add_diagnose(verbs: Verbs) -> None:
    """Add the verb ``diagnose``."""
    about = "show where a run's time went and what to change next"
    parser = verbs.add_parser("diagnose", help=about, description=DIAGNOSE_DESCRIPTION, epilog=DIAGNOSE_EXAMPLES)
    parser.add_argument("run_dir", type=file_path, metavar="RUN_DIR")
    parser.set_defaults(run=_diagnose)


def _diagnose(options: argparse.Namespace) -> None:
    folder = open_run(options.run_dir).folder
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed need not look for devices, since nothing is trained
    from ddpm_ds.predict.finished_run import facts_of
    from ddpm_ds.predict.verdict import tags, text, verdict  # imports deepspeed, whose schedules are simulated

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


def add_send(verbs: Verbs) -> None:
    """Add the verb ``send``."""
    about = "send what MLflow has not got of a run"
    parser = verbs.add_parser("send", help=about, description=SEND_DESCRIPTION, epilog=SEND_EXAMPLES)
    parser.add_argument("run_dir", type=file_path, metavar="RUN_DIR")
    parser.set_defaults(run=_send)


def _send(options: argparse.Namespace) -> int:
    from ddpm_ds.tracking.sender import send_later

    return 0 if send_later(options.run_dir) else 1


def add_checkpoint(verbs: Verbs) -> None:
    """Add the verb ``checkpoint`` and its own verbs."""
    about = "list, verify, describe or consolidate checkpoints"
    parser = verbs.add_parser("checkpoint", help=about, description=CHECKPOINT_DESCRIPTION, epilog=EXAMPLES)
    inner = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    one = inner.add_parser("list", help="list the checkpoints of a run, oldest first")
    one.add_argument("run_dir", type=file_path, metavar="RUN_DIR", help="folder of a run")
    one.set_defaults(run=_list)

    one = inner.add_parser("verify", help="read every byte and compare checksums", description=VERIFY_DESCRIPTION)
    one.add_argument("path", type=file_path, metavar="CHECKPOINT|RUN_DIR", help="folder of a checkpoint or of a run")
    one.set_defaults(run=_verify)

    one = inner.add_parser("describe", help="show when, how and from what a checkpoint was made")
    one.add_argument("path", type=file_path, metavar="CHECKPOINT|RUN_DIR", help=WHICH)
    one.set_defaults(run=_describe)

    about = "write the weights into one safetensors file"
    one = inner.add_parser("consolidate", help=about, description=CONSOLIDATE_DESCRIPTION)
    one.add_argument("path", type=file_path, metavar="CHECKPOINT|RUN_DIR", help=WHICH)
    one.add_argument("out", type=file_path, metavar="OUT", help="file to write")
    add_overwrite(one)
    one.add_argument("--weights", choices=KINDS, default="ema", help="averaged or as trained (default ema)")
    one.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), default="fp32", help="default fp32")
    one.set_defaults(run=_consolidate)


def _list(options: argparse.Namespace) -> None:
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


def _verify(options: argparse.Namespace) -> None:
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


def _describe(options: argparse.Namespace) -> None:
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


def _consolidate(options: argparse.Namespace) -> None:
    import torch

    from ddpm_ds.checkpoint.reader import consolidate

    check_output(options.out, overwrite=options.overwrite)
    torch.set_num_threads(1)  # the disk limits the speed; on a busy host, more threads only wait for each other
    checkpoint = checkpoint_at(options.path, print_to_stderr)
    consolidate(checkpoint, options.out, KINDS[options.weights], options.dtype, progress=True)
    print(f"{options.out}: {options.weights} weights in {options.dtype}, {options.out.stat().st_size / 1e6:,.1f} MB")


def _of_run(run_dir: Path) -> list[Path]:
    folder = checkpoints_of(run_dir)
    if not (found := names(folder)):
        raise CheckpointError(f"there are no checkpoints in {folder}; name the folder of a run that has saved")
    return [folder / name for name in found]
