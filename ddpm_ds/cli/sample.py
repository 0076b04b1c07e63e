"""``ddpm-ds sample``, which draws images from trained weights; and options that ``evaluate`` and ``export`` share."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import ValidationError

from ddpm_ds.cli.options import OVERWRITE, Device, Verb
from ddpm_ds.config.ds_model import MOST_SPACE
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec, check_sampler
from ddpm_ds.evaluate import USUAL_MEMBERS
from ddpm_ds.ground.errors import OptionError, SpecError
from ddpm_ds.ground.files import read_bytes
from ddpm_ds.ground.formats import MOST_DIGITS
from ddpm_ds.ground.options import batch, flag, image_number, number, option, positive, seed, whole
from ddpm_ds.ground.outputs import check_output
from ddpm_ds.ground.units import MOST_MEMBERS, Precision
from ddpm_ds.processes.ranks import set_environment
from ddpm_ds.schema.choices import SAMPLERS
from ddpm_ds.schema.types import MOST_SIDE

if TYPE_CHECKING:
    from ddpm_ds.evaluate.inputs import Inputs
    from ddpm_ds.evaluate.outputs import Request
    from ddpm_ds.evaluate.sampling import Setup
    from ddpm_ds.evaluate.trained import Trained

FORMATS = {"": "folder", ".npz": "npz", ".npy": "npy", ".zarr": "zarr"}
"""Format for each suffix of --out."""
WEIGHTS = "CHECKPOINT|RUN_DIR|EXPORT"
MOST_PROMPTS_BYTES = 2**26
FLAGS = ("steps", "eta", "spacing", "variance", "clip", "shift", "condition_guidance", "guidance_between")
"""Fields of the sampler with an option of the same name and a single value."""

T = TypeVar("T")


def different(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return a parser of values between commas, each parsed by ``kind`` and no two equal."""

    def read(text: str) -> tuple[T, ...]:
        values = tuple(map(kind, text.split(",")))
        if len(set(values)) < len(values):
            raise OptionError(f"{text!r} has one value twice")
        return values

    return read


def one_of(text: str, words: Collection[str]) -> str:
    """Parse one of some words."""
    if text not in words:
        raise OptionError(f"{text!r} is none of {', '.join(words)}")
    return text


