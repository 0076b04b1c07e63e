"""Scores of conditional runs: ensembles against true images, as a table, JSON, pictures and metrics for MLflow.

A field is (C, H, W), and its ensemble (K, C, H, W), of any float dtype. Sums are float64.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from ddpm_ds.evaluate.outputs import Request, titled_grid
from ddpm_ds.evaluate.sampling import Setup, request_for
from ddpm_ds.evaluate.scores import drawn_for_scores, four_digits, guidance_in_words, report
from ddpm_ds.ground.errors import EvaluationError
from ddpm_ds.ground.units import aligned
from ddpm_ds.tracking.pictures import write_png

COLOURS = {1: ("grey",), 3: ("red", "green", "blue")}
"""Names of a picture's channels, by their number."""
MOST_PLOTS = 9
"""Maximum number of channels whose spectra are drawn."""
LINES = {"truth": "#2b2b2b", "members": "#e07b39", "mean": "#3b7dd8"}
"""Colours of the spectra in a plot."""


@dataclass(frozen=True)
class EnsembleScores:
    """Scores of one channel or of all, over the counted pixels of all inputs."""

    rmse: float
    """Root mean square error of the ensemble mean, also called its skill."""
    crps: float
    """Mean continuous ranked probability score; with one member the mean absolute error."""
    spread_over_skill: float | None
    """Spread (root of the members' mean variance) over skill, times sqrt((K + 1) / K). It is 1 if members and truth
    have one distribution; None with one member, or if the skill is 0. Source: Fortin et al. 2014, "Why should ensemble
    spread match the RMSE of the ensemble mean?"."""


@dataclass(frozen=True)
class Spectra:
    """Power by wavenumber and channel, a mean over inputs, (C, wavenumbers).

    Wavenumbers are 0, 1, 2, ... cycles per shorter side of the domain, whose pixels are squares. Each stands for a
    ring: the Fourier modes within half a cycle of it, in all directions. A ring's power is the mean squared amplitude
    of its modes. Modes times power, summed over rings, is the mean square of the field.
    """

    modes: tuple[int, ...]
    """Number of Fourier modes of each wavenumber."""
    members: tuple[tuple[float, ...], ...]
    """Mean of the members' spectra."""
    mean: tuple[tuple[float, ...], ...]
    """Spectrum of the ensemble mean."""
    truth: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class FieldScores:
    """Scores of the ensembles of some inputs."""

    inputs: int
    members: int
    """Number K of members of each input."""
    total: EnsembleScores
    """Scores of all channels as one, which means little if their units differ."""
    channels: dict[str, EnsembleScores]
    spectra: Spectra | None
    """None if pixels were masked, since a field with holes has no Fourier modes."""

    def metrics(self) -> dict[str, float]:
        """Return the scores by their names in MLflow: ``eval/crps``, and ``eval/crps_channel/NAME``."""
        found = {f"eval/{score}": value for score, value in vars(self.total).items()}
        for name, scores in self.channels.items():
            allowed = re.sub(r"[^\w. -]", "_", name)  # MLflow refuses other characters
            found |= {f"eval/{score}_channel/{allowed}": value for score, value in vars(scores).items()}
        return {name: value for name, value in found.items() if value is not None}

    def rows(self) -> list[tuple[str, ...]]:
        """Return a table: its header, a row for each channel and, of several, a row for all channels."""
        header = ("channel", *(field.name.replace("_", " ") for field in fields(EnsembleScores)))
        lines = [*self.channels.items(), *([("all", self.total)] if len(self.channels) > 1 else [])]
        return [header, *((name, *map(four_digits, vars(scores).values())) for name, scores in lines)]


class FieldScorer:
    """Scorer that takes one input's ensemble at a time, so that large fields need not be in memory at once.

    The CRPS is an unbiased estimate for infinitely many members (Ferro 2014, "Fair scores for ensemble forecasts").
    """

    def __init__(self, channels: Sequence[str]) -> None:
        self._channels = tuple(channels)
        self._inputs = self._members = 0
        self._sums = np.zeros((len(self._channels), 4))  # pixels, error^2, variance, CRPS
        self._powers: NDArray[np.float64] | None = None  # (3, C, wavenumbers): members, mean, truth
        self._size = (0, 0)
        self._masked = False

    def add(self, members: Tensor, truth: Tensor, mask: Tensor | None = None) -> None:
        """Add the members (K, C, H, W) of one input and its truth (C, H, W); all inputs have the same shapes.

        Pixels count where `mask`, (C, H, W) or (1, H, W), is not 0. Elsewhere every value is ignored, NaN too.
        """
        self._inputs, self._members, self._size = self._inputs + 1, len(members), (truth.shape[1], truth.shape[2])
        self._masked = self._masked or mask is not None
        for channel in range(len(self._channels)):
            x, y = members[:, channel].double(), truth[channel].double()  # (K, H, W), (H, W)
            if not self._masked:
                found = np.stack([power_spectrum(field).mean(axis=0) for field in (x, x.mean(dim=0)[None], y[None])])
                if self._powers is None:
                    self._powers = np.zeros((3, len(self._channels), found.shape[-1]))
                self._powers[:, channel] += found
            counted = ... if mask is None else (mask != 0).expand(truth.shape)[channel]
            x, y = x[:, counted].flatten(1), y[counted].flatten()  # (K, pixels), (pixels)
            if len(y):
                error = x.mean(dim=0) - y
                variance = x.var(dim=0).sum() if len(x) > 1 else error.new_zeros(())
                sums = (error.square().sum(), variance, crps(x, y).sum())
                self._sums[channel] += (len(y), *(float(value) for value in sums))

    def scores(self) -> FieldScores:
        """Return the scores of all inputs so far; raises EvaluationError if a channel has no pixel that counts."""
        for name, pixels in zip(self._channels, self._sums[:, 0], strict=True):
            if not pixels:
                fault = f"no pixel of channel {name!r} counts in any input; leave it out or change the mask"
                raise EvaluationError(fault)
        channels, spectra = dict(zip(self._channels, map(self._of, self._sums), strict=True)), None
        if not self._masked and self._powers is not None:
            powers, modes = (self._powers / self._inputs).tolist(), np.bincount(rings(*self._size).ravel()).tolist()
            spectra = Spectra(tuple(modes), *(tuple(map(tuple, of_channels)) for of_channels in powers))
        return FieldScores(self._inputs, self._members, self._of(self._sums.sum(axis=0)), channels, spectra)

    def _of(self, sums: NDArray[np.float64]) -> EnsembleScores:
        squared, variance, score = (sums[1:] / sums[0]).tolist()
        k = self._members
        ratio = math.sqrt(variance / squared * (k + 1) / k) if k > 1 and squared else None
        return EnsembleScores(math.sqrt(squared), score, ratio)


