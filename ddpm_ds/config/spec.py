"""The run spec: data, U-Net and training, as frozen pydantic models read from YAML.

How it is trained (precision, ZeRO, pipeline, micro-batch) is up to the DeepSpeed JSON
(:mod:`ddpm_ds.config.ds_config`); no value is in both. The docstring of a field is its documentation in
``docs/spec.md`` and in the JSON schema that editors read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ddpm_ds.data.spec import DataSpec, check_buckets, check_condition, check_flips, check_images, check_source
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec, check_process, check_sampler
from ddpm_ds.ground.units import MOST_IMAGES
from ddpm_ds.schema.section import Section, broken_rule, needs, only_with, unused
from ddpm_ds.schema.types import MOST_LEARNING_RATE, Batch, Factor, FilePath, Fraction, Images, Small, Title
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.names import trained_layers
from ddpm_ds.unet.spec import UnetSpec, check_cross_attention, check_levels, check_widths

MOST_PICTURE_PIXELS = 2**26  # maximum pixels of a picture of samples drawn during training


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise broken_rule(f"should be a regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_compiles)]


class OptimizerSpec(Section):
    """AdamW and its learning rate: the values that `auto` means in the DeepSpeed JSON."""

    learning_rate: Annotated[float, Field(gt=0.0, le=MOST_LEARNING_RATE)]
    """Learning rate after warm-up."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    epsilon: Small = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1e3)] = 0.0
    """Decoupled weight decay."""
    warmup_images: Annotated[int, Field(ge=0, le=MOST_IMAGES)] = 0
    """Images over which the learning rate rises linearly from 0."""
    decay: Annotated[Literal["cosine", "rex", "inverse_sqrt"] | None, needs("inverse_sqrt", "reference_images")] = None
    """Decay of the learning rate with the images seen: half a cosine or REX (Chen et al.), which falls late, from
    warm-up to `train.images`, or the inverse square root beyond `reference_images` (EDM2). Null leaves it to the
    DeepSpeed JSON's `scheduler`."""
    decay_to: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the learning rate at which cosine and rex end."""
    reference_images: Images | None = None
    """Images during which inverse_sqrt keeps the learning rate constant; EDM2 uses 70,000 batches."""
    train: tuple[Pattern, ...] = ()
    """Parameters to train, by regular expressions that are found anywhere in their names in diffusers, such as attn;
    [] trains all (docs/text.md)."""
    rates: dict[Pattern, Annotated[float, Field(gt=0.0, le=1e6)]] = {}  # noqa: RUF012 - pydantic copies it
    """Factors on the learning rate of parameters by such patterns; those of several patterns are multiplied."""


class TrainSpec(Section):
    """Length, batch and seed of training."""

    images: Images
    """Length of training in images seen (not steps, not epochs)."""
    batch_images: Batch
    """Images per optimizer step over all replicas and micro-batches."""
    accumulation: Batch | Literal["auto"] = "auto"
    """Micro-batches per replica and step; auto means 1 without a pipeline and at least 4 per stage with one."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of everything random: weights, order, timesteps, noise, flips, dropout."""
    label_drop: Annotated[Fraction, only_with("unet.classes")] = 0.0
    """Share of labels replaced by "no label" in a class-conditional run, for classifier-free guidance."""
    initial_weights: FilePath | None = None
    """Safetensors file of initial weights, from `ddpm-ds import` or `checkpoint consolidate`; null: random weights."""


class EmaSpec(Section):
    """Averaged weights, which sampling and evaluation use."""

    halflife_images: Images = 500_000
    """Images after which a weight's share in the average has halved."""
    rampup_fraction: Fraction = 0.05
    """Limit of the half-life as a share of the images seen, so that early weights are forgotten; 0 means no limit."""
    on_host: bool = False
    """Keep the averages in host memory, as with offload, and update them there while the device computes."""


class CheckpointSpec(Section):
    """When checkpoints are saved and which are kept; a run is also saved at its end and when asked to stop."""

    every_images: Images | None = None
    """Images between two checkpoints; null saves by time alone."""
    every_minutes: Factor | None = 20.0
    """Minutes between two checkpoints; null saves by images alone."""
    keep_last: Annotated[int, Field(ge=1, le=10**6)] = 3
    """Number of newest checkpoints that are kept."""
    keep_every_images: Images | None = None
    """Checkpoints at multiples of this many images are never deleted."""


class BadNumbersSpec(Section):
    """Response to a loss that is not finite or jumps, or an fp16 loss scale at its floor."""

    policy: Literal["stop", "rollback"] = "stop"
    """End the run, or go back to the newest checkpoint and skip the images since."""
    spike_factor: Annotated[float, Field(gt=1.0, le=1e6)] | None = None
    """A loss above this many times the mean of the last ten points counts as bad; null allows jumps."""
    max_rollbacks: Annotated[int, Field(ge=1, le=10**6)] = 3
    """Maximum number of rollbacks before the run ends."""


Prompt = Annotated[str, Field(max_length=10_000)]


