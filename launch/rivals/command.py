"""The command line of ``launch/bench.py``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from ddpm_ds.cli.train import add_run_options
from ddpm_ds.command_line import OneLineParser, add_overwrite, check_outputs, file_path, positive, take_files
from ddpm_ds.config.spec_file import DEFAULT_SPEC
from ddpm_ds.errors import BadNumbersError, DeviceLostError, LayoutError, SpecError, UserError
from ddpm_ds.planning import RunPlan, plan_run
from ddpm_ds.processes.ranks import print_once, set_environment
from ddpm_ds.tracking.run_folder import OUTPUT_ROOT
from rivals.choice import (
    CPU_IMAGES,
    HOST_IMAGES,
    HOST_SIZES,
    ONE_DEVICE_ROWS,
    ROUNDS,
    ROWS,
    STEPS,
    choose,
    why_not_in_layout,
)

DESCRIPTION = """\
Ways of training one U-Net side by side: the same images, noise, batch, micro-batches and learning rates on the
processes that were started, under this project's engines, DeepSpeed's own, PyTorch's own, and without a pipeline.

First all rows take a few steps and their losses are compared; if one does not train the same, nothing is timed. Then
they take turns, round after round, so that other work on the machine slows all alike. A ratio of 1.1 says that a row's
step takes 1.1 times the first row's: the median over the rounds, with quartiles in brackets. Finally each row takes a
step in which the bytes that it sends are counted, and some steps in which its processes' idle time is measured.

With --one-device one process trains a U-Net on one device under diffusers, under a plain loop of ours with one switch
on at a time, and under the engine. Predictions and gradients of one batch are compared, without dropout and from
weights none of which is zero; then the rows take turns. A speed of 1.5 says: 1.5 times the first row's images/s.
"""

EXAMPLES = """\
examples
  OMP_NUM_THREADS=1 deepspeed --num_gpus 4 launch/bench.py -p 4 --deepspeed_config ds_configs/zero1_fp32.json \\
      --spec launch/specs/cifar10.yaml --set data.source=digits --set data.workers=0 \\
      --set train.batch_images=32 --set train.accumulation=16 --rounds 5 --steps-per-round 2 --compared-steps 3
      the U-Net of DDPM in 4 stages, on digits made larger, so that nothing is downloaded
  ... --rows 1f1b,folded --memory --mlflow --json folded.json
      two rows, with their peak memory; in MLflow, and every number in a file
  python launch/bench.py --one-device --deepspeed_config ds_configs/zero1_fp32.json --spec launch/specs/cifar10.yaml \\
      --set data.source=digits --set data.workers=0
      CIFAR-10's U-Net under diffusers and under ours, one switch at a time; some minutes on two cores

