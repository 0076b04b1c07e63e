"""``ddpm-ds sample``: draw images from trained weights.

``ddpm-ds evaluate`` shares the options for weights and sampler, ``ddpm-ds export`` those for weights.
"""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from ddpm_ds.command_line import (
    MOST_MEMBERS,
    Verbs,
    add_overwrite,
    batch,
    check_output,
    file_path,
    image_number,
    number,
    positive,
    seed,
    whole,
)
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec, check_sampler
from ddpm_ds.errors import SpecError
from ddpm_ds.evaluate import USUAL_MEMBERS
from ddpm_ds.files import MOST_DIGITS, read_bytes
from ddpm_ds.processes.ranks import set_environment
from ddpm_ds.schema.choices import SAMPLERS, samplers_with

if TYPE_CHECKING:
    from ddpm_ds.evaluate.inputs import Inputs
    from ddpm_ds.evaluate.outputs import Request
    from ddpm_ds.evaluate.trained import Trained

DESCRIPTION = """\
Draw images from a checkpoint of any layout, the newest checkpoint of a run, or an export. Image number I of a seed is
the same picture whatever --count, --first, and --batch-images are.
"""

EXAMPLES = """\
examples
  ddpm-ds sample runs/digits
  ddpm-ds sample runs/digits/checkpoints/images-000128000 --labels 3 --guidance 2 --out threes
  ddpm-ds sample runs/cifar10 --count 50000 --out cifar10.npz --sampler ddim --steps 100

  ddpm-ds sample runs/shapes --prompt "a red circle" --prompt "a blue square" --guidance 5 --out shapes

  ddpm-ds sample runs/downscaling --conditions held-out --members 8 --out ensembles
  ddpm-ds sample runs/downscaling --conditions coarse.nc --members 32 --out fine.zarr
  ddpm-ds sample runs/forecast --conditions today.h5 --members 8 --steps-ahead 20 --out forecast.zarr

Interrupted, it keeps the finished batches, and the same command continues from there (docs/sampling.md).

exit codes
  0 done   2 bad input, nothing was done   130 interrupted   1 a bug
"""

FORMATS = {"": "folder", ".npz": "npz", ".npy": "npy", ".zarr": "zarr"}
"""Formats by the suffix of --out."""
MOST_AHEAD = 10_000
MOST_PROMPTS_BYTES = 2**26
FLAGS = ("steps", "eta", "spacing", "variance", "clip", "guidance", "guidance_between")
"""Fields of the sampler that have an option of the same name; for `kind` it is --sampler."""