class SamplesSpec(Section):
    """Pictures sampled during training, from the averaged weights and the same noise each time."""

    every_images: Images | None = 50_000
    """Images between two pictures; null draws none."""
    count: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Images in a picture."""
    prompts: Annotated[tuple[Prompt, ...], Field(max_length=1000), only_with("data.text")] = ()
    """Prompts that images take in turn; [] takes the captions of held-out images or, without any, of the first."""


HELD_OUT_QUANTILES = tuple(range(10, 100, 10))
"""Percentiles of the trained noise levels at which the held-out loss is measured."""


class EvaluationSpec(Section):
    """Loss of the averaged weights on `data.held_out_images`, with the same noise each time."""

    every_images: Images | None = 100_000
    """Images between two evaluations; null means none."""


class LoggingSpec(Section):
    """Records kept during training."""

    log_every_images: Images
    """Images between two points of the loss curve; a point is the mean over these images."""
    experiment: Title = "ddpm_ds"
    """Name of the MLflow experiment."""


class RunSpec(Section):
    """Complete specification of a training run."""

    name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._-]+$")]
    """Short name of the run, used in folder names and in MLflow."""
    data: DataSpec
    unet: UnetSpec
    diffusion: DiffusionSpec = DiffusionSpec()
    optimizer: OptimizerSpec
    train: TrainSpec
    ema: EmaSpec = EmaSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    bad_numbers: BadNumbersSpec = BadNumbersSpec()
    sampler: SamplerSpec = SamplerSpec()
    samples: SamplesSpec = SamplesSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    logging: LoggingSpec

    @property
    def bucket_group(self) -> int | None:
        """Number of consecutive images of training that share a bucket of aspect; None without buckets."""
        buckets = self.data.buckets
        return None if buckets is None else buckets.images or self.train.batch_images

    @model_validator(mode="after")
    def _consistent(self) -> RunSpec:
        """Check fields against each other; each check ends at its first fault, since others may follow from it."""
        data, unet, train, optimizer, samples = self.data, self.unet, self.train, self.optimizer, self.samples
        weights = self.diffusion.channel_weights
        count, prompts = samples.count, len(samples.prompts)
        rules = {
            f"train.batch_images = {train.batch_images} can't be split into train.accumulation = {train.accumulation} "
            "micro-batches; use a divisor or auto": (
                train.accumulation != "auto" and train.batch_images % train.accumulation
            ),
            f"optimizer.warmup_images = {optimizer.warmup_images} leaves none of train.images = {train.images} to "
            f"optimizer.decay = {optimizer.decay}; use fewer": (
                optimizer.decay in ("cosine", "rex") and optimizer.warmup_images >= train.images
            ),
            f"samples.count = {count} is below the {prompts} of samples.prompts, which are an image each; use "
            f"{prompts} or more": prompts > count,
            f"diffusion.channel_weights = {list(weights)} has {len(weights)} weights, and data.channels = "
            f"{data.channels}; give one for each channel, or []": len(weights) not in (0, data.channels),
        }
        checks: tuple[Callable[[], None], ...] = (
            lambda: check_source(data),
            lambda: check_images(data),
            lambda: check_condition(data),
            lambda: check_flips(data),
            lambda: check_levels(unet, data.size),
            lambda: check_widths(unet, data.size),
            lambda: check_cross_attention(unet, data.interface.numbers),
            lambda: check_buckets(data, len(unet.multipliers)),
            lambda: check_process(self.diffusion),
            lambda: check_sampler(
                self.sampler,
                self.diffusion,
                classes=unet.classes,
                latents=data.autoencoder is not None,
                drops=data.text is not None or (data.condition is not None and data.condition.drop > 0.0),
                drops_both=data.text is not None and data.condition is not None and data.condition.drop > 0.0,
                unbounded=data.is_unbounded,
            ),
            lambda: check_picture(samples, data.size),
        )
        faults = [f"{key} {fault}" for key, fault, _ in unused(self)]
        for check in checks:
            try:
                check()
            except ValueError as error:
                faults += error.args
        if not faults:  # else the U-Net may have no layers
            try:
                trained_layers(unet_layers(unet, data.interface), optimizer.train, optimizer.rates)
            except ValueError as error:
                faults += error.args
        if faults := [*dict.fromkeys(faults), *(message for message, broken in rules.items() if broken)]:
            raise ValueError(*faults)
        return self


def check_picture(samples: SamplesSpec, size: tuple[int, int]) -> None:
    """Check the pictures' size for images of ``size`` (height, width) pixels; raises ValueError with one line."""
    pixels = samples.count * math.prod(size)
    if samples.every_images and pixels > MOST_PICTURE_PIXELS:
        fewer = MOST_PICTURE_PIXELS // math.prod(size)
        raise ValueError(
            f"samples.count = {samples.count} makes a picture of {pixels:,} pixels, and {MOST_PICTURE_PIXELS:,} are "
            f"the most; use {f'{fewer} or fewer' if fewer else 'samples.every_images = null'}"
        )
