"""Export of a trained U-Net as a diffusers pipeline, without diffusers; if it is installed, it reads the result back.

::

    DIR/
        README.md                                   the model card
        samples.png
        model_index.json                            parts of a DDPMPipeline, or of an LDMPipeline for latents
        scheduler/scheduler_config.json
        unet/config.json
        unet/diffusion_pytorch_model.safetensors
        vqvae/                                      copy of the autoencoder, if the U-Net draws latents

Import makes a model of diffusers the start of a run: its weights under our names, and a spec with its U-Net and
diffusion process.
"""

import copy
import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from jinja2 import Template
from pydantic import ValidationError
from safetensors.torch import save
from torch import Tensor

from ddpm_ds.config.choices import SCHEDULES
from ddpm_ds.config.spec import RunSpec, written
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.data.cache import CONSTANTS
from ddpm_ds.data.hub import from_hub
from ddpm_ds.device import DTYPES
from ddpm_ds.diffusion.choices import FLOW_TIMES, TARGETS
from ddpm_ds.diffusion.condition import TOLD_LEVEL
from ddpm_ds.diffusion.levels import alpha_bars, levels_of
from ddpm_ds.errors import CheckpointError, OutputError, SpecError
from ddpm_ds.evaluate.diffusers.folder import (
    AUTOENCODER_FOLDER,
    CONFIG,
    FIELDS,
    IMPORTED,
    PIPELINE,
    SCHEDULER_CONFIG,
    WEIGHTS,
    DiffusersFolder,
    FieldsFile,
)
from ddpm_ds.evaluate.diffusers.scheduler import scheduler_class, scheduler_config
from ddpm_ds.evaluate.diffusers.text_pipeline import copy_parts, pipeline_of
from ddpm_ds.evaluate.diffusers.unet import class_of, diffusers_config, to_diffusers
from ddpm_ds.evaluate.outputs import new_folder
from ddpm_ds.evaluate.scores import score_rows
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.secret import without_secrets
from ddpm_ds.tracking.run_folder import RunFolder
from ddpm_ds.unet.layers import SIZES
from ddpm_ds.unet.model import UNet

Precision = Literal["fp32", "fp16"]
DIFFUSERS_VERSION = "0.42.1"
"""Version of diffusers whose configuration format is written."""
PREDICTION_TOLERANCE = 1e-5
"""Maximum difference between our prediction and diffusers', relative to the largest value."""
COMPARED_TIMESTEPS = 32
"""Number of timesteps, from 0, whose predictions are compared. Both sides compute t x frequency in fp32, and at
t = 1000 its rounding error is 1e-5.
"""
SCHEDULE_TOLERANCE = 1e-5
"""Maximum difference of alpha_bar, or of denoised images; diffusers computes its schedule in fp32."""
WEIGHTS_FILE, SPEC_FILE = "weights.safetensors", "spec.yaml"
ANY_UNET = (
    *("channels=2", "multipliers=[1]", "attention_resolutions=[]", "attention_levels=[]"),
    *("head_channels=null", "norm_groups=1"),
)
"""Overrides for a U-Net that fits images of any size, used only until the model's own replaces it."""
ANY_TEXT = ("context_channels=1", "blocks=[1]", "heads=[1]", "pooled_channels=null")
"""The same for its text."""
KINDS_OF_WEIGHTS = {"ema": "averaged over training (EMA)", "raw": "as trained, not averaged", "export": "of an export"}

