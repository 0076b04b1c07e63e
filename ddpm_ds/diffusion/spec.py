"""Sections `diffusion` and `sampler` of the run spec. Does not import torch."""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from ddpm_ds.errors import SpecError
from ddpm_ds.schema.choices import OBJECTIVES, SAMPLERS, SCHEDULES, samplers_with
from ddpm_ds.schema.section import Format, Section, only_with
from ddpm_ds.schema.types import (
    ALL_SIGMAS,
    OF_NOISE,
    OF_TIMESTEPS,
    Factor,
    Fraction,
    Rho,
    Sigma,
    Sigmas,
    Timesteps,
    listed,
    one_of,
)

LEAST_SIGNAL = 1e-30
"""Smallest factor of the image in x_t at the last timestep, beyond whose inverse float32 overflows."""


class DiffusionSpec(Section):
    """The forward process and what the U-Net predicts."""

    schedule: Annotated[str, one_of(SCHEDULES), listed("Noise schedule", SCHEDULES)] = "linear"
    timesteps: Timesteps = 1000
    """Number of timesteps T; edm and flow have none."""
    beta_start: Annotated[float, Field(ge=1e-15, le=1.0)] = 1e-4
    """First beta of linear and scaled_linear; for the latter the default is 0.00085."""
    beta_end: Factor = 0.02
    """Last beta of linear and scaled_linear; for the latter the default is 0.012."""
    zero_terminal_snr: Annotated[bool, only_with(OF_TIMESTEPS, OF_NOISE)] = False
    """Rescale the betas so that the last timestep is pure noise (Lin et al.); not with eps, which is trivial there."""
    objective: Annotated[str, one_of(OBJECTIVES), listed("What the U-Net predicts", OBJECTIVES)] = "eps"
    sigma_data: Sigma = 0.5
    """Standard deviation that edm assumes for images in [-1, 1]."""
    noise_mean: Annotated[float, Field(ge=-10.0, le=10.0)] | None = None
    """Mean of log(sigma) for edm, or of the logit of time for flow; null means -1.2 (EDM) and 0. EDM2 uses -0.4."""
    noise_std: Annotated[float, Field(gt=0.0, le=5.0)] | None = None
    """Standard deviation of log(sigma) or the logit of time; null means 1.2 (EDM) and 1. EDM2 uses 1.0."""
    loss: Literal["l1", "l2", "huber"] = "l2"
    """Distance between prediction and target, averaged over pixels, in fp32."""
    huber_delta: Factor = 0.1
    """Error at which the Huber loss turns from squared to linear."""
    channel_weights: Annotated[tuple[Annotated[float, Field(ge=0.0, le=1e6)], ...], Field(max_length=256)] = ()
    """Factor of each channel's errors in the loss, which are not divided by the sum of the factors; [] weighs all
    alike."""
    weighting: Annotated[Literal["uniform", "min_snr", "sigmoid", "p2"], only_with(OF_TIMESTEPS, OF_NOISE)] = "uniform"
    """Weight of a timestep's loss: equal, min-SNR-gamma (Hang et al.), sigmoid (Hoogeboom et al.) or P2 (Choi et al.).
    For edm "uniform" is the paper's weighting."""
    min_snr_gamma: Factor = 5.0
    """Gamma of min-SNR weighting."""
    sigmoid_bias: Annotated[float, Field(ge=-20.0, le=20.0)] = 0.0
    """Bias of sigmoid weighting: the log(SNR) below which weights no longer rise; -1 to -3 for large images."""
    p2_k: Factor = 1.0
    """k of P2 weighting."""
    p2_gamma: Annotated[float, Field(ge=0.0, le=10.0)] = 1.0
    """Gamma of P2 weighting; 0 means no weighting."""
    input_perturbation: Annotated[Fraction, only_with(OF_NOISE)] = 0.0
    """Extra noise in the U-Net's input, which is not part of the target, as a share of the noise in x_t (Ning et al.:
    0.1)."""
    noise_offset: Annotated[Fraction, only_with(OF_NOISE)] = 0.0
    """Standard deviation of a number that is added to all the noise of an image's channel, in the target as well, so
    that brightness is learned (0.05 to 0.1, as `--noise_offset` of diffusers' scripts)."""

    @model_validator(mode="after")
    def _usual_betas(self) -> Self:
        """Take the ends of betas that are usual for the schedule where none are given."""
        for key, usual in zip(("beta_start", "beta_end"), SCHEDULES[self.schedule].betas or (), strict=False):
            if key not in self.model_fields_set:
                object.__setattr__(self, key, usual)  # the section is frozen for everyone else
        return self

    def process_values(self) -> dict[str, Any]:
        """Return the fields that define noise levels and prediction; U-Nets that sample together must agree in them."""
        schedule, keys = SCHEDULES[self.schedule], ["schedule", "objective"]
        if not OBJECTIVES[self.objective].diffuses:
            keys = ["objective"]
        elif not schedule.continuous:
            keys += [
                "timesteps",
                "zero_terminal_snr",
                *(["beta_start", "beta_end"] if schedule.betas else []),
            ]
        else:
            keys.append("sigma_data")
        return {key: getattr(self, key) for key in keys}


