"""Import of a model of diffusers as the start of a run: its weights by our names, and a spec with its U-Net."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import pad

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import SPECS, load_spec, parse_yaml, preset, read_values, rewritten
from ddpm_ds.data.hub import from_hub
from ddpm_ds.data.latents import autoencoder_of
from ddpm_ds.data.spec import ConditionSpec, DataSpec
from ddpm_ds.evaluate.diffusers.folder import IMPORTED, SCHEDULER_CONFIG, DiffusersFolder
from ddpm_ds.evaluate.diffusers.unet_config import use_of
from ddpm_ds.evaluate.outputs import new_output
from ddpm_ds.ground.errors import CheckpointError, SpecError
from ddpm_ds.schema.types import written
from ddpm_ds.unet.layers import InputLayer, OutputLayer

WEIGHTS_FILE, SPEC_FILE = "weights.safetensors", "spec.yaml"
ANY_UNET = (
    *("channels=2", "multipliers=[1]", "attention_resolutions=[]", "attention_levels=[]"),
    *("head_channels=null", "norm_groups=1"),
)
"""Overrides for a U-Net that fits images of any size, until the model's own replaces it."""
ANY_TEXT = ("context_channels=1", "blocks=[1]", "heads=[1]", "pooled_channels=null")
"""Overrides for such a U-Net with text, by keys of `unet.text`."""


