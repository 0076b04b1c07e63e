"""The run spec: what is trained, as frozen pydantic models read from YAML.

How it is trained (precision, ZeRO, pipeline, micro-batch) is up to the DeepSpeed JSON
(:mod:`ddpm_ds.config.ds_config`); no value is in both. The docstring of a field is its documentation in
``docs/spec.md`` and in the JSON schema that editors read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticKnownError

from ddpm_ds.command_line import MOST_BATCH, MOST_IMAGES
from ddpm_ds.config.choices import MOST_SIGMA, OBJECTIVES, SAMPLERS, SCHEDULES, SOURCES, Choice, samplers_with
from ddpm_ds.config.section import Format, Section, broken_rule, no_switch, only_with, plain, unused
from ddpm_ds.config.text import BucketsSpec, CrossAttentionSpec, TextSpec
from ddpm_ds.errors import SpecError
from ddpm_ds.files import expanded, path_fault

# Every number has a range. It ends far beyond useful values, but early enough that whatever is computed from the number
# before training, such as a plan, a schedule or a table of betas, takes seconds and little memory.
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Small = Annotated[float, Field(gt=0.0, le=1.0)]
"""Epsilon or beta."""
MOST_LEARNING_RATE = 1e6
"""Largest learning rate in the spec and in the DeepSpeed JSON."""
Factor = Annotated[float, Field(gt=0.0, le=1e6)]
Images = Annotated[int, Field(ge=1, le=MOST_IMAGES)]
"""Number of images seen, within the integers that floats represent exactly."""
Batch = Annotated[int, Field(ge=1, le=MOST_BATCH)]
"""Number of images or micro-batches in one optimizer step."""
MOST_SIDE = 8192
"""Largest height and width of an image."""
Pixels = Annotated[int, Field(ge=1, le=MOST_SIDE)]
MOST_CHANNELS = 2**16
Channels = Annotated[int, Field(ge=1, le=MOST_CHANNELS)]
Size = Annotated[
    Pixels | Annotated[tuple[Pixels, Pixels], Field(description="two of these, [height, width]")],
    AfterValidator(lambda size: size[0] if isinstance(size, tuple) and size[0] == size[1] else size),
]
"""Side of a square, or height and width; two equal sides are one, so that a square is written in one way."""
ImageChannels = Annotated[int, Field(ge=1, le=256)]
"""Channels of images, fields or latents; published latents have 4 to 32."""
LatentChannels = Annotated[int, Field(ge=1, le=64)]
"""Channels of an autoencoder's latents."""
Variable = Annotated[str, Field(min_length=1, max_length=200)]
"""Name of an array in a file."""
Normalise = Literal["statistics", "range"] | None
HeldOut = Literal["random", "last", "ranges"]
Blocks = Annotated[int, Field(ge=1, le=64)]
MOST_LEVELS = 14
"""Levels at which the largest image has been halved to one pixel."""
Sigma = Annotated[float, Field(ge=1e-6, le=MOST_SIGMA)]
"""Noise level as noise over signal, EDM's sigma."""
Rho = Annotated[float, Field(ge=1.0, le=100.0)]
Sigmas = tuple[Annotated[float, Field(ge=0.0, le=MOST_SIGMA)], Sigma]
"""Lowest and highest noise level of an interval."""
ALL_SIGMAS = (0.0, MOST_SIGMA)
Timesteps = Annotated[int, Field(ge=1, le=100_000)]
Classes = Annotated[int, Field(ge=1, le=10**6)]
LEAST_SIGNAL = 1e-30
"""Smallest factor of the image in x_t at the last timestep, beyond whose inverse float32 overflows."""
MOST_LAYERS = 256
"""Maximum layers of a U-Net, since tables of cuts have layers^2 entries; published U-Nets have about 100 layers."""
MOST_PICTURE_PIXELS = 2**26
"""Maximum pixels of a picture of samples drawn during training."""


def _possible(path: Path | str) -> Path:
    path = expanded(path)
    if fault := path_fault(path):
        raise broken_rule(f"can't be a path: {fault}")
    return path


