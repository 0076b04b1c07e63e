"""Sections `diffusion` and `sampler` of the run spec. Does not import torch."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from ddpm_ds.ground.errors import SpecError
from ddpm_ds.schema import types
from ddpm_ds.schema.choices import OBJECTIVES, SAMPLERS, SCHEDULES
from ddpm_ds.schema.section import Format, Section, needs, only_with, refuse, unused

LEAST_SIGNAL = 1e-30  # smallest factor of the image in x_t at the last timestep, beyond whose inverse float32 overflows
_NOT_EPS = types.those("objective", OBJECTIVES, lambda one: one.diffuses and one is not OBJECTIVES["eps"])


class DiffusionSpec(Section):
    """The forward process and what the U-Net predicts."""

    schedule: Annotated[
        str, types.one_of(SCHEDULES), types.listed("Noise schedule", SCHEDULES), only_with(types.OF_NOISE)
    ] = "linear"
    timesteps: types.Timesteps = 1000
    """Number of timesteps T; edm and flow have none."""
    beta_start: Annotated[float, Field(ge=1e-15, le=1.0)] = 1e-4
    """First beta of linear and scaled_linear; for the latter the default is 0.00085."""
    beta_end: types.Factor = 0.02
    """Last beta of linear and scaled_linear; for the latter the default is 0.012."""
    timestep_range: Annotated[
        tuple[Annotated[int, Field(ge=0)], types.Timesteps] | None, only_with(types.OF_TIMESTEPS, types.OF_NOISE)
    ] = None
    """First timestep that is trained, and the one after the last; null trains all, [0, timesteps]."""
    zero_terminal_snr: Annotated[bool, only_with(types.OF_TIMESTEPS, _NOT_EPS)] = False
    """Rescale the betas so that the last timestep is pure noise (Lin et al.), where eps can't be learned."""
    objective: Annotated[
        str,
        types.one_of(OBJECTIVES),
        types.listed("What the U-Net predicts", OBJECTIVES),
        needs("regression", "data.condition"),
    ] = "eps"
    sigma_data: types.Sigma = 0.5
    """Standard deviation that edm assumes for images in [-1, 1]."""
    times: Annotated[Literal["logit_normal", "uniform"], only_with("schedule=flow")] = "logit_normal"
    """Distribution of flow's times before they are shifted: logit-normal (Esser et al.) or uniform."""
    shift: Annotated[types.Shift, only_with("schedule=flow")] = 1.0
    """Factor of flow's noise over signal, in training and in drawing: time becomes s time / (1 + (s - 1) time)."""
    shift_size: Annotated[types.Size | None, only_with("schedule=flow")] = None
    """Size, in the units of `data.image_size`, that has this shift; images of other sizes have it times the root of
    their pixels over its pixels. Null gives all sizes the same shift."""
    noise_mean: Annotated[Annotated[float, Field(ge=-10.0, le=10.0)] | None, only_with("times=logit_normal")] = None
    """Mean of log(sigma) for edm, or of the logit of time for flow; null means -1.2 (EDM) and 0. EDM2 uses -0.4."""
    noise_std: Annotated[Annotated[float, Field(gt=0.0, le=5.0)] | None, only_with("times=logit_normal")] = None
    """Standard deviation of log(sigma) or the logit of time; null means 1.2 (EDM) and 1. EDM2 uses 1.0."""
    loss: Literal["l1", "l2", "huber"] = "l2"
    """Distance between prediction and target, averaged over pixels, in fp32."""
    huber_delta: types.Factor = 0.1
    """Error at which the Huber loss turns from squared to linear."""
    channel_weights: Annotated[tuple[Annotated[float, Field(ge=0.0, le=1e6)], ...], Field(max_length=256)] = ()
    """Factor of each channel's errors in the loss, not divided by their sum; [] weighs all alike."""
    weighting: Annotated[
        Literal["uniform", "min_snr", "sigmoid", "p2", "diff2flow"], only_with(types.OF_TIMESTEPS, types.OF_NOISE)
    ] = "uniform"
    """Weight of a timestep's loss: equal, min-SNR-gamma (Hang et al.), sigmoid (Hoogeboom et al.), P2 (Choi et al.), or
    that of flow matching's loss (Diff2Flow). For edm "uniform" is the paper's weighting."""
    min_snr_gamma: types.Factor = 5.0
    """Gamma of min-SNR weighting."""
    sigmoid_bias: Annotated[float, Field(ge=-20.0, le=20.0)] = 0.0
    """Bias of sigmoid weighting: the log(SNR) below which weights no longer rise; -1 to -3 for large images."""
    p2_k: types.Factor = 1.0
    """k of P2 weighting."""
    p2_gamma: Annotated[float, Field(ge=0.0, le=10.0)] = 1.0
    """Gamma of P2 weighting; 0 weighs errors of eps equally, and 1 with a p2_k near 0 those of x0."""
    input_perturbation: Annotated[types.Fraction, only_with(types.OF_NOISE)] = 0.0
    """Extra noise in the U-Net's input, not in the target, as a share of the noise in x_t (Ning et al.: 0.1)."""
    noise_offset: Annotated[types.Fraction, only_with(types.OF_NOISE)] = 0.0
    """Deviation of a number added to the noise of each channel (0.05 to 0.1, as diffusers' `--noise_offset`)."""
    noise_pairs: Annotated[int, Field(ge=1, le=1024), only_with(types.OF_NOISE)] = 1
    """Consecutive images that exchange their noises so that the sum of cosines of image and noise is greatest (optimal
    transport), a divisor of the images in a micro-batch; 1 exchanges none."""
    multires_noise: Annotated[types.Fraction, only_with(types.OF_TIMESTEPS, types.OF_NOISE)] = 0.0
    """Weight d t / timesteps of noise that is added in half to a quarter of the size, its square in a quarter to a
    sixteenth, and so on (Marigold: 0.9); 0 adds none."""

    @model_validator(mode="after")
    def _usual_betas(self) -> Self:
        """Take the schedule's usual first and last beta where none are given."""
        for key, usual in zip(("beta_start", "beta_end"), SCHEDULES[self.schedule].betas or (), strict=False):
            if key not in self.model_fields_set:
                object.__setattr__(self, key, usual)  # the section is frozen for everyone else
        return self

    def at(self, size: tuple[int, ...]) -> Self:
        """Return the process of images of a ``size`` (height, width), on which their shift may depend."""
        if self.shift_size is None:
            return self
        ratio = math.prod(size) / math.prod(types.height_and_width(self.shift_size))
        return self.model_copy(update={"shift": self.shift * math.sqrt(ratio), "shift_size": None})

    def process_values(self) -> dict[str, object]:
        """Return the fields that define noise levels and prediction; U-Nets that sample together must agree in them."""
        schedule, keys = SCHEDULES[self.schedule], ["schedule", "objective"]
        if not OBJECTIVES[self.objective].diffuses:
            keys = ["objective"]
        elif schedule.continuous:
            keys.append("sigma_data")
        else:
            keys += ["timesteps", "zero_terminal_snr", *(["beta_start", "beta_end"] if schedule.betas else [])]
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

    kind: Annotated[str, types.one_of(SAMPLERS), types.listed("Sampler", SAMPLERS)] = "dpm_solver"
    steps: Annotated[types.Timesteps | None, Field(description=_STEPS)] = None
    spacing: Literal["trailing", "leading", "linspace"] = "trailing"
    """Which timesteps are visited (diffusers' names): trailing starts at the last one, as training does."""
    sigma_max: types.Sigma = 80.0
    """Noise level at which sampling begins under edm."""
    sigma_min: types.Sigma = 0.002
    """Noise level at which the last step begins under edm."""
    rho: types.Rho = 7.0
    """Exponent that makes edm's steps shorter at low noise."""
    shift: types.Shift | None = None
    """Shift of flow's times in drawing; null means `diffusion.shift`."""
    eta: Annotated[
        float, Field(ge=0.0, le=1.0), only_with(types.those("kind", SAMPLERS, lambda kind: "eta" in kind.options))
    ] = 0.0
    """Noise that ddim adds: 0 means none, 1 as much as ddpm."""
    variance: Literal["small", "large"] = "large"
    """Variance of ddpm's steps: the posterior's (small), or beta (large) as in DDPM on CIFAR-10."""
    clip: Literal["none", "static", "dynamic"] = "static"
    """How each predicted clean image is limited to [-1, 1]: not at all, by clipping, or by a quantile (Imagen)."""
    dynamic_quantile: Annotated[float, Field(gt=0.0, le=1.0)] = 0.995
    """Quantile of an image's magnitudes by which dynamic clipping divides it."""
    guidance: Annotated[float, Field(ge=0.0, le=1e3)] = 1.0
    """Classifier-free guidance of a class-conditional U-Net: 1 means none, 0 ignores the class."""
    condition_guidance: Annotated[float, Field(ge=0.0, le=1e3)] = 1.0
    """Guidance to `data.condition` beside that to text, as InstructPix2Pix has it (1.5): 1 means none."""
    guidance_between: types.Sigmas = types.ALL_SIGMAS
    """Interval of noise levels in which images are guided (Kynkäänniemi et al.), as noise over signal (EDM's sigma),
    without its lower end; elsewhere guidance is 1. Pure noise, where flow begins, counts as 1e6."""

    @property
    def predictions(self) -> int:
        """Number of predictions that guidance mixes: with class or text, without it, and without condition too."""
        return 3 if self.condition_guidance != 1.0 else 1 if self.guidance in (0.0, 1.0) else 2

    @property
    def is_guided(self) -> bool:
        """Whether a guidance is not 1."""
        return (self.guidance, self.condition_guidance) != (1.0, 1.0)

    def guides_at(self, sigma: float) -> bool:
        """Return whether an evaluation at this noise over signal is guided; never if guidance is 1."""
        low, high = self.guidance_between
        everywhere = self.guidance_between == types.ALL_SIGMAS  # also at noise 0
        return self.is_guided and (everywhere or low < sigma <= high)

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
        """Return the most evaluations of the U-Net per image, which guidance multiplies in its interval."""
        return self.predictions * self.steps_of(diffusion)


