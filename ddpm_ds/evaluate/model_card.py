"""The README.md of an export: what it is, the numbers of its run, and how to use it."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.tracking.run_folder import EVALUATIONS, METRICS

WEIGHTS = {"ema": "averaged over training (EMA)", "raw": "as trained, not averaged", "export": "of an export"}
UNCONDITIONAL = """\
In this folder, in Python:

```python
from diffusers import DDPMPipeline

pipeline = DDPMPipeline.from_pretrained(".")
images = pipeline(batch_size=16, num_inference_steps={steps}).images
```

or, with fewer evaluations of the U-Net:

```python
from diffusers import DDPMPipeline, DPMSolverMultistepScheduler

pipeline = DDPMPipeline.from_pretrained(".")
pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config{fast_options})
images = pipeline(batch_size=16, num_inference_steps={fast_steps}).images
```
"""
CONDITIONAL = """\
The U-Net takes labels 0 to {last_class}, and {no_label} for no label. `DDPMPipeline` gives it none, so the loop is
written out; in this folder, in Python:

```python
import torch
from diffusers import DDPMPipeline

pipeline = DDPMPipeline.from_pretrained(".")
unet, scheduler = pipeline.unet, pipeline.scheduler
labels = torch.arange({classes})
x = torch.randn(len(labels), {channels}, {size}, {size}, dtype=unet.dtype)
scheduler.set_timesteps({steps})
for t in scheduler.timesteps:
    with torch.no_grad():
        prediction = unet(x, t, class_labels=labels).sample
    x = scheduler.step(prediction, t, x).prev_sample
images = pipeline.numpy_to_pil((x / 2 + 0.5).clamp(0, 1).float().permute(0, 2, 3, 1).numpy())
```

`ddpm-ds export --label none` (or a class) writes a U-Net that needs no labels.
"""
OURS = """\
Without diffusers, with ddpm_ds, which wrote this folder:

    ddpm-ds sample . --count 64 --out samples.png
"""


def model_card(trained: Trained, *, precision: str, label: str | None, picture: str | None) -> str:
    """Markdown with the front matter that model hubs read.

    ``label`` says which label was folded into the weights, if any; ``picture`` names the grid of samples.
    """
    spec = trained.spec
    title = spec.name if spec else Path(trained.origin).resolve().name
    unconditional = trained.unet_spec.classes is None
    about = {
        "library_name": "diffusers",
        **({"pipeline_tag": "unconditional-image-generation"} if unconditional else {}),
        "tags": [
            "diffusers",
            "ddpm",
            "ddpm_ds",
            "unconditional-image-generation" if unconditional else "class-conditional",
        ],
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in _facts(trained, precision, label).items())
    parts = [
        f"---\n{yaml.safe_dump(about, sort_keys=False)}---\n",
        f"# {title}\n",
        f"A diffusion U-Net for images of {_shape(trained)}, trained with ddpm_ds.\n",
        *([f"![samples]({picture})\n"] if picture else []),
        f"| | |\n|---|---|\n{rows}\n",
        "## Use\n",
        _usage(trained),
        OURS,
    ]
    return "\n".join(parts)


def last_losses(trained: Trained) -> dict[str, float]:
    """The last training and held-out loss that the run logged before the checkpoint, where it is known."""
    if trained.run_dir is None or trained.spec is None or trained.images_seen is None:
        return {}
    found = {}
    for file, metric in ((METRICS, "train/loss"), (EVALUATIONS, "eval/loss")):
        points = _points(trained.run_dir / file, metric)
        # After a rewind a lower step follows a higher one, and is the course that was kept.
        before = [loss for step, loss in points if step * trained.spec.train.batch_images <= trained.images_seen]
        if before:
            found[metric] = before[-1]
    return found


def _facts(trained: Trained, precision: str, label: str | None) -> dict[str, str]:
    """The table, as far as it is known."""
    diffusion, spec, losses = trained.diffusion, trained.spec, last_losses(trained)
    parameters = sum(parameter.numel() for parameter in trained.unet.parameters())
    facts = {"parameters": f"{parameters:,} in {precision}", "weights": WEIGHTS[trained.weights]}
    if label is not None:
        facts["label"] = f"{label}, folded into the time embedding"
    elif trained.unet_spec.classes is not None:
        facts["classes"] = f"{trained.unet_spec.classes}, and no label"
    if spec is not None and trained.images_seen is not None:
        facts["data"] = f"{spec.data.source}, {_shape(trained)}"
        facts["images seen"] = f"{trained.images_seen:,}, {spec.train.batch_images} per step"
    if "train/loss" in losses:
        facts["last training loss"] = f"{losses['train/loss']:.4f} ({diffusion.loss}, {diffusion.weighting})"
    if spec is not None and "eval/loss" in losses:
        facts["held-out loss"] = f"{losses['eval/loss']:.4f} on {spec.data.held_out_images:,} images, averaged weights"
    facts["noise schedule"] = f"{diffusion.schedule}, {diffusion.timesteps:,} timesteps"
    facts["prediction"] = diffusion.objective
    return facts


def _usage(trained: Trained) -> str:
    channels, size, _ = trained.image_shape
    steps, classes = trained.diffusion.timesteps, trained.unet_spec.classes
    if classes is not None:
        return CONDITIONAL.format(
            classes=classes, last_class=classes - 1, no_label=classes, channels=channels, size=size, steps=steps
        )
    # This scheduler has no clipping of its own, but its thresholding with the bound 1 is one.
    options = ", thresholding=True" if trained.sampler.clip == "static" else ""
    return UNCONDITIONAL.format(steps=steps, fast_steps=min(20, steps), fast_options=options)


def _shape(trained: Trained) -> str:
    channels, height, width = trained.image_shape
    return f"{height}x{width} pixels and {channels} channel{'s' if channels > 1 else ''}"


def _points(path: Path, metric: str) -> list[tuple[int, float]]:
    """(step, value) of one metric in a file of the run's folder, in the order they were logged."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            point = json.loads(line)
            found.append((int(point["step"]), float(point[metric])))
        except (ValueError, KeyError, TypeError):  # cut off when the disk was full, or without this metric
            continue
    return found
