"""Every step of our samplers is that of diffusers' scheduler of the same kind, on the same inputs.

Schedulers keep alpha_bar in fp32, so that their 1 - alpha_bar is off by 5e-4 at the first timesteps. To compare steps
and not tables, they are given ours in fp64 here; the last test compares whole drawings with schedulers as they come.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddpm_ds.config.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.diffusion.objective import alpha_bars, betas
from ddpm_ds.diffusion.samplers import Sampler, visited
from tests.diffusion.sampling import sample

diffusers = pytest.importorskip("diffusers", reason="diffusers, an optional extra, is not installed")

OBJECTIVES = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}
SCHEDULES = ("linear", "cosine", "sigmoid")
SPACINGS = ("trailing", "leading", "linspace")
CLIPS = ("none", "static", "dynamic")
CHOICES: dict[str, list[dict[str, Any]]] = {
    "ddpm": [{"variance": "small"}, {"variance": "large"}],
    "ddim": [{"eta": 0.0}, {"eta": 0.5}, {"eta": 1.0}],
    "dpm_solver": [{}],
}

# numpy's view of the tensors that DPMSolverMultistepScheduler gives it
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def scheduler_of(kind: str, diffusion: DiffusionSpec, sampler: SamplerSpec, *, exact: bool = True) -> Any:
    """diffusers' scheduler of a kind, at our timesteps; `exact` gives it alpha_bar in fp64."""
    values: dict[str, Any] = {
        "num_train_timesteps": diffusion.timesteps,
        "prediction_type": OBJECTIVES[diffusion.objective],
        "timestep_spacing": sampler.spacing,
        "thresholding": sampler.clip == "dynamic",
        "dynamic_thresholding_ratio": sampler.dynamic_quantile,
        "sample_max_value": 1e9,
    }
    if diffusion.schedule == "sigmoid":
        values["trained_betas"] = betas(diffusion).tolist()
    else:
        values["beta_schedule"] = {"linear": "linear", "cosine": "squaredcos_cap_v2"}[diffusion.schedule]
    if kind == "dpm_solver":
        if sampler.clip == "static":  # which it has as thresholding with a bound of 1
            values |= {"thresholding": True, "sample_max_value": 1.0}
        scheduler = diffusers.DPMSolverMultistepScheduler(**values)
    elif kind == "ddim":
        scheduler = diffusers.DDIMScheduler(clip_sample=sampler.clip == "static", **values)
    else:
        variance = f"fixed_{sampler.variance}"
        scheduler = diffusers.DDPMScheduler(clip_sample=sampler.clip == "static", variance_type=variance, **values)
    alpha_bar = alpha_bars(diffusion)
    if exact:
        scheduler.alphas_cumprod = alpha_bar
    scheduler.set_timesteps(sampler.steps_of(diffusion.timesteps))
    if exact and kind == "dpm_solver":
        sigmas = ((1 - alpha_bar) / alpha_bar).sqrt()[scheduler.timesteps]
        scheduler.sigmas = torch.cat([sigmas, torch.zeros(1, dtype=torch.float64)])
    return scheduler


def normal(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def assert_same(found: Tensor, expected: Tensor) -> None:
    # Both round intermediates of the size of the largest pixel to fp32, in different orders.
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5 * expected.abs().max().item())


def specs(
    kind: Any, *, schedule: Any = "linear", objective: Any = "eps", spacing: Any, clip: Any = "static", **values: Any
) -> tuple[DiffusionSpec, SamplerSpec]:
    diffusion = DiffusionSpec(schedule=schedule, objective=objective)
    return diffusion, SamplerSpec(kind=kind, spacing=spacing, clip=clip, dynamic_quantile=0.9, **values)


# Step by step


def compare_ddpm(sampler: Sampler, scheduler: Any) -> None:
    x_t = normal(0)
    for number, t in enumerate(sampler.timesteps):
        prediction, noise = normal(1 + number, 1.5), normal(100 + number)
        theirs = scheduler.step(prediction, t, x_t, generator=torch.Generator().manual_seed(100 + number))
        ours = sampler.step(number, x_t, prediction, noise=noise, previous_x0=None)
        assert_same(ours.x0, theirs.pred_original_sample)
        # After the last timestep diffusers adds noise to the image, unless that timestep is 0.
        last = number == len(sampler.timesteps) - 1
        assert_same(ours.x, theirs.pred_original_sample if last else theirs.prev_sample)
        x_t = ours.x


def compare_ddim(sampler: Sampler, scheduler: Any) -> None:
    x_t, spec = normal(0), sampler.spec
    for number, (t, next_t) in enumerate(zip(sampler.timesteps, (*sampler.timesteps[1:], -1), strict=True)):
        if spec.spacing == "linspace" or 1000 % len(sampler.timesteps):
            # diffusers goes T // S down, wherever the next timestep is: make that the way to it.
            scheduler.num_inference_steps = Fraction(1000, t - next_t)
        prediction, noise = normal(1 + number, 1.5), normal(100 + number)
        theirs = scheduler.step(prediction, t, x_t, eta=spec.eta, use_clipped_model_output=True, variance_noise=noise)
        ours = sampler.step(number, x_t, prediction, noise=noise, previous_x0=None)
        assert_same(ours.x0, theirs.pred_original_sample)
        assert_same(ours.x, theirs.prev_sample)
        x_t = ours.x


