"""Our diffusion process and the configuration of diffusers' DDPMScheduler: there, back, and what is refused."""

from __future__ import annotations

import inspect
import json
from typing import Any

import diffusers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpm_ds.config.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.diffusion.levels import alpha_bars, betas
from ddpm_ds.evaluate.diffusers.scheduler import _SchedulerArguments, process_from_scheduler, scheduler_config
from tests.launching import REPOSITORY

DDPM_CIFAR10: dict[str, Any] = {  # google/ddpm-cifar10-32
    "_class_name": "DDPMScheduler",
    "_diffusers_version": "0.1.1",
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "clip_sample": True,
    "num_train_timesteps": 1000,
    "trained_betas": None,
    "variance_type": "fixed_large",
}
PROCESSES = [
    DiffusionSpec.model_validate({"schedule": schedule, "timesteps": timesteps, "objective": objective})
    for schedule, timesteps, objective in [
        ("linear", 1000, "eps"),
        ("linear", 7, "x0"),
        ("cosine", 1000, "v"),
        ("cosine", 1, "eps"),
        ("sigmoid", 1000, "x0"),
        ("sigmoid", 50, "v"),
    ]
] + [
    DiffusionSpec(schedule="sigmoid", objective="v", zero_terminal_snr=True),
    DiffusionSpec(schedule="cosine", objective="x0", zero_terminal_snr=True),
    DiffusionSpec(beta_start=1e-3, beta_end=0.5, timesteps=20),
]


def test_ddpms_cifar10_scheduler_is_the_process_of_our_cifar10_spec() -> None:
    spec = load_spec(REPOSITORY / "launch" / "specs" / "cifar10.yaml")
    assert process_from_scheduler(DDPM_CIFAR10)[0] == spec.diffusion
    written = scheduler_config(spec.diffusion, spec.sampler)
    assert {key: written[key] for key in DDPM_CIFAR10 if not key.startswith("_")}.items() <= DDPM_CIFAR10.items()


@pytest.mark.parametrize("spec", PROCESSES, ids=lambda spec: f"{spec.schedule}-{spec.timesteps}-{spec.objective}")
def test_there_and_back_is_the_same_process_with_the_loss_of_the_base(spec: DiffusionSpec) -> None:
    config = json.loads(json.dumps(scheduler_config(spec, SamplerSpec())))
    assert process_from_scheduler(config)[0] == spec
    kept = {
        "loss": "huber",
        "huber_delta": 0.3,
        "weighting": "min_snr",
        "min_snr_gamma": 2.0,
        "input_perturbation": 0.1,
    }
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


def test_missing_keys_take_the_defaults_of_diffusers() -> None:
    parameters = inspect.signature(diffusers.DDPMScheduler.__init__).parameters
    ours = {name: field.default for name, field in _SchedulerArguments.model_fields.items()}
    assert ours == {name: parameters[name].default for name in ours}
    assert process_from_scheduler({})[0] == DiffusionSpec()


def test_betas_given_one_by_one_are_recognised_as_a_schedule_of_ours() -> None:
    for spec in PROCESSES[:-3]:
        rounded = betas(spec).float().tolist()
        config = {"num_train_timesteps": spec.timesteps, "trained_betas": rounded, "beta_schedule": "scaled_linear"}
        assert process_from_scheduler(config)[0].schedule in (spec.schedule, "linear" if spec.timesteps == 1 else "")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "class": ({"_class_name": "EulerDiscreteScheduler"}, '_class_name = "EulerDiscreteScheduler"'),
    "minus v": ({"_class_name": "EDMEulerScheduler"}, 'prediction_type = "epsilon": it should be .v_prediction'),
    "stable diffusion": ({"beta_schedule": "scaled_linear"}, 'beta_schedule = "scaled_linear": ours are linear'),
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


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.floats(0, 1), max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(_SchedulerArguments.model_fields)), JUNK)
def test_junk_under_any_key_is_one_line_that_names_a_key(key: str, junk: Any) -> None:
    try:
        process_from_scheduler({**DDPM_CIFAR10, key: junk})[0]
    except ValueError as error:
        assert "\n" not in str(error) and str(error).split(" = ")[0] in _SchedulerArguments.model_fields