CARD = """\
---
{{ front }}---

# {{ title }}

A diffusion U-Net for images of {{ images }}, trained with ddpm_ds.
{% if picture %}

![samples]({{ picture }})
{% endif %}

| | |
|---|---|
{% for name, value in facts.items() %}
| {{ name }} | {{ value }} |
{% endfor %}
{% if has_spec %}

[`spec.yaml`](spec.yaml) has all settings of the run, without the folders of its data.
{% endif %}
{% if scores %}

## Scores

| {{ scores[0] | join(" | ") }} |
|---|{{ "---|" * (scores[0] | length - 1) }}
{% for row in scores[1:] %}
| {{ row | join(" | ") }} |
{% endfor %}
{% endif %}

## Use

{% if classes %}
The U-Net takes labels 0 to {{ classes - 1 }}, and {{ classes }} for no label. `{{ pipeline }}` gives it none, so the \
loop is
written out.
{% elif single_file %}
`{{ single_file }}` has the original names, which ComfyUI and A1111 read; diffusers reads it with the configurations \
of its pipeline's folder, `from_single_file("{{ single_file }}", config="FOLDER")`.
{% elif text and not pipeline %}
The folder holds the U-Net and its scheduler, without the text encoders of its pipeline: open it as `unet` of that.
{% elif autoencoder and not text %}
The U-Net draws latents, which the autoencoder in this folder decodes to images.
{% elif conditions %}
The U-Net takes {{ conditions }} channels of a condition after those of x{{ ", and the level of the condition's noise, \
times 1000, as its class label" if told_level }}. \
`DDPMPipeline` gives it none, so the loop is written out.
{% elif continuous %}
`DDPMPipeline` does not scale the U-Net's inputs, as EDM does, so the loop is written out.
{% endif %}
{% if not single_file %}
In Python{{ ", in this folder" if here == "." }}:

```python
{% if text %}
import torch
{% if pipeline %}
from diffusers import {{ pipeline }}

pipeline = {{ pipeline }}.from_pretrained("{{ here }}")
generator = torch.Generator().manual_seed(0)
images = pipeline("a prompt", num_inference_steps=30, guidance_scale=5.0, generator=generator).images
{% else %}
from diffusers import UNet2DConditionModel

unet = UNet2DConditionModel.from_pretrained("{{ here }}", subfolder="unet")
{% endif %}
{% elif classes or autoencoder or continuous or conditions %}
import torch
from diffusers import {{ pipeline }}

pipeline = {{ pipeline }}.from_pretrained("{{ here }}")
unet, scheduler = pipeline.unet, pipeline.scheduler
scheduler.set_timesteps({{ steps }})
{% if classes %}
labels = torch.arange({{ classes }})
{% elif told_level %}
labels = torch.zeros({{ count }})
{% endif %}
{% if conditions %}
condition = torch.zeros({{ count }}, {{ conditions }}, {{ shape[1:] | join(", ") }}, dtype=unet.dtype)  # yours
{% endif %}
x = scheduler.init_noise_sigma * torch.randn({{ count }}, {{ shape | join(", ") }}, dtype=unet.dtype)
for t in scheduler.timesteps:
    x_t = scheduler.scale_model_input(x, t)
{% if conditions %}
    x_t = torch.cat((x_t, condition), dim=1)
{% endif %}
    with torch.no_grad():
        prediction = unet(x_t, t{{ ", class_labels=labels" if classes or told_level }}).sample
    x = scheduler.step(prediction, t, x).prev_sample
{% if autoencoder %}
with torch.no_grad():
    x = pipeline.vqvae.decode(x / {{ autoencoder.scale }} + {{ autoencoder.shift }}).sample
{% endif %}
images = pipeline.numpy_to_pil((x / 2 + 0.5).clamp(0, 1).float().permute(0, 2, 3, 1).numpy())
{% else %}
from diffusers import DDPMPipeline, DPMSolverMultistepScheduler

pipeline = DDPMPipeline.from_pretrained("{{ here }}")
images = pipeline(batch_size=16, num_inference_steps={{ steps }}).images

# With fewer evaluations of the U-Net:
pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config{{ clipping }})
images = pipeline(batch_size=16, num_inference_steps={{ [20, steps] | min }}).images
{% endif %}
```
{% endif %}
{% if classes %}

`ddpm-ds export --label none` (or a class) writes a U-Net that needs no labels.
{% endif %}

{% if text and pipeline and not single_file %}
Without diffusers, with ddpm_ds, which wrote this folder:

    ddpm-ds sample {{ here }} --prompt "a prompt" --guidance 5 --out samples.png

{% elif not text %}
Without diffusers, with ddpm_ds, which wrote this folder:

    ddpm-ds sample {{ here }} --count 64 --out samples.png

`ddpm-ds sample --sampler ddim` derives the noise again from the clipped image. In diffusers that is
`DDIMScheduler.step(..., use_clipped_model_output=True)`; its default does not, and gives other images.

{% endif %}
ddpm_ds, the software that made this model, is licensed under Apache-2.0.
"""

