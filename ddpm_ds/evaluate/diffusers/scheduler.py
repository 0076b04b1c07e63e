"""Configurations of diffusers, checked for types and ranges, and the conversion between our diffusion process and a
scheduler: ``DDPMScheduler`` or, for EDM, ``EDMEulerScheduler``. diffusers is not needed.
"""

import json
from collections.abc import Collection, Mapping
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddpm_ds.diffusion.choices import FLOW_TIMES, NOISE, TARGETS, ContinuousSchedule, timestep_schedules
from ddpm_ds.diffusion.levels import betas
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.schema.choices import SCHEDULES
from ddpm_ds.schema.types import Rho, Shift, Sigma, Timesteps

LONGEST_VALUE = 80


class Arguments(BaseModel):
    """Arguments with diffusers' defaults; a subclass's types allow only values that we can express.

    Keys that begin with an underscore are diffusers' own notes, not arguments.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    class_names: ClassVar[tuple[str, ...]]
    """Names of the classes that take these arguments."""
    kind: ClassVar[str] = ""
    """Word of messages for an argument; empty means ``argument of`` the first class."""
    ignored: ClassVar[Collection[str]] = ()
    """Other keys, on which nothing here depends; keys that are neither known nor ignored are refused."""

    @classmethod
    def read(cls, config: Mapping[str, object]) -> Self:
        """Return the arguments in a configuration; raise ValueError, a line with the key, its value and the fix."""
        name = config.get("_class_name", cls.class_names[0])
        if name not in cls.class_names:
            named = ", ".join(known.removesuffix("Scheduler") for known in cls.class_names)
            raise refused("_class_name", name, f"only {named} can be read")
        arguments = {key: value for key, value in config.items() if not key.startswith("_")}
        try:
            # By JSON's rules a list may be a tuple, but "64" is no number.
            found = cls.model_validate_json(json.dumps(arguments))
        except ValidationError as error:
            first, *more = error.errors()
            key = str(first["loc"][0])
            of_key = (each for each in more if each["loc"][0] == key)
            problem = max((first, *of_key), key=lambda each: len(each["loc"]))  # in a list the entry's own problem
            raise refused(key, config[key], problem["msg"].replace("Input should be", "it should be")) from None
        for key, value in (found.model_extra or {}).items():
            if key not in cls.ignored and value is not None and value is not False:
                kind = cls.kind or f"argument of {cls.class_names[0]}"
                raise refused(key, value, f"no such {kind} is known here; only null can be read")
        return found


def refused(key: str, value: object, why: str) -> ValueError:
    """Return the error for a key whose value can't be expressed."""
    text = json.dumps(value)
    return ValueError(f"{key} = {text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + '...'}: {why}")


Beta = Annotated[float, Field(gt=0.0, lt=1.0)]
EXPLICIT = "trained_betas"
"""Argument of diffusers' schedulers for the betas of a schedule without a name in diffusers."""
BETAS = {"beta_start": 0.00085, "beta_end": 0.012}
"""Ends of the betas of Stable Diffusion."""
UNLIMITED = 1e6
"""Maximum for dynamic clipping in diffusers, which requires one; ours has none."""
FLOW = "DPMSolverMultistepScheduler"
"""Scheduler of flow matching for text, since `FlowMatchEulerDiscreteScheduler` lacks `scale_model_input`, which the
pipelines call."""


def scheduler_class(diffusion: DiffusionSpec, *, text: bool = False) -> str:
    """Return the name of the class that takes the arguments of :func:`scheduler_config`."""
    ours = NOISE[diffusion.schedule]
    if not isinstance(ours, ContinuousSchedule):
        return "DDIMScheduler" if text else "DDPMScheduler"
    return FLOW if text and diffusion.schedule == "flow" else ours.diffusers or ""


