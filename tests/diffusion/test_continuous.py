"""EDM and flow matching are the papers' formulas, in training and in drawing.

What must be equal is compared in float64, in which ``assert_close`` allows 1e-7. An error of 2^-53 is divided by the
smallest signal, 1 / 80, in each of fifty steps at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from ddpm_ds.config.ds_config import DS_CONFIGS
from ddpm_ds.config.spec_file import SPECS
from ddpm_ds.diffusion.choices import TARGETS
from ddpm_ds.diffusion.levels import Continuous
from ddpm_ds.diffusion.process import Diffusion
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec, check_sampler
from ddpm_ds.ground.errors import SpecError
from ddpm_ds.ground.keyed import Stream
from tests.diffusion import sampling
from tests.diffusion.sampling import FLOW, best_prediction, sample, sampler_of
from tests.launching import drafted, tiny_spec

EDM = sampling.EDM.model_copy(update={"sigma_data": 0.6})
SHAPE = (5, 3, 4, 4)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(x: Tensor, t: Any) -> Tensor:
    """Any function of the scaled input and of t."""
    return torch.sin(3.0 * x + 0.7 * t) + 0.1 * x.flip(-1)


def edm_denoiser(scaled: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, float], Tensor]:
    """D of Karras et al. 2022, eq. 7 and table 1, in x = image + sigma noise; F is minus the U-Net's prediction."""

    def denoise(x: Tensor, sigma: float) -> Tensor:
        root = math.sqrt(sigma**2 + 0.6**2)
        c_skip, c_out, c_in, c_noise = 0.6**2 / root**2, sigma * 0.6 / root, 1.0 / root, math.log(sigma) / 4.0
        return c_skip * x - c_out * scaled(c_in * x, c_noise)

    return denoise


def test_edm_trains_the_loss_of_karras_et_al() -> None:
    x0, eps, sigma = normal(0), normal(1), torch.tensor([0.002, 0.1, 0.6, 5.0, 80.0], dtype=torch.float64)
    t = sigma.log() / 4.0
    level = Continuous(EDM).level(t).each()
    x = x0 + sigma[:, None, None, None] * eps
    prediction = network(level.signal * x0 + level.noise * eps, t[:, None, None, None])
    denoise = edm_denoiser(network)
    expected = torch.stack([denoise(*pair) for pair in zip(x, sigma.tolist(), strict=True)])
    found = TARGETS["v"].to_x0(prediction, level.signal * x0 + level.noise * eps, level)
    torch.testing.assert_close(found, expected)
    # eq. 2 with the weight of table 1 is the unweighted error of the prediction
    weight = (sigma**2 + 0.6**2) / (sigma * 0.6) ** 2
    loss = weight * (expected - x0).square().mean(dim=(1, 2, 3))
    error = (prediction - TARGETS["v"].target(x0, eps, level)).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(error, loss, rtol=1e-6, atol=0.0)


def test_flow_matching_predicts_the_way_from_image_to_noise() -> None:
    x0, eps, t = normal(0), normal(1), torch.tensor([0.0, 250.0, 500.0, 900.0, 1000.0], dtype=torch.float64)
    level, time = Continuous(FLOW).level(t).each(), (t / 1000)[:, None, None, None]
    x_t = level.signal * x0 + level.noise * eps
    torch.testing.assert_close(x_t, (1 - time) * x0 + time * eps)
    target = TARGETS["velocity"].target(x0, eps, level)
    torch.testing.assert_close(target, eps - x0)
    torch.testing.assert_close(TARGETS["velocity"].to_x0(target, x_t, level), x0)


@pytest.mark.parametrize(
    ("spec", "of_level"),
    [
        (EDM, lambda t: (4.0 * t + 1.2) / 1.2),
        (EDM.model_copy(update={"noise_mean": -0.4, "noise_std": 1.0}), lambda t: 4.0 * t + 0.4),
        (FLOW, lambda t: (t / 1000).logit()),
    ],
    ids=["edm", "edm2", "flow"],
)
def test_noise_levels_are_drawn_by_the_image_from_the_papers_distribution(spec: DiffusionSpec, of_level: Any) -> None:
    process, index = Diffusion(spec, 3, "cpu"), torch.arange(20_000)
    t, _ = process.draw(process.draws(index, (20_000, 1, 2, 2)), (20_000, 1, 2, 2))
    assert t.dtype == torch.float32 and torch.equal(
        process.draw(process.draws(index[7:9], (2, 1, 2, 2)), (2, 1, 2, 2))[0], t[7:9]
    )
    z = of_level(t.double())
    # means of 20,000 draws: five standard errors
    assert z.mean().abs() < 5 / math.sqrt(20_000) and (z.var() - 1).abs() < 5 * math.sqrt(2 / 20_000)
    for percent in (10, 50, 90):
        below, stream = process.levels.quantile(percent)
        share = (t < below).double().mean() - percent / 100
        assert share.abs() < 5 * math.sqrt(0.25 / 20_000) and stream == Stream.HELD_OUT + percent