EDM_STEPS = 50
"""Number of Euler steps that the card proposes for EDM, whose scheduler stores no number of steps."""


@torch.no_grad()
def without_labels(trained: Trained, row: int) -> Trained:
    """Return an unconditional U-Net that predicts what a class-conditional one, on the CPU, predicts for one label.

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
def rounded(trained: Trained, precision: Precision) -> Trained:
    """Round the fp32 weights in place to the values that a file in ``precision`` stores, and return the same U-Net.

    Raises:
        CheckpointError: a weight is beyond the range of ``precision``.
    """
    for name, parameter in trained.unet.layers.named_parameters():
        parameter.copy_(parameter.to(DTYPES[precision][1]))
        if not parameter.isfinite().all():
            raise CheckpointError(f"{name} of {trained.origin} has values beyond {precision}; use --dtype fp32")
    return trained


def write_pipeline(trained: Trained, folder: Path, precision: Precision) -> None:
    """Write the configurations and the weights of a ``DDPMPipeline``, or ``LDMPipeline``, into ``folder``; for a U-Net
    that reads text those of ``StableDiffusionPipeline`` or ``StableDiffusionXLPipeline``, as far as they are at hand.

    Raises:
        CheckpointError: diffusers has no such U-Net, noise schedule or objective.
    """
    if trained.spec is not None and (path := trained.spec.data.residual_of) is not None:
        raise CheckpointError(
            f"{trained.origin} can't be exported: it draws residuals of {path}, which a pipeline can't add"
        )
    text = trained.unet_spec.text
    try:
        unet = diffusers_config(trained.unet_spec, trained.interface)
        scheduler = scheduler_config(trained.diffusion, trained.sampler, text=text is not None)
    except ValueError as error:
        raise CheckpointError(f"{trained.origin} can't be exported: {error}") from None
    name = scheduler_class(trained.diffusion, text=text is not None)
    pipeline: str | None = "DDPMPipeline"
    kind = class_of(trained.unet_spec)
    parts: dict[str, Any] = {"unet": ["diffusers", kind], "scheduler": ["diffusers", name]}
    if text is not None:
        pipeline, more = copy_parts(trained, folder)
        parts |= more
    elif trained.autoencoder is not None:
        pipeline, parts[AUTOENCODER_FOLDER] = "LDMPipeline", ["diffusers", "AutoencoderKL"]
        trained.autoencoder.copy_to(folder / AUTOENCODER_FOLDER)
    configs = {
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
    tensors = to_diffusers(trained.unet.layers.state_dict(), trained.layers, linear_projection=linear)
    dtype = DTYPES[precision][1]
    # Copies, because q, k and v are views of one tensor, and convolutions' weights have their dimensions permuted.
    copies = {
        name: tensor.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    (folder / "unet" / WEIGHTS[0]).write_bytes(save(copies, metadata={"format": "pt"}))


@torch.no_grad()
def check_in_diffusers(trained: Trained, folder: Path) -> str:
    """Read a written pipeline back with diffusers and compare it with the U-Net it was made from, in fp64 on the CPU.

    Returns one line that says what was compared, or that diffusers is not installed.

    Raises:
        OutputError: they differ.
    """
    if importlib.util.find_spec("diffusers") is None:
        return "not read back, because diffusers is not installed (pip install diffusers)"
    import diffusers

    diffusers.utils.logging.set_verbosity_error()  # LDMPipeline warns, since it expects another kind of autoencoder
    diffusers.utils.logging.disable_progress_bar()
    unet, scheduler = _read_back(trained, folder)
    generator, text = torch.Generator().manual_seed(0), trained.unet_spec.text
    channels = trained.interface.channels + trained.interface.condition_channels
    # Of text the smallest images will do, since nothing depends on their size, and its U-Nets are large.
    size = trained.interface.size if text is None else (2 ** len(trained.unet_spec.multipliers),) * 2
    given = torch.randn(4, channels, *size, generator=generator, dtype=torch.float64)
    x_t = given[:, : trained.interface.channels]
    if SCHEDULES[trained.diffusion.schedule].continuous and trained.diffusion.schedule != "flow":
        t = torch.randn(4, generator=generator)
    else:
        t = torch.randint(0, min(trained.diffusion.timesteps, COMPARED_TIMESTEPS), (4,), generator=generator)
    inputs, context = [given, t], None
    others: dict[str, Any] = {}
    if (classes := trained.unet_spec.classes) is not None:
        others["class_labels"] = torch.randint(0, classes + 1, (4,), generator=generator)
    if trained.interface.told_level:
        others["class_labels"] = TOLD_LEVEL * torch.rand(4, generator=generator)
    inputs += others.values()
    if text is not None:
        context = torch.randn(4, text.tokens, text.context_channels, generator=generator, dtype=torch.float64)
        others["encoder_hidden_states"] = context
        if text.pooled_channels is not None:
            pooled = torch.randn(4, text.pooled_channels, generator=generator, dtype=torch.float64)
            sizes = torch.randint(0, COMPARED_TIMESTEPS, (4, SIZES), generator=generator).double()
            inputs.append(torch.cat((pooled, sizes), dim=1))
            others["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": sizes}
    unet.double().time_proj.register_forward_hook(lambda *of_call: of_call[-1].double())  # which it forgets for labels
    theirs = unet(given, t, **others).sample
    del unet  # before ours is widened as well
    ours = copy.deepcopy(trained.unet).double()(*inputs, context=context)
    prediction = ((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-30)).item()
    schedule, compared = _schedule_difference(trained, scheduler, x_t, t, ours)
    # Not written with "greater than", which is false for NaN.
    if not (prediction <= PREDICTION_TOLERANCE and schedule <= SCHEDULE_TOLERANCE):
        raise OutputError(
            f"diffusers {diffusers.__version__} reads something else than {trained.origin}: predictions differ by "
            f"{prediction:.1e} of the largest, {compared} by {schedule:.1e}; nothing was written, please report it"
        )
    return (
        f"read back by diffusers {diffusers.__version__}: its predictions for random images are ours within "
        f"{prediction:.0e} of the largest, its {compared} within {schedule:.0e}"
    )


def _read_back(trained: Trained, folder: Path) -> tuple[Any, Any]:
    """Return the U-Net and the scheduler that diffusers reads from a pipeline, or from its parts if it is none."""
    import diffusers

    here: dict[str, Any] = {"local_files_only": True}
    if (folder / PIPELINE).is_file():
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, low_cpu_mem_usage=False, **here)
        return pipeline.unet, pipeline.scheduler
    scheduler = getattr(diffusers, scheduler_class(trained.diffusion, text=True))
    unet = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet", low_cpu_mem_usage=False, **here)
    return unet, scheduler.from_pretrained(folder / "scheduler", **here)


def _schedule_difference(
    trained: Trained, scheduler: Any, x_t: Tensor, t: Tensor, prediction: Tensor
) -> tuple[float, str]:
    """Return how much diffusers' noise levels differ from ours, and the name of the quantity that was compared."""
    spec = trained.diffusion
    if not SCHEDULES[spec.schedule].continuous:
        return (scheduler.alphas_cumprod.double() - alpha_bars(spec)).abs().max().item(), "alphas_cumprod"
    if spec.schedule == "flow":
        scheduler.set_timesteps(4)
        scheduler._init_step_index(scheduler.timesteps[1])
        level = levels_of(spec).level(FLOW_TIMES * scheduler.sigmas[1:2].double()).each()
        ours = TARGETS[spec.objective].to_x0(prediction, x_t, level)
        theirs = scheduler.convert_model_output(prediction, sample=x_t)
        return ((ours - theirs).abs().max() / ours.abs().max()).item(), "denoised images"
    level = levels_of(spec).level(t.double()).each()
    ours = TARGETS[spec.objective].to_x0(prediction, x_t, level)
    theirs = scheduler.precondition_outputs(x_t / level.signal, prediction, level.noise / level.signal)
    return ((ours - theirs).abs().max() / ours.abs().max()).item(), "denoised images"


