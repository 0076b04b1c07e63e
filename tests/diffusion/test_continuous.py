"""EDM and flow matching are the papers' formulas, in training and in drawing.

What must be equal is compared in float64, in which ``assert_close`` allows 1e-7. An error of 2^-53 is divided by the
smallest signal, 1 / 80, in each of fifty steps at most.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from ddpm_ds.cli.main import main
from ddpm_ds.config.ds_config import DS_CONFIGS
from ddpm_ds.config.spec_file import SPECS
from ddpm_ds.diffusion.choices import NOISE, TARGETS, ContinuousSchedule, shifted
from ddpm_ds.diffusion.levels import Continuous
from ddpm_ds.diffusion.process import Diffusion
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec, check_sampler
from ddpm_ds.evaluate.diffusers.scheduler import process_from_scheduler, scheduler_config
from ddpm_ds.ground.errors import SpecError
from ddpm_ds.ground.keyed import Stream
from tests.diffusion import sampling
from tests.diffusion.sampling import FLOW, best_prediction, sample, sampler_of
from tests.launching import drafted, tiny_spec

EDM = sampling.EDM.model_copy(update={"sigma_data": 0.6})
UNIFORM = FLOW.model_copy(update={"times": "uniform", "shift": 3.0})
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
        (UNIFORM, lambda t: math.sqrt(12) * (shifted(t / 1000, 1 / 3) - 0.5)),
    ],
    ids=["edm", "edm2", "flow", "uniform, shifted"],
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


def time_of(spec: DiffusionSpec, normal: float) -> float:
    """Time from 0 to 1 at which an image is trained whose standard normal draw is ``normal``."""
    schedule = NOISE["flow"]
    assert isinstance(schedule, ContinuousSchedule)
    return float(schedule.time(spec, torch.tensor(normal, dtype=torch.float64))) / 1000


def test_a_shift_moves_times_as_sd_scripts_forks_and_simpletuner_do() -> None:
    times = [0.1, 0.25, 0.5, 0.75, 0.9]
    assert [shifted(time, 3.5) for time in times] == pytest.approx(
        [0.28, 0.538462, 0.777778, 0.913043, 0.969231], abs=1e-6
    )
    moved = FLOW.model_copy(update={"noise_mean": -0.2, "noise_std": 1.5})
    assert time_of(moved, 0.0) == pytest.approx(0.450166, abs=1e-6)
    mugen = moved.model_copy(update={"shift": 3.5})
    assert time_of(mugen, 0.0) == pytest.approx(0.741305, abs=1e-6)
    for normal in (-1.3, 0.0, 0.4):  # ln s more on the logit
        same = moved.model_copy(update={"noise_mean": -0.2 + math.log(3.5)})
        assert time_of(mugen, normal) == pytest.approx(time_of(same, normal), rel=1e-12)
    uniform = FLOW.model_copy(update={"times": "uniform", "shift": 2.5})
    assert time_of(uniform, NormalDist().inv_cdf(0.3)) == pytest.approx(0.517241, abs=1e-6)


def test_a_shift_by_pixels_is_the_root_of_the_ratio_and_each_bucket_has_its_own() -> None:
    spec = FLOW.model_copy(update={"shift_size": 128})
    assert spec.at((832 // 8, 1216 // 8)).shift == pytest.approx(0.982265, abs=1e-6)
    assert spec.at((256, 256)).shift == 2.0 and spec.at((128, 128)).shift == 1.0
    three = spec.model_copy(update={"shift": 3.0, "shift_size": 8})
    index = torch.arange(100)

    def times(spec: DiffusionSpec, *size: int) -> Tensor:
        process, shape = Diffusion(spec, 3, "cpu"), (100, 1, *size)
        return process.draw(process.draws(index, shape), shape)[0].double() / 1000

    plain = times(FLOW, 8, 8)
    for size, shift in (((8, 8), 3.0), ((16, 8), 3.0 * math.sqrt(2)), ((4, 4), 1.5)):
        # float32: a time near 1 has an error of 2^-24 of 1
        torch.testing.assert_close(times(three, *size), shifted(plain, shift), rtol=0.0, atol=4 * 2.0**-24)


def test_drawing_visits_shifted_times_and_diffusers_almost_the_same() -> None:
    shifted_by_3 = FLOW.model_copy(update={"shift": 3.0})
    times = [1000.0, 900.0, 750.0, 500.0]
    assert sampler_of(shifted_by_3, kind="ddim", steps=4).times == pytest.approx(times)
    assert sampler_of(shifted_by_3, kind="ddim", steps=4, shift=1.0).times == pytest.approx([1000, 750, 500, 250])
    assert sampler_of(FLOW, kind="ddim", steps=4, shift=3.0).times == pytest.approx(times)
    with_shift = [
        scheduler_config(*pair, text=True) for pair in ((shifted_by_3, SamplerSpec()), (FLOW, SamplerSpec(shift=3.0)))
    ]
    assert with_shift[0] == with_shift[1]
    scheduler: Any = diffusers.DPMSolverMultistepScheduler(**with_shift[0])
    scheduler.set_timesteps(4)
    theirs = [0.99967, 0.89964, 0.74962, 0.49967]
    assert scheduler.sigmas.tolist()[:4] == pytest.approx(theirs, abs=1e-5)
    named = {"_class_name": "DPMSolverMultistepScheduler", **scheduler.config}
    assert process_from_scheduler(named)[1] == {"shift": 3.0}
    for dynamic, fields in ((False, {"shift": 3.0}), (True, {})):
        euler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "use_dynamic_shifting": dynamic}
        assert process_from_scheduler(euler)[1] == fields


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


VELOCITY = {"schedule": "flow", "objective": "velocity"}


@pytest.mark.parametrize(("key", "shift"), [("diffusion", 0), ("diffusion", -1), ("sampler", 0)])
def test_a_shift_of_zero_or_below_is_refused_in_one_line(
    key: str, shift: int, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [
        f"--set={word}" for word in ("diffusion.schedule=flow", "diffusion.objective=velocity", f"{key}.shift={shift}")
    ]
    assert main(["prepare", "--spec", str(SPECS / "digits.yaml"), *typed]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and f"{key}.shift = {shift} should be a number > 0 and <= 1,000" in line


@pytest.mark.parametrize(
    ("diffusion", "sampler", "error"),
    [
        ({"times": "uniform"}, {}, "diffusion.times = uniform is used only with diffusion.schedule: flow; remove it"),
        ({"shift": 3.0}, {}, "diffusion.shift = 3 is used only with diffusion.schedule: flow; remove it, or use 1"),
        ({"shift_size": 128}, {}, "diffusion.shift_size = 128 is used only with diffusion.schedule: flow"),
        (
            {**VELOCITY, "times": "uniform", "noise_mean": 1},
            {},
            "noise_mean = 1 is used only with diffusion.times: log",
        ),
        (
            VELOCITY,
            {"kind": "euler_ancestral"},
            "euler_ancestral has no steps for diffusion.schedule = flow; use euler",
        ),
        ({}, {"shift": 3.0}, "sampler.shift = 3.0 moves the times of diffusion.schedule = flow alone; use null"),
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
