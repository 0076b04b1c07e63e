"""The model card of an export: ``card.md``, filled with some facts of the run."""

from pathlib import Path

from jinja2 import Template

from ddpm_ds.config.choices import SCHEDULES
from ddpm_ds.evaluate.diffusers.text_pipeline import pipeline_of
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.tracking.run_folder import RunFolder

KINDS_OF_WEIGHTS = {"ema": "averaged over training (EMA)", "raw": "as trained, not averaged", "export": "of an export"}
EDM_STEPS = 50
"""Number of Euler steps that the card proposes for EDM, whose scheduler stores no number of steps."""


def model_card(
    trained: Trained,
    *,
    precision: str,
    label: str | None,
    picture: str | None,
    single_file: str | None = None,
    hub_name: str | None = None,
) -> str:
    """Return the model card in Markdown, with the front matter that model hubs read.

    ``label`` says which label was folded into the weights, if any; ``picture`` names the grid of samples, and
    ``single_file`` the file that was written instead of a pipeline's folder. ``hub_name`` is where it will be.
    """
    colours, height, width = trained.picture_shape
    diffusion, spec, autoencoder = trained.diffusion, trained.spec, trained.autoencoder
    classes, text = trained.unet_spec.classes, trained.unet_spec.text is not None
    pipeline = "DDPMPipeline" if autoencoder is None else "LDMPipeline"
    continuous, how = SCHEDULES[diffusion.schedule].continuous, trained.sampler
    images = f"{height}x{width} pixels and {colours} channel{'s' if colours > 1 else ''}"
    parameters = sum(parameter.numel() for parameter in trained.unet.parameters())
    facts = {
        "parameters": f"{parameters:,} in {precision}",
        "weights": KINDS_OF_WEIGHTS[trained.weights],
        "label": label and f"{label}, folded into the time embedding",
        "data": spec and f"{spec.data.source}, {images}",
        "images seen": spec and f"{trained.images_seen:,}, {spec.train.batch_images} per step",
        "noise schedule": diffusion.schedule + ("" if continuous else f", {diffusion.timesteps:,} timesteps"),
        "prediction": diffusion.objective,
        "sampler": f"{how.kind} in {how.steps_of(diffusion)} steps, guidance {how.guidance:g}",
    }
    template = (Path(__file__).parent / "card.md").read_text(encoding="utf-8")
    return Template(template, trim_blocks=True, keep_trailing_newline=True).render(
        title=spec.name if spec else Path(trained.origin).resolve().name,
        images=images,
        shape=trained.image_shape,
        picture=picture,
        facts={name: value for name, value in facts.items() if value},
        classes=classes,
        count=classes or 16,
        autoencoder=autoencoder,
        continuous=continuous,
        pipeline=pipeline_of(trained) if text else pipeline,
        text=text,
        single_file=single_file,
        here=hub_name or ".",
        steps=EDM_STEPS if continuous else diffusion.timesteps,
        conditions=trained.interface.condition_channels,
        told_level=trained.interface.told_level,
        # This scheduler has no clipping, but its thresholding with the bound 1 has the same effect.
        clipping=", thresholding=True" if how.clip == "static" else "",
    )


def last_picture(trained: Trained) -> Path | None:
    """Return the picture that the run has drawn after the images of these averaged weights; None if there is none."""
    if trained.run_dir is None or trained.images_seen is None or trained.weights != "ema":
        return None
    path = RunFolder(trained.run_dir).samples(trained.images_seen)
    return path if path.is_file() else None