def import_weights(
    path: Path, base: Path, overrides: Sequence[str], out: Path, *, last_label_is_class: bool = False
) -> tuple[RunSpec, list[str]]:
    """Write to ``out`` the weights of the diffusers folder ``path``, or of the repository ``path`` on the Hugging Face
    hub, and the spec ``base``, changed to start from them.

    The model decides the spec's sections `unet` and `diffusion`, except dropout, loss and weighting, and has its own
    autoencoder unless one is named. Its last label means "no label" unless ``last_label_is_class``. Returns the new
    spec, and lines for the user about both files.

    Raises:
        CheckpointError: ``path`` holds no model, a damaged one, or one that our U-Net can't express.
        SpecError: ``base`` is wrong, or describes images that the model does not fit.
    """
    with new_output(out) as temporary:
        folder = _opened(path, last_label_is_class)
        typed, own = {item.partition("=")[0].strip() for item in overrides}, folder.own_autoencoder
        known = read_values(preset(base, SPECS)).get("data")
        until_replaced = [f"unet.{item}" for item in ANY_UNET]
        named = "data.autoencoder" in typed or (isinstance(known, dict) and known.get("autoencoder") is not None)
        if own is not None and not named:
            until_replaced.append(f"data.autoencoder={json.dumps(own)}")
        if folder.unet.text is None:
            until_replaced.append("unet.text=null")
        else:  # what was typed counts before the model's text
            encoding = {f"data.text.{key}": json.dumps(value) for key, value in folder.encoding().items()}
            until_replaced += [f"unet.text.{item}" for item in ANY_TEXT]
            until_replaced += [f"{key}={value}" for key, value in encoding.items() if key not in typed]
        before = load_spec(base, overrides, until_replaced)
        spec = _spec_with_model(before, folder, base, out / WEIGHTS_FILE, overrides)
        tensors = fitted(folder.tensors(spec.data), folder, spec.data)
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise CheckpointError(f"{folder.weights.path} has values in {name} that are not finite; get it again")
        (temporary / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
        (temporary / SPEC_FILE).write_text(rewritten(base, spec), encoding="utf-8")
    parameters = sum(tensor.numel() for tensor in tensors.values())
    lines = [f"{out / WEIGHTS_FILE}: {parameters:,} parameters of {folder.weights.path}, in fp32", *folder.notes]
    if folder.class_rows is not None:
        last = "; no label, which it lacks, begins at zero" if last_label_is_class else " and, last, no label"
        lines.append(f"its {folder.class_rows} labels are read as {folder.unet.classes} classes{last}")
    of_process = [item.strip() for item in overrides if item.strip().startswith("diffusion.")]
    says = folder.single is None or folder.single.scheduler(spec.diffusion.objective)[1]
    if not says and not any(item.startswith("diffusion.objective") for item in of_process):
        lines.append(f"{path} does not name its objective, and is read as eps; --set diffusion.objective=v if it is v")
    if (mine := folder.interface.channels) != spec.data.channels:
        begun = f"conv_in and conv_out keep {min(mine, spec.data.channels)} channels, and begin with zeros in others"
        lines.append(f"its latents have {mine} channels, and data.channels is {spec.data.channels}: {begun}")
    if is_enlarged(folder, spec.data):
        begun = "halves of its own" if use_of(folder.unet, spec.data) == "depth" else "zeros"
        lines.append(f"conv_in reads {spec.data.interface.condition_channels} channels of data.condition, with {begun}")
    if own is not None and own != str(spec.data.autoencoder):
        lines.append(f"data.autoencoder is {spec.data.autoencoder}; its own is {own}")
    kept = "its unet and diffusion" if folder.has_schedule else f"its unet (it has no {SCHEDULER_CONFIG})"
    return spec, [*lines, f"{out / SPEC_FILE}: {base} with {', '.join([kept, *of_process])}"]


def fitted(tensors: Mapping[str, Tensor], folder: DiffusersFolder, data: DataSpec) -> dict[str, Tensor]:
    """Return a model's weights for the latents and the condition of ``data``: the first and the last convolution keep
    the channels that both have, and their biases, and are zero in others. Marigold's begin with half of x_t's weights
    for x_t, and half for the image.
    """
    found, old, new = dict(tensors), folder.interface.channels, data.channels
    first, last = (
        next(index for index, layer in enumerate(folder.layers) if isinstance(layer, kind))
        for kind in (InputLayer, OutputLayer)
    )
    before, both = tensors[f"{first}.conv.weight"], min(old, new)  # (N, 3, 3, old + condition)
    x_t, given = pad(before[..., :both], (0, new - both)), before[..., old:]
    if is_enlarged(folder, data):
        given = x_t.new_zeros(*x_t.shape[:-1], data.interface.condition_channels)
        if use_of(folder.unet, data) == "depth":
            x_t = given = x_t / 2.0
    found[f"{first}.conv.weight"] = torch.cat((x_t, given), dim=-1)
    for name in (f"{last}.conv.weight", f"{last}.conv.bias"):  # (old, 3, 3, N) and (old,)
        found[name] = torch.cat((tensors[name][:both], tensors[name].new_zeros(new - both, *tensors[name].shape[1:])))
    return found


def is_enlarged(folder: DiffusersFolder, data: DataSpec) -> bool:
    """Return whether the first convolution of a model without a condition gets channels for the one of latents."""
    return not folder.interface.condition_channels and data.autoencoder is not None and data.condition is not None


def _opened(path: Path, last_label_is_class: bool) -> DiffusersFolder:
    name = None if path.exists() else str(path)

    def opened(found: Path) -> DiffusersFolder:
        if not found.is_file() and not DiffusersFolder.at(found):
            expected = "it should hold unet/config.json or config.json"
            raise CheckpointError(f"{name or found} is no folder of diffusers: {expected}")
        return DiffusersFolder(found, last_label_is_class=last_label_is_class, hub_name=name)

    if name is None:
        return opened(path)
    expected = "name a folder of diffusers, a .safetensors, or OWNER/NAME on the hub"
    return from_hub(name, IMPORTED, opened, key=name, expected=expected, newest=True)


def _spec_with_model(
    before: RunSpec, folder: DiffusersFolder, base: Path, weights: Path, overrides: Sequence[str]
) -> RunSpec:
    """Return the spec ``before`` with the model's U-Net, and with its diffusion process except for typed keys."""
    pairs: dict[str, tuple[object, object]] = {"data.channels": (before.data.channels, folder.interface.channels)}
    if before.data.channels != folder.interface.channels and autoencoder_of(before.data) is not None:
        del pairs["data.channels"]  # of other latents
    if folder.unet.text is None:  # a U-Net with text draws images of any size
        pairs["data.image_size"] = written(before.data.size), written(folder.interface.size)
    asked, found, model = before.data.interface, folder.interface, f"the model of {folder.path}"
    if asked.numbers:
        raise SpecError(f"{base}: data.condition has a vector or drop, and {model} takes no vector; remove them")
    if (learned := folder.fields()) is not None and learned.data.autoencoder and learned.data.condition:
        mine, its = before.data.condition or ConditionSpec(), learned.data.condition
        keys = ("kind", "scaled") if its.kind == "stored" else ("kind",)
        pairs |= {f"data.condition.{key}": (getattr(mine, key), getattr(its, key)) for key in keys}
    if before.unet.classes is not None and folder.unet.classes is not None:
        pairs["unet.classes"] = before.unet.classes, folder.unet.classes
    for key, (value, wanted) in pairs.items():
        if value != wanted:
            labels = f" (of {folder.class_rows} labels, see --last-label)" if key == "unet.classes" else ""
            raise SpecError(f"{base}: {key} = {value}, but {model} has {wanted}{labels}; --set {key}={wanted}")
    if not is_enlarged(folder, before.data) and (asked.condition_channels, asked.condition_level) != (
        found.condition_channels,
        found.condition_level,
    ):
        ours, theirs = (" and their noise level" * one.condition_level for one in (asked, found))
        channels = f"{base}: data.condition has {asked.condition_channels} channels{ours}"
        raise SpecError(f"{channels}, but {model} takes {found.condition_channels}{theirs}; change data.condition")
    values = before.model_dump(mode="json")
    values["unet"] = {**folder.unet.model_dump(mode="json"), "dropout": before.unet.dropout}
    if before.data.text is not None and before.data.text.tokens:  # no weight depends on it
        values["unet"]["text"]["tokens"] = before.data.text.tokens
    typed = {key.strip(): text for key, _, text in (item.partition("=") for item in overrides)}
    if folder.has_schedule:
        asked_process = {key: value for key, value in values["diffusion"].items() if f"diffusion.{key}" in typed}
        if "schedule" in asked_process:  # its usual betas are not the model's
            asked_process |= {key: values["diffusion"][key] for key in ("beta_start", "beta_end")}
        process, sampling = folder.process(before.diffusion, asked_process.get("objective"))
        values["diffusion"] = process.model_dump(mode="json") | asked_process
        if "schedule" not in asked_process:
            values["sampler"] |= {key: value for key, value in sampling.items() if f"sampler.{key}" not in typed}
    values["train"]["initial_weights"] = str(weights)
    for key, text in typed.items():
        value = parse_yaml(text, f"--set {key}={text}")
        has: Any = values
        for name in key.split("."):
            has = None if has is None else has.get(name)
        if key.startswith(("unet.", "train.initial_weights")) and value != has:
            raise SpecError(f"--set {key}={text}: {model} decides it, {json.dumps(has)}; leave it out")
    try:
        return RunSpec.model_validate_json(json.dumps(values))
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SpecError(f"{base} with the unet and diffusion of {folder.path}: {message}") from None