FilePath = Annotated[Path, AfterValidator(_possible)]
"""Path, in which ``~`` is expanded: a run's record names the files that were read, whoever looks at it later."""
GivenPath = Annotated[Path | str, AfterValidator(_possible)]
"""Path in Python, in which ``~`` is expanded."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise broken_rule("should be text of 1 to 200 printable characters")
    return text


Title = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]


def _one_of(choices: Mapping[str, Any]) -> AfterValidator:
    """Return a validator that accepts the names in a registry, read at each check since the registry may grow."""

    def known(name: str) -> str:
        if name not in choices:
            raise PydanticKnownError("literal_error", {"expected": " or ".join(map(repr, choices))})
        return name

    return AfterValidator(known)


def _listed(what: str, choices: Mapping[str, Choice]) -> Any:
    """Return a field's documentation that lists these names, each described by its registry entry."""
    about = f"{what}: {', '.join(f'{name} ({choice.about})' for name, choice in choices.items())}."
    return Field(description=about, json_schema_extra=lambda schema: schema.update(enum=[*choices]))


def _those(key: str, choices: Mapping[str, Any], fits: Callable[[Any], bool]) -> Callable[[], str]:
    """Return the condition of :func:`only_with` that a key has a name of a registry whose entry fits."""
    return lambda: f"{key}={'|'.join(name for name, choice in choices.items() if fits(choice))}"


def _read_by_source(key: str) -> Callable[[], str]:
    return _those("data.source", SOURCES, lambda source: source.reads(key))


OF_ARRAYS = _those("data.source", SOURCES, lambda source: source.arrays)
OF_FIELDS = "data.values=float16|float32"
OF_NOISE = _those("diffusion.objective", OBJECTIVES, lambda objective: objective.diffuses)
OF_TIMESTEPS = _those("schedule", SCHEDULES, lambda schedule: not schedule.continuous)
ONE_SIZE = "data.buckets=null"
PIXELS = "data.autoencoder=null"