def scheduler_config(diffusion: DiffusionSpec, sampler: SamplerSpec, *, text: bool = False) -> dict[str, object]:
    """Return the arguments of the scheduler that adds noise as a run did; a ``DDPMScheduler`` also samples with the
    run's clipping and variance. For ``text`` the scheduler is one by which such pipelines sample in few steps.

    Raises ValueError: diffusers has no such noise schedule or objective.
    """
    if text and diffusion.schedule == "flow":
        predicts = {"num_train_timesteps": int(FLOW_TIMES), "prediction_type": "flow_prediction"}
        return {**predicts, "use_flow_sigmas": True, "flow_shift": sampler.shift or diffusion.shift}
    ours = NOISE[diffusion.schedule]
    schedule, objective = ours.diffusers, TARGETS[diffusion.objective].diffusers
    for key, name in (("schedule", schedule), ("objective", objective)):
        if name is None:
            why = "diffusers has none like it; draw with ddpm-ds sample instead"
            raise refused(f"diffusion.{key}", getattr(diffusion, key), why)
    if isinstance(ours, ContinuousSchedule):
        return {
            "sigma_min": sampler.sigma_min,
            "sigma_max": sampler.sigma_max,
            "sigma_data": diffusion.sigma_data,
            "sigma_schedule": "karras",
            "prediction_type": objective,
            "rho": sampler.rho,
            "final_sigmas_type": "zero",
        }
    # Only trailing steps visit the last timestep, of pure noise (Lin et al.).
    sampling: dict[str, object] = {"timestep_spacing": "trailing" if diffusion.zero_terminal_snr else "leading"}
    sampling |= {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
    if not text:
        dynamic = sampler.clip == "dynamic"
        sampling = {
            "variance_type": f"fixed_{sampler.variance}",
            "clip_sample": sampler.clip == "static",
            "clip_sample_range": 1.0,
            "thresholding": dynamic,
            "dynamic_thresholding_ratio": sampler.dynamic_quantile,
            "sample_max_value": UNLIMITED if dynamic else 1.0,
            "timestep_spacing": sampler.spacing,
            "steps_offset": 0,
        }
    return {
        "num_train_timesteps": diffusion.timesteps,
        "beta_start": diffusion.beta_start,
        "beta_end": diffusion.beta_end,
        # Explicit betas replace it, but a name is required.
        "beta_schedule": "linear" if schedule == EXPLICIT else schedule,
        # Not rescaled, since the scheduler does that.
        "trained_betas": ours.betas(diffusion).tolist() if schedule == EXPLICIT else None,
        "prediction_type": objective,
        "rescale_betas_zero_snr": diffusion.zero_terminal_snr,
        **sampling,
    }


OWN_BETAS = tuple(
    f"{name}Scheduler" for name in ("DPMSolverSDE", "HeunDiscrete", "KDPM2AncestralDiscrete", "KDPM2Discrete")
)
"""Schedulers whose default beta_start and beta_end are Stable Diffusion's."""
# fmt: off
OF_SAMPLING = {
    "algorithm_type", "base_image_seq_len", "base_shift", "clip_sample", "clip_sample_range", "corrector_order",
    "disable_corrector", "dynamic_thresholding_ratio", "euler_at_final", "final_sigmas_type", "flow_shift",
    "interpolation_type", "lambda_min_clipped", "lower_order_final", "max_image_seq_len", "max_shift",
    "noise_sampler_seed", "num_train_timesteps", "predict_x0", "predictor_order", "sample_max_value",
    "set_alpha_to_one", "shift", "shift_terminal", "sigma_max", "sigma_min", "sigma_schedule", "skip_prk_steps",
    "solver_order", "solver_p", "solver_type", "steps_offset", "stochastic_sampling", "tau_func", "tensor_format",
    "thresholding", "time_shift_type", "timestep_spacing", "use_beta_sigmas", "use_dynamic_shifting",
    "use_exponential_sigmas", "use_karras_sigmas", "use_lu_lambdas", "variance_type",
}
# fmt: on
"""Arguments of diffusers' schedulers, past and present, on which no training depends."""


class _Noise(Arguments):
    """Arguments of a scheduler; keys that are neither fields nor about sampling are refused."""

    kind: ClassVar = "argument of a scheduler"
    ignored: ClassVar = OF_SAMPLING


class _SchedulerArguments(_Noise):
    """Arguments for adding noise, with their defaults."""

    class_names: ClassVar = (
        *("DDPMScheduler", "DDPMParallelScheduler", "DDIMScheduler", "DDIMParallelScheduler", "PNDMScheduler"),
        *("LMSDiscreteScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "SASolverScheduler"),
        *(FLOW, "DPMSolverSinglestepScheduler", "DEISMultistepScheduler", "UniPCMultistepScheduler", *OWN_BETAS),
    )

    num_train_timesteps: Timesteps = 1000
    beta_start: Beta = 0.0001
    beta_end: Beta = 0.02
    beta_schedule: str = "linear"
    trained_betas: tuple[Beta, ...] | None = None
    prediction_type: Literal["epsilon", "sample", "v_prediction"] = "epsilon"
    rescale_betas_zero_snr: bool = False
    predict_epsilon: Literal[True] | None = None
    """Predecessor of prediction_type; false meant sample."""
    timestep_type: Literal["discrete"] = "discrete"
    use_flow_sigmas: Literal[False] = False


class _EdmArguments(_Noise):
    """Arguments for adding noise as EDM does, and the noise levels of sampling."""

    class_names: ClassVar = ("EDMEulerScheduler", "EDMDPMSolverMultistepScheduler")

    sigma_data: Annotated[float, Field(gt=0.0)] = 0.5
    sigma_min: Sigma = 0.002
    sigma_max: Sigma = 80.0
    rho: Rho = 7.0
    prediction_type: Literal["v_prediction"]  # diffusers' default "epsilon" is the negative of our objective


class _FlowMatchArguments(_Noise):
    """Arguments of a scheduler for flow matching alone, where arguments about betas have no effect."""

    class_names: ClassVar[tuple[str, ...]] = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")
    ignored: ClassVar = OF_SAMPLING | {"beta_start", "beta_end", "beta_schedule", "trained_betas"}

    num_train_timesteps: Literal[1000] = 1000
    shift: Shift = 1.0
    use_dynamic_shifting: bool = False
    """Whether ``shift`` has no effect."""

    def sampling(self) -> dict[str, float]:
        """Return the shift as a field of the sampler."""
        return {} if self.use_dynamic_shifting else {"shift": self.shift}


class _FlowArguments(_FlowMatchArguments):
    """Arguments for flow matching of a scheduler that has other processes too."""

    class_names: ClassVar = (FLOW, "DPMSolverSinglestepScheduler", "DEISMultistepScheduler", "UniPCMultistepScheduler")

    use_flow_sigmas: Literal[True]
    prediction_type: Literal["flow_prediction"]
    flow_shift: Shift = 1.0

    def sampling(self) -> dict[str, float]:
        return {"shift": self.flow_shift}


def process_from_scheduler(
    config: Mapping[str, object], base: DiffusionSpec | None = None
) -> tuple[DiffusionSpec, dict[str, float]]:
    """Return the diffusion process of a scheduler, with the loss and weighting of ``base``. Also return the noise
    levels or the shift with which it samples, as fields of the sampler; a scheduler with timesteps has none.

    Missing keys take the defaults of the scheduler's class, and a missing class is ``DDPMScheduler``. Raises
    ValueError, a line with the key, its value and the fix: our process can't express it.
    """
    base, name = base or DiffusionSpec(), config.get("_class_name")
    if name in _EdmArguments.class_names:
        edm = _EdmArguments.read({"prediction_type": "epsilon", **config})
        changes: dict[str, object] = {"schedule": "edm", "objective": "v", "sigma_data": edm.sigma_data}
        return base.model_copy(update=changes), edm.model_dump(include={"sigma_min", "sigma_max", "rho"})
    of_flow = name in _FlowArguments.class_names and config.get("prediction_type") == "flow_prediction"
    if of_flow or name in _FlowMatchArguments.class_names:
        kind = _FlowArguments if of_flow else _FlowMatchArguments
        flow = kind.read({"use_flow_sigmas": False, **config} if of_flow else config)
        return base.model_copy(update={"schedule": "flow", "objective": "velocity"}), flow.sampling()
    found = _SchedulerArguments.read({**(BETAS if isinstance(name, str) and name in OWN_BETAS else {}), **config})
    objective = next(name for name, ours in TARGETS.items() if ours.diffusers == found.prediction_type)
    if found.rescale_betas_zero_snr and objective == "eps":
        raise refused("rescale_betas_zero_snr", True, "the noise can't be learned where there is nothing else")
    changes = {"timesteps": found.num_train_timesteps, "objective": objective, **_schedule(found)}
    return base.model_copy(update={**changes, "zero_terminal_snr": found.rescale_betas_zero_snr}), {}


def _schedule(found: _SchedulerArguments) -> dict[str, object]:
    """Return our schedule with that name, or with these betas up to fp32 rounding, and its beta range if it has one."""
    trained, timesteps, schedules = found.trained_betas, found.num_train_timesteps, timestep_schedules()
    if trained is not None and len(trained) != timesteps:
        raise refused(EXPLICIT, trained, f"{len(trained)} betas for num_train_timesteps = {timesteps}")
    start, end = (found.beta_start, found.beta_end) if trained is None else (trained[0], trained[-1])
    for name, ours in schedules.items():
        ends = {"beta_start": start, "beta_end": end} if SCHEDULES[name].betas else {}
        values = {"schedule": name, **ends}
        if trained is None:
            same = found.beta_schedule == ours.diffusers != EXPLICIT
        else:
            expected = betas(DiffusionSpec.model_validate({"timesteps": timesteps, **values}))
            same = torch.allclose(torch.tensor(trained, dtype=torch.float64), expected, rtol=1e-4, atol=2e-7)
        if same:
            return values
    if trained is not None:
        raise refused(EXPLICIT, trained, f"they are not those of our schedules {', '.join(schedules)}")
    named = " and ".join(ours.diffusers for ours in schedules.values() if ours.diffusers not in (EXPLICIT, None))
    raise refused("beta_schedule", found.beta_schedule, f"ours are {named}; others are read from {EXPLICIT}")
