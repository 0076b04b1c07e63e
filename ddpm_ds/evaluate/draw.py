"""One batch of images from trained weights, and the options that say how images are drawn.

The record of drawn images: what they follow from, which ones, and in which batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, get_args

from pydantic import ValidationError

from ddpm_ds.config.spec import SamplerSpec, check_sampler
from ddpm_ds.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

    from ddpm_ds.evaluate.trained import Trained
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ddpm_ds.device import DTYPES
from ddpm_ds.errors import OutputError
from ddpm_ds.evaluate.trained import Trained

FLAGS = ("steps", "eta", "spacing", "variance", "clip", "guidance")
"""Fields of the sampler that have a flag of their name; `kind` has --sampler."""


def draw(
    trained: Trained,
    sampler: SamplerSpec,
    index: Tensor,
    *,
    labels: Tensor | None,
    seed: int,
    after_step: Callable[[int], None] | None = None,
) -> Tensor:
    """The images with indices ``index`` (N,) int64 as uint8 (N, C, H, W) on the CPU: one batch, one process.

    An image is a function of (weights, sampler, seed, index, label), up to rounding: not of the batch it is part of.
    ``labels`` (N,) int64, or None for no label. ``after_step`` gets the number of U-Net evaluations done so far.
    """
    import torch

    from ddpm_ds.diffusion.samplers import Drawing, Sampler

    device = next(trained.unet.parameters()).device
    with torch.inference_mode():
        drawing = Drawing(
            Sampler(sampler, trained.diffusion),
            seed=seed,
            index=index.to(device),
            shape=trained.image_shape,
            labels=None if labels is None else labels.to(device),
            guidance=sampler.guidance,
            no_label=trained.unet_spec.classes,
        )
        for number in range(drawing.calls):
            drawing.take(trained.unet(*drawing.inputs()))
            if after_step is not None:
                after_step(number + 1)
        return drawing.images().cpu()


def add_sampler_options(parser: argparse.ArgumentParser) -> None:
    """How images are drawn; what is not given is as the run's own sampler has it."""
    group = parser.add_argument_group("sampler", "what is not given is as the section `sampler` of the run has it")
    group.add_argument(
        "--sampler",
        choices=_choices("kind"),
        help="ddpm adds noise in every step, ddim may (--eta), dpm_solver needs the fewest steps",
    )
    group.add_argument(
        "--steps", type=int, metavar="N", help="evaluations of the U-Net per image (20 dpm_solver, 50 ddim, all ddpm)"
    )
    group.add_argument("--eta", type=float, metavar="X", help="noise that ddim adds: 0 none, 1 as much as ddpm")
    group.add_argument("--spacing", choices=_choices("spacing"), help="which timesteps are visited")
    group.add_argument("--variance", choices=_choices("variance"), help="of ddpm's steps")
    group.add_argument("--clip", choices=_choices("clip"), help="how predicted clean images are kept in range")
    group.add_argument(
        "--guidance", type=float, metavar="W", help="classifier-free guidance: 1 is none, 0 leaves out the class"
    )


def sampler_from(
    options: argparse.Namespace, sampler: SamplerSpec, *, timesteps: int, classes: int | None
) -> SamplerSpec:
    """The sampler that the flags of :func:`add_sampler_options` make of the run's own one.

    Another kind than the run's begins with its own number of steps and without added noise.

    Raises:
        SpecError: a flag is out of range, or asks for what the sampler, the process or the U-Net does not have.
    """
    changes = {name: value for name in FLAGS if (value := getattr(options, name)) is not None}
    if options.sampler not in (None, sampler.kind):
        changes = {"kind": options.sampler, "steps": None, "eta": 0.0, **changes}
    try:
        changed = SamplerSpec.model_validate({**sampler.model_dump(), **changes})
    except ValidationError as error:
        fault = error.errors()[0]
        raise SpecError(f"--{fault['loc'][0]} {fault['input']}: {_lower(fault['msg'])}") from None
    if options.variance is not None and changed.kind != "ddpm":
        raise SpecError(f"--variance is of ddpm, not of {changed.kind}; leave it out or use --sampler ddpm")
    try:
        check_sampler(changed, timesteps=timesteps, classes=classes)
    except ValueError as error:
        raise SpecError(str(error).replace("sampler.", "--").replace("use kind ddim", "use --sampler ddim")) from None
    return changed


