"""Timesteps, the last step and clipping; on Gaussian data, whose best denoiser is known, samplers end where they must.

That each step is the paper's is in test_samplers_against_diffusers.py and test_continuous.py.

Data ~ N(mu, s^2) has E[x0 | x_t] = mu + signal s^2 (x_t - signal mu) / (signal^2 s^2 + noise^2), and the
probability-flow ODE keeps (x_t - signal_t mu) / sqrt(signal_t^2 s^2 + noise_t^2) as it is.

What must be equal is compared in float64: a rounding error of 2^-53, divided by the smallest signal (5e-5, at the end
of the cosine schedule) in each of up to 1000 steps, stays below 3e-9, and ``assert_close`` allows float64 1e-7.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpm_ds.diffusion.choices import TARGETS, timestep_schedules
from ddpm_ds.diffusion.levels import NoiseLevel, alpha_bars
from ddpm_ds.diffusion.spec import DiffusionSpec
from tests.diffusion.sampling import SPACINGS, best_prediction, sample, sampler_of

KINDS = ("ddpm", "ddim", "dpm_solver")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def no_noise(t: int) -> Tensor:
    raise AssertionError(f"noise was asked for at timestep {t}")


def gaussian(diffusion: DiffusionSpec, mu: float, s: float) -> Callable[[Tensor, Any], Tensor]:
    """The best denoiser of data ~ N(mu, s^2), in the objective of `diffusion`, float64."""
    levels = NoiseLevel.of(alpha_bars(diffusion))

    def denoise(x_t: Tensor, t: int) -> Tensor:
        return best_prediction(diffusion.objective, x_t.double(), NoiseLevel(levels.signal[t], levels.noise[t]), mu, s)

    return denoise


@pytest.mark.parametrize(("kind", "expected"), [("ddpm", 1000), ("ddim", 50), ("dpm_solver", 20)])
def test_steps_that_are_not_given_are_those_of_the_kind(kind: Any, expected: int) -> None:
    assert len(sampler_of(kind=kind).times) == expected
    assert len(sampler_of(DiffusionSpec(timesteps=8), kind=kind).times) == 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_last_step_is_the_predicted_image_without_noise_and_no_step_changes_its_inputs(
    kind: Any, steps: int
) -> None:
    sampler = sampler_of(DiffusionSpec(objective="x0"), kind=kind, steps=steps, eta=1.0 if kind == "ddim" else 0.0)
    assert not sampler.needs_noise(steps - 1)
    assert all(sampler.needs_noise(number) == (kind != "dpm_solver") for number in range(steps - 1))
    inputs = [normal(2, 1, 4, 4, seed=seed) for seed in range(4)]
    before = [tensor.clone() for tensor in inputs]
    for number in range(steps):
        x_t, prediction, noise, previous_x0 = inputs
        x, x0 = sampler.step(number, x_t, prediction, noise=noise, previous_x0=previous_x0)
    assert torch.equal(x, prediction.clamp(-1, 1)) and torch.equal(x0, x)
    assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))


@pytest.mark.parametrize("quantile", [0.001, 0.5, 0.995, 1.0])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_dynamic_clipping_scales_each_image_by_its_own_quantile_and_never_up(quantile: float, size: int) -> None:
    prediction = normal(4, 3, size, size) * torch.tensor([0.1, 1.0, 5.0, 9.0])[:, None, None, None]
    sampler = sampler_of(DiffusionSpec(objective="x0"), clip="dynamic", dynamic_quantile=quantile)
    _, x0 = sampler.step(0, torch.zeros_like(prediction), prediction, noise=None, previous_x0=None)
    bound = prediction.abs().flatten(1).quantile(quantile, dim=1).clamp(min=1)[:, None, None, None]
    torch.testing.assert_close(x0, prediction.clamp(-bound, bound) / bound)
    assert x0.abs().max() <= 1


@pytest.mark.parametrize("kind", ["ddim", "dpm_solver"])
@pytest.mark.parametrize(
    ("spacing", "zero"), [*((spacing, False) for spacing in SPACINGS), ("trailing", True), ("linspace", True)]
)
@pytest.mark.parametrize("schedule", timestep_schedules())
def test_deterministic_samplers_are_exact_for_data_that_is_a_point(
    schedule: Any, spacing: Any, zero: bool, kind: Any
) -> None:
    diffusion = DiffusionSpec(schedule=schedule, objective="v" if zero else "eps", zero_terminal_snr=zero)
    sampler = sampler_of(diffusion, kind=kind, steps=20, spacing=spacing, clip="none")
    levels, eps = NoiseLevel.of(alpha_bars(diffusion)), normal(1, 1, 8, 8)
    denoise = gaussian(diffusion, 0.3, 0.0)

    def on_the_path(x_t: Tensor, t: int) -> Tensor:
        torch.testing.assert_close(x_t, levels.signal[t] * 0.3 + levels.noise[t] * eps)
        return denoise(x_t, t)

    first = int(sampler.times[0])
    assert not zero or levels.signal[first] == 0.0, "drawing begins with noise alone"
    drawn = sample(sampler, on_the_path, levels.signal[first] * 0.3 + levels.noise[first] * eps, no_noise)
    torch.testing.assert_close(drawn, torch.full_like(drawn, 0.3))


@pytest.mark.parametrize(("variance", "mu", "s"), [("large", 0.0, 1.0), ("small", 0.4, 0.0)])
@pytest.mark.parametrize("steps", [5, 1000])
@pytest.mark.parametrize("zero", [False, True])
def test_each_variance_of_ddpm_is_exact_for_the_data_it_is_exact_for(
    variance: Any, mu: float, s: float, steps: int, zero: bool
) -> None:
    # Source: DDPM, section 3.2: beta for x0 ~ N(0, 1), the posterior's for x0 a point.
    diffusion = DiffusionSpec(objective="v", zero_terminal_snr=zero)
    sampler = sampler_of(diffusion, kind="ddpm", variance=variance, steps=steps, clip="none")
    denoise, alpha_bar = gaussian(diffusion, mu, s), alpha_bars(diffusion)[list(sampler.times)]
    expected = torch.stack((alpha_bar.sqrt() * mu, alpha_bar * s**2 + 1 - alpha_bar), dim=1)  # (S, mean and variance)
    found, (mean, spread) = [], expected[0].tolist()
    for number, t in enumerate(sampler.times):
        found.append((mean, spread))
        # The step is linear, so three probes give the mean and variance of what it makes.
        x_t = torch.tensor([mean, mean + 1.0, mean], dtype=torch.float64).reshape(3, 1, 1, 1)
        noise = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).reshape(3, 1, 1, 1)
        x = sampler.step(number, x_t, denoise(x_t, t), noise=noise, previous_x0=None)[0].flatten().tolist()
        mean, spread = x[0], (x[1] - x[0]) ** 2 * spread + (x[2] - x[0]) ** 2
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objective", [name for name in TARGETS if name != "regression"])
@pytest.mark.parametrize("schedule", timestep_schedules())
def test_clipping_keeps_half_precision_predictions_harmless_at_no_signal(
    schedule: Any, objective: Any, kind: Any
) -> None:
    # The cosine schedule ends at a signal of 5e-5, by which x0 = (x_t - noise eps) / signal divides.
    diffusion = DiffusionSpec(schedule=schedule, objective=objective)
    exact, point = gaussian(diffusion, 0.5, 0.0), 0.5
    for clip, dtype in (("static", torch.float16), ("dynamic", torch.bfloat16)):
        sampler = sampler_of(diffusion, kind=kind, clip=clip, steps=20)
        seen: list[tuple[Tensor, Tensor]] = []

        def denoise(x_t: Tensor, t: int, seen: list[tuple[Tensor, Tensor]] = seen, dtype: Any = dtype) -> Tensor:
            seen.append((x_t, exact(x_t, t)))
            return seen[-1][1].to(dtype)

        start = normal(2, 1, 4, 4, dtype=torch.float32)
        drawn = sample(sampler, denoise, start, lambda t: normal(2, 1, 4, 4, seed=t, dtype=torch.float32))
        assert drawn.dtype == torch.float32
        assert all(x_t.dtype == torch.float32 and x_t.abs().max() < 6 for x_t, _ in seen)
        # The image is the last x0. Wherever x_t has come to, the exact prediction for it gives 0.5: off are only the
        # prediction, by half a unit of its precision, and three roundings of terms up to x_t to fp32.
        level = NoiseLevel.of(alpha_bars(diffusion)[int(sampler.times[-1])])
        grows: Any = {
            "eps": level.noise / level.signal,
            "x0": 1.0,
            "v": level.noise,
            "velocity": level.noise / (level.signal + level.noise),
        }[objective]
        x_t, prediction = (tensor.abs().max().item() for tensor in seen[-1])
        rounding = prediction * torch.finfo(dtype).eps / 2 * grows + 3 * x_t * 2**-24 / level.signal
        assert (drawn - point).abs().max() <= rounding
