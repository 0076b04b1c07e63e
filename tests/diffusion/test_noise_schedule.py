"""Noise schedules are those of the papers, and of diffusers where it has the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ddpm_ds.config.spec import DiffusionSpec
from ddpm_ds.diffusion.objective import MAX_BETA, alpha_bars, betas, snr
from ddpm_ds.errors import SpecError

SCHEDULES = ("linear", "cosine", "sigmoid")


def spec(**values: Any) -> DiffusionSpec:
    return DiffusionSpec(**values)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("timesteps", [1, 2, 10, 1000, 4000])
def test_alpha_bar_falls_strictly_between_1_and_0(schedule: str, timesteps: int) -> None:
    alpha_bar = alpha_bars(spec(schedule=schedule, timesteps=timesteps))
    assert alpha_bar.shape == (timesteps,) and alpha_bar.dtype == torch.float64
    assert alpha_bar[0] < 1.0 and alpha_bar[-1] > 0.0
    assert (alpha_bar.diff() < 0.0).all()


def test_linear_is_that_of_ddpm() -> None:
    beta = betas(spec(schedule="linear"))
    assert beta[0].item() == 1e-4 and beta[-1].item() == pytest.approx(0.02)
    assert beta.diff().std() < 1e-15
    expected = math.prod(1 - (1e-4 + (0.02 - 1e-4) * t / 999) for t in range(1000))
    assert alpha_bars(spec(schedule="linear"))[-1].item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("timesteps", [100, 1000])
def test_cosine_is_the_closed_form_of_improved_ddpm(timesteps: int) -> None:
    alpha_bar = alpha_bars(spec(schedule="cosine", timesteps=timesteps))

    def f(t: int) -> float:
        return math.cos((t / timesteps + 0.008) / 1.008 * math.pi / 2) ** 2

    expected = [f(t) / f(0) for t in range(1, timesteps)]  # the last step is clipped
    torch.testing.assert_close(alpha_bar[:-1], torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("timesteps", [100, 1000])
def test_sigmoid_is_its_closed_form(timesteps: int) -> None:
    alpha_bar = alpha_bars(spec(schedule="sigmoid", timesteps=timesteps))

    def sigmoid(x: float) -> float:
        return 1.0 / (1.0 + math.exp(-x))

    expected = [(sigmoid(3) - sigmoid(6 * t / timesteps - 3)) / (sigmoid(3) - sigmoid(-3)) for t in range(1, timesteps)]
    torch.testing.assert_close(alpha_bar[:-1], torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("schedule", ["cosine", "sigmoid"])
def test_the_last_beta_is_clipped_so_that_some_signal_is_left(schedule: str) -> None:
    beta = betas(spec(schedule=schedule))
    assert beta[-1].item() == MAX_BETA == 0.999
    assert beta[:-1].max() < MAX_BETA


@pytest.mark.parametrize(("ours", "theirs"), [("linear", "linear"), ("cosine", "squaredcos_cap_v2")])
def test_betas_are_those_of_diffusers(ours: str, theirs: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=1000, beta_schedule=theirs)
    expected = betas(spec(schedule=ours)).float()
    torch.testing.assert_close(scheduler.betas, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(scheduler.alphas_cumprod, alpha_bars(spec(schedule=ours)).float(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("key", "value"), [("beta_start", 1.0), ("beta_end", 2.0)])
def test_a_beta_of_1_is_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(SpecError, match=rf"diffusion\.{key} = {value} is not below 1"):
        alpha_bars(spec(**{key: value}))


def test_snr_by_hand() -> None:
    alpha_bar = torch.tensor([0.9, 0.5, 0.2, 0.0], dtype=torch.float64)
    expected = torch.tensor([9.0, 1.0, 0.25, 0.0], dtype=torch.float64)
    torch.testing.assert_close(snr(alpha_bar), expected)
