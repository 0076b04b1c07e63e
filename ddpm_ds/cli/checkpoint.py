"""``ddpm-ds checkpoint`` and ``ddpm-ds ema``: list, verify, describe and consolidate checkpoints, and make averaged
weights of any length after training; all without a GPU.
"""

import argparse
import math
from pathlib import Path

import yaml

from ddpm_ds.checkpoint.folder import checkpoint_at, names
from ddpm_ds.checkpoint.manifest import MANIFEST, files_here, read_manifest, verify
from ddpm_ds.command_line import (
    LONGEST_EMA,
    SHORTEST_EMA,
    Verbs,
    add_overwrite,
    aligned,
    check_output,
    ema_length,
    file_path,
    images_seen,
)
from ddpm_ds.errors import CheckpointError, print_to_stderr
from ddpm_ds.tracking.run_folder import averages_of, checkpoints_of, snapshots_of

EXAMPLES = """\
examples
  ddpm-ds checkpoint list runs/digits
  ddpm-ds checkpoint verify runs/digits
  ddpm-ds checkpoint describe runs/digits/checkpoints/images-000012800
  ddpm-ds checkpoint consolidate runs/digits/checkpoints/images-000012800 digits.safetensors --dtype fp16
"""

WHICH = "folder of a checkpoint, or of a run for its newest good one"
KINDS = {"ema": "ema", "raw": "master"}
EMA_DESCRIPTION = f"""\
Make the average of the weights that a run with ema.profiles would have kept for another length, from its snapshots. A
length is relative, {SHORTEST_EMA:g} to {LONGEST_EMA:g}: sigma_rel of EDM2, the standard deviation of the times of the
averaged weights as a share of the training so far. The result is a checkpoint of these weights alone; ddpm-ds sample,
evaluate and export take it. docs/evaluation.md says which length to choose.
"""


EMA_EXAMPLES = """\
examples
  ddpm-ds ema runs/digits --length 0.1
  ddpm-ds ema runs/digits --length 0.15 --at 64000 --output digits-0.15
  ddpm-ds sample runs/digits/averages/images-000128000-ema-0.1
  ddpm-ds evaluate runs/digits --ema-length 0.05,0.1,0.15
      scores of several lengths, without writing their weights
"""


def add_checkpoint(verbs: Verbs) -> None:
    """Add the verb ``checkpoint`` and its own verbs."""
    parser = verbs.add_parser(
        "checkpoint",
        help="list, verify, describe or consolidate checkpoints",
        description="Checkpoints of a run, one folder each in RUN_DIR/checkpoints. No verb needs a GPU or changes a\n"
        "checkpoint.",
        epilog=EXAMPLES,
    )
    inner = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    one = inner.add_parser("list", help="list the checkpoints of a run, oldest first")
    one.add_argument("run_dir", type=file_path, metavar="RUN_DIR", help="folder of a run")
    one.set_defaults(run=_list)

    one = inner.add_parser(
        "verify",
        help="read every byte and compare checksums",
        description="Read every byte of a checkpoint, or of all checkpoints of a run, and compare checksums. Exit code "
        "2 if any is damaged.",
    )
    one.add_argument("path", type=file_path, metavar="CHECKPOINT|RUN_DIR", help="folder of a checkpoint or of a run")
    one.set_defaults(run=_verify)

    one = inner.add_parser("describe", help="show when, how and from what a checkpoint was made")
    one.add_argument("path", type=file_path, metavar="CHECKPOINT|RUN_DIR", help=WHICH)
    one.set_defaults(run=_describe)

    one = inner.add_parser(
        "consolidate",
        help="write the weights into one safetensors file",
        description="Write the whole weights of a checkpoint into one safetensors file, under their global names. One\n"
        "tensor at a time is in memory.",
    )
    one.add_argument("path", type=file_path, metavar="CHECKPOINT|RUN_DIR", help=WHICH)
    one.add_argument("out", type=file_path, metavar="OUT", help="file to write")
    add_overwrite(one)
    one.add_argument("--weights", choices=KINDS, default="ema", help="averaged or as trained (default ema)")
    one.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), default="fp32", help="default fp32")
    one.set_defaults(run=_consolidate)