def compare_dpm_solver(sampler: Sampler, scheduler: Any) -> None:
    x_t, x0 = normal(0), None
    for number, t in enumerate(sampler.timesteps):
        prediction = normal(1 + number, 1.5)
        expected = scheduler.step(prediction, t, x_t).prev_sample
        x_t, x0 = sampler.step(number, x_t, prediction, noise=None, previous_x0=x0)
        assert_same(x0, scheduler.model_outputs[-1])
        assert_same(x_t, expected)


COMPARE: dict[str, Callable[[Sampler, Any], None]] = {
    "ddpm": compare_ddpm,
    "ddim": compare_ddim,
    "dpm_solver": compare_dpm_solver,
}


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", COMPARE)
def test_steps_of_every_process_and_clipping(kind: str, schedule: str, objective: str, spacing: str) -> None:
    for clip in CLIPS:
        values = CHOICES[kind][-1] | {"clip": clip, "steps": 6}
        diffusion, spec = specs(kind, schedule=schedule, objective=objective, spacing=spacing, **values)
        COMPARE[kind](Sampler(spec, diffusion), scheduler_of(kind, diffusion, spec))


@pytest.mark.parametrize("spacing, steps", [("trailing", 1), *product(SPACINGS, (2, 23))])
@pytest.mark.parametrize("kind", COMPARE)
def test_steps_of_every_length_and_choice(kind: str, spacing: str, steps: int) -> None:
    for choice in CHOICES[kind]:
        diffusion, spec = specs(kind, spacing=spacing, steps=steps, **choice)
        COMPARE[kind](Sampler(spec, diffusion), scheduler_of(kind, diffusion, spec))


# Timesteps


@pytest.mark.parametrize("kind", ["ddpm", "ddim", "dpm_solver"])
@settings(max_examples=40, deadline=None)
@given(
    steps_and_timesteps=st.integers(2, 1200).flatmap(lambda total: st.tuples(st.integers(1, total), st.just(total))),
    spacing=st.sampled_from(SPACINGS),
)
@example(steps_and_timesteps=(48, 1000), spacing="trailing")  # halves, which floats miss
@example(steps_and_timesteps=(61, 1000), spacing="trailing")  # numpy.arange overruns
@example(steps_and_timesteps=(1000, 1000), spacing="leading")
@example(steps_and_timesteps=(1, 1000), spacing="linspace")
def test_timesteps_are_those_of_diffusers_where_it_has_enough(
    kind: Any, steps_and_timesteps: tuple[int, int], spacing: Any
) -> None:
    steps, total = steps_and_timesteps
    diffusion, spec = DiffusionSpec(timesteps=total), SamplerSpec(kind=kind, spacing=spacing, steps=steps)
    theirs = scheduler_of(kind, diffusion, spec, exact=False).timesteps.tolist()
    ours = list(visited(spec, total))
    if len(theirs) == steps + 1:  # the rounding of numpy.arange
        assert spacing == "trailing" and theirs.pop() == -1
    if (spacing, steps) == ("linspace", 1) and kind != "dpm_solver":
        assert (ours, theirs) == ([total - 1], [0])  # pure noise taken for an almost clean image
    elif all(here > there for here, there in pairwise(theirs)):
        assert ours == theirs
    else:
        assert (kind, steps) == ("dpm_solver", total)


# Schedulers as they come


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["ddpm", "ddim", "dpm_solver"])
def test_whole_drawings_of_schedulers_as_they_come(kind: str, schedule: str) -> None:
    diffusion, spec = specs(kind, schedule=schedule, spacing="trailing", steps=20, variance="small")
    sampler, scheduler = Sampler(spec, diffusion), scheduler_of(kind, diffusion, spec, exact=False)
    alpha_bar = alpha_bars(diffusion)

    def denoise(x_t: Tensor, t: int) -> Tensor:  # the best one for images of two values, 0.8 and -0.8
        level, noise = alpha_bar[t].sqrt().item(), (1 - alpha_bar[t]).sqrt().item()
        return (x_t - level * 0.8 * torch.tanh(level * 0.8 * x_t / noise**2)) / noise

    ours = sample(sampler, denoise, normal(0), lambda t: normal(t))
    theirs = normal(0)
    for t in scheduler.timesteps.tolist():
        options: dict[str, Any] = {"generator": torch.Generator().manual_seed(t)} if kind == "ddpm" else {}
        if kind == "ddim":
            options = {"use_clipped_model_output": True}
        theirs = scheduler.step(denoise(theirs, t), t, theirs, **options).prev_sample
    assert ours.abs().median() > 0.79
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=5e-5)