def _interval(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise OptionError(f"{text!r} is not two noise levels such as 0.3,5") from None
    return low, high


def _choices(field: str) -> tuple[str, ...]:
    return get_args(SamplerSpec.model_fields[field].annotation)


@dataclass(frozen=True)
class WeightsOptions:
    """Weights to draw with, and their device."""

    path: Path = option("a checkpoint, a run (its newest), or an export, also on the hub", WEIGHTS, names=("path",))
    weights: Literal["ema", "raw"] = option("averaged or as trained (default ema)", default="ema")
    autoencoder: Path | None = option("folder of the run's data.autoencoder, if it has moved", "DIR")
    device: Device = option("device that draws (default: CUDA if any)", default="auto")


_kinds = different(partial(one_of, words=SAMPLERS))
_weights = different(partial(number, lowest=0.0, highest=1e3, what="a guidance from 0 to 1,000"))


@dataclass(frozen=True)
class SamplerOptions:
    group = "sampler", "defaults are those of the run's section `sampler`; evaluate takes lists of KIND and W"
    sampler: tuple[str, ...] = option("see docs/sampling.md", "KIND", _kinds, default=())
    steps: int | None = option("steps from noise to image (default: see sampler.steps)", "N", int)
    eta: float | None = option("noise that ddim adds: 0 none, 1 as much as ddpm", "X", float)
    spacing: str | None = option("which timesteps are visited", choices=_choices("spacing"))
    variance: str | None = option("variance of ddpm's steps", choices=_choices("variance"))
    clip: str | None = option("how predicted clean images are brought into range", choices=_choices("clip"))
    shift: float | None = option("shift of flow matching's times (default diffusion.shift)", "S", float)
    guidance: tuple[float, ...] = option("1 is none; without --guide 0 leaves out the class", "W", _weights, default=())
    condition_guidance: float | None = option("guidance to the condition, beside that to text", "W", float)
    guidance_between: tuple[float, float] | None = option(
        "guide only at noise levels above LOW and up to HIGH, as noise over signal: EDM's sigma", "LOW,HIGH", _interval
    )
    guide: Path | None = option("averaged weights of a worse U-Net to lead away from (autoguidance)", WEIGHTS)


_ranks = partial(whole, lowest=1, highest=MOST_SPACE, what=f"a number of devices from 1 to {MOST_SPACE}")


@dataclass(frozen=True)
class DrawingOptions(WeightsOptions):
    precision: Precision = option("default fp32", default="fp32")
    seed: int = option("seed of all noise (default 0)", "N", seed, default=0)
    batch_images: int = option("images drawn at once (default 64)", "N", batch, default=64)
    space: int = option("devices of this machine that share the rows of each image (default 1)", "S", _ranks, default=1)
    sampling: SamplerOptions = SamplerOptions()


@dataclass(frozen=True)
class TextOptions:
    group = "text", "for runs that were trained with captions (data.text)"
    prompt: tuple[str, ...] | None = option(
        "may be repeated, and images take them in turn (default one of each)", "TEXT", action="append", either="prompts"
    )
    prompts: Path | None = option(
        "a prompt in each line, perhaps with options, or the captions of held-out images",
        "FILE|held-out",
        either="prompts",
    )
    negative: str | None = option("text that --guidance leads away from (default: no text)", "TEXT")


CONDITIONS = "conditions", "for runs that were trained with data.condition"


def size_in_pixels(text: str) -> tuple[int, int]:
    what, (height, _, width) = "a size in pixels such as 64 or, height first, 96x64", text.partition("x")
    return whole(height, 1, MOST_SIDE, what), whole(width or height, 1, MOST_SIDE, what)


_members = partial(whole, lowest=1, highest=MOST_MEMBERS, what=f"a number from 1 to {MOST_MEMBERS:,}")
_steps_ahead = partial(whole, lowest=1, highest=10_000, what="a number from 1 to 10,000")


@dataclass(frozen=True)
class SampleOptions:
    count: int | None = option("images, or inputs of --conditions (default up to 64, or of prompts all)", "N", positive)
    first: int = option("number of the first image or input (default 0)", "I", image_number, default=0)
    out: Path | None = option(
        "file or folder to write: PNGs and a grid, .npz, of fields .npy, .zarr (default a folder of the run)", "PATH"
    )
    size: tuple[int, int] | None = option(
        "another size in pixels than the run's, height first", "N|HxW", size_in_pixels
    )
    labels: str | None = option("classes that images take in turn (default all)", "all|none|3|0,1,2")
    conditions: Path | None = option(
        "inputs to draw images for: a file, a folder, or the run's held-out images", "PATH|held-out", group=CONDITIONS
    )
    members: int | None = option(
        f"images of each input (default {USUAL_MEMBERS}; a regression draws one)", "K", _members, group=CONDITIONS
    )
    steps_ahead: int = option(
        "feed each image back as the next condition, N - 1 times", "N", _steps_ahead, default=1, group=CONDITIONS
    )
    text: TextOptions = TextOptions()
    channel: str | None = option("channel of fields that a picture shows (default the first)", "NAME", group=CONDITIONS)
    mlflow: bool = flag("log the grid too, in a child of the MLflow run that made the checkpoint")
    overwrite: bool = flag(OVERWRITE)
    drawing: DrawingOptions = DrawingOptions()


@contextlib.contextmanager
def loaded(options: DrawingOptions) -> Iterator[tuple[Trained, Trained | None]]:
    """Yield weights and guide, which may be None; the other processes of --space end with the body."""
    from ddpm_ds.evaluate.sampling import SpaceRanks
    from ddpm_ds.evaluate.trained import load_trained
    from ddpm_ds.ground.device import DTYPES, choose_device

    device, (_, dtype), guide = choose_device(options.device), DTYPES[options.precision], options.sampling.guide
    with SpaceRanks(options.space, device) as ranks:

        def load(path: Path, weights: Literal["ema", "raw"] = "ema") -> Trained:
            found = load_trained(path, weights=weights, autoencoder=options.autoencoder, device=device, dtype=dtype)
            return replace(found, ranks=ranks)

        yield load(options.path, options.weights), None if guide is None else load(guide)


def drawn_with(
    options: SamplerOptions, trained: Trained, guide: Trained | None, size: tuple[int, int] | None = None
) -> tuple[Trained, Trained | None, list[SamplerSpec]]:
    """Return U-Net and guide for images of a ``size``, and the samplers that are asked for."""
    from ddpm_ds.evaluate.sampling import check_guide

    drawing = trained if size is None else trained.resized(size)
    samplers = samplers_from(options, trained.sampler, drawing.process, **trained.sampler_checks)
    if guide is not None:
        check_guide(guide, trained, samplers)
        guide = (guide if size is None else guide.resized(size)).shared()
    return drawing.shared(), guide, samplers


def samplers_from(
    options: SamplerOptions, sampler: SamplerSpec, diffusion: DiffusionSpec, **checks: Any
) -> list[SamplerSpec]:
    """Return the run's sampler as the options change it, for each kind with each guidance.

    A kind other than the run's has its own default steps and adds no noise. ``checks`` are further arguments of
    :func:`ddpm_ds.diffusion.spec.check_sampler`. SpecError names an option that does not fit.
    """
    from ddpm_ds.diffusion.levels import check_guidance  # it imports PyTorch

    samplers = []
    for kind, strength in itertools.product(options.sampler or (sampler.kind,), options.guidance or (None,)):
        changes = {name: value for name in FLAGS if (value := getattr(options, name)) is not None}
        if strength is not None:
            changes["guidance"] = strength
        if kind != sampler.kind:
            changes = {"kind": kind, "steps": None, "eta": 0.0, **changes}
        try:
            changed = SamplerSpec.model_validate({**sampler.model_dump(), **changes})
        except ValidationError as error:
            fault = error.errors()[0]
            message = fault["msg"][:1].lower() + fault["msg"][1:]
            raise SpecError(f"--{str(fault['loc'][0]).replace('_', '-')} {fault['input']}: {message}") from None
        if options.variance is not None and "variance" not in SAMPLERS[kind].options:
            by = " or ".join(name for name, one in SAMPLERS.items() if "variance" in one.options)
            raise SpecError(f"--variance is an option of {by}, not of {kind}; leave it out or use --sampler {by}")
        try:
            check_sampler(changed, diffusion, guide=options.guide is not None, **checks)
            check_guidance(changed, diffusion)
        except (ValueError, SpecError) as error:
            message = re.sub(r"sampler\.(\w+)", lambda key: "--" + key[1].replace("_", "-"), str(error))
            raise SpecError(message.replace("--kind", "--sampler")) from None
        samplers.append(changed)
    return samplers


def _labels(options: SampleOptions, trained: Trained) -> tuple[int, ...] | None:
    """Return the labels that images take in turn; None for images without labels."""
    from ddpm_ds.evaluate.sampling import check_label

    text, classes, sampling = options.labels, trained.unet_spec.classes, options.drawing.sampling
    if text == "none" or (text is None and classes is None):
        guides = sampling.guide is not None or (classes is None and trained.sampler_checks["drops"])
        if sampling.guidance not in ((), (1.0,)) and not guides:
            raise SpecError(f"--guidance {sampling.guidance[0]:g} needs classes to guide to; leave out --labels none")
        return None
    if classes is None:
        raise SpecError(f"--labels {text}: the U-Net has no classes (unet.classes is null); leave it out")
    if text in (None, "all"):
        return tuple(range(classes))
    words = text.split(",")
    if not all(word.isdecimal() and len(word) <= MOST_DIGITS for word in words):
        raise SpecError(f"--labels {text} should be all, none, a class such as 3, or classes such as 0,1,2")
    labels = tuple(int(word) for word in words)
    check_label(max(labels), classes)
    return labels


def _inputs(options: SampleOptions, trained: Trained) -> Inputs | None:
    """Open the inputs of --conditions; None for a run without conditions."""
    from ddpm_ds.evaluate.inputs import Inputs, check_ahead, check_unconditioned

    if options.conditions is None:
        for name, value in (("members", options.members), ("steps-ahead", options.steps_ahead)):
            if value not in (None, 1):
                raise SpecError(f"--{name} {value} needs --conditions; give it or leave --{name} out")
        check_unconditioned(trained)
        return None
    if options.steps_ahead > 1:
        check_ahead(trained)
    return Inputs.open(options.conditions, trained)


class Line(NamedTuple):
    """Prompt of a file, and its options by their letters."""

    text: str
    given: Mapping[str, Any] = MappingProxyType({})

    def on(self, options: SampleOptions, trained: Trained) -> SampleOptions:
        """Return options with those of the line."""
        given, drawing, size = self.given, options.drawing, options.size
        if given.keys() & {"h", "w"}:
            height, width = size or trained.picture_shape[1:]
            size = given.get("h", height), given.get("w", width)
        sampling = replace(
            drawing.sampling,
            steps=given.get("s", drawing.sampling.steps),
            guidance=(given["l"],) if "l" in given else drawing.sampling.guidance,
            shift=given.get("fs", drawing.sampling.shift),
        )
        text = replace(options.text, negative=given.get("n", options.text.negative))
        drawing = replace(drawing, seed=given.get("d", drawing.seed), sampling=sampling)
        return replace(options, size=size, text=text, drawing=drawing)


_side = partial(whole, lowest=1, highest=MOST_SIDE, what="a number of pixels")
LETTERS: Mapping[str, Callable[[str], Any]] = {
    **{"n": str, "w": _side, "h": _side, "d": seed, "s": positive},
    **{letter: partial(number, lowest=0.0, highest=1e3, what="a number from 0 to 1,000") for letter in ("l", "fs")},
}
"""Options behind a prompt in a file, which sd-scripts reads too, and their types."""


def lines_of(options: TextOptions, trained: Trained) -> list[Line] | None:
    """Return the prompts of --prompt or --prompts; None without both."""
    from ddpm_ds.evaluate.inputs import HELD_OUT, held_out_captions

    path = options.prompts
    if path is None:
        return None if options.prompt is None else [*map(Line, options.prompt)]
    if str(path) == HELD_OUT and not path.exists():  # refused without text
        return [*map(Line, [HELD_OUT] if trained.unet_spec.text is None else held_out_captions(trained))]
    try:
        lines = read_bytes(path, MOST_PROMPTS_BYTES).decode().splitlines()
    except OSError as error:
        raise SpecError(f"--prompts {path} can't be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise SpecError(f"--prompts {path} is no text in UTF-8; write a prompt in each line") from None
    found = []
    for place, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        text, *words = re.split(r"(?:^|\s+)--", line)
        given: dict[str, Any] = {}
        for letter, _, value in (word.partition(" ") for word in words):
            where = f"--prompts {path}, line {place}: --{letter}"
            if letter not in LETTERS:
                raise SpecError(f"{where} is none of {', '.join(f'--{one}' for one in LETTERS)}; remove it")
            try:
                given[letter] = LETTERS[letter](value.strip())
            except OptionError as error:
                raise SpecError(f"{where}: {error}") from None
        found.append(Line(text, given))
    if not found:
        raise SpecError(f"--prompts {path} has no prompt; write one in each line")
    return found


def texts_of(options: TextOptions, trained: Trained) -> Sequence[str] | None:
    """Return the prompts of --prompt or --prompts, without options of their own; None without both."""
    lines = lines_of(options, trained)
    if letter := next((letter for line in lines or () for letter in line.given), None):
        raise SpecError(f"--prompts {options.prompts}: --{letter} is an option for ddpm-ds sample; remove it")
    return None if lines is None else [line.text for line in lines]


def _parts(options: SampleOptions, trained: Trained) -> list[tuple[SampleOptions, Sequence[str] | None]]:
    """Return options and prompts of successive images that are drawn alike; all are, unless lines of a file differ."""
    lines = lines_of(options.text, trained)
    if lines is None:
        return [(options, None)]
    groups = [[*group] for _, group in itertools.groupby(lines, key=lambda line: line.given)]
    if len(groups) == 1:
        return [(lines[0].on(options, trained), [line.text for line in lines])]
    for name, usual in (("count", None), ("first", 0), ("mlflow", False)):
        if (value := getattr(options, name)) != usual:
            fault = f"has lines with options of their own, an image each, and --{name} {value}; leave it out"
            raise SpecError(f"--prompts {options.text.prompts} {fault}")
    if options.out is not None and options.out.suffix:
        raise SpecError(f"--out {options.out} can't hold images for lines with options of their own; name a folder")
    parts, first = list[tuple[SampleOptions, Sequence[str] | None]](), 0
    for group in groups:
        texts, turn = [line.text for line in group], -first % len(group)  # image I takes prompt I modulo their number
        part = replace(group[0].on(options, trained), first=first, count=len(group))
        parts.append((part, [*texts[turn:], *texts[:turn]]))
        first += len(group)
    return parts


def _channel(options: SampleOptions, trained: Trained) -> int:
    channels, channel = trained.channels if trained.are_fields else (), options.channel
    if channel is not None and channel not in channels:
        known = f"is none of {', '.join(channels)}" if channels else "needs a run of fields"
        raise SpecError(f"--channel {channel} {known}; leave it out")
    return 0 if channel is None else channels.index(channel)


def _output(options: SampleOptions, trained: Trained) -> tuple[Path, str]:
    """Return the path of the output and its format; raises an error if it can't be written."""
    from ddpm_ds.evaluate.outputs import check_new, check_recordable

    out, ahead = options.out, options.steps_ahead
    if out is None:
        folder, images = (trained.run_dir, f"-{trained.images_seen:09}") if trained.run_dir else (Path(), "")
        out, kind = folder / f"samples{images}", "folder"
    elif (suffix := out.suffix.lower()) in FORMATS:
        kind = FORMATS[suffix]
    else:
        raise SpecError(f"--out {out}: unknown suffix {out.suffix}; use .npz, .npy or .zarr, or none for a folder")
    if kind != "folder" and trained.are_fields == (kind == "npz"):
        what, use = ("fields", ".npy, .zarr") if trained.are_fields else ("pictures", ".npz")
        raise SpecError(f"--out {out} can't hold {what}, which {options.drawing.path} draws; use {use} or a folder")
    if kind == "folder" and ahead > 1:
        raise SpecError(f"--out {out} can't hold --steps-ahead {ahead}; use .npy or .zarr")
    if kind == "zarr" and not (find_spec("zarr") and find_spec("xarray")):
        raise SpecError(f"--out {out} needs packages that are missing: pip install 'ddpm_ds[fields]'; or use .npy")
    if options.mlflow and kind != "folder":
        raise SpecError(f"--mlflow logs a grid, and --out {out} is a {kind}; leave one of them out")
    if options.mlflow:
        check_recordable(trained)
    if kind in ("folder", "zarr"):
        check_new(out)
    else:
        check_output(out, overwrite=options.overwrite, called="--out ")
    return out, kind


def _requests(options: SampleOptions, trained: Trained, guide: Trained | None) -> list[tuple[Setup, Request]]:
    """Return the images of each part, and everything that they are drawn with."""
    from ddpm_ds.evaluate.sampling import Setup, request_for

    found = []
    for part, texts in _parts(options, trained):
        drawing, its_guide, (sampler,) = drawn_with(part.drawing.sampling, trained, guide, part.size)
        labels, setup = _labels(part, drawing), Setup(drawing, sampler, its_guide, _inputs(part, drawing))
        setup = setup.with_prompts(texts, part.text.negative)
        request = request_for(
            setup,
            labels if part.labels else "all",
            first=part.first,
            count=part.count,
            members=part.members,
            steps_ahead=part.steps_ahead,
            seed=part.drawing.seed,
            batch_images=part.drawing.batch_images,
        )
        found.append((setup, request))
    return found


@Verb
def sample(options: SampleOptions) -> int:
    """Draw images from a checkpoint or an export.

    Image number I of a seed is the same picture for any --count, --first and --batch-images. If interrupted, finished
    batches are kept, and the same command continues from there (docs/sampling.md).

      ddpm-ds sample runs/digits/checkpoints/images-000128000 --labels 3 --guidance 2 --out threes
      ddpm-ds sample runs/cifar10 --count 50000 --out cifar10.npz --sampler ddim --steps 100
      ddpm-ds sample runs/shapes --prompt "a red circle" --guidance 5 --out shapes
      ddpm-ds sample runs/forecast --conditions today.h5 --members 8 --steps-ahead 20 --out forecast.zarr
    """
    set_environment()
    if max(len(options.drawing.sampling.sampler), len(options.drawing.sampling.guidance)) > 1:
        raise SpecError("sample takes one --sampler and one --guidance; ddpm-ds evaluate compares several")
    with loaded(options.drawing) as (trained, guide):
        return _sample(options, trained, guide)


def _sample(options: SampleOptions, trained: Trained, guide: Trained | None) -> int:
    """Draw the images that are asked for, and return the exit code."""
    from ddpm_ds.evaluate import outputs
    from ddpm_ds.evaluate.sampling import draw_missing
    from ddpm_ds.unet.operations import widening

    channel, (out, kind) = _channel(options, trained), _output(options, trained)
    requests = _requests(options, trained, guide)
    work = [(*one, outputs.DrawnImages(out.parent / f".{out.name}.{one[1].key}", one[1])) for one in requests]
    if line := widening(trained.device.type, trained.dtype):
        print(line)
    count = sum(request.count for _, request, _ in work)
    try:
        for setup, request, drawn in work:
            draw_missing(setup, request, drawn)
        images, shown, inputs = drawn.images(), request.labels_of(request.index), setup.inputs
        if kind == "zarr":
            outputs.write_zarr(out, trained, request.by_input(images), options.first)
        elif kind == "npy":
            outputs.write_numpy(out, images if inputs is None else request.by_input(images))
        elif kind == "npz":
            outputs.write_numpy(out, images, shown)
        else:
            grid = None  # where images may differ in size
            if len(work) == 1:
                given: dict[str, Any] = {"inputs": inputs, "request": request, "channel": channel}
                grid = outputs.titled_grid(setup.trained, setup.sampler, images, shown, **given)
            numbered = (zip(one.index, drawn.images(), strict=True) for _, one, drawn in work)
            outputs.write_pngs(out, grid, itertools.chain.from_iterable(numbered))
        for *_, drawn in work:
            drawn.remove()
    except KeyboardInterrupt:
        kept = f"{sum(drawn.count for *_, drawn in work):,} of {count:,} images are kept"
        print(f"interrupted: {kept}; the same command continues from there")
        return 128 + signal.SIGINT
    if len(work) > 1:
        print(f"{out}: {count:,} images, as the lines of {options.text.prompts} say")
        return 0
    seen = "" if request.images_seen is None else f" after {request.images_seen:,} images"
    each = "" if inputs is None else f", {request.members} for each of {request.count // request.members:,} inputs,"
    made = f"{request.sampler.kind} in {request.sampler.steps} steps, seed {request.seed}, {request.weights} weights"
    print(f"{out}: {request.count:,} images{each} by {made}{seen}")
    if options.mlflow:
        params = request.model_dump(exclude={"batch_images"})
        outputs.record_child(trained, "sample", params, artifacts={out / outputs.GRID: ""})
    return 0