exit codes
  0 done   2 bad input, nothing was started   3 the losses differ   1 a bug
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a benchmark.

    Raises:
        SpecError: an option is unknown or has a wrong value.
    """
    meanings = ["".join(f"  {name:20}{what}\n" for name, what in rows.items()) for rows in (ROWS, ONE_DEVICE_ROWS)]
    parser = OneLineParser(
        prog="deepspeed [launcher options] launch/bench.py",
        description=DESCRIPTION,
        epilog="rows\n{}\nrows of --one-device\n{}\n{}".format(*meanings, EXAMPLES),
    )
    add_run_options(parser)
    parser.add_argument(
        "--one-device", action="store_true", help="compare with diffusers in one process, one switch at a time"
    )

    def number(option: str, explanation: str, default: int | None = None) -> None:
        parser.add_argument(option, type=positive, default=default, metavar="N", help=explanation)

    number("--images", f"with --one-device: images of a step (default: the spec's on a GPU, {CPU_IMAGES} on a CPU)")
    parser.add_argument(
        "--rows",
        type=lambda text: [name.strip() for name in text.split(",")],
        metavar="ROW,ROW,...",
        help="which rows, see below (default: all that can run; with --one-device on a CPU none that takes minutes)",
    )
    default = "(default {layout}; with --one-device {cuda} on a GPU, {cpu} on a CPU)"
    number("--rounds", f"turns of each row {default.format(**ROUNDS)}")
    number("--steps-per-round", f"steps of each row in a round {default.format(**STEPS)}")
    number("--compared-steps", "first steps, whose losses are compared (default 50)", 50)
    parser.add_argument(
        "--memory", action="store_true", help="measure the peak memory of each row, in processes that train it alone"
    )
    parser.add_argument(
        "--host",
        action="store_true",
        help="with --one-device: also count what a step costs the host, for all layers of the spec with 8 channels, "
        "8x8 pixels and 2 images",
    )
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)  # a child of --memory
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write every number here")
    add_overwrite(parser)
    parser.add_argument(
        "--mlflow",
        action="store_true",
        help=f"log a run with the table and one for each row (store: MLFLOW_TRACKING_URI, else in {OUTPUT_ROOT})",
    )
    options = parser.parse_args(arguments)
    take_files(options, DEFAULT_SPEC, quiet=os.environ.get("RANK", "0") != "0")
    rows = ONE_DEVICE_ROWS if options.one_device else ROWS
    for name in options.rows or ():
        if name not in rows:
            raise SpecError(f"argument --rows: {name!r} is no row; rows are {', '.join(rows)}")
    if options.rows is not None:
        options.rows = [name for name in rows if name in options.rows]  # in the table's order
    if options.images is not None and not options.one_device:
        raise SpecError("--images belongs to --one-device; write --set train.batch_images=N")
    if options.host and not options.one_device:
        raise SpecError("--host counts the steps of --one-device; add it")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        set_environment()
        options = parse(arguments)
        check_outputs(options, "json")
        _benchmark(options)
    except DeviceLostError as error:  # nothing that waits for the device may follow
        print_once(f"ddpm_ds: error: {error}")
        os._exit(error.exit_code)
    except (UserError, BadNumbersError) as error:
        print_once(f"ddpm_ds: error: {error}")
        return error.exit_code
    return 0


def _benchmark(options: argparse.Namespace) -> None:
    """Compare ways of training one U-Net on all processes, or in one.

    Raises:
        LayoutError: several processes were started for ``--one-device``.
    """
    if options.one_device and (processes := os.environ["WORLD_SIZE"]) != "1":
        raise LayoutError(f"--one-device has one process, and {processes} were started; deepspeed --num_gpus 1")
    plan = _plan(options, options.overrides)
    if not options.one_device:
        names, not_run = choose(options.rows or list(ROWS), lambda row: why_not_in_layout(row, plan))
    from ddpm_ds.device import choose_device  # torch, now that everything cheap is checked
    from ddpm_ds.pipeline import import_deepspeed

    device = choose_device(options.device, plan.ds.layout.stages)
    import_deepspeed()
    from rivals.benchmark import run_layout, run_one_device

    if not options.one_device:
        return run_layout(plan, device, names, not_run, options)
    images = options.images or (HOST_IMAGES if options.host else CPU_IMAGES if device.type == "cpu" else None)
    batch = [] if images is None else [f"train.batch_images={images}"]
    overrides = [*(HOST_SIZES if options.host else ()), *options.overrides, *batch, "train.accumulation=1"]
    run_one_device(_plan(options, overrides), device, overrides, options)


def _plan(options: argparse.Namespace, overrides: Sequence[str]) -> RunPlan:
    plan = plan_run(
        options.spec,
        overrides,
        options.deepspeed_config,
        world_size=int(os.environ["WORLD_SIZE"]),
        stages=options.pipeline_stages,
        device=options.device,
    )
    if plan.spec.unet.text is not None and options.one_device:
        raise SpecError(
            "unet.text needs captions, which no row of --one-device reads; --set unet.text=null --set data.text=null"
        )
    for key in ("augmentation", "colour_augmentation"):
        if value := getattr(plan.spec.unet, key):
            raise SpecError(f"unet.{key} = {value:g} makes a U-Net that no other row has; --set unet.{key}=0")
    return plan
