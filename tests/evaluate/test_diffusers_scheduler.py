"""Our diffusion process and the configuration of diffusers' DDPMScheduler: there, back, and what is refused."""

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.diffusion.choices import FLOW_TIMES, TARGETS
from ddpm_ds.diffusion.levels import Timesteps, alpha_bars, betas, levels_of
from ddpm_ds.diffusion.process import Diffusion
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.evaluate.diffusers.scheduler import (
    _FlowMatchArguments,
    _SchedulerArguments,
    process_from_scheduler,
    scheduler_class,
    scheduler_config,
)
from tests.evaluate.test_diffusers_unet import JUNK
from tests.launching import REPOSITORY

DDPM_CIFAR10: dict[str, Any] = {  # google/ddpm-cifar10-32
    **{"_class_name": "DDPMScheduler", "_diffusers_version": "0.1.1", "beta_end": 0.02, "beta_schedule": "linear"},
    **{"beta_start": 0.0001, "clip_sample": True, "num_train_timesteps": 1000, "trained_betas": None},
    "variance_type": "fixed_large",
}
DDPM_KEYS = inspect.signature(diffusers.DDPMScheduler.__init__).parameters
PROCESSES = [
    DiffusionSpec(schedule="linear", timesteps=7, objective="x0"),
    DiffusionSpec(schedule="scaled_linear", timesteps=50, objective="v"),
    DiffusionSpec(schedule="cosine", timesteps=1000, objective="v"),
    DiffusionSpec(schedule="cosine", timesteps=1, objective="eps"),
    DiffusionSpec(schedule="sigmoid", timesteps=1000, objective="x0"),
    DiffusionSpec(schedule="sigmoid", objective="v", zero_terminal_snr=True),
    DiffusionSpec(schedule="cosine", objective="x0", zero_terminal_snr=True),
    DiffusionSpec(schedule="scaled_linear", objective="v", zero_terminal_snr=True),
    DiffusionSpec(beta_start=1e-3, beta_end=0.5, timesteps=20),
]


def test_ddpms_cifar10_scheduler_is_the_process_of_our_cifar10_spec() -> None:
    spec = load_spec(REPOSITORY / "launch" / "specs" / "cifar10.yaml")
    assert process_from_scheduler(DDPM_CIFAR10)[0] == spec.diffusion
    written = scheduler_config(spec.diffusion, spec.sampler)
    assert {key: written[key] for key in DDPM_CIFAR10 if not key.startswith("_")}.items() <= DDPM_CIFAR10.items()


STABLE_DIFFUSION: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SD 1.5": ({"_class_name": "PNDMScheduler", "skip_prk_steps": True, "steps_offset": 1}, {}),
    "SD 2.1": ({"_class_name": "DDIMScheduler", "prediction_type": "v_prediction"}, {"objective": "v"}),
    "SDXL": ({"_class_name": "EulerDiscreteScheduler", "use_karras_sigmas": False, "interpolation_type": "linear"}, {}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_stable_diffusions_schedulers_are_read_and_add_the_same_noise(name: str) -> None:
    config, values = PUBLISHED[name]
    config = {**STABLE_DIFFUSION, "num_train_timesteps": 1000, "trained_betas": None, **config}
    spec = process_from_scheduler(config)[0]
    assert spec == DiffusionSpec(schedule="scaled_linear", **values)
    generator = torch.Generator().manual_seed(0)
    x0, eps = (torch.randn(1000, 4, 2, 2, generator=generator) for _ in range(2))
    t = torch.arange(1000)
    adds: Any = diffusers.DDPMScheduler(**{key: value for key, value in config.items() if key in DDPM_KEYS})
    # Betas in fp32 as above: alpha_bar of at most 1 moves by 3 x 2^-24 of itself a step, its root by half of that.
    within = 1000 * 3 / 2 * 2**-24 * float(x0.abs().max() + eps.abs().max())
    found = Diffusion(spec, 0, "cpu").noised(x0, t, eps)
    torch.testing.assert_close(found, adds.add_noise(x0, eps, t), rtol=0.0, atol=within)
    if name == "SDXL":
        scheduler: Any = diffusers.EulerDiscreteScheduler.from_config(config, timestep_spacing="trailing")
        scheduler.set_timesteps(10)
        visits = Timesteps(spec).visits(SamplerSpec(kind="ddim", steps=10))
        assert [visit.t for visit in visits] == scheduler.timesteps.tolist()
        assert scheduler.sigmas[:-1].tolist() == pytest.approx([visit.sigma for visit in visits], rel=1e-3)


@pytest.mark.parametrize("spec", PROCESSES, ids=lambda spec: f"{spec.schedule}-{spec.timesteps}-{spec.objective}")
def test_there_and_back_is_the_same_process_with_the_loss_of_the_base(spec: DiffusionSpec) -> None:
    config = json.loads(json.dumps(scheduler_config(spec, SamplerSpec())))
    assert process_from_scheduler(config)[0] == spec
    kept = {"loss": "huber", "huber_delta": 0.3, "weighting": "min_snr", "min_snr_gamma": 2.0}
    kept |= {"input_perturbation": 0.1, "noise_offset": 0.05}
    base = DiffusionSpec.model_validate(kept)
    assert process_from_scheduler(config, base)[0] == spec.model_copy(update=kept)


@pytest.mark.parametrize("spec", PROCESSES, ids=lambda spec: f"{spec.schedule}-{spec.timesteps}-{spec.objective}")
def test_diffusers_has_the_same_alpha_bars(spec: DiffusionSpec) -> None:
    scheduler: Any = diffusers.DDPMScheduler(**scheduler_config(spec, SamplerSpec()))
    # It rounds each beta to fp32, by up to 2^-24, which moves 1 - beta by the share 2^-24 / (1 - beta); then the
    # difference and the product with it are rounded. A share of alpha_bar is the sum of its factors' shares.
    expected = alpha_bars(spec)
    if spec.zero_terminal_snr:  # rescaling subtracts what is rounded: at both ends of each signal by 2^-24
        assert (scheduler.alphas_cumprod.double() - expected).abs().max() < len(expected) * 2**-24
        assert scheduler.alphas_cumprod[-1] == expected[-1] == 0.0
        return
    rounding = 2**-24 * (1 / (1 - betas(spec)) + 2).cumsum(0)
    assert ((scheduler.alphas_cumprod.double() / expected - 1).abs() <= rounding).all()


@pytest.mark.parametrize(("schedule", "objective"), [("edm", "v"), ("flow", "velocity")])
def test_the_scheduler_of_an_export_without_timesteps_denoises_as_ours(schedule: Any, objective: Any) -> None:
    spec, is_flow = DiffusionSpec(schedule=schedule, objective=objective), schedule == "flow"
    arguments = scheduler_config(spec, SamplerSpec(), text=is_flow)
    scheduler: Any = getattr(diffusers, scheduler_class(spec, text=is_flow))(**arguments)
    x_t, prediction = torch.randn(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scheduler.set_timesteps(4)
    scheduler._init_step_index(scheduler.timesteps[1])
    sigma = scheduler.sigmas[1:2].double()
    level = levels_of(spec).level(FLOW_TIMES * sigma if is_flow else sigma.log() / 4).each()
    if is_flow:
        theirs = scheduler.convert_model_output(prediction, sample=x_t)
    else:
        theirs = scheduler.precondition_outputs(x_t / level.signal, prediction, level.noise / level.signal)
    ours = TARGETS[spec.objective].to_x0(prediction, x_t, level)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5 * ours.abs().max().item())


def test_missing_keys_take_the_defaults_of_diffusers() -> None:
    ours = {name: each.default for name, each in _SchedulerArguments.model_fields.items() if name in DDPM_KEYS}
    assert len(ours) == 7 and ours == {name: DDPM_KEYS[name].default for name in ours}
    assert process_from_scheduler({})[0] == DiffusionSpec()


@pytest.mark.parametrize("name", [*_SchedulerArguments.class_names, *_FlowMatchArguments.class_names])
@pytest.mark.parametrize("noise", [{}, {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}])
def test_schedulers_of_the_same_noise_are_read(name: str, noise: dict[str, Any], tmp_path: Path) -> None:
    """As ``save_pretrained`` writes them, and where keys are missing."""
    try:
        scheduler = getattr(diffusers, name)(**({} if name in _FlowMatchArguments.class_names else noise))
    except ImportError:
        pytest.skip(f"{name} needs another package")
    scheduler.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "scheduler_config.json").read_text())
    found = process_from_scheduler(written)[0]
    assert found == process_from_scheduler({"_class_name": name, **noise})[0]
    if name in _FlowMatchArguments.class_names:
        assert (found.schedule, found.objective) == ("flow", "velocity")
    else:
        assert (alpha_bars(found) - scheduler.alphas_cumprod.double()).abs().max() < 1e-5


