"""``ddpm-ds sample`` and ``launch/sample.py``: images from trained weights, by one process or several."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_ds.command_line import OneLineParser, natural, positive, seed
from ddpm_ds.errors import PeerLostError, SpecError, UserError
from ddpm_ds.evaluate.draw import add_sampler_options, sampler_from
from ddpm_ds.processes.ranks import print_once, record_exit, set_environment

if TYPE_CHECKING:
    from ddpm_ds.evaluate.draw import Request, SavedRequest
    from ddpm_ds.evaluate.sampling import Keeper, Share
    from ddpm_ds.evaluate.trained import Trained

DESCRIPTION = """\
Draw images from a checkpoint of any layout, the newest checkpoint of a run, or an export. Image number I of a seed is
the same picture whatever --count, --first, --batch-images and the number of processes are.
"""

EXAMPLES = """\
examples
  ddpm-ds sample runs/digits
  ddpm-ds sample runs/digits/checkpoints/images-000128000 --labels 3 --guidance 2 --out threes.png
  ddpm-ds sample runs/cifar10 --count 50000 --out cifar10.npz --sampler ddim --steps 100
  deepspeed --num_gpus 2 launch/sample.py runs/cifar10 --count 50000 --out cifar10.npz

Interrupted, it keeps the finished batches, and the same command goes on from there (docs/sampling.md).

exit codes
  0 done   2 bad input, nothing was done   130 interrupted   76 another process died: start it again   1 a bug
