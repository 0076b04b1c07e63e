"""Scores of conditional runs: ensembles against held-out truths, as a table, JSON, pictures and metrics for MLflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from ddpm_ds.evaluate.fields import SSIM_WINDOW, Spectra, psnr, ssim

BYTES = 255.0
"""Difference of the largest and the smallest value of a picture."""
COLOURS = ("red", "green", "blue")
MOST_PLOTS = 9
"""Maximum number of channels whose spectra are drawn."""
LINES = {"truth": "#2b2b2b", "members": "#e07b39", "mean": "#3b7dd8"}
"""Spectra in a plot, with the colours of their lines."""


@dataclass
class PictureScores:
    """PSNR and SSIM of members as pictures, which are rounded to bytes: means over all of them."""

    psnr: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)

    def add(self, members: Tensor, truth: Tensor) -> None:
        """Add the members (K, C, H, W) of an input and its truth (C, H, W), from 0 to 255."""
        drawn, true = members.round().clamp(0.0, BYTES), truth.float().expand(members.shape)
        self.psnr.append(psnr(drawn, true, data_range=BYTES))
        if min(truth.shape[1:]) >= SSIM_WINDOW:
            self.ssim.append(ssim(drawn, true, data_range=BYTES))

    def means(self) -> dict[str, float]:
        """Return the means by name; without the PSNR if a member equals its truth, and the SSIM of tiny pictures."""
        means = {name: float(np.mean(values)) for name, values in vars(self).items() if values}
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}


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