def test_betas_given_one_by_one_are_recognised_as_a_schedule_of_ours() -> None:
    for spec in PROCESSES[:-4]:
        rounded = betas(spec).float().tolist()
        config = {"num_train_timesteps": spec.timesteps, "trained_betas": rounded, "beta_schedule": "laplace"}
        assert process_from_scheduler(config)[0].schedule in (spec.schedule, "linear" if spec.timesteps == 1 else "")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "class": ({"_class_name": "LCMScheduler"}, '_class_name = "LCMScheduler"'),
    "a list": ({"_class_name": ["DDPMScheduler"]}, r'_class_name = \["DDPMScheduler"\]: only'),
    "unknown": ({"snr_shift_scale": 3.0}, "snr_shift_scale = 3.0: no such argument of a scheduler is known"),
    "x0": ({"predict_epsilon": False}, "predict_epsilon = false"),
    "continuous": ({"_class_name": "EulerDiscreteScheduler", "timestep_type": "continuous"}, "timestep_type = "),
    "flow of eps": ({"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True}, "use_flow_sigmas = true"),
    "minus v": ({"_class_name": "EDMEulerScheduler"}, 'prediction_type = "epsilon": it should be .v_prediction'),
    "another sigmoid": ({"beta_schedule": "sigmoid"}, 'beta_schedule = "sigmoid".*trained_betas'),
    "zero snr": ({"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr = true"),
    "flow": ({"prediction_type": "flow_prediction"}, "prediction_type.*'epsilon', 'sample' or 'v_prediction'"),
    "beta": ({"beta_end": 1.5}, r"beta_end = 1\.5"),
    "betas": ({"trained_betas": [0.1, 0.3, 0.2], "num_train_timesteps": 3}, "trained_betas.*not those of our"),
    "betas missing": ({"trained_betas": [0.1, 0.2]}, "trained_betas.*2 betas for num_train_timesteps = 1000"),
    "no betas": ({"trained_betas": []}, "trained_betas"),
    "timesteps": ({"num_train_timesteps": 0}, "num_train_timesteps = 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_our_process_cannot_express_is_refused_by_name(name: str) -> None:
    change, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        process_from_scheduler({**DDPM_CIFAR10, **change})[0]
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(_SchedulerArguments.model_fields)), JUNK)
def test_junk_under_any_key_is_one_line_that_names_a_key(key: str, junk: Any) -> None:
    try:
        process_from_scheduler({**DDPM_CIFAR10, key: junk})[0]
    except ValueError as error:
        assert "\n" not in str(error) and str(error).split(" = ")[0] in _SchedulerArguments.model_fields
