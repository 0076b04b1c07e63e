"""The run spec: what is trained, as frozen pydantic models read from YAML.

Sections that one room obeys are in that room: :mod:`ddpm_ds.data.spec`, :mod:`ddpm_ds.unet.spec`,
:mod:`ddpm_ds.diffusion.spec`. How it is trained (precision, ZeRO, pipeline, micro-batch) is up to the DeepSpeed JSON
(:mod:`ddpm_ds.config.ds_config`); no value is in both. The docstring of a field is its documentation in
``docs/spec.md`` and in the JSON schema that editors read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ddpm_ds.command_line import MOST_IMAGES
from ddpm_ds.data.spec import DataSpec, check_condition, check_flips, check_images, check_source
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec, check_process, check_sampler
from ddpm_ds.schema.choices import OBJECTIVES
from ddpm_ds.schema.section import Section, only_with, unused
from ddpm_ds.schema.types import MOST_LEARNING_RATE, Batch, Factor, FilePath, Fraction, Images, Small, Title, written
from ddpm_ds.unet.spec import UnetSpec, check_cross_attention, check_levels, check_widths

MOST_PICTURE_PIXELS = 2**26
"""Maximum pixels of a picture of samples drawn during training."""


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
    decay: Literal["cosine", "inverse_sqrt"] | None = None
    """Decay of the learning rate with the images seen: half a cosine from warm-up to `train.images`, or the inverse
    square root beyond `reference_images` (EDM2). Null leaves it to the DeepSpeed JSON's `scheduler`."""
    decay_to: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the learning rate at which cosine decay ends."""
    reference_images: Images | None = None
    """Images during which inverse_sqrt keeps the learning rate constant; EDM2 uses 70,000 batches."""


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
    """Safetensors file of initial weights, from `ddpm-ds import` or `ddpm-ds checkpoint consolidate`; null means random
    weights."""


class EmaSpec(Section):
    """Averaged weights, which sampling and evaluation use."""

    halflife_images: Images = 500_000
    """Images after which a weight's share in the average has halved."""
    rampup_fraction: Fraction = 0.05
    """Limit of the half-life as a share of the images seen, so that early weights are forgotten; 0 means no limit."""
    on_host: bool = False
    """Keep the averages in host memory and update them there, each step, while the device computes the next. With
    offload they are there in any case."""


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
    """Prompts that the images take in turn, in a run with text; [] takes the captions of held-out images or, without
    any, of the first."""


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
    """The images."""
    unet: UnetSpec
    """The network."""
    diffusion: DiffusionSpec = DiffusionSpec()
    """The diffusion process and the loss."""
    optimizer: OptimizerSpec
    """The optimizer."""
    train: TrainSpec
    """Length, batch and seed."""
    ema: EmaSpec = EmaSpec()
    """Averaged weights."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints."""
    bad_numbers: BadNumbersSpec = BadNumbersSpec()
    """Response to bad losses."""
    sampler: SamplerSpec = SamplerSpec()
    """Sampler of images."""
    samples: SamplesSpec = SamplesSpec()
    """Pictures during training."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Held-out loss."""
    logging: LoggingSpec
    """Logging."""

    @property
    def bucket_group(self) -> int | None:
        """Number of consecutive images of training that share a bucket of aspect; None without buckets."""
        buckets = self.data.buckets
        return None if buckets is None else buckets.images or self.train.batch_images

    @model_validator(mode="after")
    def _consistent(self) -> RunSpec:
        """Check fields against each other; a message for each fault names the key, the value and the fix, in one line.

        A check ends at its first fault, since its others may follow from that one.
        """
        faults: list[str] = []
        for check in _CHECKS:
            try:
                check(self)
            except ValueError as error:
                faults += error.args
        if faults:
            raise ValueError(*faults)
        return self


def _check_used(spec: RunSpec) -> None:
    """Refuse values that have no effect beside the others."""
    if faults := [f"{key} {fault}" for key, fault, _ in unused(spec)]:
        raise ValueError(*faults)


