"""A trained U-Net as a pipeline of diffusers: written without it, and read back by it where it is installed.

::

    DIR/
        README.md                                   the model card
        samples.png
        model_index.json                            what DDPMPipeline is made of
        scheduler/scheduler_config.json
        unet/config.json
        unet/diffusion_pytorch_model.safetensors

A model of diffusers as the start of a run: its weights under our names, and a spec with its U-Net and process.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import save
from torch import Tensor

from ddpm_ds.config.spec import DiffusionSpec, RunSpec
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.device import DTYPES
from ddpm_ds.diffusion.diffusers_config import scheduler_config
from ddpm_ds.diffusion.objective import alpha_bars
from ddpm_ds.errors import CheckpointError, OutputError, SpecError
from ddpm_ds.evaluate.outputs import check_new_folder, new_folder
from ddpm_ds.evaluate.trained import CONFIG, SCHEDULER_CONFIG, WEIGHTS, DiffusersFolder, Trained
from ddpm_ds.unet.diffusers import diffusers_config, to_diffusers
from ddpm_ds.unet.layers import Layer, unet_layers
from ddpm_ds.unet.model import UNet, parameter_shapes

Precision = Literal["fp32", "fp16"]
DIFFUSERS_VERSION = "0.42.1"
"""Whose configurations these are."""
PREDICTION_TOLERANCE = 1e-5
"""Largest difference between our prediction and diffusers', as a share of the largest value."""
COMPARED_TIMESTEPS = 32
"""The first ones: both compute the angles t x frequency in fp32, whose rounding alone makes 1e-5 at t = 1000."""
ALPHA_BAR_TOLERANCE = 1e-5
"""diffusers adds up its schedule in fp32."""


def layers_of(trained: Trained) -> tuple[Layer, ...]:
    """The list of layers of a trained U-Net."""
    channels, size, _ = trained.image_shape
    return unet_layers(trained.unet_spec, image_channels=channels, image_size=size)


@torch.no_grad()
def without_labels(trained: Trained, row: int) -> Trained:
    """The unconditional U-Net that predicts what a class-conditional one on the CPU does for one label.

    What label ``row`` adds to the embedding moves into the bias that is added just before: exact but for rounding.
    """
    spec = trained.unet_spec.model_copy(update={"classes": None})
    folded = replace(trained, unet_spec=spec, sampler=trained.sampler.model_copy(update={"guidance": 1.0}))
    unet = UNet(layers_of(folded), 0).eval().requires_grad_(False)
    state = trained.unet.layers.state_dict()
    state["0.linear2.bias"] = state["0.linear2.bias"] + state.pop("0.label_embedding.weight")[row]
    unet.layers.load_state_dict(state)
    return replace(folded, unet=unet)


@torch.no_grad()
def rounded(trained: Trained, precision: Precision) -> Trained:
    """The same U-Net, in fp32, with its weights rounded in place to what a file in ``precision`` holds.

    Raises:
        CheckpointError: a weight is beyond the range.
    """
    for name, parameter in trained.unet.layers.named_parameters():
        parameter.copy_(parameter.to(DTYPES[precision][1]))
        if not parameter.isfinite().all():
            raise CheckpointError(f"{name} of {trained.origin} has values beyond {precision}; use --dtype fp32")
    return trained


def unet_config(trained: Trained) -> dict[str, Any]:
    """Arguments of the ``UNet2DModel`` that equals a trained U-Net.

    Raises:
        CheckpointError: diffusers has no such U-Net.
    """
    channels, size, _ = trained.image_shape
    try:
        return diffusers_config(trained.unet_spec, image_channels=channels, image_size=size)
    except ValueError as error:
        raise CheckpointError(f"{trained.origin} can't be exported: {error}") from None


