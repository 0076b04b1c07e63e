"""Scores of conditional runs: ensembles against true images, as a table, JSON, pictures and metrics for MLflow."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from ddpm_ds.command_line import aligned
from ddpm_ds.config.spec import SamplerSpec
from ddpm_ds.data.pictures import write_png
from ddpm_ds.errors import EvaluationError
from ddpm_ds.evaluate.fields import SSIM_WINDOW, FieldScorer, FieldScores, Spectra, psnr, ssim
from ddpm_ds.evaluate.inputs import Inputs
from ddpm_ds.evaluate.outputs import DrawnImages, Request, record_child, titled_grid, writing
from ddpm_ds.evaluate.sampling import ALONE, draw_missing, prompts_for, request_for, said_of
from ddpm_ds.evaluate.scores import guidance_said, rounded
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.files import write_file
from ddpm_ds.pipeline.staged import Pipelines
from ddpm_ds.version import __version__

BYTES = 255.0
"""Difference of the largest and the smallest value of a picture."""
COLOURS = {1: ("grey",), 3: ("red", "green", "blue")}
"""Names of a picture's channels."""
MOST_PLOTS = 9
"""Maximum number of channels whose spectra are drawn."""
LINES = {"truth": "#2b2b2b", "members": "#e07b39", "mean": "#3b7dd8"}
"""Spectra in a plot, with the colours of their lines."""


@dataclass(frozen=True)
class Evaluated:
    """Scores of the ensembles of a request."""

    request: Request
    scores: FieldScores
    pictures: Mapping[str, float]
    """PSNR and SSIM by name; empty for fields."""

    @property
    def metrics(self) -> dict[str, float]:
        """Scores by their names in MLflow."""
        return {**self.scores.metrics(), **{f"eval/{name}": value for name, value in self.pictures.items()}}


@dataclass
class PictureScores:
    """PSNR and SSIM of members as pictures: means over all of them."""

    psnr: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)

    def add(self, members: Tensor, truth: Tensor) -> None:
        """Add the members (K, C, H, W) of an input and its truth (C, H, W), from 0 to 255."""
        true = truth.expand(members.shape)
        self.psnr.append(psnr(members, true, data_range=BYTES))
        if min(truth.shape[1:]) >= SSIM_WINDOW:
            self.ssim.append(ssim(members, true, data_range=BYTES))

    def means(self) -> dict[str, float]:
        """Return the means by name; without the PSNR if a member equals its truth, and the SSIM of tiny pictures."""
        means = {name: float(np.mean(values)) for name, values in vars(self).items() if values}
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}


def evaluate_ensembles(
    trained: Trained,
    sampler: SamplerSpec,
    guide: Trained | None,
    inputs: Inputs,
    out: Path | None,
    *,
    count: int | None,
    members: int | None,
    seed: int,
    batch_images: int,
    pipelines: Pipelines = ALONE,
) -> Evaluated | None:
    """Draw, score and record ``members`` (None: the usual number) for each of the first ``count`` inputs (None: all),
    in a folder of their own.

    It is in ``out``, by default among the run's evaluations. Of several ``pipelines`` all draw and only the first does
    the rest; the others return None.

    Raises:
        EvaluationError: the true images of the inputs are not known.
        SpecError: there are fewer inputs, or a regression is asked for several members.
    """
    if not inputs.are_known:
        raise EvaluationError("--conditions has no true images to compare with; leave it out for those held out")
    labels = None if trained.unet_spec.classes is None else range(trained.unet_spec.classes)
    prompts = prompts_for(trained, None, None, sampler, guided=guide is not None, log=print)
    numbers: dict[str, Any] = {"seed": seed, "batch_images": batch_images, **said_of(prompts, None)}
    count = len(inputs) if count is None else count
    request = request_for(trained, sampler, labels, guide, inputs, False, count=count, members=members, **numbers)
    count, members = request.count // request.members, request.members
    origin, kind, steps = Path(request.origin).resolve().name, request.sampler.kind, request.sampler.steps
    folder = out or (trained.run_dir or Path()) / "evaluations"
    folder /= f"{origin}-{request.weights}-{kind}-{steps}-{count}x{members}-{request.key}"
    said = print if pipelines.is_first else lambda *_, **__: None
    said(
        f"weights    {request.weights} of {trained.origin}, {request.precision}\n"
        f"sampler    {kind} in {steps} steps, seed {seed}\n"
        f"inputs     {count:,}, with {members} member{'s' if members > 1 else ''} each\n"
        f"outputs    {folder}",
        flush=True,
    )
    drawn = DrawnImages(folder / "drawn", request)
    try:
        draw_missing(trained, request, drawn, pipelines, guide=guide, inputs=inputs, prompts=prompts)
        if not pipelines.is_first:
            return None
        images = drawn.images()
        found = scored(trained, inputs, request, images)
    except KeyboardInterrupt:
        said("interrupted: what is drawn is kept, and the same command continues from there")
        raise
    facts = request.model_dump(mode="json", exclude={"batch_images", "labels"})
    facts["version"] = {"ddpm_ds": __version__, "torch": torch.__version__}
    with writing(folder):
        samples = titled_grid(trained, sampler, images, None, inputs=inputs, request=request)
        files = write_report(folder, facts, found, samples)
    record_child(trained, "evaluate", facts, metrics=found.metrics, artifacts=dict.fromkeys(files, ""))
    return found


