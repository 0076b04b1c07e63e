"""Noise schedules are those of the papers; targets, conversions, weights and distances agree with one another and with
numbers worked out by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpm_ds.diffusion.choices import MAX_BETA, TARGETS, timestep_schedules
from ddpm_ds.diffusion.levels import NoiseLevel, alpha_bars, betas, weights
from ddpm_ds.diffusion.process import Diffusion, mean_error
from ddpm_ds.diffusion.spec import DiffusionSpec
from ddpm_ds.ground.errors import SpecError


@pytest.mark.parametrize("schedule", timestep_schedules())
@pytest.mark.parametrize("timesteps", [1, 2, 10, 1000, 4000])
def test_alpha_bar_falls_strictly_between_1_and_0(schedule: Any, timesteps: int) -> None:
    alpha_bar = alpha_bars(DiffusionSpec(schedule=schedule, timesteps=timesteps))
    assert alpha_bar.shape == (timesteps,) and alpha_bar.dtype == torch.float64
    assert alpha_bar[0] < 1.0 and alpha_bar[-1] > 0.0
    assert (alpha_bar.diff() < 0.0).all()


def test_linear_betas_are_those_of_ddpm() -> None:
    beta = betas(DiffusionSpec(schedule="linear"))
    assert beta[0].item() == 1e-4 and beta[-1].item() == pytest.approx(0.02)
    assert beta.diff().std() < 1e-15
    expected = math.prod(1 - (1e-4 + (0.02 - 1e-4) * t / 999) for t in range(1000))
    assert alpha_bars(DiffusionSpec(schedule="linear"))[-1].item() == pytest.approx(expected, rel=1e-10)


def test_cosine_and_sigmoid_are_their_closed_forms() -> None:
    timesteps = 1000

    def cosine(t: int) -> float:
        return math.cos((t / timesteps + 0.008) / 1.008 * math.pi / 2) ** 2

    def sigmoid(t: int) -> float:
        return 1 / (1 + math.exp(-3)) - 1 / (1 + math.exp(3 - 6 * t / timesteps))

    kinds: dict[Any, Any] = {"cosine": cosine, "sigmoid": sigmoid}
    for schedule, left in kinds.items():
        spec = DiffusionSpec(schedule=schedule, timesteps=timesteps)
        alpha_bar, beta = alpha_bars(spec), betas(spec)
        assert beta[-1] == MAX_BETA == 0.999 and beta[:-1].max() < MAX_BETA, "the last step is clipped, to leave signal"
        expected = [left(t) / left(0) for t in range(1, timesteps)]
        # A ratio, its difference from 1 and back, and a product per timestep, each rounded by up to 2^-53 of a number
        # that is at most 4 times what is left: no beta but the last, which is clipped, is above 0.75.
        rounding = 4 * 4 * timesteps * 2.0**-53
        torch.testing.assert_close(alpha_bar[:-1], torch.tensor(expected, dtype=torch.float64), rtol=rounding, atol=0)


def test_a_beta_of_1_is_refused_by_name() -> None:
    for key, value in (("beta_start", 1.0), ("beta_end", 2.0)):
        with pytest.raises(SpecError, match=rf"diffusion\.{key} = {value} is not below 1"):
            alpha_bars(DiffusionSpec.model_validate({key: value}))


@pytest.mark.parametrize("schedule", timestep_schedules())
@pytest.mark.parametrize("timesteps", [2, 10, 1000])
def test_zero_terminal_snr_moves_and_stretches_the_signal_down_to_0(schedule: Any, timesteps: int) -> None:
    """Lin et al. 2024, algorithm 1, number by number."""
    values = {"schedule": schedule, "timesteps": timesteps, "objective": "v"}
    signals = [math.sqrt(left) for left in alpha_bars(DiffusionSpec.model_validate(values)).tolist()]
    first, last = signals[0], signals[-1]
    expected = [((signal - last) * first / (first - last)) ** 2 for signal in signals]
    rescaled = DiffusionSpec.model_validate({**values, "zero_terminal_snr": True})
    alpha_bar, beta = alpha_bars(rescaled), betas(rescaled)
    torch.testing.assert_close(alpha_bar, torch.tensor(expected, dtype=torch.float64))
    assert alpha_bar[-1] == 0.0 and beta[-1] == 1.0 and alpha_bar[0].item() == pytest.approx(first**2, rel=1e-15)
    assert (alpha_bar.diff() < 0.0).all() and (beta > 0.0).all() and (beta[:-1] < 1.0).all()


def sample(count: int) -> tuple[Tensor, Tensor]:
    """x0 in [-1, 1] and eps, (N, 3, 4, 4) float64."""
    generator = torch.Generator().manual_seed(0)
    x0 = torch.rand(count, 3, 4, 4, generator=generator, dtype=torch.float64) * 2 - 1
    return x0, torch.randn(count, 3, 4, 4, generator=generator, dtype=torch.float64)


def level_of(alpha_bar: Tensor) -> NoiseLevel:
    return NoiseLevel.of(alpha_bar).each()


@pytest.mark.parametrize("schedule", timestep_schedules())
@pytest.mark.parametrize("objective", TARGETS)
def test_the_exact_prediction_gives_back_the_image(objective: str, schedule: Any) -> None:
    alpha_bar = alpha_bars(DiffusionSpec(schedule=schedule))
    level, (x0, eps) = level_of(alpha_bar), sample(len(alpha_bar))
    prediction = TARGETS[objective].target(x0, eps, level)
    x_t = level.signal * x0 + level.noise * eps
    torch.testing.assert_close(TARGETS[objective].to_x0(prediction, x_t, level), x0)


MIN_SNR, P2 = {"weighting": "min_snr", "min_snr_gamma": 5.0}, {"weighting": "p2", "p2_k": 2.0, "p2_gamma": 0.5}
P2_OF_EPS = ((7 / 3) ** -0.5, 3**-0.5, 11**-0.5)
"""1 / (2 + snr)^0.5 at alpha_bar 1/4, 1/2 and 9/10, so snr 1/3, 1 and 9."""


@pytest.mark.parametrize(
    ("objective", "weighting", "expected"),
    [
        # alpha_bar 0, 1/4, 1/2, 5/6, 9/10, 1, so snr 0, 1/3, 1, 5, 9, inf, with gamma 5
        ("eps", MIN_SNR, [1.0, 1.0, 1.0, 1.0, 5 / 9, 0.0]),
        ("x0", MIN_SNR, [0.0, 1 / 3, 1.0, 5.0, 5.0, 5.0]),
        ("v", MIN_SNR, [0.0, 1 / 4, 1 / 2, 5 / 6, 1 / 2, 0.0]),
        ("eps", P2, P2_OF_EPS),
        ("x0", P2, [snr * weight for snr, weight in zip((1 / 3, 1, 9), P2_OF_EPS, strict=True)]),
        ("v", P2, [left * weight for left, weight in zip((1 / 4, 1 / 2, 9 / 10), P2_OF_EPS, strict=True)]),
    ],
)
def test_weights_by_hand(objective: str, weighting: dict[str, Any], expected: list[float]) -> None:
    spec = DiffusionSpec.model_validate({"objective": objective, **weighting})
    alpha_bar = [1 / 4, 1 / 2, 9 / 10] if len(expected) == 3 else [0.0, 1 / 4, 1 / 2, 5 / 6, 9 / 10, 1.0]
    found = weights(spec, torch.tensor(alpha_bar, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert weights(DiffusionSpec(), torch.tensor([0.1, 0.9])).tolist() == [1.0, 1.0]


STABLE = {"schedule": "scaled_linear"}
DEBIASED = {"weighting": "p2", "p2_k": 1e-6}
OF_V = {"objective": "v", "zero_terminal_snr": True}


@pytest.mark.parametrize(
    ("process", "expected"),
    [
        ({"weighting": "min_snr"}, {100: 0.59144}),
        ({"weighting": "min_snr", "objective": "v"}, {100: 0.52888}),
        ({"weighting": "min_snr", **OF_V}, {500: 0.241019, 900: 0.002960, 999: 0.0}),
        ({**DEBIASED, "p2_gamma": 0.5}, {500: 1.61828}),
        ({**DEBIASED, "p2_gamma": 1.0, "objective": "v"}, {500: 0.723667}),
        ({**DEBIASED, "p2_gamma": 0.0, "objective": "v"}, {500: 1.0 - 0.723667}),  # SNR / (SNR + 1), as eps
        ({"weighting": "diff2flow"}, {0: 1.0592, 500: 6.8554, 999: 243.82}),
        ({"weighting": "diff2flow", "objective": "v"}, {0: 1.0583, 500: 1.8944, 999: 1.1362}),
        ({"weighting": "diff2flow", "objective": "velocity"}, {0: 1.0, 500: 1.0, 999: 1.0}),
    ],
)
def test_weights_are_those_of_other_trainers_at_timesteps_of_stable_diffusion(
    process: dict[str, Any], expected: dict[int, float]
) -> None:
    spec = DiffusionSpec.model_validate({**STABLE, **process})
    found = weights(spec, alpha_bars(spec))
    for t, weight in expected.items():
        assert found[t].item() == pytest.approx(weight, rel=1e-4, abs=1e-6), t  # as many digits as are given


def test_the_weight_of_diff2flow_makes_the_loss_of_eps_that_of_flow_matching() -> None:
    """x_t / (signal + noise) is on flow's line at sigma = noise / (signal + noise), and eps - x0 follows from eps."""
    alpha_bar = alpha_bars(DiffusionSpec.model_validate(STABLE))
    level = NoiseLevel.of(alpha_bar)
    sigma = level.noise / (level.signal + level.noise)
    assert sigma[[0, 500, 999]].tolist() == pytest.approx([0.02834, 0.61807, 0.93596], abs=1e-5)
    x0, eps, error = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (level.signal * x0 + level.noise * eps) / (level.signal + level.noise)
    torch.testing.assert_close(x, (1 - sigma) * x0 + sigma * eps)
    velocity = (eps + error) - (x - sigma * (eps + error)) / (1 - sigma)
    weight = weights(DiffusionSpec.model_validate({**STABLE, "weighting": "diff2flow"}), alpha_bar)
    torch.testing.assert_close((velocity - (eps - x0)).square(), weight * error.square())


