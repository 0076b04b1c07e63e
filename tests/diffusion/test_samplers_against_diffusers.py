"""Every step of our samplers is that of diffusers' scheduler of the same kind, made of the configuration that an
export has, on the same inputs.

Schedulers keep alpha_bar in fp32, so that their 1 - alpha_bar is off by 5e-4 at the first timesteps. To compare steps
and not tables, they are given ours in fp64 here; the last test compares whole drawings with schedulers as they come.
"""

from fractions import Fraction
from itertools import pairwise
from typing import Any

import diffusers
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddpm_ds.diffusion.levels import alpha_bars, visited
from ddpm_ds.diffusion.samplers import Sampler
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.evaluate.diffusers.scheduler import scheduler_config
from tests.diffusion.sampling import SPACINGS, sample

SCHEDULES: tuple[Any, ...] = ("linear", "scaled_linear", "cosine", "sigmoid")
CHOICES: dict[str, list[dict[str, Any]]] = {
    "ddpm": [{"variance": "small"}, {"variance": "large"}],
    "ddim": [{"eta": 0.0}, {"eta": 0.5}, {"eta": 1.0}],
    "dpm_solver": [{}],
}
SCHEDULERS = {"ddpm": "DDPMScheduler", "ddim": "DDIMScheduler", "dpm_solver": "DPMSolverMultistepScheduler"}


@pytest.mark.parametrize("kind", ["euler", "euler_ancestral"])
@pytest.mark.parametrize("objective", ["eps", "v"])
def test_eulers_steps_are_those_of_other_programs(kind: str, objective: str) -> None:
    """diffusers' schedulers after k-diffusion, whose x is ours divided by the signal."""
    diffusion = DiffusionSpec.model_validate({"schedule": "scaled_linear", "objective": objective})
    spec = SamplerSpec(kind=kind, steps=7, clip="none")
    sampler, predicts = Sampler(spec, diffusion), {"eps": "epsilon", "v": "v_prediction"}[objective]
    name = "EulerDiscreteScheduler" if kind == "euler" else "EulerAncestralDiscreteScheduler"
    stable = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "prediction_type": predicts}
    scheduler = getattr(diffusers, name)(**stable, timestep_spacing="trailing")
    scheduler.set_timesteps(7)
    assert sampler.times == tuple(scheduler.timesteps.tolist())

    def network(x: Tensor, t: int) -> Tensor:
        return normal(1000 + t, dtype=torch.float32) + 0.1 * x

    def noise(t: int) -> Tensor:
        return normal(t, dtype=torch.float32)

    start = normal(0, dtype=torch.float32)
    x = start * float(1.0 / sampler.visits[0].level.signal)
    for t in scheduler.timesteps:
        prediction = network(scheduler.scale_model_input(x, t), int(t))
        generator = torch.Generator().manual_seed(int(t))
        x = scheduler.step(prediction, t, x, generator=generator).prev_sample
    drawn = sample(sampler, network, start, noise)
    # Both begin with noise of 15 times an image, times 3; a step rounds it by 2^-23, and alpha_bar is off by as much.
    torch.testing.assert_close(drawn, x, rtol=0.0, atol=7 * 45 * 2 * 2.0**-23)


# numpy's view of the tensors that DPMSolverMultistepScheduler gives it
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def scheduler_of(diffusion: DiffusionSpec, sampler: SamplerSpec, *, exact: bool = True) -> Any:
    """diffusers' scheduler of the sampler's kind, at our timesteps; `exact` gives it alpha_bar in fp64."""
    config = scheduler_config(diffusion, sampler)
    if sampler.kind == "dpm_solver" and sampler.clip == "static":
        config["thresholding"] = True  # with the bound 1 it is static clipping, which this scheduler does not have
    scheduler = getattr(diffusers, SCHEDULERS[sampler.kind]).from_config(config)
    alpha_bar = alpha_bars(diffusion)
    if exact:
        scheduler.alphas_cumprod = alpha_bar
    scheduler.set_timesteps(sampler.steps_of(diffusion))
    if exact and sampler.kind == "dpm_solver":
        sigmas = ((1 - alpha_bar) / alpha_bar).sqrt()[scheduler.timesteps]
        scheduler.sigmas = torch.cat([sigmas, torch.zeros(1, dtype=torch.float64)])
    return scheduler