@functools.lru_cache(maxsize=64)
def _log_signal(start: float, end: float, steps: int, root: float) -> float:
    """Return the logarithm of a beta schedule's last alpha_bar."""
    first, last = start ** (1 / root), end ** (1 / root)
    betas = ((first + (last - first) * step / max(steps - 1, 1)) ** root for step in range(steps))
    return sum(math.log1p(-beta) for beta in betas)


def check_process(diffusion: DiffusionSpec) -> None:
    """Check the noise schedule beside the objective; raises ValueError with one line."""
    schedule, steps = SCHEDULES[diffusion.schedule], diffusion.timesteps
    start, end = diffusion.beta_start, diffusion.beta_end
    diffuses, slopes = OBJECTIVES[diffusion.objective].diffuses, diffusion.weighting == "sigmoid"
    with_betas = diffuses and schedule.betas is not None
    rises, (low, high) = start < end < 1, diffusion.timestep_range or (0, steps)
    refuse(
        {
            f"diffusion.channel_weights = {list(diffusion.channel_weights)} leaves no loss; use a weight": (
                diffusion.channel_weights and not any(diffusion.channel_weights)
            ),
            f"diffusion.objective = {diffusion.objective} does not go with schedule {diffusion.schedule}; use "
            f"{schedule.objective}": schedule.continuous and diffuses and diffusion.objective != schedule.objective,
            f"diffusion.beta_start = {start} and beta_end = {end} must rise and stay below 1, as the usual "
            f"{' and '.join(map(str, schedule.betas or ()))} do": with_betas and not rises,
            f"diffusion.timesteps = {steps} with beta_start = {start} and beta_end = {end} leave less than "
            f"{LEAST_SIGNAL:g} of the image, too little to compute with; use fewer timesteps or a smaller beta_end": (
                with_betas and rises and _log_signal(start, end, steps, schedule.beta_root) < 2 * math.log(LEAST_SIGNAL)
            ),
            f"diffusion.timestep_range = [{low}, {high}] should rise within 0 and diffusion.timesteps = {steps}": (
                not low < high <= steps
            ),
            f"diffusion.timesteps = {steps} is too few for "
            f"{'weighting = sigmoid' if slopes else 'zero_terminal_snr = true'}; use 2 or more": (
                (diffusion.zero_terminal_snr or slopes) and steps < 2
            ),
        }
    )


