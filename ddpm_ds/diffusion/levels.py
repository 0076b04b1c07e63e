"""Noise levels of a diffusion process: the draws of training, the U-Net's input t, and the visits of samplers.

A noise level is the pair (signal, noise): x_t = signal x0 + noise eps. With timesteps it is
(sqrt(alpha_bar), sqrt(1 - alpha_bar)) rather than alpha_bar, since in float32 1 - alpha_bar loses three digits at the
first timesteps. Tables are float64 on the CPU, because betas of 1e-4 and signals of 1e-9 meet in 1 - alpha_bar. Index 0
is the paper's t = 1, which has the least noise, but some.
"""

import math
from statistics import NormalDist
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from ddpm_ds.diffusion.choices import NOISE, STEPS, TARGETS, ContinuousSchedule, NoiseLevel
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.ground.errors import SpecError
from ddpm_ds.ground.keyed import Draws, Stream
from ddpm_ds.schema.choices import MOST_SIGMA, OBJECTIVES
from ddpm_ds.schema.types import ALL_SIGMAS


def betas(spec: DiffusionSpec) -> Tensor:
    """Return the variance of the noise that each step adds, (T,) float64; the schedules are in
    :data:`ddpm_ds.diffusion.choices.NOISE`.

    With `zero_terminal_snr` the signal sqrt(alpha_bar) is moved and stretched so that it ends at 0 and begins where it
    did: the last beta is 1. Source: Lin et al. 2024, "Common diffusion noise schedules and sample steps are flawed",
    algorithm 1.

    Raises SpecError: a beta of the linear schedule is not below 1.
    """
    schedule = NOISE[spec.schedule]
    assert not isinstance(schedule, ContinuousSchedule), "it has no timesteps"
    beta = schedule.betas(spec)
    if not spec.zero_terminal_snr:
        return beta
    signal = torch.cumprod(1.0 - beta, dim=0).sqrt()
    left = ((signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])).square()
    return torch.cat((beta[:1], 1.0 - left[1:] / left[:-1]))


def alpha_bars(spec: DiffusionSpec) -> Tensor:
    """Return the remaining share of the image's variance, strictly falling, (T,) float64; the last is 0 with
    `zero_terminal_snr`. Raises SpecError as :func:`betas`. Source: DDPM, above eq. 4.
    """
    return torch.cumprod(1.0 - betas(spec), dim=0)


class Visit(NamedTuple):
    """One evaluation of the U-Net by a sampler."""

    t: float
    """Time given to the U-Net; an int with timesteps."""
    level: NoiseLevel
    """Noise level, float64 scalars."""
    alpha_bar: float
    """Share of the image in the variance of x_t, for an image of variance 1."""
    size: float
    """Standard deviation of x_t, for an image of variance 1; 1 with timesteps."""
    stream: int
    """Random stream of the noise that is added after the evaluation."""

    @property
    def sigma(self) -> float:
        """Noise over signal, at most MOST_SIGMA; rounded to 12 digits, so that 80 is exactly 80."""
        return min(MOST_SIGMA, float(f"{float(self.level.noise / self.level.signal):.12g}"))


class Timesteps:
    """Noise levels of T timesteps, in float32 tables on `device`; raises SpecError for an impossible schedule."""

    dtype = torch.int64
    """Data type of t."""
    normal = False
    """Whether t is made from a normal draw, or from a random word."""

    def __init__(self, spec: DiffusionSpec, device: torch.device | str = "cpu") -> None:
        self._spec, self._range = spec, spec.timestep_range or (0, spec.timesteps)
        self._alpha_bar = alpha_bars(spec)  # (T,) float64, rounded only at the end
        signal, noise, _ = NoiseLevel.of(self._alpha_bar)
        self._signal, self._noise = signal.float().to(device), noise.float().to(device)
        self._weights = weights(spec, self._alpha_bar).float().to(device)

    def draw(self, draws: Draws, size: tuple[int, ...]) -> Tensor:
        """Return the t, the paper's t - 1, at which each image of a size (H, W) is trained, (N,). Source: DDPM,
        algorithm 1.
        """
        low, high = self._range
        found = draws.integers(Stream.TIMESTEP, high - low)
        return low + found if low else found  # a launch less

    def level(self, t: Tensor) -> NoiseLevel:
        """Return the noise levels at t, (N,) float32 each."""
        return NoiseLevel(self._signal[t], self._noise[t])

    def weights(self, t: Tensor) -> Tensor:
        """Return the loss weight at each t, (N,) float32."""
        return self._weights[t]

    def quantile(self, percent: int) -> tuple[int, int]:
        """Return the t at a percentile of the trained levels, and the random stream of its held-out noise."""
        low, high = self._range
        t = low + max(round((high - low) * percent / 100) - 1, 0)
        return t, Stream.HELD_OUT + t

    def visits(self, sampler: SamplerSpec) -> list[Visit]:
        """Return the evaluations of a sampler, from noise to image."""
        return [
            Visit(t, NoiseLevel.of(self._alpha_bar[t]), float(self._alpha_bar[t]), 1.0, Stream.SAMPLE + 1 + t)
            for t in visited(sampler, self._spec)
        ]