def _height_and_width(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def written(size: tuple[int, int]) -> str:
    """Return (height, width) as a spec may say it: 64, or [64,96]."""
    return str(size[0]) if size[0] == size[1] else f"[{size[0]},{size[1]}]"


class ConditionSpec(Section):
    """Condition of each image: channels beside x_t that are never noised, and a vector beside the time embedding.

    Channels of the condition are in this order: stored or made ones, constants, grid.
    """

    kind: Literal["stored", "reduced", "grey", "cut_out"] | None = None
    """Where the condition's channels come from: a second array of the same images, or made from the image itself:
    reduced by `factor` and enlarged again (super-resolution), its grey values (colourisation), or the image with a
    rectangle cut out and a channel that is 1 there (inpainting). Null has none of these."""
    path: Annotated[FilePath | None, only_with("kind=stored or constants or vector", OF_ARRAYS)] = None
    """File or folder of the stored condition; null means `data.path`."""
    held_out_path: Annotated[FilePath | None, only_with("path", "data.held_out_path")] = None
    """The same for the images in `data.held_out_path`, if the condition has a `path` of its own."""
    variables: Annotated[tuple[Variable, ...], only_with("kind=stored", OF_ARRAYS)] = ()
    """Names of the arrays that are the stored condition, (N, h, w) or (N, C, h, w) each; [] means one that is named
    condition, or the only one in a `path` of its own."""
    channels: Annotated[int, Field(ge=0, le=256), only_with("kind=stored")] = 0
    """Channels of the stored condition; those that are made are counted by themselves."""
    resize: Annotated[Literal["nearest", "bilinear", "bicubic"], only_with("kind=stored|reduced")] = "bilinear"
    """How a condition of another size is brought to that of the image."""
    normalise: Annotated[Normalise, only_with("kind=stored or constants")] = None
    """How the stored condition and the constants come to the U-Net's scale, each channel by statistics of its own; see
    `data.normalise`."""
    factor: Annotated[int, Field(ge=2, le=64), only_with("kind=reduced")] = 4
    """Pixels of the image, each way, in one of the reduced image."""
    noise: Annotated[float, Field(ge=0.0, le=1.0), only_with("kind=reduced", OF_NOISE)] = 0.0
    """Highest level of the noise that is mixed into a reduced image: each image has a random level up to this one, of
    which the U-Net is told, x -> sqrt(1 - level^2) x + level noise. Samples have level 0."""
    cut: Annotated[tuple[Small, Small], only_with("kind=cut_out")] = (0.25, 0.75)
    """Smallest and largest side of the rectangle that is cut out, as a share of the image's."""
    constants: Annotated[tuple[Variable, ...], only_with(OF_ARRAYS)] = ()
    """Names of arrays in `path`, (H, W) or (C, H, W), that are the same for all images, such as the land's height;
    they are stored once."""
    constant_channels: Annotated[int, Field(ge=0, le=256)] = 0
    """Channels of all `constants`."""
    grid_channels: Annotated[int, Field(ge=0, le=64, multiple_of=4)] = 0
    """Channels with the position of each pixel, sinusoids of 1, 2, ... periods: sine and cosine, downwards and to the
    right."""
    vector: Annotated[tuple[Variable, ...], only_with(OF_ARRAYS)] = ()
    """Names of arrays in `path`, (N,) or (N, K), such as a lead time or parameters, which are added to the time
    embedding."""
    vector_size: Annotated[int, Field(ge=0, le=4096)] = 0
    """Numbers in all arrays of `vector` together."""
    drop: Fraction = 0.0
    """Share of the images whose condition, vector included, is replaced by zeros, of which the U-Net is told; needed
    for guidance."""

    def made_channels(self, image_channels: int) -> int:
        """Return the channels that are stored or made from the image, without constants and grid."""
        made = {"stored": self.channels, "reduced": image_channels, "grey": 1, "cut_out": image_channels + 1}
        return made[self.kind] if self.kind else 0

    def input_channels(self, image_channels: int) -> int:
        """Return all channels of the condition."""
        return self.made_channels(image_channels) + self.constant_channels + self.grid_channels

    @property
    def numbers(self) -> int:
        """Size of the vector that the U-Net is told: that of the data, and a flag of a dropped condition."""
        return self.vector_size + (self.drop > 0.0)


class DataSpec(Section):
    """Images to learn."""

    source: Annotated[str, _one_of(SOURCES), _listed("Where images come from", SOURCES)]
    path: Annotated[FilePath | None, only_with(_read_by_source("path"), "name=null")] = None
    """Path that the source reads: a folder of images for `folder`, whose subfolders are classes; a file for
    `arrays` and `hdf5`; a folder for `zarr`; either for `webdataset`, `huggingface` and `netcdf`. Other sources refuse
    a path."""
    name: Annotated[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]+$", max_length=200)] | None, only_with(_read_by_source("name"))
    ] = None
    """Name of the data set: on the Hugging Face hub (`OWNER/NAME`, or `OWNER/NAME/CONFIGURATION` if it has several),
    or of the class in torchvision.datasets, such as CIFAR100."""
    split: Annotated[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=200)] | None, only_with(_read_by_source("split"))
    ] = None
    """Split of the data set that `huggingface` or `torchvision` reads; null means train, else the only split or
    torchvision's default."""
    image_column: Annotated[
        Annotated[str, Field(min_length=1, max_length=200)] | None, only_with(_read_by_source("image_column"))
    ] = None
    """Column of images that `huggingface` reads; null means the only image column."""
    label_column: Annotated[
        Annotated[str, Field(min_length=1, max_length=200)] | None, only_with(_read_by_source("label_column"))
    ] = None
    """Column of labels that `huggingface` reads; null means the only column of class labels, or else a column of whole
    numbers or names that is named label."""
    image_size: Size
    """Size in pixels of the images, which are scaled up or down and centre-cropped, or of `autoencoder`'s latents: a
    number for squares, or [height, width]. Fields have this size already."""
    crop_from: Annotated[
        Size | None, only_with(PIXELS, ONE_SIZE, "residual_of=null", "unet.text.pooled_channels=null")
    ] = None
    """Size in pixels of the prepared images. Training takes a random crop of `image_size` each time an image is seen,
    evaluation the centre; null prepares images of `image_size`."""
    channels: ImageChannels
    """Channels of the images (1 grey, 3 RGB), of fields, or of `autoencoder`'s latents."""
    variables: Annotated[tuple[Variable, ...], only_with(OF_ARRAYS)] = ()
    """Names of the arrays in `path` that are the fields to learn, (N, H, W) or (N, C, H, W) each, joined along the
    channels; [] means the only array that fits, or one that is named image or images."""
    values: Annotated[Literal["bytes", "float16", "float32"], only_with(OF_ARRAYS)] = "bytes"
    """How values are stored: bytes for pictures, floats for fields."""
    normalise: Annotated[Normalise, only_with(OF_FIELDS)] = None
    """How fields come to the U-Net's scale, by channel: "statistics" subtracts the mean and divides by the standard
    deviation, "range" maps the smallest and the largest value to -1 and 1; both are computed while the data are
    prepared, and undone in samples and scores. Null keeps the values; pictures are always mapped to [-1, 1]."""
    mask: Annotated[Variable | None, only_with(OF_ARRAYS, PIXELS)] = None
    """Name of an array in `path`, (N, H, W), (H, W) or (N, C, H, W), that is 1 where a pixel counts in the loss and 0
    elsewhere; or "nan", which masks what is not a number in the fields. Masked values are read as the mean of their
    channel, and those of a condition that are not a number too. Null refuses fields that are not finite."""
    missing_chunks: Annotated[Literal["refuse", "fill"], only_with(OF_ARRAYS)] = "refuse"
    """What is done if chunks of a Zarr or HDF5 array are not there: refuse it, or take its fill value for them, which
    is right where a writer leaves out chunks that have this value alone."""
    held_out: HeldOut = "random"
    """Which images are held out: random ones, the last, or ten evenly spaced ranges of neighbours, for images that
    resemble those beside them, such as hours of weather."""
    held_out_path: Annotated[FilePath | None, only_with(_read_by_source("path"), "name=null")] = None
    """Path of held-out images that are a source of their own, of the same kind as `path` and read by the same keys,
    such as a folder of validation images or the file of another year; all of `path` is trained on. Null holds out
    images of `path`."""
    flips_negate: Annotated[tuple[Variable | int, ...], only_with("horizontal_flips", OF_FIELDS)] = ()
    """Channels whose sign changes in a mirrored image, such as the component of a vector across the mirror: numbers
    from 0, those of a stored condition after those of the fields, or names in `variables` of either, if each of these
    has one channel."""
    condition: Annotated[ConditionSpec | None, only_with(PIXELS, ONE_SIZE)] = None
    """What each image is conditioned on; null learns images alone."""
    autoencoder: FilePath | None = None
    """Autoencoder whose latents are learned (latent diffusion): a folder saved by diffusers' AutoencoderKL, or a name
    on the Hugging Face hub. `ddpm-ds prepare --encode` makes the latents; null learns pixels."""
    text: Annotated[
        TextSpec | None, only_with("unet.text", _those("source", SOURCES, lambda source: source.captions))
    ] = None
    """Captions, for a U-Net with `unet.text`; null trains without text."""
    buckets: BucketsSpec | None = None
    """Buckets of aspect, whose images have about as many pixels as `image_size`, and each bucket its own height and
    width; null has one size."""
    residual_of: Annotated[
        FilePath | None, only_with(OF_FIELDS, "condition", "data.condition.kind=null|stored", OF_NOISE)
    ] = None
    """Folder of a run with `diffusion.objective: regression` whose predictions are subtracted from the fields: what is
    learned is what is left, and samples are the sum of both. `ddpm-ds prepare --residual RUN_DIR` makes these
    residuals; null learns the fields themselves."""
    horizontal_flips: Annotated[bool, only_with(PIXELS)] = False
    """Mirror an image with probability 1/2 each time it is seen."""
    held_out_images: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Number of images that are held out of training, for the held-out loss; it and `held_out` alone decide which
    images these are, of buckets of aspect about the same share of each. 0 holds out none, or all of `held_out_path`."""
    max_bad_fraction: Fraction = 0.01
    """Share of images left out, mostly unreadable ones, above which preparation fails; skipped.txt names them."""
    store_root: FilePath = Path("data")
    """Folder of data-set caches; a cache is named after its source, size, channels and contents."""
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Loader processes per rank that loads data; 0 reads in threads of the training process, which is fastest for
    pixels."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels of the images that are learned."""
        return _height_and_width(self.image_size)

    @property
    def stored_size(self) -> tuple[int, int]:
        """Height and width in pixels of the prepared images."""
        return _height_and_width(self.crop_from or self.image_size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of the images that are learned."""
        return (self.channels, *self.size)

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of the prepared images."""
        return (self.channels, *self.stored_size)

    @property
    def interface(self) -> Interface:
        """What a U-Net for these data takes and predicts."""
        condition = self.condition or ConditionSpec()
        return Interface(
            channels=self.channels,
            size=self.size,
            condition_channels=condition.input_channels(self.channels),
            numbers=condition.numbers,
            told_level=condition.noise > 0.0,
        )

    @property
    def are_fields(self) -> bool:
        """Whether the images are fields of floats instead of pictures of bytes."""
        return self.values != "bytes"

    @property
    def is_unbounded(self) -> bool:
        """Whether fields come to the U-Net with values beyond [-1, 1]."""
        return self.are_fields and self.normalise != "range"

    @property
    def named_arrays(self) -> dict[str, Any]:
        """Values of the keys that only a source of named arrays reads, by key, if they are given."""
        condition = self.condition or ConditionSpec()
        given = {
            "data.values": self.values if self.are_fields else None,
            "data.variables": self.variables,
            "data.mask": self.mask,
            "data.missing_chunks": self.missing_chunks if self.missing_chunks == "fill" else None,
            "data.condition.kind": condition.kind if condition.kind == "stored" else None,
            "data.condition.path": condition.path,
            "data.condition.variables": condition.variables,
            "data.condition.constants": condition.constants,
            "data.condition.vector": condition.vector,
        }
        return {key: value for key, value in given.items() if value}

    @property
    def reads_arrays(self) -> bool:
        """Whether images are named arrays of their final size, instead of pictures that are decoded and scaled."""
        return SOURCES[self.source].arrays and (not SOURCES[self.source].pictures or bool(self.named_arrays))


@dataclass(frozen=True, kw_only=True)
class Interface:
    """What a U-Net takes and predicts, as the data decide it."""

    channels: int
    """Channels of x_t and of the prediction."""
    size: tuple[int, int]
    """Height and width in pixels."""
    condition_channels: int = 0
    """Channels that are concatenated to x_t, after it, and never noised."""
    numbers: int = 0
    """Size of the vector that is added to the time embedding."""
    told_level: bool = False
    """Whether the U-Net is told a second noise level, that of its condition."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of x_t and of the prediction."""
        return (self.channels, *self.size)


class UnetSpec(Section):
    """U-Net of DDPM/ADM residual blocks: an encoder, a middle and a decoder."""

    channels: Channels
    """Base width, which `multipliers` multiply."""
    multipliers: Annotated[tuple[Channels, ...], Field(min_length=1, max_length=MOST_LEVELS)]
    """Width of each level as a multiple of `channels`; every level after the first halves the image."""
    blocks_per_level: Blocks = 2
    """Residual blocks per encoder level; a decoder level has one more."""
    attention_resolutions: Annotated[
        tuple[Pixels, ...], Field(max_length=MOST_LEVELS), only_with("text=null", ONE_SIZE)
    ] = ()
    """Sizes of square images (pixels) at which every residual block is followed by self-attention."""
    attention_levels: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...],
        Field(max_length=MOST_LEVELS),
        only_with("text=null", "attention_resolutions=[]"),
    ] = ()
    """The same by level, 0 for full size, 1 for half of it; for images of any shape, instead of
    `attention_resolutions`."""
    middle_attention: bool = True
    """Attention between the two middle blocks."""
    head_channels: Annotated[Channels | None, only_with("text=null")] = None
    """Channels per attention head; null means one head of full width."""
    norm_groups: Channels = 32
    """Groups of every group normalisation."""
    norm_epsilon: Small = 1e-6
    """Epsilon of every group normalisation."""
    dropout: Annotated[Fraction, only_with(ONE_SIZE)] = 0.0
    """Dropout before the second convolution of each residual block."""
    embedding_channels: Channels | None = None
    """Width of the time embedding; null means 4 x the first level's width."""
    time_conditioning: Literal["add", "scale_shift"] = "add"
    """How a block uses the time embedding: added after the first convolution (DDPM), or as scale and shift of the
    second normalisation (ADM)."""
    sinusoid_order: Literal["sin_cos", "cos_sin"] = "sin_cos"
    """Order of the halves of the sinusoidal embedding (diffusers: `flip_sin_to_cos` true is cos_sin)."""
    sinusoid_shift: Annotated[Literal[0, 1], BeforeValidator(no_switch)] = 1
    """Subtracted from the half width in the frequency exponent (diffusers: `freq_shift`)."""
    downsample_padding: Literal["symmetric", "asymmetric"] = "asymmetric"
    """Zero padding of the strided convolution: on all sides (diffusers: 1), or right and bottom only as in DDPM (0)."""
    text: Annotated[CrossAttentionSpec | None, only_with("data.text")] = None
    """Cross-attention to a caption; null has none."""
    classes: Classes | None = None
    """Number of classes of a class-conditional U-Net; null trains without labels."""

    def attended_levels(self, size: tuple[int, int]) -> tuple[int, ...]:
        """Return the levels with attention, for images of ``size`` (height, width)."""
        if self.text is not None:
            return tuple(level for level, blocks in enumerate(self.text.blocks[: len(self.multipliers)]) if blocks)
        sides = [size[0] >> level if size[0] == size[1] else None for level in range(len(self.multipliers))]
        return tuple(
            level
            for level, side in enumerate(sides)
            if level in self.attention_levels or side in self.attention_resolutions
        )