@pytest.mark.parametrize("bias", [-3.0, 0.0, 2.0])
@pytest.mark.parametrize("objective", ["eps", "x0", "v", "velocity"])
def test_sigmoid_weights_are_those_of_time_without_steps(objective: str, bias: float) -> None:
    """The error of eps weighs -d lambda / dt sigmoid(bias - lambda), with lambda = log(snr) differentiated exactly."""
    timesteps = 1000
    time = (torch.arange(1, timesteps + 1, dtype=torch.float64) / timesteps).requires_grad_()
    left = ((time + 0.008) / 1.008 * math.pi / 2).cos() ** 2 / math.cos(0.008 / 1.008 * math.pi / 2) ** 2
    log_snr = (left / (1 - left)).log()
    (slope,) = torch.autograd.grad(log_snr.sum(), time)
    snr = log_snr.detach().exp()
    # Of the squared error of x0, that of eps is snr, of v snr + 1 and of velocity (sqrt(snr) + 1)^2 times as much.
    ratio: Any = {"eps": 1.0, "x0": snr, "v": snr / (snr + 1), "velocity": snr / (snr.sqrt() + 1) ** 2}[objective]
    expected = -slope * (bias - log_snr.detach()).sigmoid() * ratio
    spec = DiffusionSpec(schedule="cosine", objective=objective, weighting="sigmoid", sigmoid_bias=bias)
    found = weights(spec, alpha_bars(spec))
    # A difference over two timesteps, of a curve that bends most at its beginning: its error falls with their square.
    torch.testing.assert_close(found[10:-10], expected[10:-10], rtol=3e-3, atol=0.0)