def write_pipeline(trained: Trained, folder: Path, precision: Precision) -> None:
    """Write the configurations and the weights of a ``DDPMPipeline`` into ``folder``."""
    classes = {"unet": "UNet2DModel", "scheduler": "DDPMScheduler"}
    configs = {
        "unet/" + CONFIG: ("UNet2DModel", unet_config(trained)),
        "scheduler/" + SCHEDULER_CONFIG: ("DDPMScheduler", scheduler_config(trained.diffusion, trained.sampler)),
        "model_index.json": ("DDPMPipeline", {part: ["diffusers", name] for part, name in classes.items()}),
    }
    for name, (class_name, values) in configs.items():
        (folder / name).parent.mkdir(exist_ok=True)
        content = {"_class_name": class_name, "_diffusers_version": DIFFUSERS_VERSION, **values}
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    tensors = to_diffusers(trained.unet.layers.state_dict(), layers_of(trained))
    dtype = DTYPES[precision][1]
    # Copies, because q, k and v are views of one tensor, and convolutions' weights have their dimensions permuted.
    copies = {
        name: tensor.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    (folder / "unet" / WEIGHTS[0]).write_bytes(save(copies, metadata={"format": "pt"}))


@torch.no_grad()
def check_in_diffusers(trained: Trained, folder: Path) -> str:
    """Read a written pipeline back with diffusers and compare it with the U-Net on the CPU it was made from, in fp64.

    Returns what was compared in one line, or that diffusers is not installed.

    Raises:
        OutputError: they differ.
    """
    if importlib.util.find_spec("diffusers") is None:
        return "not read back, because diffusers is not installed (pip install diffusers)"
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    pipeline = diffusers.DDPMPipeline.from_pretrained(folder, local_files_only=True, low_cpu_mem_usage=False)
    alpha_bar = alpha_bars(trained.diffusion)
    schedule = (pipeline.scheduler.alphas_cumprod.double() - alpha_bar).abs().max().item()
    inputs = _examples(trained)
    theirs = pipeline.unet.double()(*inputs).sample
    ours = copy.deepcopy(trained.unet).double()(*inputs)
    prediction = ((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-30)).item()
    # Not by "greater than", which a NaN is not.
    if not (prediction <= PREDICTION_TOLERANCE and schedule <= ALPHA_BAR_TOLERANCE):
        raise OutputError(
            f"diffusers {diffusers.__version__} reads something else than {trained.origin}: predictions differ by "
            f"{prediction:.1e} of the largest, alpha_bar by {schedule:.1e}; nothing was written, please report it"
        )
    return (
        f"read back by diffusers {diffusers.__version__}: its predictions for random images are ours within "
        f"{prediction:.0e} of the largest, its alphas_cumprod within {schedule:.0e}"
    )


def _examples(trained: Trained) -> tuple[Tensor, ...]:
    """Four random x_t in fp64, t and, for a class-conditional U-Net, labels."""
    generator = torch.Generator().manual_seed(0)
    x_t = torch.randn(4, *trained.image_shape, generator=generator, dtype=torch.float64)
    t = torch.randint(0, min(trained.diffusion.timesteps, COMPARED_TIMESTEPS), (4,), generator=generator)
    classes = trained.unet_spec.classes
    return (x_t, t) if classes is None else (x_t, t, torch.randint(0, classes + 1, (4,), generator=generator))


WEIGHTS_FILE, SPEC_FILE = "weights.safetensors", "spec.yaml"
ANY_UNET = ("channels=2", "multipliers=[1]", "attention_resolutions=[]", "head_channels=null", "norm_groups=1")
"""A U-Net that fits images of any size: the one of the base spec is replaced, so it need not fit."""


def import_weights(path: Path, base: Path, overrides: Sequence[str], out: Path) -> list[str]:
    """Write ``out``: the weights of the diffusers folder ``path`` and ``base`` as a spec that begins with them.

    Of the spec's sections `unet` and `diffusion` the model decides everything but dropout, loss and weighting, which
    the weights don't depend on. Returns what was done, in lines.

    Raises:
        CheckpointError: ``path`` holds no model, a damaged one, or one that our U-Net can't express.
        SpecError: ``base`` is wrong, or is of other images than the model.
        OutputError: ``out`` is there, or can't be written.
    """
    check_new_folder(out)
    spec_of_run = load_spec(base, [*overrides, *(f"unet.{item}" for item in ANY_UNET)])
    if not DiffusersFolder.at(path):
        raise CheckpointError(f"{path} is no folder of diffusers: it should hold unet/config.json or config.json")
    folder = DiffusersFolder(path)
    _check_images(folder, spec_of_run, base)
    diffusion = folder.diffusion(spec_of_run.diffusion) if folder.has_schedule else spec_of_run.diffusion
    spec = _merged(spec_of_run, folder, diffusion, base, out / WEIGHTS_FILE)
    layers = unet_layers(folder.unet, image_channels=folder.image_channels, image_size=folder.image_size)
    with new_folder(out) as temporary:
        parameters = _write_weights(folder, layers, temporary / WEIGHTS_FILE)
        text = yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False)
        (temporary / SPEC_FILE).write_text(text)
    lines = [f"{out / WEIGHTS_FILE}: {parameters:,} parameters of {folder.weights}, in fp32"]
    if folder.class_rows is not None:
        lines.append(f"its {folder.class_rows} labels are read as {folder.unet.classes} classes and, last, no label")
    kept = "its unet and diffusion" if folder.has_schedule else "its unet (it has no scheduler_config.json)"
    return [*lines, f"{out / SPEC_FILE}: {base} with {kept}"]


def _check_images(folder: DiffusersFolder, spec: RunSpec, base: Path) -> None:
    """The images of the base spec are those that the model is for, and so are its classes."""
    wanted: dict[str, Any] = {"data.channels": folder.image_channels, "data.image_size": folder.image_size}
    there: dict[str, Any] = {"data.channels": spec.data.channels, "data.image_size": spec.data.image_size}
    if spec.unet.classes is not None and folder.unet.classes is not None:
        wanted["unet.classes"], there["unet.classes"] = folder.unet.classes, spec.unet.classes
    for key, value in there.items():
        if value != wanted[key]:
            what = f"the model of {folder.path} has {wanted[key]}"
            if key == "unet.classes":
                what += f" (its last label of {folder.class_rows} is read as no label)"
            raise SpecError(f"{base}: {key} = {value}, but {what}; --set {key}={wanted[key]}")


def _merged(base: RunSpec, folder: DiffusersFolder, diffusion: DiffusionSpec, origin: Path, weights: Path) -> RunSpec:
    """The spec of a run that begins with the model's weights."""
    values = base.model_dump(mode="json")
    values["unet"] = {**folder.unet.model_dump(mode="json"), "dropout": base.unet.dropout}
    values["diffusion"] = diffusion.model_dump(mode="json")
    values["train"]["initial_weights"] = str(weights)
    try:
        return RunSpec.model_validate_json(json.dumps(values))
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SpecError(f"{origin} with the unet and diffusion of {folder.path}: {message}") from None


def _write_weights(folder: DiffusersFolder, layers: Sequence[Layer], path: Path) -> int:
    """Write all tensors under our names; returns the number of values."""
    tensors = dict(folder.tensors(layers, parameter_shapes(layers)))
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{folder.weights} has values in {name} that are not finite; get it again")
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    return sum(tensor.numel() for tensor in tensors.values())
