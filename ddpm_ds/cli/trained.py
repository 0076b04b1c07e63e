"""Verbs for trained weights besides ``sample``: ``evaluate``, and ``export`` and ``import`` to and from diffusers."""

from __future__ import annotations

import argparse
import copy
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddpm_ds.cli.options import SpecOptions, Verb
from ddpm_ds.cli.sample import (
    DrawingOptions,
    TextOptions,
    WeightsOptions,
    different,
    drawn_with,
    loaded,
    one_of,
    texts_of,
)
from ddpm_ds.evaluate import FEWEST_IMAGES, METRICS, USUAL_MEMBERS
from ddpm_ds.ground.errors import SpecError
from ddpm_ds.ground.options import flag, option, positive, whole
from ddpm_ds.ground.units import MOST_COUNT
from ddpm_ds.processes.ranks import set_environment

if TYPE_CHECKING:
    from ddpm_ds.evaluate.ensembles import FieldScores
    from ddpm_ds.evaluate.outputs import Request
    from ddpm_ds.evaluate.sampling import Setup
    from ddpm_ds.evaluate.scores import Score
    from ddpm_ds.evaluate.trained import Trained

MANY = 10_000
OF_DRAWN = ("count", "members", "conditions", "inception_weights", "prompt", "prompts", "negative")
"""Options of ``evaluate`` on drawn images and their scores."""
DRAWN_AT_ONCE = 16
_metrics = different(partial(one_of, words=METRICS))


@dataclass(frozen=True)
class EvaluateOptions:
    count: int | None = option(f"images (default {MANY}), or inputs to draw members for (default all)", "N", positive)
    members: int | None = option(f"images of each input (default {USUAL_MEMBERS}, of a regression 1)", "K", positive)
    conditions: Path | None = option("inputs with their true images (default the run's held-out ones)", "PATH|held-out")
    metrics: tuple[str, ...] | None = option(
        f"some of {','.join(METRICS)} (default all that can be computed of drawn images)", "NAME,...", _metrics
    )
    dataset: Path | None = option("folder of the prepared real images, for an export or if it has moved", "DIR")
    inception_weights: Path | None = option("torch-fidelity's weights, instead of a download", "FILE")
    out: Path | None = option("folder of evaluations (default RUN_DIR/evaluations, or ./evaluations)", "DIR")
    text: TextOptions = TextOptions()
    drawing: DrawingOptions = DrawingOptions()


@Verb
def evaluate(options: EvaluateOptions) -> None:
    """Score a checkpoint or an export against the real images.

    Draws images and compares them with those of the prepared data set: FID, KID, precision and recall of Inception
    features (extra [fid] and a download), and a Fréchet distance of raw pixels. For a run with conditions, it draws
    ensembles for the held-out images: error of the mean, CRPS and spread over skill by channel, and spectra. --metrics
    loss measures the held-out loss by noise level, as training does, and draws nothing.

    Lists of samplers and guidances are evaluated one by one. The numbers go to one table, to folders
    RUN_DIR/evaluations/NAME, and into MLflow as children of the run (docs/evaluation.md). If interrupted, drawn images
    are kept; the same command, also with other --metrics, draws none of them again.

      ddpm-ds evaluate runs/digits --count 2000 --metrics pixel --sampler ddim,dpm_solver --steps 100
      ddpm-ds evaluate runs/cifar10 --weights raw --metrics loss
      ddpm-ds evaluate runs/faces --guidance 1,1.5,2,3 --guidance-between 0.3,5
      ddpm-ds evaluate exported --dataset data/cifar10-32px-3ch --inception-weights inception.pth
      ddpm-ds evaluate runs/shapes --prompts held-out --count 1000 --metrics fid
      ddpm-ds evaluate runs/downscaling --members 16
    """
    set_environment()
    from ddpm_ds.evaluate.ensembles import ensemble_table
    from ddpm_ds.evaluate.inputs import held_out_images
    from ddpm_ds.evaluate.outputs import check_recordable
    from ddpm_ds.evaluate.sampling import Setup
    from ddpm_ds.evaluate.scores import evaluate_losses, loss_table, table

    measures, drawing = "loss" in (options.metrics or ()), options.drawing
    if options.metrics is not None:
        options = replace(options, metrics=tuple(name for name in options.metrics if name != "loss"))
    draws = options.metrics != ()
    if not draws:
        _refuse(options, OF_DRAWN, " is an option for drawn images, and --metrics loss draws none")
    tables = []
    with loaded(drawing) as weights:
        trained, guide, samplers = drawn_with(drawing.sampling, *weights)
        check_recordable(trained)
        if measures:
            held_out = held_out_images(trained, "--metrics loss", options.dataset, instead="leave it out")
        if draws:
            work = (_of_ensembles if trained.is_conditioned else _of_images)(options, trained)
        if measures:
            losses = evaluate_losses(trained, held_out, options.out, drawing.batch_images)
            tables.append(loss_table(trained.weights, losses))
        if draws:
            found: list[Any] = [work(Setup(trained, sampler, guide)) for sampler in samplers]
            tables.append((ensemble_table if trained.is_conditioned else table)(found))
    print(*(f"\n{text}" for text in tables), sep="\n")