def crps(members: Tensor, truth: Tensor) -> Tensor:
    """Return the continuous ranked probability score of members (K, ...) at each pixel of the truth (...).

    It is the mean of \\|x_i - y\\| minus half the mean of \\|x_i - x_j\\| over pairs of two members. The second sum
    needs one sort. Source: Gneiting and Raftery 2007, section 4.2; Ferro 2014.
    """
    k = len(members)
    error = (members - truth).abs().mean(dim=0)
    if k == 1:
        return error
    ranks = torch.arange(1 - k, k, 2, dtype=members.dtype, device=members.device)  # 2 i - K - 1 for i = 1 ... K
    pairs = torch.tensordot(ranks, members.sort(dim=0).values, dims=1)  # sum over pairs i < j
    return error - pairs / (k * (k - 1))


def rings(height: int, width: int) -> NDArray[np.int64]:
    """Return the wavenumber of each Fourier mode, (H, W), rounded to cycles per shorter side."""
    cycles = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width))  # per pixel
    return np.rint(cycles * min(height, width)).astype(np.int64)


def power_spectrum(values: Tensor) -> NDArray[np.float64]:
    """Return the power by wavenumber of fields (N, H, W), (N, wavenumbers), as :class:`Spectra` describes it."""
    height, width = values.shape[-2:]
    powers = torch.fft.fft2(values.double(), norm="forward").abs().square().cpu().numpy()  # (N, H, W)
    ring = rings(height, width).ravel()
    modes = np.bincount(ring)
    return np.stack([np.bincount(ring, weights=power.ravel()) for power in powers]) / modes


def evaluate_ensembles(
    setup: Setup, out: Path | None, *, count: int | None, members: int | None, **numbers: int
) -> tuple[Request, FieldScores]:
    """Draw, score and record ``members`` (None: the usual number) for each of the first ``count`` inputs (None: all).
    They get a folder of their own in ``out``. ``numbers`` are ``seed`` and ``batch_images``.

    Raises EvaluationError: the true images of the inputs are not known.
    """
    trained, inputs = setup.trained, setup.inputs
    assert inputs is not None, "ensembles are drawn for inputs"
    if inputs.truths(inputs.positions[:1]) is None:
        raise EvaluationError("--conditions has no true images to compare with; leave it out for those held out")
    count = len(inputs) if count is None else count
    request = request_for(setup, "all", count=count, members=members, **numbers)
    count, members = request.count // request.members, request.members
    against = {"inputs": f"{count:,}, with {members} member{'s' if members > 1 else ''} each"}
    with drawn_for_scores(setup, request, out, f"{count}x{members}", against) as (folder, images):
        scorer = FieldScorer(trained.channels if trained.are_fields else COLOURS[trained.picture_shape[0]])
        for number, each in enumerate(request.by_input(images)):
            truth, mask = inputs.truth([number]), inputs.mask([number])
            assert truth is not None, "the true images are known"
            scorer.add(torch.from_numpy(np.array(each)).float(), truth[0], None if mask is None else mask[0])
        scores = scorer.scores()
        grid = titled_grid(trained, setup.sampler, images, None, inputs=inputs, request=request)
        pictures: dict[str, Callable[[Path], object]] = {"samples": lambda path: write_png(grid, path)}
        if (spectra := scores.spectra) is not None:
            pictures["spectra"] = lambda path: spectra_plot(spectra, list(scores.channels), path)
        facts = request.model_dump(mode="json", exclude={"batch_images", "labels"})
        report(trained, folder, facts, asdict(scores), scores.metrics(), **pictures)
    return request, scores


def ensemble_table(results: Sequence[tuple[Request, FieldScores]]) -> str:
    """Return a table of some evaluations, with a line for each channel and all settings in it."""
    rows: list[tuple[str, ...]] = []
    for request, scores in results:
        header, *lines = scores.rows()
        how = {
            "inputs": f"{scores.inputs:,}",
            "members": str(scores.members),
            "sampler": request.sampler.kind,
            "steps": str(request.sampler.steps),
            "weights": request.weights,
            "guidance": guidance_in_words(request),
        }
        rows = rows or [(*header, *how)]
        rows += [(*line, *how.values()) for line in lines]
    left = {number for number, name in enumerate(rows[0]) if name in ("channel", "sampler", "weights")}
    return "\n".join(aligned(rows, left))


def spectra_plot(spectra: Spectra, channels: Sequence[str], path: Path) -> None:
    """Write a PNG with a plot for each channel: power by wavenumber of truths, members and ensemble means."""
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