def _check_buckets(spec: RunSpec) -> None:
    """Refuse what has one size of images where buckets of aspect have several."""
    data, unet = spec.data, spec.unet
    if data.buckets is None:
        return
    step, halved = data.buckets.step, 2 ** (len(unet.multipliers) - 1)
    if step % halved:
        raise ValueError(
            f"data.buckets.step = {step} can't be halved {len(unet.multipliers) - 1} times, as the levels of "
            f"unet.multipliers ask; use a multiple of {halved}, or fewer levels"
        )
    if data.autoencoder is None and any(side % step for side in data.size):
        raise ValueError(
            f"data.image_size = {written(data.size)} is no multiple of data.buckets.step = {step}; use one, or another "
            "step"
        )


def _check_batch(spec: RunSpec) -> None:
    train = spec.train
    if isinstance(train.accumulation, int) and train.batch_images % train.accumulation:
        raise ValueError(
            f"train.batch_images = {train.batch_images} can't be split into train.accumulation = {train.accumulation} "
            f"micro-batches; use a divisor or auto"
        )


def _check_decay(spec: RunSpec) -> None:
    train = spec.train
    if spec.optimizer.decay == "inverse_sqrt" and spec.optimizer.reference_images is None:
        raise ValueError(
            "optimizer.reference_images is missing; optimizer.decay = inverse_sqrt needs it, such as --set "
            f"optimizer.reference_images={max(train.images // 10, 1)}"
        )
    if spec.optimizer.decay == "cosine" and spec.optimizer.warmup_images >= train.images:
        raise ValueError(
            f"optimizer.warmup_images = {spec.optimizer.warmup_images} leaves none of train.images = {train.images} to "
            "optimizer.decay = cosine; use fewer"
        )


def _check_picture(spec: RunSpec) -> None:
    check_picture(spec.samples, spec.data.size)
    samples = spec.samples
    if len(samples.prompts) > samples.count:
        raise ValueError(
            f"samples.count = {samples.count} is below the {len(samples.prompts)} of samples.prompts, which are an "
            f"image each; use {len(samples.prompts)} or more"
        )


def check_picture(samples: SamplesSpec, size: tuple[int, int]) -> None:
    """Check the pictures' size for images of ``size`` (height, width) pixels; raises ValueError with one line."""
    pixels = samples.count * math.prod(size)
    if samples.every_images and pixels > MOST_PICTURE_PIXELS:
        fewer = MOST_PICTURE_PIXELS // math.prod(size)
        raise ValueError(
            f"samples.count = {samples.count} makes a picture of {pixels:,} pixels, and {MOST_PICTURE_PIXELS:,} are "
            f"the most; use {f'{fewer} or fewer' if fewer else 'samples.every_images = null'}"
        )


def _check_diffusion(spec: RunSpec) -> None:
    diffusion, data = spec.diffusion, spec.data
    if len(diffusion.channel_weights) not in (0, data.channels):
        raise ValueError(
            f"diffusion.channel_weights = {list(diffusion.channel_weights)} has {len(diffusion.channel_weights)} "
            f"weights, and data.channels = {data.channels}; give one for each channel, or []"
        )
    check_process(diffusion)
    if not OBJECTIVES[diffusion.objective].diffuses and data.condition is None:
        raise ValueError(
            f"diffusion.objective = {diffusion.objective} predicts an image from its condition, and data.condition is "
            "null; give one, or use eps, x0 or v"
        )
    drops = data.text is not None or (data.condition is not None and data.condition.drop > 0.0)
    check_sampler(
        spec.sampler,
        diffusion,
        classes=spec.unet.classes,
        latents=data.autoencoder is not None,
        drops=drops,
        unbounded=data.is_unbounded,
    )


_CHECKS: tuple[Callable[[RunSpec], None], ...] = (
    _check_used,
    lambda spec: check_source(spec.data),
    lambda spec: check_images(spec.data),
    lambda spec: check_condition(spec.data),
    lambda spec: check_flips(spec.data),
    lambda spec: check_levels(spec.unet, spec.data.size),
    lambda spec: check_widths(spec.unet, spec.data.size),
    lambda spec: check_cross_attention(spec.unet, spec.data.interface.numbers),
    _check_buckets,
    _check_diffusion,
    _check_batch,
    _check_decay,
    _check_picture,
)