def _refuse(options: EvaluateOptions, names: Sequence[str], why: str) -> None:
    """Raise SpecError with the words ``why`` if one of the options is given."""
    for name in names:
        if (value := getattr(options if hasattr(options, name) else options.text, name)) is not None:
            given = ",".join(value) if isinstance(value, tuple) else value
            raise SpecError(f"--{name.replace('_', '-')} {given}{why}; leave it out")


def _of_images(options: EvaluateOptions, trained: Trained) -> Callable[[Setup], tuple[Request, list[Score]]]:
    from ddpm_ds.evaluate.scores import Scorer, evaluate, open_reference

    _refuse(options, ("members", "conditions"), f": {trained.origin} was trained without conditions")
    count = MANY if options.count is None else options.count
    if not FEWEST_IMAGES <= count <= MOST_COUNT:
        raise SpecError(f"--count {count} should be {FEWEST_IMAGES} to {MOST_COUNT:,}; fewer images can't be compared")
    scorer = Scorer(options.metrics, open_reference(trained, options.dataset), options.inception_weights)
    numbers = {"seed": options.drawing.seed, "count": count, "batch_images": options.drawing.batch_images}
    texts, negative = texts_of(options.text, trained), options.text.negative
    return lambda setup: evaluate(setup.with_prompts(texts, negative), scorer, options.out, **numbers)


def _of_ensembles(options: EvaluateOptions, trained: Trained) -> Callable[[Setup], tuple[Request, FieldScores]]:
    from ddpm_ds.evaluate.ensembles import evaluate_ensembles
    from ddpm_ds.evaluate.inputs import Inputs, held_out_captions

    why = f" is an option for runs without conditions, and {trained.origin} has some"
    _refuse(options, ("metrics", "inception_weights"), why)
    given, drawing, texts = options.conditions, options.drawing, texts_of(options.text, trained)
    inputs = Inputs.held_out(trained, options.dataset) if given is None else Inputs.open(given, trained)
    if texts is None and given is None and trained.unet_spec.text is not None:
        texts = held_out_captions(trained)
    evaluated = partial(evaluate_ensembles, count=options.count, members=options.members)
    numbers = {"seed": drawing.seed, "batch_images": drawing.batch_images}
    return lambda setup: evaluated(
        replace(setup, inputs=inputs).with_prompts(texts, options.text.negative), options.out, **numbers
    )


_samples = partial(whole, lowest=0, highest=64, what="a number from 0 to 64")


def _label(text: str) -> str:
    if text != "none":
        whole(text, 0, 10**6, "none or a class, such as 3")
    return text


