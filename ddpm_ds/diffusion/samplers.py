"""Samplers, which turn noise into images with one evaluation of the U-Net per step.

Every sampler's step mixes x_t, the predicted clean image x0, the x0 of the step before and fresh noise. They differ in
the four coefficients, which :func:`ancestral`, :func:`ddim` and :func:`dpm_solver` compute in float64 from alpha_bar. A
:class:`Drawing` is the state of some unfinished images; any denoiser can drive it, such as a pipeline of stages.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ddpm_ds import keyed
from ddpm_ds.config.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.diffusion.objective import NoiseLevel, alpha_bars, to_x0
from ddpm_ds.keyed import Stream


class Coefficients(NamedTuple):
    """Factors of the terms of a step."""

    x_t: float
    x0: float
    previous_x0: float = 0.0
    noise: float = 0.0


class SamplerStep(NamedTuple):
    """Result of a step, (N, C, H, W) each."""

    x: Tensor
    """x at the next timestep; after the last step the image."""
    x0: Tensor
    """Clean image as predicted here, clipped; the next step's `previous_x0`."""


class Sampler:
    """Sampler of a spec; immutable. The specs must agree, see :func:`ddpm_ds.config.spec.check_sampler`.

    The step that leaves the last timestep returns x0 as it is, without noise.
    """

    def __init__(self, sampler: SamplerSpec, diffusion: DiffusionSpec) -> None:
        alpha_bar = alpha_bars(diffusion)  # (T,) float64
        self.spec = sampler
        self.objective = diffusion.objective
        self.timesteps = visited(sampler, diffusion.timesteps)
        """Timesteps at which the U-Net is evaluated, falling, each in [0, T)."""
        # A float64 scalar leaves float32 images float32, and on the CPU it makes no device wait.
        self._levels = [NoiseLevel.of(alpha_bar[t]) for t in self.timesteps]
        self._coefficients = _coefficients(sampler, [float(alpha_bar[t]) for t in self.timesteps])

    def needs_noise(self, number: int) -> bool:
        """Return whether step `number` adds noise; the last one never does."""
        return number < len(self._coefficients) and self._coefficients[number].noise > 0.0

    def step(
        self, number: int, x_t: Tensor, prediction: Tensor, *, noise: Tensor | None, previous_x0: Tensor | None
    ) -> SamplerStep:
        """Go from x_t at ``timesteps[number]`` to the next timestep, or to the image after the last one.

        ``x_t``, the U-Net's ``prediction`` for it (of any float dtype), the standard normal ``noise`` (not used unless
        :meth:`needs_noise`) and ``previous_x0`` (x0 of the step before; None at the first) are (N, C, H, W). The dtype
        is that of ``x_t``.
        """
        x0 = self._clipped(to_x0(self.objective, prediction.to(x_t.dtype), x_t, self._levels[number]))
        if number == len(self._coefficients):
            return SamplerStep(x0, x0)
        part = self._coefficients[number]
        x = part.x_t * x_t + part.x0 * x0
        if part.previous_x0:
            assert previous_x0 is not None
            x = x + part.previous_x0 * previous_x0
        if part.noise:
            assert noise is not None
            x = x + part.noise * noise
        return SamplerStep(x, x0)

    def _clipped(self, x0: Tensor) -> Tensor:
        """Return x0 in [-1, 1] as the spec asks. Source of dynamic clipping: Imagen (Saharia et al. 2022),
        section 2.3.
        """
        if self.spec.clip == "none":
            return x0
        if self.spec.clip == "static":
            return x0.clamp(-1.0, 1.0)
        # torch.quantile is the same, but refuses more than 2^24 pixels in older versions.
        magnitudes = x0.abs().flatten(1).sort(dim=1).values  # (N, C x H x W)
        place = self.spec.dynamic_quantile * (magnitudes.shape[1] - 1)
        below, above = magnitudes[:, math.floor(place)], magnitudes[:, math.ceil(place)]
        bound = torch.lerp(below, above, place % 1.0).clamp(min=1.0)[:, None, None, None]  # (N, 1, 1, 1)
        return x0.clamp(-bound, bound) / bound