class DiffusionSpec(Section):
    """The forward process and what the U-Net predicts."""

    schedule: Annotated[str, _one_of(SCHEDULES), _listed("Noise schedule", SCHEDULES)] = "linear"
    timesteps: Timesteps = 1000
    """Number of timesteps T; edm and flow have none."""
    beta_start: Annotated[float, Field(ge=1e-15, le=1.0)] = 1e-4
    """First beta of linear and scaled_linear; for the latter the default is 0.00085."""
    beta_end: Factor = 0.02
    """Last beta of linear and scaled_linear; for the latter the default is 0.012."""
    zero_terminal_snr: Annotated[bool, only_with(OF_TIMESTEPS, OF_NOISE)] = False
    """Rescale the betas so that the last timestep is pure noise (Lin et al.); not with eps, which is trivial there."""
    objective: Annotated[str, _one_of(OBJECTIVES), _listed("What the U-Net predicts", OBJECTIVES)] = "eps"
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

    kind: Annotated[str, _one_of(SAMPLERS), _listed("Sampler", SAMPLERS)] = "dpm_solver"
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


def _check_source(spec: RunSpec) -> None:
    data, source = spec.data, SOURCES[spec.data.source]
    takes = {f"data.{key}": word for key, word in (("path", source.path), ("name", source.name)) if word is not None}
    if takes and data.path is None and data.name is None:
        needs = " or ".join(f"--set {key}={word}" for key, word in takes.items())
        raise ValueError(f"{' or '.join(takes)} is missing; source {data.source} needs it: {needs}")
    condition = data.condition
    if condition is not None and condition.kind == "stored" and not source.arrays:
        raise ValueError(
            f"data.condition.kind = stored is used only with {OF_ARRAYS().replace('=', ': ').replace('|', ' or ')}; "
            "use another kind"
        )
    for key, value in (("autoencoder", data.autoencoder), ("text", data.text), ("buckets", data.buckets)):
        if data.reads_arrays and value is not None:
            raise ValueError(f"data.{key} needs pictures, and data.source = {data.source} has arrays here; use null")


