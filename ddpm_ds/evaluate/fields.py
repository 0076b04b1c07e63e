"""Scores of ensembles of fields against the truth, by channel; PSNR and SSIM of pictures. Arithmetic without files.

Arrays are of torch or numpy, of any float dtype; sums are float64. A field is (C, H, W), and its ensemble (K, C, H, W).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ddpm_ds.errors import EvaluationError

Array = Tensor | NDArray[Any]

SSIM_WINDOW = 11
"""Height and width of the window of SSIM, in pixels."""


@dataclass(frozen=True)
class EnsembleScores:
    """Scores of a channel, or of all channels, over the pixels that count of all inputs."""

    mae: float
    """Mean absolute error of the ensemble mean."""
    rmse: float
    """Root mean square error of the ensemble mean, which is called its skill."""
    crps: float
    """Mean continuous ranked probability score; with one member the mean absolute error."""
    spread: float | None
    """Root of the mean variance of the members, divided by K - 1; None with one member."""
    spread_over_skill: float | None
    """Spread over skill times sqrt((K + 1) / K), which is 1 if truth and members have the same distribution; None with
    one member and for a skill of 0. Source: Fortin et al. 2014, "Why should ensemble spread match
    the RMSE of the ensemble mean?"."""


@dataclass(frozen=True)
class Spectra:
    """Power by wavenumber and channel, a mean over inputs, (C, wavenumbers).

    Wavenumbers are 0, 1, 2, ... cycles per shorter side of the domain, whose pixels are squares. Each stands for the
    ring of Fourier modes within half a cycle of it, of all directions. The power of a ring is the mean over its modes
    of the squared amplitude, and the sum over rings of modes times power is the mean square of the field.
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
        """Return a table: its header, a row for each channel, and a row for all if there is more than one."""
        header = ("channel", *(field.name.replace("_", " ") for field in fields(EnsembleScores)))
        lines = [*self.channels.items(), *([("all", self.total)] if len(self.channels) > 1 else [])]
        return [header, *((name, *map(_rounded, vars(scores).values())) for name, scores in lines)]


def _tensor(values: Array) -> Tensor:
    """Return an array as a tensor, copied only if it is read-only, of which PyTorch warns."""
    return values if isinstance(values, Tensor) else torch.from_numpy(np.require(values, requirements="W"))


def _rounded(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


class FieldScorer:
    """Scorer that takes the ensemble of one input at a time, so that large fields need not be in memory at once.

    With `fair`, the CRPS is an unbiased estimate of that of infinitely many members (Ferro 2014, "Fair scores for
    ensemble forecasts"); without, it is the score of the K members as a distribution.
    """

    def __init__(self, channels: Sequence[str], *, fair: bool = True) -> None:
        self._channels, self._fair = tuple(channels), fair
        self._inputs = self._members = 0
        self._sums = np.zeros((len(self._channels), 5))  # pixels, |error|, error^2, variance, CRPS
        self._powers: NDArray[np.float64] | None = None  # (3, C, wavenumbers): members, mean, truth
        self._size: tuple[int, int] | None = None
        self._masked = False

    def add(self, members: Array, truth: Array, mask: Array | None = None) -> None:
        """Add the members (K, C, H, W) of one input and its truth (C, H, W).

        Pixels count where `mask`, (C, H, W) or (1, H, W), is not 0; elsewhere any value is ignored, NaN too. A channel
        is computed at a time, on the members' device.

        Raises:
            EvaluationError: the shapes do not fit each other or those of earlier inputs.
        """
        drawn = _tensor(members)
        true = _tensor(truth).to(drawn.device)
        counts = None if mask is None else _tensor(mask).to(drawn.device) != 0
        self._check(drawn, true, counts)
        self._inputs, self._members = self._inputs + 1, len(drawn)
        self._masked = self._masked or counts is not None
        for channel in range(len(self._channels)):
            x, y = drawn[:, channel].double(), true[channel].double()  # (K, H, W), (H, W)
            if not self._masked:
                self._add_spectra(channel, x, y)
            counted = ... if counts is None else counts.expand(true.shape)[channel]
            self._add_sums(channel, x[:, counted].flatten(1), y[counted].flatten())

    def scores(self) -> FieldScores:
        """Return the scores of all inputs so far.

        Raises:
            EvaluationError: there are no inputs, or a channel has no pixel that counts.
        """
        if not self._inputs:
            raise EvaluationError("there are no inputs to score; add at least one")
        for name, pixels in zip(self._channels, self._sums[:, 0], strict=True):
            if not pixels:
                raise EvaluationError(
                    f"no pixel of channel {name!r} counts in any input; leave it out or change the mask"
                )
        channels = {name: self._of(sums) for name, sums in zip(self._channels, self._sums, strict=True)}
        return FieldScores(self._inputs, self._members, self._of(self._sums.sum(axis=0)), channels, self._spectra())

    def _check(self, members: Tensor, truth: Tensor, mask: Tensor | None) -> None:
        shapes = f"members of {tuple(members.shape)} and a truth of {tuple(truth.shape)}"
        if members.ndim != 4 or members.shape[1:] != truth.shape or len(truth) != len(self._channels):
            raise EvaluationError(f"{shapes} are not (K, C, H, W) and (C, H, W) with {len(self._channels)} channels")
        if mask is not None and (mask.shape[1:] != truth.shape[1:] or len(mask) not in (1, len(truth))):
            raise EvaluationError(f"a mask of {tuple(mask.shape)} does not fit a truth of {tuple(truth.shape)}")
        size = (truth.shape[1], truth.shape[2])
        if self._inputs and (len(members), size) != (self._members, self._size):
            raise EvaluationError(f"{shapes} differ from {self._members} members of {self._size} before")
        self._size = size

    def _add_sums(self, channel: int, x: Tensor, y: Tensor) -> None:
        """Add the members (K, P) and the truth (P) of pixels."""
        if not len(y):
            return
        error = x.mean(dim=0) - y
        variance = x.var(dim=0).sum() if len(x) > 1 else error.new_zeros(())
        sums = (error.abs().sum(), error.square().sum(), variance, crps(x, y, fair=self._fair).sum())
        self._sums[channel] += (len(y), *(float(value) for value in sums))

    def _add_spectra(self, channel: int, x: Tensor, y: Tensor) -> None:
        found = np.stack([power_spectrum(field).mean(axis=0) for field in (x, x.mean(dim=0)[None], y[None])])
        if self._powers is None:
            self._powers = np.zeros((3, len(self._channels), found.shape[-1]))
        self._powers[:, channel] += found

    def _spectra(self) -> Spectra | None:
        if self._masked or self._powers is None or self._size is None:
            return None
        powers = (self._powers / self._inputs).tolist()
        modes = np.bincount(rings(*self._size).ravel()).tolist()
        return Spectra(tuple(modes), *(tuple(map(tuple, of_channels)) for of_channels in powers))

    def _of(self, sums: NDArray[np.float64]) -> EnsembleScores:
        mae, squared, variance, score = (sums[1:] / sums[0]).tolist()
        rmse, k = math.sqrt(squared), self._members
        spread = math.sqrt(variance) if k > 1 else None
        ratio = spread / rmse * math.sqrt((k + 1) / k) if spread is not None and rmse else None
        return EnsembleScores(mae, rmse, score, spread, ratio)


def field_scores(
    members: Array,
    truths: Array,
    masks: Array | None = None,
    *,
    channels: Sequence[str] | None = None,
    fair: bool = True,
) -> FieldScores:
    """Return the scores of members (K, N, C, H, W) against truths (N, C, H, W), as :class:`FieldScorer` computes them.

    Masks are (N, C, H, W) or (N, 1, H, W). Channels are named 0, 1, ... if no names are given.

    Raises:
        EvaluationError: the shapes do not fit, or a channel has no pixel that counts.
    """
    if members.ndim != 5 or members.shape[1] != len(truths):
        shapes = f"members of {tuple(members.shape)} and truths of {tuple(truths.shape)}"
        raise EvaluationError(f"{shapes} are not (K, N, C, H, W) and (N, C, H, W)")
    scorer = FieldScorer(channels or [str(number) for number in range(members.shape[2])], fair=fair)
    for number, truth in enumerate(truths):
        scorer.add(members[:, number], truth, None if masks is None else masks[number])
    return scorer.scores()


def crps(members: Tensor, truth: Tensor, *, fair: bool = True) -> Tensor:
    """Return the continuous ranked probability score of members (K, ...) at each pixel of the truth (...).

    It is the mean of \\|x_i - y\\| minus half the mean of \\|x_i - x_j\\|: over all pairs or, if `fair`, those of two
    members. The second sum needs one sort. Source: Gneiting and Raftery 2007, section 4.2; Ferro 2014.
    """
    k = len(members)
    error = (members - truth).abs().mean(dim=0)
    if k == 1:
        return error
    ranks = torch.arange(1 - k, k, 2, dtype=members.dtype, device=members.device)  # 2 i - K - 1 for i = 1 ... K
    apart = torch.tensordot(ranks, members.sort(dim=0).values, dims=1)  # sum over pairs i < j
    return error - apart / (k * (k - 1) if fair else k**2)


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


def psnr(pictures: Array, truths: Array, *, data_range: float) -> float:
    """Return the peak signal-to-noise ratio in dB of pictures (N, C, H, W), a mean over pictures; inf if one is exact.

    `data_range` is the difference of the largest and the smallest possible value, such as 255.
    """
    error = _tensor(pictures).double() - _tensor(truths).double()
    return float((10.0 * (data_range**2 / error.square().flatten(1).mean(dim=1)).log10()).mean())


def ssim(pictures: Array, truths: Array, *, data_range: float) -> float:
    """Return the structural similarity of pictures (N, C, H, W), a mean over all places of the window inside them.

    The window is Gaussian, 11x11 pixels with a standard deviation of 1.5; K1 is 0.01 and K2 0.03. Channels count
    alike. `data_range` is the difference of the largest and the smallest possible value, such as 255.
    Source: Wang et al. 2004, eq. 13, and section III-C for the constants.

    Raises:
        EvaluationError: a side is shorter than the window.
    """
    x, y = _tensor(pictures).double(), _tensor(truths).double()
    height, width = x.shape[-2:]
    if min(height, width) < SSIM_WINDOW:
        raise EvaluationError(f"SSIM needs pictures of at least {SSIM_WINDOW}x{SSIM_WINDOW}, not {height}x{width}")
    offsets = torch.arange(SSIM_WINDOW, dtype=torch.float64, device=x.device) - SSIM_WINDOW // 2
    window = (-(offsets**2) / (2.0 * 1.5**2)).exp()
    window /= window.sum()

    def mean(values: Tensor) -> Tensor:  # (N, C, H, W) to (N C, 1, H - 10, W - 10)
        rows = F.conv2d(values.reshape(-1, 1, height, width), window[None, None, None])
        return F.conv2d(rows, window[None, None, :, None])

    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y, both = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2, mean(x * y) - mean_x * mean_y
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    luminance = (2.0 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    return float((luminance * (2.0 * both + c2) / (var_x + var_y + c2)).mean())