class Continuous:
    """Noise levels of a :class:`ddpm_ds.diffusion.choices.ContinuousSchedule`; same methods as :class:`Timesteps`."""

    dtype = torch.float32
    normal = True

    def __init__(self, spec: DiffusionSpec) -> None:
        schedule = NOISE[spec.schedule]
        assert isinstance(schedule, ContinuousSchedule)
        self._spec, self._schedule = spec, schedule

    def draw(self, draws: Draws, size: tuple[int, ...]) -> Tensor:
        return self._schedule.time(self._spec.at(size), draws.normal(Stream.TIMESTEP)[:, 0])

    def level(self, t: Tensor) -> NoiseLevel:
        return self._schedule.level(self._spec, t)

    def weights(self, t: Tensor) -> Tensor:
        """Return ones: the loss weight of F cancels in Karras et al. 2022, eq. 8."""
        return torch.ones_like(t)

    def quantile(self, percent: int) -> tuple[float, int]:
        normal = torch.tensor(NormalDist().inv_cdf(percent / 100), dtype=torch.float64)
        return float(self._schedule.time(self._spec, normal)), Stream.HELD_OUT + percent

    def visits(self, sampler: SamplerSpec) -> list[Visit]:
        times = self._schedule.visited(self._spec, sampler, sampler.steps_of(self._spec))
        levels = [self._schedule.level(self._spec, torch.tensor(t, dtype=torch.float64)) for t in times]
        sizes = [math.hypot(level.signal, level.noise) for level in levels]
        return [
            Visit(t, level, (float(level.signal) / size) ** 2, size, Stream.SAMPLE + 1 + number)
            for number, (t, level, size) in enumerate(zip(times, levels, sizes, strict=True))
        ]


