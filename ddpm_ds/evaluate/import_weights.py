"""A model of diffusers as the start of a run: its weights under our names, and a spec with its U-Net and process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from safetensors.torch import save

from ddpm_ds.errors import CheckpointError, SpecError
from ddpm_ds.evaluate.diffusers_folder import DiffusersFolder
from ddpm_ds.evaluate.new_folder import check_new_folder, new_folder
from ddpm_ds.spec import DiffusionSpec, RunSpec
from ddpm_ds.spec_file import load_spec
from ddpm_ds.unet.layers import Layer, unet_layers
from ddpm_ds.unet.model import parameter_shapes

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