def add_sample(verbs: Verbs) -> None:
    """Add the verb ``sample``."""
    what = "draw images from a checkpoint or an export"
    parser = verbs.add_parser("sample", help=what, description=DESCRIPTION, epilog=EXAMPLES)
    _add_options(parser)
    parser.set_defaults(run=_sample)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--count",
        type=positive,
        metavar="N",
        help="images (default 64, or one of each prompt), or inputs of --conditions (default all up to 64)",
    )
    parser.add_argument(
        "--first", type=image_number, default=0, metavar="I", help="number of the first image or input (default 0)"
    )
    parser.add_argument(
        "--out",
        type=file_path,
        metavar="PATH",
        help="file or folder to write: PNGs and a grid, .npz, of fields .npy, .zarr (default RUN_DIR/samples-IMAGES, "
        "where IMAGES is how many the checkpoint has seen, or ./samples)",
    )
    parser.add_argument(
        "--labels",
        metavar="all|none|3|0,1,2",
        help="classes of a class-conditional U-Net, which images take in turn (default all)",
    )
    group = parser.add_argument_group("conditions", "for runs that were trained with data.condition")
    group.add_argument(
        "--conditions",
        type=file_path,
        metavar="PATH|held-out",
        help="what images are drawn for: a file or folder, or the run's held-out images",
    )
    group.add_argument(
        "--members",
        type=partial(whole, lowest=1, highest=MOST_MEMBERS, what="a number from 1 to 4,096"),
        metavar="K",
        help=f"images of each input (default {USUAL_MEMBERS}; a regression draws one)",
    )
    group.add_argument(
        "--steps-ahead",
        type=partial(whole, lowest=1, highest=MOST_AHEAD, what="a number from 1 to 10,000"),
        default=1,
        metavar="N",
        help="feed each image back as the next condition, N - 1 times (--steps is the sampler's)",
    )
    add_text_options(parser)
    group.add_argument("--channel", metavar="NAME", help="channel of fields that a picture shows (default the first)")
    parser.add_argument(
        "--mlflow", action="store_true", help="log the grid too, in a child of the MLflow run that made the checkpoint"
    )
    add_overwrite(parser)
    add_drawing_options(parser)


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what a U-Net with text draws."""
    text = parser.add_argument_group("text", "for runs that were trained with captions (data.text)")
    either = text.add_mutually_exclusive_group()
    either.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="what images show; may be given several times, images take them in turn (default count: one of each)",
    )
    either.add_argument(
        "--prompts",
        type=file_path,
        metavar="FILE|held-out",
        help="text file with a prompt in each line, or the captions of the run's held-out images",
    )
    text.add_argument("--negative", metavar="TEXT", help="what --guidance leads away from (default: no text)")


def add_drawing_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the options that choose the weights and how they draw images; with ``several``, the sampler and the guidance
    are tuples of different ones.
    """
    add_weights_options(parser)
    more, many = (",...", different) if several else ("", lambda kind: kind)
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp32", help="default fp32")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of all noise (default 0)")
    parser.add_argument("--batch-images", type=batch, default=64, metavar="N", help="images drawn at once (default 64)")
    group = parser.add_argument_group("sampler", "defaults are those of the section `sampler` of the run")
    group.add_argument(
        "--sampler",
        type=many(_sampler),
        metavar=f"KIND{more}",
        help="ddpm adds noise in every step, ddim may (--eta), dpm_solver needs the fewest steps",
    )
    group.add_argument("--steps", type=int, metavar="N", help="steps from noise to image (default: see sampler.steps)")
    group.add_argument("--eta", type=float, metavar="X", help="noise that ddim adds: 0 none, 1 as much as ddpm")
    group.add_argument("--spacing", choices=_choices("spacing"), help="which timesteps are visited")
    group.add_argument("--variance", choices=_choices("variance"), help="variance of ddpm's steps")
    group.add_argument("--clip", choices=_choices("clip"), help="how predicted clean images are kept in range")
    group.add_argument(
        "--guidance",
        type=many(_guidance),
        metavar=f"W{more}",
        help="guidance: 1 is none; without --guide 0 leaves out the class",
    )
    group.add_argument(
        "--guidance-between",
        type=_interval,
        metavar="LOW,HIGH",
        help="guide only at noise levels above LOW and up to HIGH, as noise over signal: EDM's sigma",
    )
    group.add_argument(
        "--guide",
        type=file_path,
        metavar="CHECKPOINT|RUN_DIR|EXPORT",
        help="weights of a worse U-Net, averaged, that guidance leads away from instead of no class (autoguidance)",
    )


def add_weights_options(parser: argparse.ArgumentParser) -> None:
    """Add the folder of the weights, and the options that choose the kind of weights and the device."""
    folder = "folder of the weights; of a run, its newest checkpoint; or an export on the hub, OWNER/NAME"
    parser.add_argument("path", type=file_path, metavar="CHECKPOINT|RUN_DIR|EXPORT", help=folder)
    parser.add_argument("--weights", choices=("ema", "raw"), default="ema", help="averaged or as trained (default ema)")
    moved = "data.autoencoder of the run, if it has moved"
    parser.add_argument("--autoencoder", type=file_path, metavar="DIR", help=moved)
    where = "device that draws (default: CUDA if any)"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=where)