@pytest.mark.parametrize("weighting", ["min_snr", "sigmoid", "p2"])
@pytest.mark.parametrize("objective", TARGETS)
def test_weights_are_finite_for_every_schedule_that_can_be_asked_for(objective: str, weighting: Any) -> None:
    extremes: list[dict[str, Any]] = [
        {"beta_start": 1e-15, "beta_end": 1e-14},
        {"beta_start": 0.06, "beta_end": 0.07, "timesteps": 2000},
    ]
    ends = [{"zero_terminal_snr": True}] * (objective != "eps")
    for values in ({}, {"schedule": "cosine"}, *extremes, *ends):
        spec = DiffusionSpec.model_validate({"objective": objective, "weighting": weighting, **values})
        weight = weights(spec, alpha_bars(spec))
        assert weight.isfinite().all() and (weight >= 0.0).all(), values


@pytest.mark.parametrize(
    ("loss", "by_hand"),
    [("l1", [1.0, 300.0]), ("l2", [1.25, 90_000.0]), ("huber", [(0.125 + 0.5 * 1.25) / 2, 0.5 * 299.75])],
)
def test_distance_is_the_mean_over_pixels_of_each_image_in_fp32(loss: Any, by_hand: list[float]) -> None:
    diffusion = Diffusion(DiffusionSpec(loss=loss, huber_delta=0.5), 0, "cpu")
    small, large = [[0.5, -1.5], [-0.5, 1.5]], [[300.0, 300.0], [300.0, 300.0]]  # whose square overflows fp16
    prediction, nought = torch.tensor([[small], [large]], dtype=torch.float16), torch.zeros(2, 1, 2, 2)
    found = mean_error(diffusion.errors(prediction, nought, nought, torch.tensor([0, 0])), None)
    assert found.dtype == torch.float32 and found.tolist() == by_hand