def check_sampler(
    sampler: SamplerSpec,
    diffusion: DiffusionSpec,
    *,
    classes: int | None,
    guide: bool = False,
    latents: bool = False,
    drops: bool = False,
    drops_both: bool = False,
    unbounded: bool = False,
) -> None:
    """Check a sampler against the diffusion process and the U-Net; raises ValueError with one line.

    Guidance needs ``classes``, another U-Net as ``guide``, or conditions that training ``drops``; two guidances need
    text and images that it ``drops_both``. Clipping is for pixels, not for ``latents`` or ``unbounded`` fields.
    """
    kind, schedule = SAMPLERS[sampler.kind], SCHEDULES[diffusion.schedule]
    steps, (low, high) = sampler.steps, sampler.guidance_between
    regresses = not OBJECTIVES[diffusion.objective].diffuses
    clips, clip = sampler.clip != "none", f"sampler.clip = {sampler.clip} keeps"
    skips_last = diffusion.zero_terminal_snr and sampler.spacing == "leading" and not schedule.continuous
    rules = {f"{key} {fault}": True for key, fault, _ in unused(SimpleNamespace(sampler=sampler), "sampler.")} | {
        f"{clip} values in [-1, 1], and fields are beyond it unless data.normalise is range; use none": unbounded
        and clips,
        f"{clip} pixels in [-1, 1], and latents of an autoencoder are beyond it; use none": latents and clips,
        f"sampler.steps = {steps}, but objective {diffusion.objective} evaluates the U-Net once; use null": regresses
        and steps not in (None, 1),
        f"sampler.steps = null means all timesteps for {sampler.kind}, and schedule {diffusion.schedule} has none; "
        "give a number": schedule.continuous and steps is None and kind.steps is None,
        f"sampler.steps = {steps} is above the {diffusion.timesteps} timesteps; use fewer": not schedule.continuous
        and (steps or 0) > diffusion.timesteps,
        "sampler.spacing = leading leaves out the last timestep, at which diffusion.zero_terminal_snr begins; use "
        "trailing": skips_last and sampler.steps_of(diffusion) < diffusion.timesteps,
        f"sampler.sigma_min = {sampler.sigma_min:g} and sigma_max = {sampler.sigma_max:g} must rise, as EDM's 0.002 "
        "and 80 do": sampler.sigma_min >= sampler.sigma_max,
        "sampler.kind = euler_ancestral has no steps for diffusion.schedule = flow; use euler": (
            sampler.kind == "euler_ancestral" and diffusion.schedule == "flow"
        ),
        f"sampler.shift = {sampler.shift} moves the times of diffusion.schedule = flow alone; use null": (
            sampler.shift is not None and diffusion.schedule != "flow"
        ),
        f"sampler.guidance = {sampler.guidance:g} needs a class-conditional U-Net; leave it at 1, or train one with "
        "unet.classes and train.label_drop, or with data.condition.drop": sampler.guidance != 1.0
        and not (classes or guide or drops),
        f"sampler.condition_guidance = {sampler.condition_guidance:g} needs text and data.condition.drop, and no "
        "guide; leave it at 1": sampler.condition_guidance != 1.0 and (guide or not drops_both),
        f"sampler.guidance_between = {low:g},{high:g} must rise from the lowest noise level guided": low >= high,
    }
    refuse(rules)