def _check_images(spec: RunSpec) -> None:
    data = spec.data
    if any(stored < cropped for stored, cropped in zip(data.stored_size, data.size, strict=True)):
        raise ValueError(
            f"data.crop_from = {written(data.stored_size)} is below data.image_size = {written(data.size)}, the size "
            f"of the crops; use {written(data.size)} or more, or null for no crops"
        )
    if data.autoencoder is None and not data.are_fields and data.channels not in (1, 3):
        raise ValueError(
            f"data.channels = {data.channels} should be 1 (grey) or 3 (RGB); other numbers are of the latents of "
            "data.autoencoder, which is null, or of fields (data.values)"
        )


def _check_condition(spec: RunSpec) -> None:
    data, condition = spec.data, spec.data.condition
    if condition is None:
        return
    if not (condition.kind or condition.constants or condition.grid_channels or condition.vector):
        raise ValueError(
            "data.condition has neither a kind nor constants, grid_channels or vector; give one, or use null"
        )
    of_each_image = condition.kind == "stored" or condition.vector
    if data.held_out_path and condition.path and of_each_image and condition.held_out_path is None:
        raise ValueError(
            f"data.condition.path = {condition.path} has the condition of data.path, and data.held_out_path = "
            f"{data.held_out_path} has none; name it by data.condition.held_out_path"
        )
    if condition.kind == "stored" and not condition.channels:
        raise ValueError("data.condition.channels = 0, but kind stored has channels; give their number")
    for names, size in (("constants", "constant_channels"), ("vector", "vector_size")):
        given, count = getattr(condition, names), getattr(condition, size)
        if bool(given) != bool(count):
            raise ValueError(
                f"data.condition.{names} = {plain(given)} and {size} = {count} belong together; give both or neither"
            )
    if condition.kind == "grey" and data.channels != 3:
        raise ValueError(f"data.condition.kind = grey needs 3 channels, and data.channels = {data.channels}")
    if condition.kind == "reduced" and any(side % condition.factor for side in data.size):
        raise ValueError(
            f"data.condition.factor = {condition.factor} does not divide data.image_size = {written(data.size)}; use a "
            "divisor"
        )
    if condition.cut[0] > condition.cut[1]:
        raise ValueError(f"data.condition.cut = {plain(condition.cut)} should not fall; give the smaller side first")