def different(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of different values separated by commas, each parsed by ``kind``."""

    def read(text: str) -> tuple[Any, ...]:
        values = tuple(map(kind, text.split(",")))
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} has one value twice")
        return values

    return read


def _sampler(text: str) -> str:
    if text not in SAMPLERS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(SAMPLERS)}")
    return text


def _guidance(text: str) -> float:
    return number(text, 0.0, 1e3, "a guidance from 0 to 1,000")


def _interval(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not two noise levels such as 0.3,5") from None
    return low, high


def _choices(field: str) -> tuple[str, ...]:
    """Return the values that the Literal ``field`` of the spec's sampler section accepts."""
    return get_args(SamplerSpec.model_fields[field].annotation)


def load(
    options: argparse.Namespace,
    changes: Sequence[Mapping[str, Any]] = ({},),
) -> tuple[Trained, list[SamplerSpec], Trained | None]:
    """Load the weights, and the guide if there is one, and make the samplers that the options ask for.

    There is a sampler for each of ``changes``, which are values instead of those of the options.

    Raises:
        CheckpointError: there are no such weights.
        SpecError: an option asks for something that the weights or the sampler don't have.
    """
    from ddpm_ds.device import DTYPES, choose_device
    from ddpm_ds.evaluate.sampling import check_guide
    from ddpm_ds.evaluate.trained import load_trained

    device, (_, dtype) = choose_device(options.device), DTYPES[options.precision]
    place: dict[str, Any] = {"autoencoder": options.autoencoder, "device": device, "dtype": dtype}
    trained = load_trained(options.path, weights=options.weights, **place)
    samplers = [
        sampler_from(
            argparse.Namespace(**{**vars(options), **change}),
            trained.sampler,
            trained.diffusion,
            **trained.sampler_checks,
        )
        for change in changes
    ]
    if options.guide is None:
        return trained, samplers, None
    guide = load_trained(options.guide, **place)
    check_guide(guide, trained, samplers)
    return trained, samplers, guide


def sampler_from(
    options: argparse.Namespace,
    sampler: SamplerSpec,
    diffusion: DiffusionSpec,
    *,
    classes: int | None,
    **checks: bool,
) -> SamplerSpec:
    """Return the run's sampler, changed by the options.

    A kind other than the run's starts from its own number of steps and without added noise. ``checks`` are further
    arguments of :func:`ddpm_ds.diffusion.spec.check_sampler`.

    Raises:
        SpecError: an option is out of range, or the sampler, the diffusion process or the U-Net does not support it.
    """
    changes = {name: value for name in FLAGS if (value := getattr(options, name)) is not None}
    if options.sampler not in (None, sampler.kind):
        changes = {"kind": options.sampler, "steps": None, "eta": 0.0, **changes}
    try:
        changed = SamplerSpec.model_validate({**sampler.model_dump(), **changes})
    except ValidationError as error:
        fault = error.errors()[0]
        message = fault["msg"][:1].lower() + fault["msg"][1:]
        raise SpecError(f"--{str(fault['loc'][0]).replace('_', '-')} {fault['input']}: {message}") from None
    if options.variance is not None and "variance" not in SAMPLERS[changed.kind].options:
        readers = samplers_with("variance")
        raise SpecError(
            f"--variance is an option of {readers}, not of {changed.kind}; leave it out or use --sampler {readers}"
        )
    from ddpm_ds.diffusion.levels import check_guidance  # it imports PyTorch

    try:
        check_sampler(changed, diffusion, classes=classes, guide=options.guide is not None, **checks)
        check_guidance(changed, diffusion)
    except (ValueError, SpecError) as error:
        said = re.sub(r"sampler\.(\w+)", lambda key: "--" + key[1].replace("_", "-"), str(error))
        raise SpecError(said.replace("--kind", "--sampler")) from None
    return changed


def _labels(options: argparse.Namespace, trained: Trained) -> tuple[int, ...] | None:
    """Return the labels of --labels, which images take in turn; None for images without labels."""
    from ddpm_ds.evaluate.sampling import check_label

    text, classes = options.labels, trained.unet_spec.classes
    if text == "none" or (text is None and classes is None):
        guides = options.guide is not None or (classes is None and trained.sampler_checks["drops"])
        if options.guidance not in (None, 1.0) and not guides:
            raise SpecError(f"--guidance {options.guidance:g} needs classes to guide to; leave out --labels none")
        return None
    if classes is None:
        raise SpecError(f"--labels {text}: the U-Net has no classes (unet.classes is null); leave it out")
    if text in (None, "all"):
        return tuple(range(classes))
    words = text.split(",")
    if not all(word.isdecimal() and len(word) <= MOST_DIGITS for word in words):
        raise SpecError(f"--labels {text} is none of all, none, a class such as 3, or classes such as 0,1,2")
    labels = tuple(int(word) for word in words)
    check_label(max(labels), classes)
    return labels


def _inputs(options: argparse.Namespace, trained: Trained) -> Inputs | None:
    """Open what --conditions names; None for a run without a condition of each image."""
    from ddpm_ds.evaluate.inputs import Inputs, check_ahead, check_unconditioned

    if options.conditions is None:
        for name, value in (("members", options.members), ("steps-ahead", options.steps_ahead)):
            if value not in (None, 1):
                raise SpecError(f"--{name} {value} is of --conditions, which is missing")
        check_unconditioned(trained)
        return None
    if options.steps_ahead > 1:
        check_ahead(trained)
    return Inputs.open(options.conditions, trained)


def texts_of(options: argparse.Namespace, trained: Trained) -> list[str] | None:
    """Return the prompts of --prompt or --prompts; None without."""
    from ddpm_ds.evaluate.inputs import HELD_OUT, held_out_captions

    if options.prompts is None:
        prompts: list[str] | None = options.prompt
        return prompts
    if str(options.prompts) == HELD_OUT and not options.prompts.exists():
        return [HELD_OUT] if trained.unet_spec.text is None else held_out_captions(trained)  # the former are refused
    try:
        lines = read_bytes(options.prompts, MOST_PROMPTS_BYTES).decode().splitlines()
    except OSError as error:
        raise SpecError(f"--prompts {options.prompts} can't be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise SpecError(f"--prompts {options.prompts} is no text in UTF-8; write a prompt in each line") from None
    if not (prompts := [line for line in map(str.strip, lines) if line]):
        raise SpecError(f"--prompts {options.prompts} has no prompt; write one in each line")
    return prompts


def _channel(options: argparse.Namespace, trained: Trained) -> int:
    """Return the number of the channel that --channel names."""
    if options.channel is None:
        return 0
    if not trained.are_fields:
        raise SpecError(f"--channel {options.channel} is of fields, and {options.path} draws pictures; leave it out")
    if options.channel not in trained.channels:
        raise SpecError(f"--channel {options.channel} is none of {', '.join(trained.channels)}")
    return trained.channels.index(options.channel)


def _out_and_format(options: argparse.Namespace, trained: Trained) -> tuple[Path, str]:
    """Return the path of the output, and its format."""
    out = options.out
    if out is None:
        folder, images = (trained.run_dir, f"-{trained.images_seen:09}") if trained.run_dir else (Path(), "")
        return folder / f"samples{images}", "folder"
    if out.suffix.lower() not in FORMATS:
        raise SpecError(
            f"--out {out}: the suffix {out.suffix} is of no format; use none for a folder, .npz, .npy or .zarr"
        )
    return out, FORMATS[out.suffix.lower()]


def _check_format(options: argparse.Namespace, trained: Trained, out: Path, kind: str) -> None:
    """Refuse a format that can't hold the images, and one whose package is missing."""
    if kind != "folder" and trained.are_fields == (kind == "npz"):
        what, use = ("fields", ".npy, .zarr") if trained.are_fields else ("pictures", ".npz")
        raise SpecError(f"--out {out} can't hold {what}, which {options.path} draws; use {use} or a folder")
    if kind == "folder" and options.steps_ahead > 1:
        raise SpecError(f"--out {out} can't hold --steps-ahead {options.steps_ahead}; use .npy or .zarr")
    if kind == "zarr" and not (find_spec("zarr") and find_spec("xarray")):
        raise SpecError(f"--out {out} needs packages that are missing: pip install 'ddpm_ds[fields]'; or use .npy")


def _sample(options: argparse.Namespace) -> int:
    set_environment()
    from ddpm_ds.evaluate.outputs import (
        GRID,
        DrawnImages,
        check_new_folder,
        check_recordable,
        record_child,
        titled_grid,
        write_numpy,
        write_pngs,
        write_zarr,
    )
    from ddpm_ds.evaluate.sampling import Setup, draw_missing, request_for
    from ddpm_ds.unet.operations import widening

    trained, (sampler,), guide = load(options)
    inputs = _inputs(options, trained)
    setup = Setup(trained, sampler, guide, inputs).with_prompts(texts_of(options, trained), options.negative)
    given = ("seed", "first", "count", "batch_images", "members", "steps_ahead")
    numbers: dict[str, Any] = {name: value for name in given if (value := getattr(options, name)) is not None}
    labels = _labels(options, trained)
    request = request_for(setup, labels if options.labels else "all", **numbers)
    channel = _channel(options, trained)
    out, kind = _out_and_format(options, trained)
    _check_format(options, trained, out, kind)
    if options.mlflow and kind != "folder":
        raise SpecError(f"--mlflow logs a grid, and --out {out} is a {kind}; leave one of them out")
    if options.mlflow:
        check_recordable(trained)
    if kind in ("folder", "zarr"):
        check_new_folder(out)
    else:
        check_output(out, overwrite=options.overwrite, called="--out ")
    drawn = DrawnImages(out.parent / f".{out.name}.{request.key}", request)
    if line := widening(trained.device.type, trained.dtype):
        print(line)
    try:
        draw_missing(setup, request, drawn)
        images, shown = drawn.images(), request.labels_of(request.index)
        if kind == "npy":
            write_numpy(out, images if inputs is None else request.by_input(images))
        elif kind == "zarr":
            write_zarr(out, trained, request.by_input(images), options.first)
        elif kind == "npz":
            write_numpy(out, images, shown)
        else:
            how: dict[str, Any] = {"inputs": inputs, "request": request, "channel": channel}
            grid = titled_grid(trained, sampler, images, shown, **how)
            write_pngs(out, grid, images, request.index)
        drawn.remove()
    except KeyboardInterrupt:
        print(
            f"interrupted: {drawn.count:,} of {request.count:,} images are kept; the same command continues from there"
        )
        return 128 + signal.SIGINT
    print(f"{out}: {_summary(request)}")
    if options.mlflow:
        record_child(trained, "sample", request.model_dump(exclude={"batch_images"}), artifacts={out / GRID: ""})
    return 0


def _summary(request: Request) -> str:
    trained = "" if request.images_seen is None else f" after {request.images_seen:,} images"
    sampler = f"{request.sampler.kind} in {request.sampler.steps} steps"
    images = f"{request.count:,} images"
    if request.inputs is not None:
        members = request.members
        images += f", {members} for each of {request.count // members:,} inputs,"
    return f"{images} by {sampler}, seed {request.seed}, {request.weights} weights{trained}"