def visited(sampler: SamplerSpec, timesteps: int) -> tuple[int, ...]:
    """Return the `steps` timesteps of [0, T) that are visited, strictly falling.

    They are those of the diffusers scheduler of the same kind and spacing, with S steps:

    - trailing: T - 1 and down by T / S, rounded, for every kind.
    - leading: multiples of T // S from 0 up; for dpm_solver of T // (S + 1), without 0.
    - linspace: S points from T - 1 to 0, rounded; for dpm_solver S + 1 points, without 0.

    Where diffusers has no falling list of S timesteps this one has: all of them when S = T, and T - 1 for one step of
    linspace. The previous timestep is always the next in the list. Source: Lin et al. 2023, table 2.
    """
    steps = sampler.steps_of(timesteps)
    if steps == timesteps:
        return tuple(reversed(range(timesteps)))
    # With S < T neighbours are more than 1 apart before rounding, so they stay apart: 1 + 1 / S is far above the
    # error of floats, and two halves that round to the same even number are exactly 1 apart.
    if sampler.spacing == "trailing":
        gap = timesteps - (timesteps - timesteps / steps)  # as numpy.arange has it, so that halves round alike
        return tuple(round(timesteps - number * gap) - 1 for number in range(steps))
    points = steps + 1 if sampler.kind == "dpm_solver" else steps
    if sampler.spacing == "leading":
        return tuple(timesteps // points * point for point in reversed(range(points)))[:steps]
    if points == 1:
        return (timesteps - 1,)
    gap = (timesteps - 1) / (points - 1)
    return tuple(round(point * gap) for point in reversed(range(points)))[:steps]


def ancestral(here: float, there: float, *, large: bool) -> Coefficients:
    """Return the DDPM step from alpha_bar `here` to `there`, with the variance of the posterior, or beta where `large`.

    Source: DDPM (Ho et al. 2020), eq. 6 and 7, and 3.2 for the variances; over more than one timestep alpha is
    here / there, Improved DDPM (Nichol and Dhariwal 2021), section 4.
    """
    alpha = here / there
    return Coefficients(
        x_t=math.sqrt(alpha) * (1.0 - there) / (1.0 - here),
        x0=math.sqrt(there) * (1.0 - alpha) / (1.0 - here),
        noise=math.sqrt(1.0 - alpha if large else _posterior_variance(here, there)),
    )


def ddim(here: float, there: float, *, eta: float) -> Coefficients:
    """Return the DDIM step from alpha_bar `here` to `there`; eps is the rest of x_t after x0, so clipping x0 changes
    it.

    Source: DDIM (Song et al. 2021), eq. 12 and 16.
    """
    variance = eta**2 * _posterior_variance(here, there)
    eps = math.sqrt(max(0.0, 1.0 - there - variance))
    x_t = eps / math.sqrt(1.0 - here)  # eps = (x_t - sqrt(here) x0) / sqrt(1 - here)
    return Coefficients(x_t=x_t, x0=math.sqrt(there) - x_t * math.sqrt(here), noise=math.sqrt(variance))


def dpm_solver(here: float, there: float, before: float | None) -> Coefficients:
    """Return the DPM-Solver++ step (2M, midpoint) from alpha_bar `here` to `there`, after a step from `before`.

    The first-order step is DDIM's; the second order leans x0 away from the x0 of the step before, by half the ratio of
    the two steps in log(signal / noise). Source: Lu et al. 2022, "DPM-Solver++", algorithm 2.
    """
    first = ddim(here, there, eta=0.0)
    if before is None:
        return first
    lean = (_log_snr(there) - _log_snr(here)) / (_log_snr(here) - _log_snr(before)) / 2.0
    return first._replace(x0=first.x0 * (1.0 + lean), previous_x0=-first.x0 * lean)


def _coefficients(sampler: SamplerSpec, alpha_bar: list[float]) -> list[Coefficients]:
    """Return the coefficients of every step but the last, from the alpha_bar of each timestep."""
    moves = list(pairwise(alpha_bar))
    if sampler.kind == "ddpm":
        return [ancestral(here, there, large=sampler.variance == "large") for here, there in moves]
    if sampler.kind == "ddim":
        return [ddim(here, there, eta=sampler.eta) for here, there in moves]
    befores = [None, *alpha_bar]
    return [dpm_solver(here, there, before) for before, (here, there) in zip(befores, moves, strict=False)]


def _posterior_variance(here: float, there: float) -> float:
    """Return the variance of x at `there` given x at `here` and the clean image. Source: DDPM, eq. 7."""
    return (1.0 - there) / (1.0 - here) * (1.0 - here / there)


def _log_snr(alpha_bar: float) -> float:
    """Return the logarithm of the signal-to-noise ratio, twice that of signal / noise."""
    return math.log(alpha_bar / (1.0 - alpha_bar))


class Drawing:
    """Images on their way from noise: :meth:`inputs` go to the U-Net, its prediction to :meth:`take`, `calls` times.

    All noise is a function of (seed, image index), so an image doesn't depend on the batch it is drawn in. Everything
    stays on the device of `index`, and nothing waits for it. Images are drawn without gradients: ask the U-Net under
    ``torch.no_grad``.

    Under guidance w the U-Net is asked with and without the label, and its prediction is taken to be
    without + w (with - without), for any objective. With w = 1 only the labels are asked for, with w = 0 only "no
    label". Source: Ho and Salimans 2022, eq. 6, whose w is ours - 1.

    `index` (N,) int64 are the images, of `shape` (C, H, W), and `labels` (N,) int64 their labels on the same device, or
    None without classes or to let the U-Net take "no label", whose number is `no_label`.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        seed: int,
        index: Tensor,
        shape: tuple[int, int, int],
        labels: Tensor | None,
        guidance: float,
        no_label: int | None,
    ) -> None:
        self.calls = len(sampler.timesteps)
        """Number of evaluations of the U-Net in all."""
        self._sampler, self._seed, self._index, self._shape = sampler, seed, index, shape
        self._guidance = guidance
        self._guided = labels is not None and guidance not in (0.0, 1.0)
        if labels is not None and guidance != 1.0:
            assert no_label is not None
            none = torch.full_like(labels, no_label)
            labels = torch.cat([labels, none]) if self._guided else none
        self._labels = labels  # (M,)
        self._x = self._noise(Stream.SAMPLE)  # (N, C, H, W)
        self._x0: Tensor | None = None
        self._taken = 0

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the next inputs of the U-Net: x_t (M, C, H, W) float32, t (M,) int64 and, with labels, labels (M,)
        int64.

        M is N, or 2 N under guidance: all images with their labels, then all without.
        """
        x_t = torch.cat([self._x, self._x]) if self._guided else self._x
        t = torch.full((len(x_t),), self._sampler.timesteps[self._taken], dtype=torch.int64, device=x_t.device)
        return (x_t, t) if self._labels is None else (x_t, t, self._labels)

    def take(self, prediction: Tensor) -> None:
        """Continue with the prediction for :meth:`inputs`, (M, C, H, W) of any float dtype."""
        prediction = prediction.float()
        if self._guided:
            labelled, unlabelled = prediction.chunk(2)
            prediction = unlabelled + self._guidance * (labelled - unlabelled)  # (N, C, H, W)
        sampler, number = self._sampler, self._taken
        needed = sampler.needs_noise(number)
        noise = self._noise(Stream.SAMPLE + 1 + sampler.timesteps[number]) if needed else None
        self._x, self._x0 = sampler.step(number, self._x, prediction, noise=noise, previous_x0=self._x0)
        self._taken += 1

    def images(self) -> Tensor:
        """Return the images, (N, C, H, W) uint8, once all predictions are taken; a pixel that is not a number
        is black.
        """
        assert self._taken == self.calls, f"{self.calls - self._taken} of {self.calls} predictions are still to take"
        # The way back from Diffusion.prepare, which it undoes exactly.
        pixels = self._x.add(1.0).mul_(127.5).round_()
        return pixels.nan_to_num_(nan=0.0).clamp_(0.0, 255.0).to(torch.uint8)

    def _noise(self, stream: int) -> Tensor:
        """Return standard normal noise of each image, (N, C, H, W) float32."""
        return keyed.normal(self._seed, stream, self._index, math.prod(self._shape)).unflatten(1, self._shape)