def _check_flips(spec: RunSpec) -> None:
    data, condition = spec.data, spec.data.condition or ConditionSpec()
    both = data.channels + condition.channels
    named = [
        name
        for names, count in ((data.variables, data.channels), (condition.variables, condition.channels))
        if len(names) == count
        for name in names
    ]
    for one in data.flips_negate:
        if isinstance(one, int) and not 0 <= one < both:
            raise ValueError(
                f"data.flips_negate has {one}, but the channels of the fields and of their stored condition are 0 to "
                f"{both - 1}; use those"
            )
        if isinstance(one, str) and one not in named:
            raise ValueError(
                f"data.flips_negate has {one}, which is no variable of one channel; use a name in data.variables, if "
                "each of them has one channel, or the channel's number"
            )


def check_extent(unet: UnetSpec) -> None:
    """Check the number of layers and the widths of a U-Net against the limits; raises ValueError with one line."""
    levels, blocks = len(unet.multipliers), unet.blocks_per_level
    attending = min(len({*unet.attention_resolutions, *unet.attention_levels}), levels)
    attention, middle = [1] * attending, 1
    if unet.text is not None:
        attention, middle = [depth + 2 for depth in unet.text.blocks[:levels] if depth], unet.text.middle_blocks + 2
    layers = (2 * blocks + 1) * (levels + sum(attention)) + 2 * levels + 3 + middle * unet.middle_attention
    if layers > MOST_LAYERS:
        raise ValueError(
            f"unet.blocks_per_level = {blocks} makes {layers:,} layers on {levels} levels, and {MOST_LAYERS} are the "
            "most; use fewer blocks"
        )
    width = unet.channels * max(unet.multipliers)
    if width > MOST_CHANNELS:
        raise ValueError(
            f"unet.channels = {unet.channels} times {max(unet.multipliers)} of unet.multipliers is {width:,}, and "
            f"{MOST_CHANNELS:,} channels are the most; use fewer"
        )