class Noiseless:
    """The only level of a regression, at which x_t is zeros; same methods as :class:`Timesteps`."""

    dtype = torch.float32
    normal = False

    def draw(self, draws: Draws, size: tuple[int, ...]) -> Tensor:
        return torch.zeros_like(draws.uniform(Stream.TIMESTEP)[:, 0])

    def level(self, t: Tensor) -> NoiseLevel:
        return NoiseLevel(torch.zeros_like(t), torch.zeros_like(t))

    def weights(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def quantile(self, percent: int) -> tuple[float, int]:
        return 0.0, Stream.HELD_OUT

    def visits(self, sampler: SamplerSpec) -> list[Visit]:
        return [Visit(0.0, self.level(torch.zeros((), dtype=torch.float64)), 0.0, 1.0, Stream.SAMPLE + 1)]


def levels_of(spec: DiffusionSpec, device: torch.device | str = "cpu") -> Timesteps | Continuous | Noiseless:
    """Return the noise levels of a process; raises SpecError for an impossible schedule."""
    if not OBJECTIVES[spec.objective].diffuses:
        return Noiseless()
    return Continuous(spec) if isinstance(NOISE[spec.schedule], ContinuousSchedule) else Timesteps(spec, device)


def check_guidance(sampler: SamplerSpec, diffusion: DiffusionSpec) -> None:
    """Check that some steps of a sampler are in its interval of guidance; raises SpecError."""
    if not sampler.is_guided or sampler.guidance_between == ALL_SIGMAS:
        return
    sigmas = [visit.sigma for visit in levels_of(diffusion).visits(sampler)]
    if not any(map(sampler.guides_at, sigmas)):
        low, high = sampler.guidance_between
        raise SpecError(
            f"sampler.guidance_between = {low:g},{high:g} has none of the steps' noise levels, which are from "
            f"{min(sigmas):.3g} to {max(sigmas):.3g}; choose an interval that has some"
        )


def weights(spec: DiffusionSpec, alpha_bar: Tensor) -> Tensor:
    """Return the weight of each timestep's loss, in the shape and dtype of alpha_bar, (T,) float64.

    Weightings are defined for the squared error of x0, so they are divided by the ratio of the prediction's error to
    it. With snr = alpha_bar / (1 - alpha_bar) they are

    - min_snr: min(snr, gamma). Source: Hang et al. 2023 (Min-SNR-gamma), eq. 8.
    - p2: snr / (k + snr)^gamma, which weights the error of eps by 1 / (k + snr)^gamma. Source: Choi et al. 2022 (P2),
      eq. 8.
    - diff2flow: (1 + sqrt(snr))^2, which weights the error of noise minus image equally. Source: Schusterbauer et al.
      2025 (Diff2Flow), whose timesteps, with even sigmas of flow, are not drawn here.
    - sigmoid: -d log(snr) / dt times snr sigmoid(bias - log(snr)), with t from 0 to 1. Source: Kingma and Gao 2023;
      Hoogeboom et al. 2024 (SiD2), section 3, without their factor 1/2.
    """
    # Clamped, since alpha_bar may round to 0 or 1, where weights would be 0 / 0.
    snr = (alpha_bar / (1.0 - alpha_bar)).clamp(1e-30, 1e30)
    match spec.weighting:
        case "uniform":
            return torch.ones_like(alpha_bar)
        case "min_snr":
            of_x0 = snr.clamp(max=spec.min_snr_gamma)
        case "p2":
            of_x0 = snr / (spec.p2_k + snr) ** spec.p2_gamma
        case "diff2flow":
            of_x0 = TARGETS["velocity"].error(snr)
        case "sigmoid":
            # -d log(snr) / dt is -2 signal' / (signal (1 - alpha_bar)); times snr, it is finite even without signal.
            signal = alpha_bar.sqrt()
            slope = torch.gradient(signal)[0] * len(signal)
            of_x0 = -2.0 * signal * slope * (1.0 + snr) ** 2 / (1.0 + snr * math.exp(-spec.sigmoid_bias))
        case unknown:
            assert_never(unknown)
    return of_x0 / TARGETS[spec.objective].error(snr)


def visited(sampler: SamplerSpec, diffusion: DiffusionSpec) -> tuple[int, ...]:
    """Return the `steps` timesteps in [0, T) that a sampler visits, strictly falling.

    They equal the timesteps of diffusers' scheduler of the same kind and spacing, with S steps:

    - trailing: from T - 1 down by T / S, rounded, for every kind.
    - leading: multiples of T // S from 0 up; of T // (S + 1) for a kind that leaves out 0, such as dpm_solver.
    - linspace: S points from T - 1 to 0, rounded; S + 1 points without 0 for a kind that leaves out 0.

    If diffusers has no falling list of S timesteps, the list is all timesteps for S = T, and T - 1 for one step of
    linspace. The previous timestep is always the next in the list. Source: Lin et al. 2023, table 2.
    """
    steps, timesteps = sampler.steps_of(diffusion), diffusion.timesteps
    if steps == timesteps:
        return tuple(reversed(range(timesteps)))
    points = steps + 1 if STEPS[sampler.kind].leaves_out_zero else steps
    # With S < T neighbours differ by more than 1 before rounding, so they stay distinct: 1 + 1 / S is far above the
    # error of floats, and two halves that round to the same even number differ by exactly 1.
    match sampler.spacing:
        case "trailing":
            gap = timesteps - (timesteps - timesteps / steps)  # computed as in numpy.arange, so that halves round alike
            return tuple(round(timesteps - number * gap) - 1 for number in range(steps))
        case "leading":
            return tuple(timesteps // points * point for point in reversed(range(points)))[:steps]
        case "linspace":
            if points == 1:
                return (timesteps - 1,)
            gap = (timesteps - 1) / (points - 1)
            return tuple(round(point * gap) for point in reversed(range(points)))[:steps]
        case unknown:
            assert_never(unknown)