def _list(options: argparse.Namespace) -> None:
    header = ("checkpoint", "images", "steps", "written (UTC)", "MB", "holds")
    rows = [header]
    for checkpoint in _of_run(options.run_dir):
        try:
            manifest = read_manifest(checkpoint)
        except CheckpointError as error:
            rows.append((checkpoint.name, "-", "-", "-", "-", str(error)))
            continue
        written, size = f"{manifest.created:%Y-%m-%d %H:%M:%S}", f"{manifest.total_bytes / 1e6:,.1f}"
        here, kinds = len(files_here(checkpoint, manifest)), ", ".join(manifest.kinds)
        if here < len(manifest.files):
            kinds += f"; {here} of {len(manifest.files)} files here"
        rows.append((checkpoint.name, f"{manifest.images:,}", f"{manifest.step:,}", written, size, kinds))
    print("\n".join(aligned(rows, left={0, len(header) - 1})))


def _verify(options: argparse.Namespace) -> None:
    alone = (options.path / MANIFEST).exists() or not checkpoints_of(options.path).exists()
    checkpoints = [options.path] if alone else _of_run(options.path)
    damaged: dict[Path, CheckpointError] = {}
    for checkpoint in checkpoints:
        try:
            manifest = read_manifest(checkpoint)
            verify(checkpoint, manifest, progress=True)
        except CheckpointError as error:
            damaged[checkpoint] = error
        else:
            print(f"{checkpoint.name}: good, {manifest.total_bytes:,} bytes in {len(manifest.files)} files")
    if len(damaged) == 1:
        raise next(iter(damaged.values()))
    if damaged:
        which = ", ".join(map(str, damaged))
        raise CheckpointError(
            f"{len(damaged)} of {len(checkpoints)} checkpoints are damaged or not whole here, verify each: {which}"
        )


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

    from ddpm_ds.checkpoint.power_ema import averaged_kind
    from ddpm_ds.checkpoint.reader import consolidate

    check_output(options.out, overwrite=options.overwrite)
    torch.set_num_threads(1)  # the disk limits the speed; on a busy host, more threads only wait for each other
    checkpoint = checkpoint_at(options.path, print_to_stderr)
    kind = KINDS[options.weights]
    if options.weights == "ema":
        kind = averaged_kind(read_manifest(checkpoint).kinds) or kind
    consolidate(checkpoint, options.out, kind, options.dtype, progress=True)
    print(f"{options.out}: {options.weights} weights in {options.dtype}, {options.out.stat().st_size / 1e6:,.1f} MB")


def _of_run(run_dir: Path) -> list[Path]:
    folder = checkpoints_of(run_dir)
    if not (found := names(folder)):
        raise CheckpointError(f"there are no checkpoints in {folder}; name the folder of a run that has saved")
    return [folder / name for name in found]


def add_ema(verbs: Verbs) -> None:
    """Add the verb ``ema``."""
    what = "make averaged weights of another length after training"
    parser = verbs.add_parser("ema", help=what, description=EMA_DESCRIPTION, epilog=EMA_EXAMPLES)
    parser.add_argument("run_dir", type=file_path, metavar="RUN_DIR", help="folder of a run that keeps snapshots")
    parser.add_argument("--length", type=ema_length, required=True, metavar="L", help="relative length, such as 0.1")
    parser.add_argument(
        "--at", type=images_seen, metavar="IMAGES", help="time of the snapshot that it ends at (default: the newest)"
    )
    parser.add_argument(
        "--output",
        type=file_path,
        metavar="FOLDER",
        help="folder to write; must not exist (default RUN_DIR/averages/images-IMAGES-ema-L)",
    )
    parser.set_defaults(run=_ema)


def _ema(options: argparse.Namespace) -> None:
    import torch

    from ddpm_ds.checkpoint.power_ema import Reconstruction, average_name

    torch.set_num_threads(1)  # the disk limits the speed
    made = Reconstruction(snapshots_of(options.run_dir), options.length, options.at)
    out = options.output or averages_of(options.run_dir) / average_name(made.images, options.length)
    made.write(out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(
        f"{out}: average of relative length {options.length:g} after {made.images:,} images, {size / 1e6:,.1f} MB, "
        f"from {made.snapshots} snapshots; its profile is {made.distance:.2%} off"
    )
