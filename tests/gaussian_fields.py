"""Fields of a Gaussian process that are observed coarsely: what a diffusion should draw is known in closed form.

A field x (16, 16) has mean 0, variance 1 and a Matérn covariance of smoothness 3/2. Its observation y (4, 4) is the
mean of each block of 4x4 pixels plus white noise. Given y, x is Gaussian again: its mean is linear in y, and its
covariance does not depend on y. All arrays are float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddpm_ds.evaluate.ensembles import FieldScorer, FieldScores

GRID, BLOCK = 16, 4
"""Height and width of a field, and of an observed block, in pixels."""
LENGTH, NOISE = 4.0, 0.2
"""Length of the covariance in pixels, and standard deviation of an observation's noise."""

Array = NDArray[np.float64]


def field_scores(members: Any, truths: Any, masks: Any = None, channels: Sequence[str] | None = None) -> FieldScores:
    """Return the scores of members (K, N, C, H, W) against truths (N, C, H, W), with masks (N, C or 1, H, W)."""
    scorer = FieldScorer(channels or [str(number) for number in range(members.shape[2])])
    for number, truth in enumerate(truths):
        arrays = (members[:, number], truth, *(() if masks is None else (masks[number],)))
        scorer.add(*(torch.tensor(np.asarray(array)) for array in arrays))
    return scorer.scores()


@cache
def covariance() -> Array:
    """Return the covariance of a field's pixels, (256, 256). Source: Rasmussen and Williams 2006, eq. 4.17."""
    places = np.stack(np.divmod(np.arange(GRID**2), GRID), axis=1).astype(float)
    scaled = math.sqrt(3.0) * np.linalg.norm(places[:, None] - places, axis=-1) / LENGTH
    return (1.0 + scaled) * np.exp(-scaled)


@cache
def observing() -> Array:
    """Return the matrix that takes a field to the means of its blocks, (16, 256)."""
    blocks = np.arange(GRID) // BLOCK
    block_of = (blocks[:, None] * (GRID // BLOCK) + blocks).ravel()
    inside = block_of == np.arange((GRID // BLOCK) ** 2)[:, None]
    return inside.astype(np.float64) / BLOCK**2


@cache
def _gain() -> Array:
    """Return the matrix that takes an observation to the posterior's mean, (256, 16)."""
    h, prior = observing(), covariance()
    seen = h @ prior @ h.T + NOISE**2 * np.eye(len(h))
    return np.linalg.solve(seen, h @ prior).T.astype(np.float64)


@cache
def posterior_covariance() -> Array:
    """Return the covariance of a field's pixels given any observation, (256, 256)."""
    return covariance() - _gain() @ observing() @ covariance()


def posterior_sd() -> Array:
    """Return the posterior's standard deviation of each pixel, (16, 16)."""
    return np.sqrt(np.diag(posterior_covariance())).reshape(GRID, GRID)


def posterior_mean(observations: Array) -> Array:
    """Return the posterior's mean, (N, 16, 16), given observations (N, 4, 4)."""
    return (observations.reshape(len(observations), -1) @ _gain().T).reshape(-1, GRID, GRID)


def draw_fields(count: int, generator: np.random.Generator) -> Array:
    """Draw fields, (N, 16, 16)."""
    return _correlated(covariance(), (count,), generator)


def observe(fields: Array, generator: np.random.Generator) -> Array:
    """Return noisy means of the blocks, (N, 4, 4), of fields (N, 16, 16)."""
    means = fields.reshape(len(fields), -1) @ observing().T
    return (means + NOISE * generator.standard_normal(means.shape)).reshape(-1, GRID // BLOCK, GRID // BLOCK)


def draw_posterior(members: int, observations: Array, generator: np.random.Generator) -> Array:
    """Draw members of the exact posterior, (K, N, 16, 16), given observations (N, 4, 4)."""
    shape = members, len(observations)
    return posterior_mean(observations) + _correlated(posterior_covariance(), shape, generator)


def _correlated(matrix: Array, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Draw fields with mean 0 and this covariance of pixels, (*shape, 16, 16)."""
    root = np.linalg.cholesky(matrix)
    return (generator.standard_normal((*shape, len(root))) @ root.T).reshape(*shape, GRID, GRID)


def posterior_crps(truths: Array, observations: Array) -> float:
    """Return the mean CRPS of the posterior's pixels, for truths (N, 16, 16) and their observations (N, 4, 4)."""
    return float(gaussian_crps(posterior_mean(observations), posterior_sd(), truths).mean())


def gaussian_crps(mean: Array | float, sd: Array | float, truth: Array) -> Array:
    """Return the CRPS of Gaussian forecasts, in the shape of `truth` (Gneiting and Raftery 2007, section 4.2)."""
    z = (truth - mean) / sd
    below, density = torch.special.ndtr(torch.from_numpy(z)).numpy(), np.exp(-(z**2) / 2.0) / math.sqrt(2.0 * math.pi)
    return sd * (z * (2.0 * below - 1.0) + 2.0 * density - 1.0 / math.sqrt(math.pi))


@dataclass(frozen=True)
class Verdict:
    """How far an ensemble is from the posterior; draws of the posterior itself have 0, 1, 1, 1."""

    mean_error: float
    """Root mean square difference of ensemble mean and posterior mean, less what finitely many members err by, as a
    share of the posterior's standard deviation."""
    spread: float
    """Spread as a share of the posterior's standard deviation."""
    spread_over_skill: float
    """Spread over skill times sqrt((K + 1) / K)."""
    crps: float
    """Fair CRPS as a share of the posterior's on the same truths."""

    @property
    def passes(self) -> bool:
        """Whether these are draws of the posterior, as far as a trained U-Net must reach it."""
        near = abs(self.spread - 1.0) <= 0.1 and 0.9 <= self.spread_over_skill <= 1.1
        return self.mean_error <= 0.1 and near and self.crps <= 1.015


def verdict(members: Array, truths: Array, observations: Array) -> Verdict:
    """Compare members (K, N, 16, 16), drawn given observations (N, 4, 4) of truths (N, 16, 16), with the posterior."""
    scores = field_scores(members[:, :, None], truths[:, None]).total
    assert scores.spread_over_skill is not None, "one member has no spread"
    spread = scores.spread_over_skill * scores.rmse / math.sqrt((len(members) + 1) / len(members))
    sd = math.sqrt((posterior_sd() ** 2).mean())
    squared = ((members.mean(axis=0) - posterior_mean(observations)) ** 2).mean() - spread**2 / len(members)
    return Verdict(
        math.sqrt(max(squared, 0.0)) / sd,
        spread / sd,
        scores.spread_over_skill,
        scores.crps / posterior_crps(truths, observations),
    )


def write_pairs(path: Path, count: int, seed: int) -> None:
    """Write an .npz file to learn from: `image` (N, 1, 16, 16) and `condition` (N, 1, 4, 4), float32."""
    generator = np.random.default_rng(seed)
    fields = draw_fields(count, generator)
    condition = observe(fields, generator)
    np.savez(path, image=fields[:, None].astype(np.float32), condition=condition[:, None].astype(np.float32))