def normal(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return scale * torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def compare(diffusion: DiffusionSpec, spec: SamplerSpec) -> None:
    """Take every step with both, from our x_t in fp64."""
    sampler, scheduler = Sampler(spec, diffusion), scheduler_of(diffusion, spec)
    x_t, x0 = normal(0), None
    for number, (t, next_t) in enumerate(zip(sampler.times, (*sampler.times[1:], -1), strict=True)):
        prediction, noise = normal(1 + number, 1.5), normal(100 + number)
        tolerance: dict[str, Any] = {}
        if spec.kind == "ddpm":
            theirs = scheduler.step(prediction, t, x_t, generator=torch.Generator().manual_seed(100 + number))
            # After the last timestep diffusers adds noise to the image, unless that timestep is 0.
            expected_x0 = theirs.pred_original_sample
            expected = theirs.prev_sample if next_t >= 0 else expected_x0
        elif spec.kind == "ddim":
            if spec.spacing == "linspace" or 1000 % len(sampler.times):
                # diffusers goes T // S down, wherever the next timestep is: make that the way to it.
                scheduler.num_inference_steps = Fraction(1000, int(t - next_t))
            how = {"eta": spec.eta, "use_clipped_model_output": True, "variance_noise": noise}
            theirs = scheduler.step(prediction, t, x_t, **how)
            expected, expected_x0 = theirs.prev_sample, theirs.pred_original_sample
        else:
            expected = scheduler.step(prediction, t, x_t).prev_sample
            expected_x0 = scheduler.model_outputs[-1]
            # It rounds x_t and its product with a factor below 1 to fp32, each by half a unit in the last place.
            tolerance = {"rtol": 0.0, "atol": 2 * 2**-24 * x_t.abs().max().item()}
        x_t, x0 = sampler.step(number, x_t, prediction, noise=noise, previous_x0=x0)
        torch.testing.assert_close(x0, expected_x0)
        torch.testing.assert_close(x_t, expected, **tolerance)


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", CHOICES)
def test_steps_of_every_process_and_clipping(kind: Any, schedule: Any, spacing: Any) -> None:
    objectives: tuple[Any, ...] = ("eps", "x0", "v")
    for objective in objectives:
        diffusion = DiffusionSpec(schedule=schedule, objective=objective)
        for clip in ("none", "static", "dynamic"):
            values = CHOICES[kind][-1] | {"clip": clip, "dynamic_quantile": 0.9, "steps": 6}
            compare(diffusion, SamplerSpec(kind=kind, spacing=spacing, **values))


@pytest.mark.parametrize("kind", ["ddpm", "ddim"])  # diffusers' DPM-Solver++ begins at another noise there
def test_steps_from_noise_alone(kind: Any) -> None:
    diffusion = DiffusionSpec(schedule="scaled_linear", objective="v", zero_terminal_snr=True)
    compare(diffusion, SamplerSpec(kind=kind, spacing="trailing", steps=8, clip="none"))


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("kind", CHOICES)
def test_steps_of_every_length_and_choice(kind: Any, spacing: Any) -> None:
    for choice in CHOICES[kind]:
        for steps in (2, 23) if spacing != "trailing" else (1, 2, 23):
            compare(DiffusionSpec(), SamplerSpec(kind=kind, spacing=spacing, steps=steps, **choice))


@pytest.mark.parametrize("kind", CHOICES)
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
    theirs = scheduler_of(diffusion, spec, exact=False).timesteps.tolist()
    ours = list(visited(spec, diffusion))
    if len(theirs) == steps + 1:  # the rounding of numpy.arange
        assert spacing == "trailing" and theirs.pop() == -1
    if (spacing, steps) == ("linspace", 1) and kind != "dpm_solver":
        assert (ours, theirs) == ([total - 1], [0])  # pure noise taken for an almost clean image
    elif all(here > there for here, there in pairwise(theirs)):
        assert ours == theirs
    else:
        assert (kind, steps) == ("dpm_solver", total)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", CHOICES)
def test_whole_drawings_of_schedulers_as_they_come(kind: Any, schedule: Any) -> None:
    diffusion = DiffusionSpec(schedule=schedule)
    spec = SamplerSpec(kind=kind, spacing="trailing", steps=20, variance="small")
    scheduler, alpha_bar = scheduler_of(diffusion, spec, exact=False), alpha_bars(diffusion)

    def denoise(x_t: Tensor, t: int) -> Tensor:  # the best one for images of two values, 0.8 and -0.8
        level, noise = alpha_bar[t].sqrt().item(), (1 - alpha_bar[t]).sqrt().item()
        return (x_t - level * 0.8 * torch.tanh(level * 0.8 * x_t / noise**2)) / noise

    start = normal(0, dtype=torch.float32)
    ours = sample(Sampler(spec, diffusion), denoise, start, lambda t: normal(t, dtype=torch.float32))
    theirs = start
    for t in scheduler.timesteps.tolist():
        options: dict[str, Any] = {"generator": torch.Generator().manual_seed(t)} if kind == "ddpm" else {}
        if kind == "ddim":
            options = {"use_clipped_model_output": True}
        theirs = scheduler.step(denoise(theirs, t), t, theirs, **options).prev_sample
    assert ours.abs().median() > 0.79
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1 / 255)  # half a step between two bytes