def import_weights(
    path: Path, base: Path, overrides: Sequence[str], out: Path, *, last_label_is_class: bool = False
) -> list[str]:
    """Write to ``out`` the weights of the diffusers folder ``path``, or of a repository of this name on the Hugging
    Face hub, and the spec ``base`` changed to start from them.

    The model decides the spec's sections `unet` and `diffusion`, except dropout, loss and weighting; its last label
    means "no label" unless ``last_label_is_class``. Returns lines that say what was done.

    Raises:
        CheckpointError: ``path`` holds no model, a damaged one, or one that our U-Net can't express.
        DataError: there is no ``path``, and the hub has none or can't be reached.
        SpecError: ``base`` is wrong, or describes images that the model does not fit.
        OutputError: ``out`` exists already, or can't be written.
    """
    with new_folder(out) as temporary:
        folder = _opened(path, last_label_is_class)
        before = load_spec(base, [*overrides, *_until_replaced(folder)])
        spec = _spec_with_model(before, folder, base, out / WEIGHTS_FILE)
        tensors = folder.tensors()
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise CheckpointError(f"{folder.weights.path} has values in {name} that are not finite; get it again")
        (temporary / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
        (temporary / SPEC_FILE).write_text(yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False))
    parameters = sum(tensor.numel() for tensor in tensors.values())
    lines = [f"{out / WEIGHTS_FILE}: {parameters:,} parameters of {folder.weights.path}, in fp32"]
    if folder.class_rows is not None:
        last = "; no label, which it lacks, begins at zero" if last_label_is_class else " and, last, no label"
        lines.append(f"its {folder.class_rows} labels are read as {folder.unet.classes} classes{last}")
    if folder.single is not None and not folder.single.says_prediction:
        lines.append(f"the file does not say whether it predicts eps or v; diffusion.objective of {base} is kept")
    kept = "its unet and diffusion" if folder.has_schedule else f"its unet (it has no {SCHEDULER_CONFIG})"
    return [*lines, f"{out / SPEC_FILE}: {base} with {kept}"]