def _check_levels(spec: RunSpec) -> None:
    unet, size, levels = spec.unet, spec.data.size, len(spec.unet.multipliers)
    step = 2 ** (levels - 1)
    if any(side % step for side in size):
        below = (max(step, size[0] // step * step), max(step, size[1] // step * step))
        above = (-(-size[0] // step) * step, -(-size[1] // step) * step)
        near = " or ".join(map(written, dict.fromkeys((below, above))))
        raise ValueError(
            f"data.image_size = {written(size)} can't be halved {levels - 1} times, as the {levels} levels of "
            f"unet.multipliers ask; use a multiple of {step}, such as {near}, or fewer levels"
        )
    if unet.attention_resolutions and size[0] != size[1]:
        raise ValueError(
            f"unet.attention_resolutions = {list(unet.attention_resolutions)} are sides of squares, and "
            f"data.image_size is {written(size)}; use unet.attention_levels, 0 to {levels - 1}"
        )
    sizes = [size[0] >> level for level in range(levels)]
    for key, found in (("attention_resolutions", sizes), ("attention_levels", [*range(levels)])):
        if others := [one for one in getattr(unet, key) if one not in found]:
            raise ValueError(f"unet.{key} has {others[0]}, but the levels are {found}; use some of those")


def _check_widths(spec: RunSpec) -> None:
    unet = spec.unet
    check_extent(unet)
    widths = [unet.channels * multiplier for multiplier in unet.multipliers]
    if widths[0] % 2:
        raise ValueError(
            f"unet.channels = {unet.channels} makes a first level of {widths[0]} channels (diffusers: the first of "
            "block_out_channels), which is odd; the sinusoidal embedding needs an even width"
        )
    for width in widths:
        if width % unet.norm_groups:
            raise ValueError(f"unet.norm_groups = {unet.norm_groups} does not divide {width} channels; use a divisor")
    attended = [widths[level] for level in unet.attended_levels(spec.data.size)]
    for width in attended + widths[-1:] * unet.middle_attention:
        if unet.head_channels and width % unet.head_channels:
            raise ValueError(
                f"unet.head_channels = {unet.head_channels} does not divide the {width} channels that are attended; "
                f"use a divisor"
            )


def _check_text(spec: RunSpec) -> None:
    data, unet = spec.data, spec.unet
    if unet.text is None or data.text is None:
        return
    text, levels = unet.text, len(unet.multipliers)
    for key in ("blocks", "heads"):
        if len(found := getattr(text, key)) != levels:
            raise ValueError(
                f"unet.text.{key} = {list(found)} has {len(found)} numbers, and unet.multipliers has {levels} levels; "
                "give one for each level"
            )
    widths = [unet.channels * multiplier for multiplier in unet.multipliers]
    depths = [*text.blocks[:-1], text.blocks[-1] or unet.middle_attention]
    for width, heads, depth in zip(widths, text.heads, depths, strict=True):
        if depth and width % heads:
            raise ValueError(
                f"unet.text.heads has {heads}, which does not divide the {width} channels of its level; use a divisor"
            )
    if not any(depths):
        raise ValueError(f"unet.text.blocks = {list(text.blocks)} reads no text; give a level some blocks")
    told = data.condition is not None and data.condition.numbers
    if text.pooled_channels and told:
        raise ValueError(
            f"unet.text.pooled_channels = {text.pooled_channels} and numbers of data.condition are two vectors beside "
            "the time embedding; use one"
        )


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


@functools.lru_cache(maxsize=64)
def _log_signal(start: float, end: float, steps: int, root: float) -> float:
    """Return the logarithm of the last alpha_bar of a schedule of betas."""
    first, last = start ** (1 / root), end ** (1 / root)
    betas = ((first + (last - first) * step / max(steps - 1, 1)) ** root for step in range(steps))
    return sum(math.log1p(-beta) for beta in betas)


def _check_diffusion(spec: RunSpec) -> None:
    diffusion = spec.diffusion
    schedule = SCHEDULES[diffusion.schedule]
    if len(diffusion.channel_weights) not in (0, spec.data.channels):
        raise ValueError(
            f"diffusion.channel_weights = {list(diffusion.channel_weights)} has {len(diffusion.channel_weights)} "
            f"weights, and data.channels = {spec.data.channels}; give one for each channel, or []"
        )
    if diffusion.channel_weights and not any(diffusion.channel_weights):
        raise ValueError(f"diffusion.channel_weights = {list(diffusion.channel_weights)} leaves no loss; use a weight")
    if not OBJECTIVES[diffusion.objective].diffuses:
        _check_regression(spec)
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
    data = spec.data
    latents, condition = data.autoencoder is not None, data.condition
    drops = data.text is not None or (condition is not None and condition.drop > 0.0)
    check_sampler(
        spec.sampler, diffusion, classes=spec.unet.classes, latents=latents, drops=drops, unbounded=data.is_unbounded
    )


def _check_regression(spec: RunSpec) -> None:
    if spec.data.condition is None:
        raise ValueError(
            f"diffusion.objective = {spec.diffusion.objective} predicts an image from its condition, and "
            "data.condition is null; give one, or use eps, x0 or v"
        )
    if spec.diffusion.schedule != "linear":
        raise ValueError(f"diffusion.schedule = {spec.diffusion.schedule} is used only with noise; use linear")


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


_CHECKS = (
    _check_used,
    _check_source,
    _check_images,
    _check_condition,
    _check_flips,
    _check_levels,
    _check_widths,
    _check_text,
    _check_buckets,
    _check_diffusion,
    _check_batch,
    _check_decay,
    _check_picture,
)
