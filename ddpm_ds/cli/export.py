"""``ddpm-ds export`` and ``ddpm-ds import``: convert weights to and from diffusers."""

from __future__ import annotations

import argparse
import copy
import shlex
from dataclasses import replace
from typing import Any

from ddpm_ds.cli.sample import add_weights_options
from ddpm_ds.command_line import add_overrides, file_path, whole
from ddpm_ds.errors import SpecError
from ddpm_ds.processes.ranks import set_environment

MOST_SAMPLES = 64
DRAWN_AT_ONCE = 16

EXPORT_DESCRIPTION = """\
Write trained weights as a folder that diffusers' DDPMPipeline loads and samples from, with a model card and a grid of
samples. diffusers is not needed; if it is installed, it reads the folder back and the two are compared before the
folder appears. From a run's checkpoint the export is recorded in MLflow, as a child of the run.
"""

EXPORT_EXAMPLES = """\
examples
  ddpm-ds export runs/digits hub/digits
  ddpm-ds export runs/digits/checkpoints/images-000128000 hub/digits --dtype fp16 --register digits
  ddpm-ds export runs/faces hub/faces --label none
      a class-conditional U-Net as an unconditional one, which DDPMPipeline can sample from

docs/export.md says how to use the folder.
"""

IMPORT_DESCRIPTION = """\
Take a UNet2DModel of diffusers as the start of a run: OUT/weights.safetensors, and OUT/spec.yaml, which is BASE with
the model's U-Net and noise schedule, and train.initial_weights. What our U-Net can't express is refused by name.
"""

IMPORT_EXAMPLES = """\
examples
  ddpm-ds import downloads/ddpm-cifar10-32 --spec launch/specs/cifar10.yaml --out imported
  deepspeed launch/train.py --deepspeed_config ds_configs/zero2_fp16.json --spec imported/spec.yaml

  ddpm-ds import hub/digits --spec launch/specs/digits.yaml --set optimizer.learning_rate=1e-4 --out imported
      an export of ours

  ddpm-ds import training/unet_ema --spec launch/specs/cifar10.yaml --last-label class --out imported
      averaged weights of diffusers' own training, whose every label is a class
"""


def add_export(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb ``export``."""
    what = "write trained weights as a pipeline of diffusers"
    parser = verbs.add_parser("export", help=what, description=EXPORT_DESCRIPTION, epilog=EXPORT_EXAMPLES)
    add_weights_options(parser)
    parser.add_argument("out", type=file_path, metavar="DIR", help="folder to write; must be empty or not exist")
    of_file = "data type of the file (default fp32)"
    parser.add_argument("--dtype", choices=("fp32", "fp16"), default="fp32", help=of_file)
    parser.add_argument(
        "--label", type=_label, metavar="none|K", help="fold this label into the weights of a class-conditional U-Net"
    )
    parser.add_argument(
        "--samples",
        type=_samples,
        default=MOST_SAMPLES,
        metavar="N",
        help=f"images in samples.png, drawn by the run's sampler (default {MOST_SAMPLES}, 0 draws none)",
    )
    parser.add_argument("--register", metavar="NAME", help="make the export a version of this model in MLflow")
    parser.set_defaults(run=_export)


def add_import(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb ``import``."""
    what = "take a model of diffusers as the start of a run"
    parser = verbs.add_parser("import", help=what, description=IMPORT_DESCRIPTION, epilog=IMPORT_EXAMPLES)
    parser.add_argument("path", type=file_path, metavar="DIR", help="folder of a pipeline, or of a UNet2DModel")
    parser.add_argument(
        "--spec", type=file_path, required=True, metavar="BASE", help="spec of the run: data, length, batch"
    )
    add_overrides(parser)
    parser.add_argument(
        "--out", type=file_path, required=True, metavar="OUT", help="folder to write; must be empty or not exist"
    )
    parser.add_argument(
        "--last-label",
        choices=("none", "class"),
        default="none",
        help="what the last of num_class_embeds is: no label, as in our exports (default), or a class like the others",
    )
    parser.set_defaults(run=_import)


def _label(text: str) -> str:
    if text != "none":
        whole(text, 0, 10**6, "none or a class, such as 3")
    return text


def _samples(text: str) -> int:
    return whole(text, 0, MOST_SAMPLES, f"a number from 0 to {MOST_SAMPLES}")


def _export(options: argparse.Namespace) -> None:
    set_environment()
    import torch

    from ddpm_ds.data.pictures import write_png
    from ddpm_ds.device import choose_device
    from ddpm_ds.evaluate.diffusers.export import (
        check_in_diffusers,
        model_card,
        rounded,
        without_labels,
        write_pipeline,
    )
    from ddpm_ds.evaluate.outputs import check_recordable, new_folder, record_child, titled_grid
    from ddpm_ds.evaluate.sampling import sample
    from ddpm_ds.evaluate.trained import load_trained

    device = choose_device(options.device)
    with new_folder(options.out) as folder:
        trained = load_trained(options.path, weights=options.weights, autoencoder=options.autoencoder)
        check_recordable(trained)
        if options.register and trained.run_dir is None:
            raise SpecError(
                f"--register {options.register}: {trained.origin} is not in the folder of a run, whose MLflow run "
                f"would hold the model; leave it out"
            )
        if (row := _row(options.label, trained.unet_spec.classes)) is not None:
            trained = without_labels(trained, row)
        trained = rounded(trained, options.dtype)
        write_pipeline(trained, folder, options.dtype)
        compared = check_in_diffusers(trained, folder)
        picture = "samples.png" if options.samples else None
        if picture:
            drawing = replace(trained, unet=copy.deepcopy(trained.unet).to(device))
            images = sample(drawing, options.samples, batch_images=DRAWN_AT_ONCE, progress=True)
            classes = trained.unet_spec.classes
            labels = None if classes is None else torch.arange(options.samples) % classes
            write_png(titled_grid(trained, trained.sampler, images.numpy(), labels), folder / picture)
        card = model_card(trained, precision=options.dtype, label=options.label, picture=picture)
        (folder / "README.md").write_text(card, encoding="utf-8")
    size = sum(file.stat().st_size for file in options.out.rglob("*"))
    print(f"{options.out}: {trained.weights} weights of {trained.origin} in {options.dtype}, {size / 1e6:,.1f} MB")
    print(compared)
    record_child(
        trained,
        "export",
        {"dtype": options.dtype, "label": options.label, "weights": trained.weights, "compared": compared},
        artifacts=dict.fromkeys(sorted(options.out.iterdir()), "export"),
        model_name=options.register,
    )


def _row(label: str | None, classes: int | None) -> int | None:
    """Return the row of the label embedding that --label asks for; None without --label."""
    from ddpm_ds.evaluate.sampling import check_label

    if label is None:
        return None
    if label == "none" and classes is not None:
        return classes
    check_label(label, classes, "--label")
    return int(label)


def _import(options: argparse.Namespace) -> None:
    from ddpm_ds.evaluate.diffusers.export import SPEC_FILE, import_weights

    given, is_class = (options.path, options.spec, options.overrides, options.out), options.last_label == "class"
    print("\n".join(import_weights(*given, last_label_is_class=is_class)))
    spec = shlex.quote(str(options.out / SPEC_FILE))
    print(f"train it with\n  deepspeed launch/train.py --deepspeed_config ds_configs/zero2_fp16.json --spec {spec}")