def _opened(path: Path, last_label_is_class: bool) -> DiffusersFolder:
    """Return the model at ``path``, or else on the Hugging Face hub, of which what an import reads is downloaded."""

    def opened(found: Path, name: str | None = None) -> DiffusersFolder:
        if not found.is_file() and not DiffusersFolder.at(found):
            expected = "it should hold unet/config.json or config.json"
            raise CheckpointError(f"{name or found} is no folder of diffusers: {expected}")
        return DiffusersFolder(found, last_label_is_class=last_label_is_class, hub_name=name)

    if path.exists():
        return opened(path)
    name, expected = str(path), "name a folder of diffusers, a .safetensors, or OWNER/NAME on the hub"
    return from_hub(name, IMPORTED, partial(opened, name=name), said=name, expected=expected, newest=True)


def _until_replaced(folder: DiffusersFolder) -> list[str]:
    """Return overrides that make a spec for the model's kind: with its text encoders, or without text."""
    any_unet = [f"unet.{item}" for item in ANY_UNET]
    if folder.unet.text is None:
        return [*any_unet, "unet.text=null"]
    encoding = {key: f"data.text.{key}={json.dumps(value)}" for key, value in folder.encoding().items()}
    return [*any_unet, *(f"unet.text.{item}" for item in ANY_TEXT), *encoding.values()]


