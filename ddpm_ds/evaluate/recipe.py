"""The record of drawn images: what they follow from, which ones, and in which batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from ddpm_ds.checkpoint.consolidate import DTYPES
from ddpm_ds.errors import OutputError
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.spec import SamplerSpec

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


class Job(Request):
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
