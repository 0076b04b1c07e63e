"""Model card (README.md) of an export: its description, the numbers of its run, and how to use it."""

from __future__ import annotations

import math
from pathlib import Path

import yaml
from jinja2 import Template

from ddpm_ds.config.choices import SCHEDULES
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.tracking.runs import Run

WEIGHTS = {"ema": "averaged over training (EMA)", "raw": "as trained, not averaged", "export": "of an export"}
CARD = """\
---
{{ front }}---

# {{ title }}

A diffusion U-Net for images of {{ shape }}, trained with ddpm_ds.
{% if picture %}

![samples]({{ picture }})
{% endif %}

| | |
|---|---|
{% for name, value in facts.items() %}
| {{ name }} | {{ value }} |
{% endfor %}

## Use

{% if classes %}
The U-Net takes labels 0 to {{ classes - 1 }}, and {{ classes }} for no label. `{{ pipeline }}` gives it none, so the \
loop is
written out.
{% elif autoencoder %}
The U-Net draws latents, which the autoencoder in this folder decodes to images.
{% elif continuous %}
`DDPMPipeline` does not scale the U-Net's inputs, as EDM does, so the loop is written out.
{% endif %}
In this folder, in Python:

```python
{% if classes or autoencoder or continuous %}
import torch
from diffusers import {{ pipeline }}

pipeline = {{ pipeline }}.from_pretrained(".")
unet, scheduler = pipeline.unet, pipeline.scheduler
scheduler.set_timesteps({{ steps }})
{% if classes %}
labels = torch.arange({{ classes }})
{% endif %}
x = scheduler.init_noise_sigma * torch.randn({{ count }}, {{ channels }}, {{ size }}, {{ size }}, dtype=unet.dtype)
for t in scheduler.timesteps:
    with torch.no_grad():
        prediction = unet(scheduler.scale_model_input(x, t), t{{ ", class_labels=labels" if classes }}).sample
    x = scheduler.step(prediction, t, x).prev_sample
{% if autoencoder %}
with torch.no_grad():
    x = pipeline.vqvae.decode(x / {{ autoencoder.scale }} + {{ autoencoder.shift }}).sample
{% endif %}
images = pipeline.numpy_to_pil((x / 2 + 0.5).clamp(0, 1).float().permute(0, 2, 3, 1).numpy())
{% else %}
from diffusers import DDPMPipeline, DPMSolverMultistepScheduler

pipeline = DDPMPipeline.from_pretrained(".")
images = pipeline(batch_size=16, num_inference_steps={{ steps }}).images

# With fewer evaluations of the U-Net:
pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config{{ clipping }})
images = pipeline(batch_size=16, num_inference_steps={{ [20, steps] | min }}).images
{% endif %}
```
{% if classes %}

`ddpm-ds export --label none` (or a class) writes a U-Net that needs no labels.
{% endif %}

Without diffusers, with ddpm_ds, which wrote this folder:

    ddpm-ds sample . --count 64 --out samples.png

`ddpm-ds sample --sampler ddim` derives the noise again from the clipped image. In diffusers that is
`DDIMScheduler.step(..., use_clipped_model_output=True)`; its default does not, and gives other images.

ddpm_ds, the software that made this model, is licensed under Apache-2.0.
"""
EDM_STEPS = 50
"""Number of Euler steps that the card proposes for EDM, whose scheduler stores no number of steps."""


def model_card(trained: Trained, *, precision: str, label: str | None, picture: str | None) -> str:
    """Return the model card in Markdown, with the front matter that model hubs read.

    ``label`` says which label was folded into the weights, if any; ``picture`` names the grid of samples.
    """
    (channels, size, _), (colours, pixels, _) = trained.image_shape, trained.picture_shape
    diffusion, spec, autoencoder, losses = trained.diffusion, trained.spec, trained.autoencoder, last_losses(trained)
    classes, task = trained.unet_spec.classes, "unconditional-image-generation"
    continuous = SCHEDULES[diffusion.schedule].continuous
    tags = ["diffusers", "ddpm", "ddpm_ds", "class-conditional" if classes else task]
    front = {"license": "apache-2.0", "library_name": "diffusers", "tags": tags}
    if not classes:
        front["pipeline_tag"] = task
    shape = f"{pixels}x{pixels} pixels and {colours} channel{'s' if colours > 1 else ''}"
    parameters = sum(parameter.numel() for parameter in trained.unet.parameters())
    kind, _, length = trained.weights.partition("-")
    of_length = f" of relative length {length} by a power function (EDM2)" if length else ""
    facts = {"parameters": f"{parameters:,} in {precision}", "weights": WEIGHTS[kind] + of_length}
    if classes:
        facts["classes"] = f"{classes}, and no label"
    if autoencoder is not None:
        facts["latents"] = f"{size}x{size} and {channels} channels, of the autoencoder {autoencoder.name}"
    if label is not None:
        facts["label"] = f"{label}, folded into the time embedding"
    if spec is not None:
        facts["data"] = f"{spec.data.source}, {shape}"
        facts["images seen"] = f"{trained.images_seen:,}, {spec.train.batch_images} per step"
    if "train/loss" in losses:
        facts["last training loss"] = f"{losses['train/loss']:.4f} ({diffusion.loss}, {diffusion.weighting})"
    if spec is not None and "eval/loss" in losses:
        facts["held-out loss"] = f"{losses['eval/loss']:.4f} on {spec.data.held_out_images:,} images, averaged weights"
    facts["noise schedule"] = diffusion.schedule + ("" if continuous else f", {diffusion.timesteps:,} timesteps")
    facts["prediction"] = diffusion.objective
    return Template(CARD, trim_blocks=True, keep_trailing_newline=True).render(
        front=yaml.safe_dump(front, sort_keys=False),
        title=spec.name if spec else Path(trained.origin).resolve().name,
        shape=shape,
        picture=picture,
        facts=facts,
        classes=classes,
        count=classes or 16,
        autoencoder=autoencoder,
        continuous=continuous,
        pipeline="DDPMPipeline" if autoencoder is None else "LDMPipeline",
        steps=EDM_STEPS if continuous else diffusion.timesteps,
        channels=channels,
        size=size,
        # This scheduler has no clipping, but its thresholding with the bound 1 has the same effect.
        clipping=", thresholding=True" if trained.sampler.clip == "static" else "",
    )


def last_losses(trained: Trained) -> dict[str, float]:
    """Return the last training and held-out losses that the run logged before the checkpoint, if they are known."""
    if trained.run_dir is None or trained.spec is None or trained.images_seen is None:
        return {}
    last_step = trained.images_seen // trained.spec.train.batch_images
    run, found = Run(trained.run_dir), {}
    for columns, metric in ((run.metrics, "train/loss"), (run.evaluations, "eval/loss")):
        for step, value in zip(columns.get("step", ()), columns.get(metric, ()), strict=False):
            if step <= last_step and not math.isnan(value):
                found[metric] = value
    return found