def _spec_with_model(before: RunSpec, folder: DiffusersFolder, base: Path, weights: Path) -> RunSpec:
    """Return the spec ``before``, read from ``base``, with the U-Net and the diffusion process of the model."""
    pairs: dict[str, tuple[Any, Any]] = {"data.channels": (before.data.channels, folder.interface.channels)}
    if folder.unet.text is None:  # whose images may be of any size
        pairs["data.image_size"] = written(before.data.size), written(folder.interface.size)
    asked, found = before.data.interface, folder.interface
    if asked.numbers:
        raise SpecError(
            f"{base}: data.condition has a vector or drop, and the model of {folder.path} takes no vector; remove them"
        )
    if (asked.condition_channels, asked.told_level) != (found.condition_channels, found.told_level):
        told = {True: ", whose noise it is told", False: ""}
        raise SpecError(
            f"{base}: data.condition has {asked.condition_channels} channels{told[asked.told_level]}, but the model of "
            f"{folder.path} takes {found.condition_channels}{told[found.told_level]}; change data.condition"
        )
    if before.unet.classes is not None and folder.unet.classes is not None:
        pairs["unet.classes"] = before.unet.classes, folder.unet.classes
    for key, (value, wanted) in pairs.items():
        if value != wanted:
            labels = f" (of {folder.class_rows} labels, see --last-label)" if key == "unet.classes" else ""
            what = f"the model of {folder.path} has {wanted}{labels}"
            raise SpecError(f"{base}: {key} = {value}, but {what}; --set {key}={wanted}")
    values = before.model_dump(mode="json")
    values["unet"] = {**folder.unet.model_dump(mode="json"), "dropout": before.unet.dropout}
    if folder.has_schedule:
        values["diffusion"] = folder.process(before.diffusion)[0].model_dump(mode="json")
    values["train"]["initial_weights"] = str(weights)
    try:
        return RunSpec.model_validate_json(json.dumps(values))
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SpecError(f"{base} with the unet and diffusion of {folder.path}: {message}") from None


def shared_spec(spec: RunSpec) -> str:
    """Return a run's spec as YAML without what is of its host alone: secrets, and the folders above absolute paths."""
    return without_secrets(yaml.safe_dump(_shared(spec.model_dump(mode="json")), sort_keys=False))