"""

SUFFIXES = {"grid": ".png", "npz": ".npz", "folder": ""}


def add_sample(verbs: argparse._SubParsersAction[Any]) -> None:
    """The verb."""
    parser = verbs.add_parser(
        "sample",
        help="draw images from a checkpoint or an export",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    _add_options(parser)
    parser.set_defaults(run=_sample)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of ``launch/sample.py``, of each process: run it and return its exit code."""
    parser = OneLineParser(
        prog="deepspeed [launcher options] launch/sample.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    _add_options(parser)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # of launchers
    try:
        set_environment()
        return _sample(parser.parse_args(arguments))
    except PeerLostError as error:  # nothing that waits for the others may follow
        print(f"ddpm_ds: error: {error}", file=sys.stderr, flush=True)
        os._exit(record_exit(error.exit_code))
    except UserError as error:
        print_once(f"ddpm_ds: error: {error}")
        return error.exit_code


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="CHECKPOINT|RUN_DIR|EXPORT", help="folder of the weights")
    parser.add_argument("--count", type=positive, default=64, metavar="N", help="images (default 64)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="file or folder to write (default RUN_DIR/samples-IMAGES, where IMAGES is how many the checkpoint has "
        "seen, or ./samples for weights outside a run; with the suffix of --format)",
    )
    parser.add_argument(
        "--format",
        choices=SUFFIXES,
        help="one PNG, a folder of PNGs or a numpy archive (default by --out: .png, no suffix, .npz; else grid)",
    )
    parser.add_argument(
        "--batch-images", type=positive, default=64, metavar="N", help="images drawn at once by a process (default 64)"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of all noise (default 0)")
    parser.add_argument("--first", type=natural, default=0, metavar="I", help="number of the first image (default 0)")
    parser.add_argument(
        "--labels",
        metavar="all|none|3|0,1,2",
        help="classes of a class-conditional U-Net, which images take in turn (default all)",
    )
    parser.add_argument("--weights", choices=("ema", "raw"), help="averaged or as trained (default ema)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA if any")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp32", help="default fp32")
    parser.add_argument(
        "--mlflow", action="store_true", help="log the grid too, in a child of the MLflow run that made the checkpoint"
    )
    add_sampler_options(parser)


def labels_from(text: str | None, classes: int | None) -> tuple[int, ...] | None:
    """The labels that images take in turn, from --labels; None for images without labels.

    Raises:
        SpecError: there are no classes, or not these.
    """
    if text == "none" or (text is None and classes is None):
        return None
    if classes is None:
        raise SpecError(f"--labels {text}: the U-Net has no classes (unet.classes is null); leave it out")
    if text in (None, "all"):
        return tuple(range(classes))
    words = str(text).split(",")
    if not all(word.isdecimal() for word in words):
        raise SpecError(f"--labels {text} is none of all, none, a class such as 3, or classes such as 0,1,2")
    for label in (int(word) for word in words):
        if label >= classes:
            raise SpecError(f"--labels {label} is out of range: the U-Net has {classes} classes, 0 to {classes - 1}")
    return tuple(int(word) for word in words)


def _out_and_format(options: argparse.Namespace, trained: Trained) -> tuple[Path, str]:
    """Where to write what."""
    out, wanted = options.out, options.format
    if out is None:
        wanted = wanted or "grid"
        folder, images = (trained.run_dir, f"-{trained.images_seen:09}") if trained.run_dir else (Path(), "")
        return folder / f"samples{images}{SUFFIXES[wanted]}", wanted
    by_suffix = next((name for name, suffix in SUFFIXES.items() if suffix == out.suffix.lower()), None)
    if wanted is None and by_suffix is None:
        raise SpecError(
            f"--out {out}: the suffix {out.suffix} is of no format; use .png, .npz or none, or say --format"
        )
    if wanted is not None and by_suffix not in (None, "folder", wanted):
        raise SpecError(f"--out {out} has the suffix of a {by_suffix}, not of --format {wanted}; leave one of them out")
    return out, wanted or str(by_suffix)


def _sample(options: argparse.Namespace) -> int:
    """Run the verb, or this process's share of it."""
    set_environment()
    from ddpm_ds.evaluate.draw import Request
    from ddpm_ds.evaluate.outputs import WRITERS, PngFolder, check_file
    from ddpm_ds.evaluate.sampling import DrawnImages, share_of_launcher
    from ddpm_ds.unet.operations import widening

    share = share_of_launcher()
    say = print if share.rank == 0 else _say_nothing
    trained = _load(options)
    job = _job(options, trained)
    out, kind = _out_and_format(options, trained)
    if options.mlflow and kind != "grid":
        raise SpecError(f"--mlflow logs a grid, and --out {out} is a {kind}; leave one of them out")
    request = job.only(Request)
    partial = out.with_name(f".{out.name}.partial")
    keeper = PngFolder(out, job) if kind == "folder" else DrawnImages(partial, job, trained.image_shape)
    there = kind != "folder" and check_file(out, request)
    if not there:
        keeper.check()
    if there or (kind == "folder" and keeper.done() == job.count):
        say(f"{out}: already there, {_summary(job)}")
        return 0
    stored = next(trained.unet.parameters())
    if (line := widening(stored.device.type, stored.dtype)) is not None:
        say(line)
    try:
        _draw(trained, job, keeper, share)
        if share.rank == 0 and isinstance(keeper, DrawnImages):
            WRITERS[kind](out, keeper.images(), request)
            shutil.rmtree(partial, ignore_errors=True)
    except KeyboardInterrupt:
        say(f"interrupted: {keeper.done():,} of {job.count:,} images are kept; the same command goes on from there")
        return 128 + signal.SIGINT
    say(f"{out}: {_summary(job)}")
    if options.mlflow and share.rank == 0:
        _log(out, request, trained)
    return 0


def _load(options: argparse.Namespace) -> Trained:
    from ddpm_ds.device import DTYPES, choose_device
    from ddpm_ds.evaluate.trained import load_trained

    device, (_, dtype) = choose_device(options.device), DTYPES[options.precision]
    trained = load_trained(options.path, weights=options.weights or "ema", device=device, dtype=dtype)
    if options.weights and trained.weights == "export":
        raise SpecError(f"--weights {options.weights}: an export has only one set of weights; leave it out")
    return trained


def _job(options: argparse.Namespace, trained: Trained) -> SavedRequest:
    """What is to be drawn, checked."""
    from ddpm_ds.evaluate.draw import SavedRequest

    classes = trained.unet_spec.classes
    sampler = sampler_from(options, trained.sampler, timesteps=trained.diffusion.timesteps, classes=classes)
    labels = labels_from(options.labels, classes)
    if labels is None and options.guidance not in (None, 1.0):
        raise SpecError(f"--guidance {options.guidance:g} needs classes to guide to; leave out --labels none")
    where = {"first": options.first, "count": options.count, "batch_images": options.batch_images}
    return SavedRequest.of(trained, sampler, options.seed, labels, **where)


def _draw(trained: Trained, job: SavedRequest, keeper: Keeper, share: Share) -> None:
    """This process's share; returns when all shares are drawn."""
    from ddpm_ds.evaluate.sampling import draw_share, together

    leads = share.rank == 0
    if leads:
        keeper.claim()
        if done := keeper.done():
            print(f"{done:,} of {job.count:,} images are there from before", flush=True)
    with together(share) as wait_for_all:
        draw_share(trained, job, keeper, share, progress=leads)
        wait_for_all()


def _log(grid: Path, request: Request, trained: Trained) -> None:
    """Make the grid an artifact in MLflow."""
    from ddpm_ds.evaluate.diary import Child

    child = Child.begin(trained, "sample", request.model_dump())
    child.artifact(grid)
    if link := child.finish():
        print(f"MLflow run {link.run_id or f'not reached at {link.tracking_uri}'}")


def _say_nothing(line: str) -> None:
    """Of other ranks than 0."""


def _summary(job: SavedRequest) -> str:
    trained = "" if job.images_seen is None else f" after {job.images_seen:,} images"
    sampler = f"{job.sampler.kind} in {job.sampler.steps} steps"
    return f"{job.count:,} images by {sampler}, seed {job.seed}, {job.weights} weights{trained}"