class InsteadOfPlace(argparse.Action):
    """Option in the place of the positional argument ``place``, which is then not required."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, *_: Any) -> None:
        next(each for each in parser._actions if each.dest == "place").required = False
        setattr(namespace, self.dest, value)


@dataclass(frozen=True)
class ExportOptions(WeightsOptions):
    place: Path | None = option("folder to write, empty or new; or a new .safetensors", "OUT", names=("place",))
    out: Path | None = option("OUT, written as an option", "OUT", action=InsteadOfPlace)
    dtype: Literal["fp32", "fp16"] = option("data type of the file (default fp32)", default="fp32")
    label: str | None = option("fold this label into the weights of a class-conditional U-Net", "none|K", _label)
    samples: int = option("images in samples.png (default %(default)s; 0 draws none)", "N", _samples, default=64)
    single_file: bool = flag("write one .safetensors with the original names into the folder, and its card")


@dataclass(frozen=True)
class ImportOptions(SpecOptions):
    path: Path = option(
        "folder of a pipeline or U-Net, a .safetensors, or a name on the hub", "PATH|OWNER/NAME", names=("path",)
    )
    spec: Path = option("spec of the run: data, length, batch", "BASE", required=True)
    out: Path = option("folder to write; must be empty or not exist", "OUT", required=True)
    last_label: Literal["none", "class"] = option("the last class embedding (default none: no label)", default="none")


@Verb
def export(options: ExportOptions) -> None:
    """Write trained weights as a pipeline of diffusers.

    Writes a folder for diffusers' DDPMPipeline, with a model card and a grid of samples, or of a U-Net with text a
    single file; diffusers is not needed. An export of a run is recorded in MLflow as the run's child. docs/export.md
    says how to use it.

      ddpm-ds export runs/digits/checkpoints/images-000128000 hub/digits --dtype fp16
      ddpm-ds export runs/sdxl --out sdxl.safetensors --dtype fp16
          one file with U-Net, autoencoder and text encoders, for ComfyUI and A1111
      ddpm-ds export runs/faces hub/faces --label none
          a class-conditional U-Net as an unconditional one, which DDPMPipeline can sample from
    """
    set_environment()
    import torch

    from ddpm_ds.evaluate.diffusers.card import last_picture, model_card
    from ddpm_ds.evaluate.diffusers.export import rounded, without_labels, write_pipeline
    from ddpm_ds.evaluate.diffusers.text_pipeline import tokens_note, write_single_file
    from ddpm_ds.evaluate.outputs import check_recordable, new_output, record_child, titled_grid
    from ddpm_ds.evaluate.sampling import sample
    from ddpm_ds.evaluate.trained import load_trained
    from ddpm_ds.ground.device import choose_device
    from ddpm_ds.tracking.pictures import write_png

    device, out = choose_device(options.device), options.out or options.place
    assert out is not None, "the parser asks for one"
    if options.out and options.place:
        raise SpecError(f"--out {options.out}: OUT is {options.place} already; leave one of them out")
    is_file = out.suffix.lower() == ".safetensors"
    with new_output(out, file=is_file) as written:
        trained = load_trained(options.path, weights=options.weights, autoencoder=options.autoencoder)
        check_recordable(trained)
        if (row := _row(options.label, trained.unet_spec.classes)) is not None:
            trained = without_labels(trained, row)
        trained = rounded(trained, options.dtype)
        single = None if is_file or not options.single_file else f"{out.name}.safetensors"
        write = write_single_file if is_file or single else write_pipeline
        held = write(trained, written / (single or ""), options.dtype)
        alone = not trained.is_conditioned and trained.unet_spec.text is None
        last = None if alone else last_picture(trained)
        picture = "samples.png" if options.samples and (alone or last) and not is_file else None
        if picture and last:
            shutil.copyfile(last, written / picture)
        elif picture:
            drawing = replace(trained, unet=copy.deepcopy(trained.unet).to(device))
            images = sample(drawing, options.samples, batch_images=DRAWN_AT_ONCE, progress=True)
            classes = trained.unet_spec.classes
            labels = None if classes is None else torch.arange(options.samples) % classes
            write_png(titled_grid(trained, trained.sampler, images.numpy(), labels), written / picture)
        card = model_card(trained, precision=options.dtype, label=options.label, picture=picture, single_file=single)
        if not is_file:
            (written / "README.md").write_text(card, encoding="utf-8")
    size = sum(file.stat().st_size for file in (out, *out.rglob("*")) if file.is_file())
    what = f"{trained.weights} weights of {trained.origin} in {options.dtype}"
    print(f"{out}: {what}, {size / 1e6:,.1f} MB", *filter(None, (held, tokens_note(trained.text))), sep="\n")
    params = {"dtype": options.dtype, "label": options.label, "weights": trained.weights}
    files = [out] if is_file else sorted(out.iterdir())
    record_child(trained, "export", params, artifacts=dict.fromkeys(files, "export"))


def _row(label: str | None, classes: int | None) -> int | None:
    """Return the row of the label embedding that --label names; None without --label."""
    from ddpm_ds.evaluate.sampling import check_label

    if label is None:
        return None
    if label == "none" and classes is not None:
        return classes
    check_label(label, classes, "--label")
    return int(label)


@Verb
def import_(options: ImportOptions) -> None:
    """Take a model of diffusers as the start of a run.

    Reads a U-Net of diffusers, or a single file of SD 1, SD 2 or SDXL. Writes OUT/weights.safetensors and
    OUT/spec.yaml: BASE with the model's U-Net, noise schedule and text encoders, and train.initial_weights. A model
    that our U-Net can't express is refused with the reason.

      ddpm-ds import downloads/ddpm-cifar10-32 --spec launch/specs/cifar10.yaml --out imported
      ddpm-ds import stabilityai/stable-diffusion-xl-base-1.0 --spec captions.yaml --out imported
      ddpm-ds import downloads/sd_xl_base_1.0.safetensors --spec captions.yaml --out imported
          a single file; data.text of the spec names the pipeline's text encoders
      ddpm-ds import training/unet_ema --spec launch/specs/cifar10.yaml --last-label class --out imported
          averaged weights of diffusers' own training, whose every label is a class
    """
    from ddpm_ds.evaluate.diffusers.importing import SPEC_FILE, import_weights

    given, is_class = (options.path, options.spec, options.overrides, options.out), options.last_label == "class"
    imported, lines = import_weights(*given, last_label_is_class=is_class)
    encodes = imported.data.autoencoder is not None or imported.data.text is not None
    print("\n".join(lines))
    spec = shlex.quote(str(options.out / SPEC_FILE))
    config = "zero2_fp16"
    if encodes:
        config = "zero2_bf16"
        print(f"encode its pictures and captions with\n  ddpm-ds prepare --encode --spec {spec}")
    print(f"train it with\n  ddpm-ds train --deepspeed_config ds_configs/{config}.json --spec {spec}")