def _shared(value: Any) -> Any:
    """Return a value of a spec in which absolute paths are their last parts."""
    if isinstance(value, dict):
        return {key: _shared(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shared(each) for each in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def model_card(
    trained: Trained,
    *,
    precision: str,
    label: str | None,
    picture: str | None,
    single_file: str | None = None,
    hub_name: str | None = None,
    has_spec: bool = False,
) -> str:
    """Return the model card in Markdown, with the front matter that model hubs read.

    ``label`` says which label was folded into the weights, if any; ``picture`` names the grid of samples, and
    ``single_file`` the file that was written instead of a pipeline's folder. ``hub_name`` is where it will be, and
    ``has_spec`` says that ``spec.yaml`` is beside it.
    """
    colours, height, width = trained.picture_shape
    diffusion, spec, autoencoder, losses = trained.diffusion, trained.spec, trained.autoencoder, last_losses(trained)
    classes, text = trained.unet_spec.classes, trained.unet_spec.text is not None
    task = "text-to-image" if text else "unconditional-image-generation"
    pipeline = "DDPMPipeline" if autoencoder is None else "LDMPipeline"
    if text:
        pipeline = pipeline_of(trained) or ""
    continuous = SCHEDULES[diffusion.schedule].continuous
    tags = ["diffusers", "ddpm", "ddpm_ds", "class-conditional" if classes else task]
    front = {"license": "apache-2.0", "library_name": "diffusers", "tags": tags}
    if not classes:
        front["pipeline_tag"] = task
    images = f"{height}x{width} pixels and {colours} channel{'s' if colours > 1 else ''}"
    parameters = sum(parameter.numel() for parameter in trained.unet.parameters())
    facts = {"parameters": f"{parameters:,} in {precision}", "weights": KINDS_OF_WEIGHTS[trained.weights]}
    if classes:
        facts["classes"] = f"{classes}, and no label"
    if autoencoder is not None:
        channels, rows, columns = trained.image_shape
        facts["latents"] = f"{rows}x{columns} and {channels} channels, of the autoencoder {_shared(autoencoder.name)}"
    if label is not None:
        facts["label"] = f"{label}, folded into the time embedding"
    if spec is not None:
        facts["data"] = f"{spec.data.source}, {images}"
        facts["images seen"] = f"{trained.images_seen:,}, {spec.train.batch_images} per step"
        facts["learning rate"] = f"{spec.optimizer.learning_rate:g}"
    if "train/loss" in losses:
        facts["last training loss"] = f"{losses['train/loss']:.4f} ({diffusion.loss}, {diffusion.weighting})"
    if spec is not None and "eval/loss" in losses:
        held_out = f"{spec.data.held_out_images:,}" if spec.data.held_out_images else "all held-out"
        facts["held-out loss"] = f"{losses['eval/loss']:.4f} on {held_out} images, averaged weights"
    facts["noise schedule"] = diffusion.schedule + ("" if continuous else f", {diffusion.timesteps:,} timesteps")
    facts["prediction"] = diffusion.objective
    how, steps = trained.sampler, trained.sampler.steps_of(diffusion)
    facts["sampler"] = f"{how.kind} in {steps} steps" + (f", guidance {how.guidance:g}" if how.guides else "")
    return Template(CARD, trim_blocks=True, keep_trailing_newline=True).render(
        front=yaml.safe_dump(front, sort_keys=False),
        title=spec.name if spec else Path(trained.origin).resolve().name,
        images=images,
        shape=trained.image_shape,
        picture=picture,
        facts=facts,
        classes=classes,
        count=classes or 16,
        autoencoder=autoencoder,
        continuous=continuous,
        pipeline=pipeline,
        text=text,
        single_file=single_file,
        here=hub_name or ".",
        has_spec=has_spec,
        scores=[] if label is not None else score_rows(trained),
        steps=EDM_STEPS if continuous else diffusion.timesteps,
        conditions=trained.interface.condition_channels,
        told_level=trained.interface.told_level,
        # This scheduler has no clipping, but its thresholding with the bound 1 has the same effect.
        clipping=", thresholding=True" if trained.sampler.clip == "static" else "",
    )


def last_losses(trained: Trained) -> dict[str, float]:
    """Return the last training and held-out losses that the run logged before the checkpoint, if they are known."""
    if trained.run_dir is None or trained.spec is None or trained.images_seen is None:
        return {}
    last_step = trained.images_seen // trained.spec.train.batch_images
    run, found = RunFolder(trained.run_dir), {}
    for columns, metric in ((run.metrics, "train/loss"), (run.evaluations, "eval/loss")):
        for step, value in zip(columns.get("step", ()), columns.get(metric, ()), strict=False):
            if step <= last_step and not math.isnan(value):
                found[metric] = value
    return found


def last_picture(trained: Trained) -> Path | None:
    """Return the picture that the run has drawn after the images of these averaged weights; None if there is none."""
    if trained.run_dir is None or trained.images_seen is None or trained.weights != "ema":
        return None
    path = RunFolder(trained.run_dir).samples(trained.images_seen)
    return path if path.is_file() else None
