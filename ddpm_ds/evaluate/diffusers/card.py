"""The model card of an export: ``card.md``, filled with facts about the run."""

from pathlib import Path

from jinja2 import Template

from ddpm_ds.evaluate.diffusers.text_pipeline import of_flow, pipeline_of
from ddpm_ds.evaluate.diffusers.unet_config import use_of
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.schema.choices import SCHEDULES
from ddpm_ds.tracking.run_folder import RunFolder


def model_card(trained: Trained, **written: str | None) -> str:
    """Return the model card in Markdown, with the front matter that model hubs read.

    ``written`` are the ``precision``, the ``label`` folded into the weights, the ``picture`` of samples, and the
    ``single_file``, if any.
    """
    text = trained.unet_spec.text is not None
    plain = "DDPMPipeline" if trained.autoencoder is None else "LDMPipeline"
    template = (Path(__file__).parent / "card.md").read_text(encoding="utf-8")
    return Template(template, trim_blocks=True, keep_trailing_newline=True).render(
        trained=trained,
        spec=trained.spec,
        title=trained.spec.name if trained.spec else Path(trained.origin).resolve().name,
        parameters=sum(parameter.numel() for parameter in trained.unet.parameters()),
        **written,
        text=text,
        pipeline=pipeline_of(trained) if text else plain,
        use=use_of(trained.unet_spec, trained.known_data),
        flow=of_flow(trained),
        continuous=SCHEDULES[trained.diffusion.schedule].continuous,
    )


def last_picture(trained: Trained) -> Path | None:
    """Return the run's own picture of these averaged weights; None if there is none."""
    if trained.run_dir is None or trained.images_seen is None or trained.weights != "ema":
        return None
    path = RunFolder(trained.run_dir).samples(trained.images_seen)
    return path if path.is_file() else None