@pytest.mark.parametrize(
    ("kind", "theirs"), [("ddim", "EDMEulerScheduler"), ("dpm_solver", "EDMDPMSolverMultistepScheduler")]
)
def test_samplers_of_edm_are_those_of_diffusers(kind: str, theirs: str) -> None:
    diffusion = EDM.model_copy(update={"sigma_data": 0.5})
    sampler = sampler_of(diffusion, kind=kind, steps=12, clip="none")
    options: dict[str, Any] = {"euler_at_final": True} if kind == "dpm_solver" else {}
    scheduler = getattr(diffusers, theirs)(sigma_data=0.5, prediction_type="v_prediction", **options)
    scheduler.set_timesteps(12)
    x = normal(0).float() * scheduler.sigmas[0]
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, t)
        x = scheduler.step(network(scaled, t), t, x).prev_sample
    start = sampler.visits[0].level.noise * normal(0).float()
    drawn = sample(sampler, network, start, lambda t: pytest.fail("no noise"))
    assert sampler.times == pytest.approx(scheduler.timesteps.tolist(), rel=1e-5)
    # float32, in which sigmas of 80 meet images of 1: 80 x 2^-24 in each of 12 steps
    torch.testing.assert_close(drawn, x, rtol=0.0, atol=12 * 80 * 2.0**-24)


def test_eulers_steps_of_flow_matching_go_along_the_velocity() -> None:
    x, steps = normal(0), 8
    sampler = sampler_of(FLOW, kind="ddim", steps=steps, clip="none")
    expected = x
    for number in range(steps):
        time = 1 - number / steps
        expected = expected - network(expected, 1000 * time) / steps
    drawn = sample(sampler, network, x, lambda t: pytest.fail("no noise"))
    torch.testing.assert_close(drawn, expected)


@pytest.mark.parametrize(("kind", "order"), [("ddim", 1), ("dpm_solver", 2)])
def test_errors_shrink_by_the_order_of_the_sampler(kind: str, order: int) -> None:
    """Data ~ N(0.3, 0.5^2), whose best denoiser is known, and whose images are those of its noise in a straight way."""

    errors = []
    for steps in (32, 64, 128):
        sampler = sampler_of(EDM, kind=kind, steps=steps, clip="none", sigma_min=0.02, sigma_max=20)
        levels = {visit.t: visit.level for visit in sampler.visits}
        first, last = sampler.visits[0].level, sampler.visits[-1].level
        x = first.signal * 0.3 + (first.signal**2 * 0.25 + first.noise**2).sqrt() * normal(4)
        wanted = last.signal * 0.3 + (last.signal**2 * 0.25 + last.noise**2).sqrt() * normal(4)
        previous = None
        for number, t in enumerate(sampler.times[:-1]):
            x, previous = sampler.step(
                number, x, best_prediction("v", x, levels[t], 0.3, 0.5), noise=None, previous_x0=previous
            )
        errors.append((x - wanted).abs().max().item())
    assert [one / two for one, two in pairwise(errors)] == pytest.approx([2.0**order] * 2, rel=0.2)


@pytest.mark.parametrize(
    ("diffusion", "sampler", "error"),
    [
        ({"schedule": "edm"}, {}, "diffusion.objective = eps does not go with schedule edm; use v"),
        ({"schedule": "flow", "objective": "v"}, {}, "objective = v does not go with schedule flow; use velocity"),
        ({"schedule": "edm", "objective": "v"}, {"kind": "ddpm"}, "steps = null means all timesteps.*give a number"),
        (
            {"objective": "v", "zero_terminal_snr": True},
            {"spacing": "leading"},
            "spacing = leading leaves out the last",
        ),
        ({"objective": "v", "zero_terminal_snr": True, "timesteps": 1}, {"steps": 1}, "timesteps = 1 is too few"),
        ({"weighting": "sigmoid", "timesteps": 1}, {"steps": 1}, "1 is too few for weighting = sigmoid; use 2 or more"),
        ({}, {"sigma_min": 1, "sigma_max": 0.5}, "sigma_min = 1 and sigma_max = 0.5 must rise"),
        ({}, {"guidance_between": [5, 0.3]}, "guidance_between = 5,0.3 must rise from the lowest"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(diffusion: Any, sampler: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        tiny_spec(diffusion=diffusion, sampler=sampler)


@pytest.mark.parametrize(
    ("process", "between", "error"),
    [
        ([], "[158,200]", "has none of the steps' noise levels.* from 0.173 to 157;"),
        (
            ["diffusion.schedule=edm", "diffusion.objective=v"],
            "[80,90]",
            "steps' noise levels.* from 0.002 to 80;",
        ),
    ],
)
def test_an_interval_of_guidance_that_no_step_is_in_is_refused(process: list[str], between: str, error: str) -> None:
    changes = ["unet.classes=10", "train.label_drop=0.1", "sampler.guidance=2", f"sampler.guidance_between={between}"]
    with pytest.raises(SpecError, match=error):
        drafted(SPECS / "digits.yaml", [*process, *changes], DS_CONFIGS / "zero0_fp32.json", world_size=1, stages=1)


def test_a_number_of_timesteps_does_not_bound_the_steps_of_edm() -> None:
    check_sampler(SamplerSpec(steps=2000), EDM, classes=None)
