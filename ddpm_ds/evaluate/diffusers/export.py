"""Export of a trained U-Net as a pipeline of diffusers, without that package::

DIR/
    README.md                                   the model card
    samples.png
    model_index.json                            parts of a DDPMPipeline, or of an LDMPipeline for latents
    scheduler/scheduler_config.json
    unet/config.json
    unet/diffusion_pytorch_model.safetensors
    vqvae/                                      copy of the autoencoder, if the U-Net draws latents
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from ddpm_ds.data.cache import CONSTANTS
from ddpm_ds.evaluate.diffusers.folder import (
    AUTOENCODER_FOLDER,
    CONFIG,
    FIELDS,
    PIPELINE,
    SCHEDULER_CONFIG,
    WEIGHTS,
    FieldsFile,
)
from ddpm_ds.evaluate.diffusers.scheduler import scheduler_class, scheduler_config
from ddpm_ds.evaluate.diffusers.text_pipeline import FilePrecision, copied, copy_parts
from ddpm_ds.evaluate.diffusers.unet import to_diffusers
from ddpm_ds.evaluate.diffusers.unet_config import class_of, diffusers_config, input_order, use_of
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.ground.device import DTYPES
from ddpm_ds.ground.errors import CheckpointError
from ddpm_ds.unet.model import UNet

DIFFUSERS_VERSION = "0.42.1"
"""Version of diffusers whose configuration format is written."""


@torch.no_grad()
def without_labels(trained: Trained, row: int) -> Trained:
    """Return an unconditional U-Net that predicts as a class-conditional one, on the CPU, does for one label.

    The embedding of label ``row`` is added to the preceding bias, so the two agree up to rounding.
    """
    spec = trained.unet_spec.model_copy(update={"classes": None})
    folded = replace(trained, unet_spec=spec)
    unet = UNet(folded.layers, 0).eval().requires_grad_(False)
    state = trained.unet.layers.state_dict()
    state["0.linear2.bias"] = state["0.linear2.bias"] + state.pop("0.label_embedding.weight")[row]
    unet.layers.load_state_dict(state)
    return replace(folded, unet=unet)


@torch.no_grad()
def rounded(trained: Trained, precision: FilePrecision) -> Trained:
    """Round the fp32 weights in place to the values that a file in ``precision`` stores, and return the same U-Net.

    Raises CheckpointError: a weight is beyond the range of ``precision``.
    """
    for name, parameter in trained.unet.layers.named_parameters():
        parameter.copy_(parameter.to(DTYPES[precision][1]))
        if not parameter.isfinite().all():
            raise CheckpointError(f"{name} of {trained.origin} has values beyond {precision}; use --dtype fp32")
    return trained


def write_pipeline(trained: Trained, folder: Path, precision: FilePrecision) -> str:
    """Write the configurations and weights of a pipeline into ``folder``: ``DDPMPipeline``, or ``LDMPipeline`` for
    latents. A U-Net with text gets a ``StableDiffusionPipeline`` or ``StableDiffusionXLPipeline`` if its other parts
    are at hand.

    Returns a line with the class that opens it.
    """
    if trained.spec is not None and (path := trained.spec.data.residual_of) is not None:
        raise CheckpointError(f"{trained.origin} can't be exported: no pipeline adds its residuals to {path}")
    text = trained.unet_spec.text
    try:
        unet = diffusers_config(trained.unet_spec, trained.interface)
        scheduler = scheduler_config(trained.process, trained.sampler, text=text is not None)
        use, order = use_of(trained.unet_spec, trained.known_data), input_order(trained.unet_spec, trained.known_data)
    except ValueError as error:
        raise CheckpointError(f"{trained.origin} can't be exported: {error}") from None
    if use == "depth" and "timestep_spacing" in scheduler:  # as Marigold draws, and ours
        scheduler |= {"timestep_spacing": "trailing", "set_alpha_to_one": True}
    name, kind = scheduler_class(trained.diffusion, text=text is not None), class_of(trained.unet_spec)
    pipeline: str | None = "DDPMPipeline"
    parts: dict[str, object] = {"unet": ["diffusers", kind], "scheduler": ["diffusers", name]}
    if text is not None:
        pipeline, more = copy_parts(trained, folder)
        parts |= more
    elif trained.autoencoder is not None:
        pipeline, parts[AUTOENCODER_FOLDER] = "LDMPipeline", ["diffusers", "AutoencoderKL"]
        trained.autoencoder.copy_to(folder / AUTOENCODER_FOLDER)
    configs: dict[str, tuple[str, dict[str, object]]] = {
        "unet/" + CONFIG: (kind, unet),
        "scheduler/" + SCHEDULER_CONFIG: (name, scheduler),
        **({} if pipeline is None else {PIPELINE: (pipeline, parts)}),
    }
    for file, (class_name, values) in configs.items():
        (folder / file).parent.mkdir(exist_ok=True)
        content = {"_class_name": class_name, "_diffusers_version": DIFFUSERS_VERSION, **values}
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")
    if trained.spec is not None and (fields := FieldsFile.of(trained.spec.data, trained.facts)) is not None:
        (folder / FIELDS).write_text(fields.model_dump_json(indent=2, exclude_defaults=True) + "\n", encoding="utf-8")
        if trained.constants is not None:
            np.save(folder / CONSTANTS, trained.constants)
    linear = text is not None and text.linear_projection
    tensors = to_diffusers(trained.unet.layers.state_dict(), trained.layers, linear_projection=linear, order=order)
    (folder / "unet" / WEIGHTS[0]).write_bytes(save(copied(tensors, precision), metadata={"format": "pt"}))
    return f"diffusers opens it as {pipeline or kind}"
