"""Targets, conversions, weights and distances agree with one another and with numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddpm_ds.config.spec import DiffusionSpec
from ddpm_ds.diffusion.objective import (
    Loss,
    NoiseLevel,
    Objective,
    add_noise,
    alpha_bars,
    distance,
    target,
    to_eps,
    to_x0,
    weights,
)

OBJECTIVES: tuple[Objective, ...] = ("eps", "x0", "v")


def sample(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x0 = torch.rand(count, 3, 4, 4, generator=generator, dtype=torch.float64) * 2 - 1
    eps = torch.randn(count, 3, 4, 4, generator=generator, dtype=torch.float64)
    return x0.to(dtype), eps.to(dtype)


def level_of(alpha_bar: Tensor, dtype: torch.dtype = torch.float64) -> NoiseLevel:
    return NoiseLevel(*(part.to(dtype)[:, None, None, None] for part in NoiseLevel.of(alpha_bar)))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "sigmoid"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_exact_prediction_gives_back_image_and_noise(objective: Objective, schedule: str) -> None:
    alpha_bar = alpha_bars(DiffusionSpec(schedule=schedule))  # type: ignore[arg-type]
    x0, eps = sample(len(alpha_bar), torch.float32)
    level = level_of(alpha_bar, torch.float32)
    x_t = add_noise(x0, eps, level)
    prediction = target(objective, x0, eps, level)
    # Rounding of x_t, a few 1e-7, is divided by the signal or the noise, whichever the objective leaves out.
    x0_error = (to_x0(objective, prediction, x_t, level) - x0).abs()
    eps_error = (to_eps(objective, prediction, x_t, level) - eps).abs()
    assert (x0_error * (level.signal if objective == "eps" else 1.0)).max() < 1e-6
    assert (eps_error * (level.noise if objective == "x0" else 1.0)).max() < 1e-6


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_ddim_steps_with_the_exact_prediction_stay_on_the_path(objective: Objective) -> None:
    alpha_bar = alpha_bars(DiffusionSpec(schedule="cosine", timesteps=50))
    x0, eps = sample(2)
    levels = [level_of(value.expand(2)) for value in alpha_bar]
    x_t = add_noise(x0, eps, levels[-1])
    for here, there in zip(levels[:0:-1], levels[-2::-1], strict=True):  # noisiest to cleanest
        prediction = target(objective, x0, eps, here)
        # DDIM (Song et al. 2021), eq. 12 with sigma = 0
        clean, noise = to_x0(objective, prediction, x_t, here), to_eps(objective, prediction, x_t, here)
        x_t = add_noise(clean, noise, there)
        torch.testing.assert_close(x_t, add_noise(x0, eps, there), rtol=0.0, atol=1e-9)


def test_targets_by_hand() -> None:
    level = NoiseLevel(torch.tensor(0.6), torch.tensor(0.8))
    x0, eps = torch.tensor(0.5), torch.tensor(2.0)
    assert add_noise(x0, eps, level).item() == pytest.approx(0.6 * 0.5 + 0.8 * 2.0)
    assert target("eps", x0, eps, level).item() == 2.0
    assert target("x0", x0, eps, level).item() == 0.5
    assert target("v", x0, eps, level).item() == pytest.approx(0.6 * 2.0 - 0.8 * 0.5)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [  # alpha_bar 1/4, 1/2, 5/6, 9/10, so snr 1/3, 1, 5, 9, with gamma 5
        ("eps", [1.0, 1.0, 1.0, 5 / 9]),
        ("x0", [1 / 3, 1.0, 5.0, 5.0]),
        ("v", [1 / 4, 1 / 2, 5 / 6, 1 / 2]),
    ],
)
def test_min_snr_weights_by_hand(objective: Objective, expected: list[float]) -> None:
    spec = DiffusionSpec(objective=objective, weighting="min_snr", min_snr_gamma=5.0)
    alpha_bar = torch.tensor([1 / 4, 1 / 2, 5 / 6, 9 / 10], dtype=torch.float64)
    torch.testing.assert_close(weights(spec, alpha_bar), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("objective", "expected"), [("eps", [1.0, 0.0]), ("x0", [0.0, 5.0]), ("v", [0.0, 0.0])])
def test_min_snr_weights_have_their_limits_at_no_signal_and_no_noise(
    objective: Objective, expected: list[float]
) -> None:
    spec = DiffusionSpec(objective=objective, weighting="min_snr")
    assert weights(spec, torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist() == expected


def test_uniform_weights_are_ones() -> None:
    assert weights(DiffusionSpec(), torch.tensor([0.1, 0.9])).tolist() == [1.0, 1.0]


def test_min_snr_weighs_the_same_error_alike_for_every_objective() -> None:
    alpha_bar = alpha_bars(DiffusionSpec(timesteps=20))
    level = level_of(alpha_bar)
    x0, eps = sample(20)
    x_t = add_noise(x0, eps, level)
    guess = x0 + 0.1 * sample(20)[1]
    guessed_eps = to_eps("x0", guess, x_t, level)
    losses = []
    for objective in OBJECTIVES:
        spec = DiffusionSpec(objective=objective, weighting="min_snr")
        prediction, wanted = target(objective, guess, guessed_eps, level), target(objective, x0, eps, level)
        losses.append(weights(spec, alpha_bar) * (prediction - wanted).square().flatten(1).mean(1))
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2])


@pytest.mark.parametrize("loss", ["l1", "l2", "huber"])
def test_distance_is_the_mean_over_pixels_of_each_image(loss: Loss) -> None:
    prediction, wanted = sample(4, torch.float32)
    functional = {"l1": F.l1_loss, "l2": F.mse_loss, "huber": lambda a, b: F.huber_loss(a, b, delta=0.3)}[loss]
    expected = torch.stack([functional(a, b) for a, b in zip(prediction, wanted, strict=True)])
    torch.testing.assert_close(distance(loss, prediction, wanted, 0.3), expected)


@pytest.mark.parametrize(("loss", "expected"), [("l1", 1.0), ("l2", 1.25), ("huber", (0.125 + 1.0) / 2)])
def test_distance_by_hand(loss: Loss, expected: float) -> None:
    difference = torch.tensor([[[[0.5, -1.5]], [[-0.5, 1.5]]]])  # delta 1 lies between
    assert distance(loss, difference, torch.zeros_like(difference), 1.0).item() == pytest.approx(expected)


def test_distance_of_fp16_is_taken_in_fp32() -> None:
    prediction = torch.full((1, 1, 2, 2), 300.0, dtype=torch.float16)  # its square overflows fp16
    value = distance("l2", prediction, torch.zeros(1, 1, 2, 2), 1.0)
    assert value.dtype == torch.float32 and value.item() == 90_000.0
