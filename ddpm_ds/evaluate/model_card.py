"""README.md of an export: description, the numbers of its run, and how to use it."""

from __future__ import annotations

import math
from pathlib import Path

import yaml

from ddpm_ds.diffusion.choices import SCHEDULES, ContinuousSchedule
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.tracking.runs import Run

WEIGHTS = {"ema": "averaged over training (EMA)", "raw": "as trained, not averaged", "export": "of an export"}
CARD = """\
---
{front}---

# {title}

A diffusion U-Net for images of {shape}, trained with ddpm_ds.
{picture}
| | |
|---|---|
{rows}

## Use

{usage}
Without diffusers, with ddpm_ds, which wrote this folder:

    ddpm-ds sample . --count 64 --out samples.png

`ddpm-ds sample --sampler ddim` derives the noise again from the clipped image. In diffusers that is
`DDIMScheduler.step(..., use_clipped_model_output=True)`; its default does not, and gives other images.

ddpm_ds, the software that made this model, is licensed under Apache-2.0.
"""
UNCONDITIONAL = """\
In this folder, in Python:

```python
from diffusers import DDPMPipeline, DPMSolverMultistepScheduler

pipeline = DDPMPipeline.from_pretrained(".")
images = pipeline(batch_size=16, num_inference_steps={steps}).images

# With fewer evaluations of the U-Net:
pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config{options})
images = pipeline(batch_size=16, num_inference_steps={fast_steps}).images
```
"""
LOOP = """\
{why}
In this folder, in Python:

```python
import torch
from diffusers import {pipeline}

pipeline = {pipeline}.from_pretrained(".")
unet, scheduler = pipeline.unet, pipeline.scheduler
scheduler.set_timesteps({steps})
{labels}x = scheduler.init_noise_sigma * torch.randn({count}, {channels}, {size}, {size}, dtype=unet.dtype)
for t in scheduler.timesteps:
    with torch.no_grad():
        prediction = unet(scheduler.scale_model_input(x, t), t{argument}).sample
    x = scheduler.step(prediction, t, x).prev_sample
{decode}images = pipeline.numpy_to_pil((x / 2 + 0.5).clamp(0, 1).float().permute(0, 2, 3, 1).numpy())
```
"""
DECODE = """\
with torch.no_grad():
    x = pipeline.vqvae.decode(x / {scale} + {shift}).sample
"""
LATENTS = "The U-Net draws latents, of which the autoencoder of this folder makes the images."
SCALED = "`DDPMPipeline` does not scale the U-Net's inputs, as EDM does, so the loop is written out."
CONDITIONAL = """\
The U-Net takes labels 0 to {last_class}, and {classes} for no label. `{pipeline}` gives it none, so the loop is
written out."""
UNLABELLED = """
`ddpm-ds export --label none` (or a class) writes a U-Net that needs no labels.
"""
EDM_STEPS = 50
"""Steps of Euler's method that the card proposes for EDM, whose scheduler has no number of its own."""


def model_card(trained: Trained, *, precision: str, label: str | None, picture: str | None) -> str:
    """Return Markdown with the front matter that model hubs read.

    ``label`` says which label was folded into the weights, if any; ``picture`` names the grid of samples.
    """
    channels, size, _ = trained.image_shape
    autoencoder = trained.autoencoder
    diffusion, spec, losses = trained.diffusion, trained.spec, last_losses(trained)
    classes, task = trained.unet_spec.classes, "unconditional-image-generation"
    pipeline = "DDPMPipeline" if autoencoder is None else "LDMPipeline"
    continuous = isinstance(SCHEDULES[diffusion.schedule], ContinuousSchedule)
    steps = EDM_STEPS if continuous else diffusion.timesteps
    count, labels, argument = 16, "", ""
    tags = ["diffusers", "ddpm", "ddpm_ds", "class-conditional" if classes is not None else task]
    front: dict[str, object] = {"license": "apache-2.0", "library_name": "diffusers", "tags": tags}
    colours, pixels, _ = trained.picture_shape
    shape = f"{pixels}x{pixels} pixels and {colours} channel{'s' if colours > 1 else ''}"
    parameters = sum(parameter.numel() for parameter in trained.unet.parameters())
    kind, _, length = trained.weights.partition("-")
    of_length = f" of relative length {length} by a power function (EDM2)" if length else ""
    facts = {"parameters": f"{parameters:,} in {precision}", "weights": WEIGHTS[kind] + of_length}
    if classes is None:
        front["pipeline_tag"], why = task, SCALED if autoencoder is None else LATENTS
    else:
        facts["classes"] = f"{classes}, and no label"
        why = CONDITIONAL.format(classes=classes, last_class=classes - 1, pipeline=pipeline)
        count, labels, argument = classes, f"labels = torch.arange({classes})\n", ", class_labels=labels"
    if classes is None and not continuous and autoencoder is None:
        # This scheduler has no clipping of its own, but its thresholding with the bound 1 is one.
        options = ", thresholding=True" if trained.sampler.clip == "static" else ""
        usage = UNCONDITIONAL.format(steps=steps, fast_steps=min(20, steps), options=options)
    else:
        usage = LOOP.format(
            why=why,
            steps=steps,
            labels=labels,
            count=count,
            channels=channels,
            size=size,
            argument=argument,
            pipeline=pipeline,
            decode="" if autoencoder is None else DECODE.format(scale=autoencoder.scale, shift=autoencoder.shift),
        ) + (UNLABELLED if classes is not None else "")
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
    return CARD.format(
        front=yaml.safe_dump(front, sort_keys=False),
        title=spec.name if spec else Path(trained.origin).resolve().name,
        shape=shape,
        picture=f"\n![samples]({picture})\n" if picture else "",
        rows="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        usage=usage,
    )


def last_losses(trained: Trained) -> dict[str, float]:
    """Return the last training and held-out loss that the run logged before the checkpoint, where they are known."""
    if trained.run_dir is None or trained.spec is None or trained.images_seen is None:
        return {}
    last_step = trained.images_seen // trained.spec.train.batch_images
    run, found = Run(trained.run_dir), {}
    for columns, metric in ((run.metrics, "train/loss"), (run.evaluations, "eval/loss")):
        for step, value in zip(columns.get("step", ()), columns.get(metric, ()), strict=False):
            if step <= last_step and not math.isnan(value):
                found[metric] = value
    return found