def _choices(field: str) -> tuple[str, ...]:
    """The values of a Literal of the spec."""
    return get_args(SamplerSpec.model_fields[field].annotation)


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


AnyRecipe = TypeVar("AnyRecipe", bound="Recipe")


class Recipe(BaseModel):
    """What every pixel of image i follows from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    origin: str
    """Where the weights were; the same weights may have moved."""
    weights: str
    images_seen: int | None
    digest: str
    """Of the weights."""
    precision: str
    sampler: SamplerSpec
    """With the number of steps filled in."""
    seed: int
    labels: tuple[int, ...] | None
    """Image i has label number i modulo their number; None draws without labels."""

    @classmethod
    def of(cls, trained: Trained, sampler: SamplerSpec, seed: int, labels: Sequence[int] | None, **more: int) -> Self:
        """The record of images of ``trained``."""
        stored = next(trained.unet.parameters()).dtype
        return cls(
            origin=trained.origin,
            weights=trained.weights,
            images_seen=trained.images_seen,
            digest=trained.digest,
            precision=next(name for name, (_, dtype) in DTYPES.items() if dtype is stored),
            sampler=sampler.model_copy(update={"steps": sampler.steps_of(trained.diffusion.timesteps)}),
            seed=seed,
            labels=None if labels is None else tuple(labels),
            **more,
        )

    def only(self, kind: type[AnyRecipe]) -> AnyRecipe:
        """The part that a simpler record has."""
        return kind.model_validate(self.model_dump(include=set(kind.model_fields)))

    def difference(self, there: Self) -> str:
        """What decides pixels and is otherwise ``there``, by name; empty when its images are these images."""
        mine, theirs = _flat(self), _flat(there)
        return ", ".join("weights" if name == "digest" else name for name in mine if mine[name] != theirs[name])

    def dump(self) -> bytes:
        """As JSON for people and :meth:`read`."""
        return (self.model_dump_json(indent=2) + "\n").encode()

    @classmethod
    def read(cls, content: bytes | str) -> Self | None:
        """What :meth:`dump` has written; None for anything else."""
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            return None

    def labels_of(self, index: Sequence[int]) -> Tensor | None:
        """The labels of images, (N,) int64."""
        return None if self.labels is None else torch.tensor([self.labels[i % len(self.labels)] for i in index])


class Request(Recipe):
    """Some images of a recipe."""

    first: int
    count: int

    @property
    def index(self) -> range:
        return range(self.first, self.first + self.count)


class SavedRequest(Request):
    """How they are drawn: a batch of another size gives the same images only up to rounding."""

    batch_images: int

    @property
    def batches(self) -> list[range]:
        """The image indices of each batch."""
        starts = range(self.first, self.first + self.count, self.batch_images)
        return [range(start, min(start + self.batch_images, self.index.stop)) for start in starts]


def refuse_other(path: Path, asked: AnyRecipe, there: AnyRecipe | None) -> None:
    """Raises OutputError unless ``path`` holds ``there`` what is asked for."""
    if there is None:
        raise OutputError(f"{path} exists and does not say how it was drawn; remove it, or name another --out")
    if difference := asked.difference(there):
        raise OutputError(f"{path} was drawn with other {difference}; remove it, or name another --out")


def _flat(recipe: Recipe) -> dict[str, Any]:
    """The values that decide pixels, nested ones under dotted names."""
    values = recipe.model_dump(exclude={"origin", "weights", "images_seen", "sampler"})
    return values | {f"sampler.{name}": value for name, value in recipe.sampler}