_STEPS = "Steps to an image, an evaluation of the U-Net each; null means {}.".format(
    ", ".join(f"{kind.steps or 'all timesteps'} for {name}" for name, kind in SAMPLERS.items())
)


class SamplerSpec(Section):
    """Sampler of images during training and in `ddpm-ds sample`."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SpecError(*Format(type(self), name="sampler").faults(error, values).values()) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined] # pydantic: read in a spec without __init__

    kind: Annotated[str, one_of(SAMPLERS), listed("Sampler", SAMPLERS)] = "dpm_solver"
    steps: Annotated[Timesteps | None, Field(description=_STEPS)] = None
    spacing: Literal["trailing", "leading", "linspace"] = "trailing"
    """Which timesteps are visited (diffusers' names): trailing starts at the last one, as training does."""
    sigma_max: Sigma = 80.0
    """Noise level at which sampling begins under edm."""
    sigma_min: Sigma = 0.002
    """Noise level at which the last step begins under edm."""
    rho: Rho = 7.0
    """Exponent that makes edm's steps shorter at low noise."""
    eta: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Noise that ddim adds: 0 means none, 1 as much as ddpm."""
    variance: Literal["small", "large"] = "large"
    """Variance of ddpm's steps: the posterior's (small), or beta (large) as in DDPM on CIFAR-10."""
    clip: Literal["none", "static", "dynamic"] = "static"
    """How each predicted clean image is kept in [-1, 1]: not at all, by clipping, or by a quantile (Imagen)."""
    dynamic_quantile: Annotated[float, Field(gt=0.0, le=1.0)] = 0.995
    """Quantile of an image's magnitudes by which dynamic clipping divides it."""
    guidance: Annotated[float, Field(ge=0.0, le=1e3)] = 1.0
    """Classifier-free guidance of a class-conditional U-Net: 1 means none, 0 ignores the class."""
    guidance_between: Sigmas = ALL_SIGMAS
    """Interval of noise levels, as noise over signal (EDM's sigma), without its lower end, in which images are guided
    (Kynkäänniemi et al.); elsewhere guidance is 1. Pure noise, where flow begins, counts as 1e6."""

    @property
    def guides(self) -> bool:
        """Whether guidance evaluates the U-Net twice, with the class and without it."""
        return self.guidance not in (0.0, 1.0)

    def guides_at(self, sigma: float) -> bool:
        """Return whether an evaluation at this noise over signal is guided; never if guidance is 1."""
        low, high = self.guidance_between
        everywhere = self.guidance_between == ALL_SIGMAS  # also at noise 0
        return self.guidance != 1.0 and (everywhere or low < sigma <= high)

    def steps_of(self, diffusion: DiffusionSpec) -> int:
        """Return the number of steps from noise to image, with the default for null; a regression has one."""
        if not OBJECTIVES[diffusion.objective].diffuses:
            return 1
        usual = SAMPLERS[self.kind].steps
        if SCHEDULES[diffusion.schedule].continuous:
            steps = self.steps or usual
            assert steps is not None, "check_sampler refuses it"
            return steps
        return self.steps or min(usual or diffusion.timesteps, diffusion.timesteps)

    def evaluations_of(self, diffusion: DiffusionSpec) -> int:
        """Return the most evaluations of the U-Net per image: classifier-free guidance doubles those in its interval,
        which may leave out some.
        """
        steps = self.steps_of(diffusion)
        return 2 * steps if self.guides else steps


@functools.lru_cache(maxsize=64)
def _log_signal(start: float, end: float, steps: int, root: float) -> float:
    """Return the logarithm of the last alpha_bar of a schedule of betas."""
    first, last = start ** (1 / root), end ** (1 / root)
    betas = ((first + (last - first) * step / max(steps - 1, 1)) ** root for step in range(steps))
    return sum(math.log1p(-beta) for beta in betas)


def check_process(diffusion: DiffusionSpec) -> None:
    """Check the noise schedule beside the objective; raises ValueError with one line."""
    schedule = SCHEDULES[diffusion.schedule]
    if diffusion.channel_weights and not any(diffusion.channel_weights):
        raise ValueError(f"diffusion.channel_weights = {list(diffusion.channel_weights)} leaves no loss; use a weight")
    if not OBJECTIVES[diffusion.objective].diffuses:
        if diffusion.schedule != "linear":
            raise ValueError(f"diffusion.schedule = {diffusion.schedule} is used only with noise; use linear")
    elif schedule.continuous:
        if diffusion.objective != schedule.objective:
            raise ValueError(
                f"diffusion.objective = {diffusion.objective} does not go with schedule {diffusion.schedule}; "
                f"use {schedule.objective}"
            )
    elif schedule.betas:
        start, end, steps = diffusion.beta_start, diffusion.beta_end, diffusion.timesteps
        if not start < end < 1:
            raise ValueError(
                f"diffusion.beta_start = {start} and beta_end = {end} must rise and stay below 1, as the usual "
                f"{schedule.betas[0]} and {schedule.betas[1]} do"
            )
        if _log_signal(start, end, steps, schedule.beta_root) < 2.0 * math.log(LEAST_SIGNAL):
            raise ValueError(
                f"diffusion.timesteps = {steps} with beta_start = {start} and beta_end = {end} leave less than "
                f"{LEAST_SIGNAL:g} of the image, too little to compute with; use fewer timesteps or a smaller beta_end"
            )
    if diffusion.zero_terminal_snr and diffusion.objective == "eps":
        raise ValueError(
            "diffusion.objective = eps can't be learned if diffusion.zero_terminal_snr leaves noise alone; use v or x0"
        )
    slopes = diffusion.zero_terminal_snr or diffusion.weighting == "sigmoid"
    if slopes and diffusion.timesteps < 2:
        what = "zero_terminal_snr = true" if diffusion.zero_terminal_snr else "weighting = sigmoid"
        raise ValueError(f"diffusion.timesteps = {diffusion.timesteps} is too few for {what}; use 2 or more")


def check_sampler(
    sampler: SamplerSpec,
    diffusion: DiffusionSpec,
    *,
    classes: int | None,
    guide: bool = False,
    latents: bool = False,
    drops: bool = False,
    unbounded: bool = False,
) -> None:
    """Check a sampler against the diffusion process and the U-Net; raises ValueError with one line.

    ``guide`` means that another U-Net guides, and ``drops`` that conditions were dropped in training: guidance needs no
    classes then. ``latents`` means that the U-Net samples latents, and ``unbounded`` that it samples fields, which are
    not in [-1, 1].
    """
    kind = SAMPLERS[sampler.kind]
    if unbounded and sampler.clip != "none":
        raise ValueError(
            f"sampler.clip = {sampler.clip} keeps values in [-1, 1], and fields are beyond it unless data.normalise is "
            "range; use none"
        )
    if not OBJECTIVES[diffusion.objective].diffuses and sampler.steps not in (None, 1):
        raise ValueError(
            f"sampler.steps = {sampler.steps}, but objective {diffusion.objective} evaluates the U-Net once; use null"
        )
    if latents and sampler.clip != "none":
        raise ValueError(
            f"sampler.clip = {sampler.clip} keeps pixels in [-1, 1], and latents of an autoencoder are beyond it; use "
            "none"
        )
    schedule = SCHEDULES[diffusion.schedule]
    if schedule.continuous:
        if sampler.steps is None and kind.steps is None:
            raise ValueError(
                f"sampler.steps = null means all timesteps for {sampler.kind}, and schedule {diffusion.schedule} has "
                "none; give a number"
            )
    elif sampler.steps is not None and sampler.steps > diffusion.timesteps:
        raise ValueError(f"sampler.steps = {sampler.steps} is above the {diffusion.timesteps} timesteps; use fewer")
    elif (
        diffusion.zero_terminal_snr
        and sampler.spacing == "leading"
        and sampler.steps_of(diffusion) < diffusion.timesteps
    ):
        raise ValueError(
            "sampler.spacing = leading leaves out the last timestep, at which diffusion.zero_terminal_snr begins; use "
            "trailing"
        )
    if sampler.sigma_min >= sampler.sigma_max:
        raise ValueError(
            f"sampler.sigma_min = {sampler.sigma_min:g} and sigma_max = {sampler.sigma_max:g} must rise, as EDM's "
            "0.002 and 80 do"
        )
    if sampler.eta and "eta" not in kind.options:
        readers = samplers_with("eta")
        raise ValueError(
            f"sampler.eta = {sampler.eta:g} is of {readers}, not of {sampler.kind}; use kind {readers} or eta 0"
        )
    if sampler.guidance != 1.0 and classes is None and not guide and not drops:
        raise ValueError(
            f"sampler.guidance = {sampler.guidance:g} needs a class-conditional U-Net; leave it at 1, or train one "
            "with unet.classes and train.label_drop, or with data.condition.drop"
        )
    low, high = sampler.guidance_between
    if low >= high:
        raise ValueError(f"sampler.guidance_between = {low:g},{high:g} must rise from the lowest noise level guided")