def scored(trained: Trained, inputs: Inputs, request: Request, images: np.ndarray) -> Evaluated:
    """Return the scores of images (N K, C, H, W), which are K members of each of N inputs."""
    names = trained.channels if trained.are_fields else COLOURS[trained.interface.channels]
    scorer, pictures = FieldScorer(names), PictureScores()
    for number in range(request.count // request.members):
        first = number * request.members
        members = torch.from_numpy(np.array(images[first : first + request.members])).float()
        truth, mask = inputs.truth([number]), inputs.mask([number])
        assert truth is not None, "the true images are known"
        scorer.add(members, truth[0], None if mask is None else mask[0])
        if not trained.are_fields:
            pictures.add(members, truth[0])
    return Evaluated(request, scorer.scores(), pictures.means())


def write_report(folder: Path, facts: Mapping[str, Any], found: Evaluated, samples: Image.Image) -> list[Path]:
    """Write ``scores.json``, the scores with ``facts`` about them, the picture ``samples.png`` and, unless pixels are
    masked, the plot ``spectra.png``; return the files.

    Raises:
        OSError: the file system refuses.
    """
    path, picture, plot = (folder / name for name in ("scores.json", "samples.png", "spectra.png"))
    scores = found.scores
    content = {**facts, "scores": {**asdict(scores), **found.pictures}}
    write_file(path, (json.dumps(content, indent=2) + "\n").encode())
    write_png(samples, picture)
    if scores.spectra is None:
        return [path, picture]
    spectra_plot(scores.spectra, list(scores.channels), plot)
    return [path, picture, plot]


def ensemble_table(results: Sequence[Evaluated]) -> str:
    """Return a table with a line for each channel of some evaluations, and all that it depends on."""
    rows: list[tuple[str, ...]] = []
    for found in results:
        request, scores = found.request, found.scores
        header, *lines = scores.rows()
        shown = {name.upper(): rounded(found.pictures.get(name)) for name in ("psnr", "ssim") if found.pictures}
        how = {
            **shown,
            "inputs": f"{scores.inputs:,}",
            "members": str(scores.members),
            "sampler": request.sampler.kind,
            "steps": str(request.sampler.steps),
            "weights": request.weights,
            "guidance": guidance_said(request),
        }
        rows = rows or [(*header, *how)]
        rows += [(*line, *how.values()) for line in lines]
    left = {number for number, name in enumerate(rows[0]) if name in ("channel", "sampler", "weights")}
    return "\n".join(aligned(rows, left))


def spectra_plot(spectra: Spectra, channels: Sequence[str], path: Path) -> None:
    """Write a PNG with the power by wavenumber of truths, members and ensemble means, a plot for each channel."""
    shown = list(channels)[:MOST_PLOTS]
    columns = math.ceil(math.sqrt(len(shown)))
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(3.4 * columns, 0.4 + 2.6 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    waves = np.arange(1, len(spectra.modes))  # 0 is the mean, and has no place on a logarithmic axis
    for number, name in enumerate(shown):
        axes = figure.add_subplot(rows, columns, number + 1)
        for line, colour in LINES.items():
            axes.loglog(waves, getattr(spectra, line)[number][1:], color=colour, label=line, linewidth=1.2)
        axes.set_title(name, fontsize=8)
        axes.tick_params(labelsize=7, which="both")
        axes.set_xlabel("wavenumber, cycles per shorter side", fontsize=7)
        axes.set_ylabel("power per mode", fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=7)
    figure.savefig(path, format="png", metadata={"Software": None})
