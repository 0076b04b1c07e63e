"""Types of the run spec's fields, each within a range, and the conditions under which fields are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field
from pydantic_core import PydanticKnownError

from ddpm_ds.ground.files import expanded, path_fault
from ddpm_ds.ground.units import MOST_BATCH, MOST_IMAGES
from ddpm_ds.schema.choices import MOST_SIGMA, OBJECTIVES, SCHEDULES, SOURCES, Choice
from ddpm_ds.schema.section import broken_rule

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
LatentScale = Factor | Annotated[tuple[Factor, ...], Field(min_length=1, max_length=64)]
"""One factor, or one for each channel of latents."""
_Shift = Annotated[float, Field(ge=-1e6, le=1e6)]
LatentShift = _Shift | Annotated[tuple[_Shift, ...], Field(min_length=1, max_length=64)]
Variable = Annotated[str, Field(min_length=1, max_length=200)]
"""Name of an array in a file."""
Normalise = Literal["statistics", "range"] | None
HeldOut = Literal["random", "last", "ranges"]
MOST_VARIANTS = 64
"""Maximum latents that are stored of an image's condition."""
Blocks = Annotated[int, Field(ge=1, le=64)]
MOST_LEVELS = 14
"""Levels at which the largest image has been halved to one pixel."""
MOST_LAYERS = 256
"""Maximum layers of a U-Net, since tables of cuts have layers^2 entries; published U-Nets have about 100 layers."""
Sigma = Annotated[float, Field(ge=1e-6, le=MOST_SIGMA)]
"""Noise level as noise over signal, EDM's sigma."""
Rho = Annotated[float, Field(ge=1.0, le=100.0)]
Shift = Annotated[float, Field(gt=0.0, le=1000.0)]
"""Factor of noise over signal by which flow matching moves its times."""
Sigmas = tuple[Annotated[float, Field(ge=0.0, le=MOST_SIGMA)], Sigma]
"""Lowest and highest noise level of an interval."""
ALL_SIGMAS = (0.0, MOST_SIGMA)
Timesteps = Annotated[int, Field(ge=1, le=100_000)]
Classes = Annotated[int, Field(ge=1, le=10**6)]
Width = Annotated[int, Field(ge=1, le=2**16)]
Depth = Annotated[int, Field(ge=0, le=64)]
Heads = Annotated[int, Field(ge=1, le=1024)]


def _possible(path: Path | str) -> Path:
    path = expanded(path)
    if fault := path_fault(path):
        raise broken_rule(f"can't be a path: {fault}")
    return path


FilePath = Annotated[Path, AfterValidator(_possible)]
"""Path with ``~`` expanded, so that a run's record names the files that were read, whoever looks at it later."""
GivenPath = Annotated[Path | str, AfterValidator(_possible)]
"""Path in Python, in which ``~`` is expanded."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise broken_rule("should be text of 1 to 200 printable characters")
    return text


Title = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]


C = TypeVar("C", bound=Choice)


def one_of(choices: Mapping[str, Choice]) -> AfterValidator:
    """Return a validator that accepts the names in a registry, read at each check since the registry may grow."""

    def known(name: str) -> str:
        if name not in choices:
            raise PydanticKnownError("literal_error", {"expected": " or ".join(map(repr, choices))})
        return name

    return AfterValidator(known)


def listed(what: str, choices: Mapping[str, Choice]) -> Any:
    """Return a field's documentation that lists these names, each described by its registry entry."""
    about = f"{what}: {', '.join(f'{name} ({choice.about})' for name, choice in choices.items())}."
    return Field(description=about, json_schema_extra=lambda schema: schema.update(enum=[*choices]))


def those(key: str, choices: Mapping[str, C], fits: Callable[[C], object]) -> Callable[[], str]:
    """Return the condition of :func:`only_with` that a key has a name of a registry whose entry fits."""
    return lambda: f"{key}={'|'.join(name for name, choice in choices.items() if fits(choice))}"


def read_by_source(key: str) -> Callable[[], str]:
    return those("data.source", SOURCES, lambda source: source.reads(key))


OF_ARRAYS = those("data.source", SOURCES, lambda source: source.arrays)
OF_FILES = those("data.source", SOURCES, lambda source: source.arrays or source.path == "FOLDER")
"""Sources that read a mask and a stored condition of each image."""
OF_FIELDS = "data.values=float16|float32"
OF_NOISE = those("diffusion.objective", OBJECTIVES, lambda objective: objective.diffuses)
OF_TIMESTEPS = those("schedule", SCHEDULES, lambda schedule: not schedule.continuous)
ONE_SIZE = "data.buckets=null"
PIXELS = "data.autoencoder=null"
LATENTS = "data.autoencoder"


def height_and_width(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def written(size: tuple[int, int]) -> str:
    """Return (height, width) as a spec may say it: 64, or [64,96]."""
    return str(size[0]) if size[0] == size[1] else f"[{size[0]},{size[1]}]"
