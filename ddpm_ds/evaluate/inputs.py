"""Inputs that images are drawn for, by number: the held-out images of a run, or a file or folder of conditions.

Image number I of a request with K members is member I % K of input I // K. A trained regression predicts fields from
such inputs, and its residuals are cached as a data set.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpm_ds.checkpoint.manifest import read_manifest
from ddpm_ds.data.cache import CONDITION, IMAGES, DatasetCache, Indices, Subset, by_field
from ddpm_ds.data.captions import first_captions
from ddpm_ds.data.held_out import parts, prepare_held_out, training_and_held_out
from ddpm_ds.data.inputs import HOLE, Reading, open_inputs
from ddpm_ds.data.latents import condition_of, condition_pixels, pixels_of, rectangles
from ddpm_ds.data.spec import ConditionSpec, DataSpec
from ddpm_ds.diffusion.condition import REST_SEED, Condition, Moves
from ddpm_ds.diffusion.samplers import Drawing, Sampler
from ddpm_ds.evaluate.trained import Trained, load_trained
from ddpm_ds.ground.errors import DataError, SpecError
from ddpm_ds.ground.keyed import Draws, Stream
from ddpm_ds.schema.choices import OBJECTIVES
from ddpm_ds.schema.types import written

HELD_OUT = "held-out"
"""Value of ``--conditions`` for the images that a run has held out, and of ``--prompts`` for their captions."""
CONDITION_KEYS = ("kind", "variables", "channels", "constants", "constant_channels", "vector", "vector_size")
"""Keys of the condition that must be equal in a regression and in the run on its residuals."""


class Stored(Protocol):
    """Values of one kind for each image, on disk."""

    def read(self, positions: Indices, /) -> npt.NDArray[Any]:
        """Return the values (n, ...) at ``positions`` (n,)."""


@dataclass(frozen=True)
class Inputs:
    """Conditions for images of ``trained``; input i is stored at ``positions[i]``."""

    trained: Trained
    fields: Mapping[str, Stored] = field(repr=False)
    """Values by name: the sources of conditions, and a mask of the true images, if they have one."""
    positions: Indices
    key: str
    """Checksum that changes whenever the inputs do."""
    truths: Callable[[Indices], npt.NDArray[Any] | None] = lambda positions: None
    """Function from positions to true images; it returns None if they are not known."""
    labels: Indices | None = None
    """Labels (inputs,) int64; None if no classes are known."""
    are_residuals: bool = False
    """Whether the true images are residuals, as a U-Net draws that was trained on residuals."""

    @classmethod
    def open(cls, conditions: Path, trained: Trained) -> Self:
        """Open the value of ``--conditions``: a file or folder, or the run's held-out images."""
        if str(conditions) == HELD_OUT and not conditions.exists():
            return cls.held_out(trained)
        return cls.at(conditions, trained)

    @classmethod
    def held_out(cls, trained: Trained, dataset: Path | None = None) -> Self:
        """Open the held-out images of a run with a condition; raises as :func:`held_out_images`."""
        _conditioned(trained)
        cache, positions = held_out_images(trained, f"--conditions {HELD_OUT}", dataset)
        key = hashlib.sha256(f"{cache.key} {positions.tolist()}".encode()).hexdigest()
        labels = None if trained.unet_spec.classes is None else cache.labels[positions]

        def read(positions: Indices) -> npt.NDArray[Any]:
            found = cache.images.read(positions)
            return found if trained.autoencoder is None else trained.to_pixels(torch.from_numpy(found)).numpy()

        return cls(trained, cache.fields, positions, key, read, labels, are_residuals=True)

    @classmethod
    def at(cls, path: Path, trained: Trained) -> Self:
        """Open conditions in a file or folder; raises DataError if they are not of the kind that the run learned."""
        data = _conditioned(trained)
        found = open_inputs(data if trained.autoencoder is None else pixels_of(data), trained.facts, path)
        key, fields = hashlib.sha256(found.key.encode()).hexdigest(), found.fields
        if trained.autoencoder is not None:
            fields = {CONDITION: Reading(partial(_encoded, trained, found.fields))}
        elif trained.facts is None and data.condition_is_stored:
            fields = {CONDITION: found.fields[IMAGES]}
        return cls(trained, fields, np.arange(found.count), key, found.truths)

    @classmethod
    def of_states(cls, trained: Trained, states: Tensor) -> Self:
        """Return inputs made of drawn images (n, C, H, W) in physical units."""
        fields = {CONDITION: Reading(lambda positions: states.numpy()[positions])}
        return cls(trained, fields, np.arange(len(states)), "")

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def are_known(self) -> bool:
        """Whether the true image of the first input is known."""
        return self.truths(self.positions[:1]) is not None

    def condition(self, numbers: Sequence[int], device: torch.device) -> Condition:
        """Return the conditions of the inputs with these ``numbers``; each input is read once."""
        different, places = np.unique(np.asarray(numbers, np.int64), return_inverse=True)
        trained, conditions = self.trained, self.trained.conditions
        names = [name for name in (*conditions.reads, HOLE) if name in self.fields]
        fields = {name: self._read(name, different).to(device) for name in names}
        found = conditions.at_rest(fields, torch.from_numpy(different).to(device), trained.scale)
        every = torch.from_numpy(places).to(device)
        return found.each(lambda tensor: tensor[every])

    def shown(self, numbers: Sequence[int]) -> Tensor | None:
        """Return pictures of inputs (n, c, H, W), float32 in stored units, on the CPU; None without channels."""
        trained, condition = self.trained, self.condition(numbers, self.trained.device)
        if trained.autoencoder is not None:
            return condition_pixels(trained.coder, trained.conditions.spec, condition.channels).cpu().float()
        found = trained.conditions.shown(condition, trained.scale)
        return None if found is None else found.cpu()

    def truth(self, numbers: Sequence[int]) -> Tensor | None:
        """Return the true images (n, C, H, W), float32 in physical units or, for pictures, 0 to 255; None if they are
        not known. Masked values are the mean of their channel.
        """
        found = self.truths(self._at(numbers))
        if found is None:
            return None
        images = Moves(self.trained.picture_shape[1:]).of(torch.from_numpy(found)).float()
        base = self.base(numbers) if self.are_residuals else None
        return images if base is None else images + base

    def mask(self, numbers: Sequence[int]) -> Tensor | None:
        """Return the mask of the true images (n, 1 or C, H, W), uint8, not 0 where a pixel counts; None if all do, as
        of latents.
        """
        if "mask" not in self.fields or self.trained.autoencoder is not None:
            return None
        return Moves(self.trained.data.size).of(self._read("mask", np.asarray(numbers, np.int64)))

    def base(self, numbers: Sequence[int]) -> Tensor | None:
        """Return the regression's predictions (n, C, H, W), float32 on the CPU; None if residuals are not drawn."""
        regression = self.trained.regression
        return None if regression is None else replace(self, trained=regression).predicted(numbers)

    def predicted(self, numbers: Sequence[int]) -> Tensor:
        """Return predictions (n, C, H, W) of a regression, ``trained``: float32 in physical units, on the CPU."""
        trained, device = self.trained, self.trained.device
        with torch.inference_mode():
            drawing = Drawing(
                Sampler(trained.sampler, trained.diffusion),
                seed=0,
                index=torch.tensor(numbers, device=device),
                shape=trained.image_shape,
                conditions=(self.condition(numbers, device), None),
            )
            for _ in range(drawing.calls):
                drawing.take(trained.unet(*drawing.inputs()))
            return trained.finished(drawing.images()).float().cpu()

    def _read(self, name: str, numbers: Indices) -> Tensor:
        return torch.from_numpy(self.fields[name].read(self._at(numbers)))

    def _at(self, numbers: Sequence[int] | Indices) -> Indices:
        """Return the positions of inputs; with prompts, a single input has all numbers."""
        return self.positions[np.asarray(numbers, np.int64) % len(self)]


def _encoded(trained: Trained, fields: Mapping[str, Stored], positions: Indices) -> npt.NDArray[Any]:
    """Return the conditions (n, c, h, w) of a U-Net on latents, float32, from the pictures at ``positions``; without
    masks, rectangles are cut out.
    """
    spec, pixels = trained.conditions.spec, torch.from_numpy(fields[IMAGES].read(positions))
    if spec.kind == "stored":
        given = pixels
    elif HOLE in fields:
        given = torch.from_numpy(fields[HOLE].read(positions))
    else:
        drawn = Draws(REST_SEED, torch.from_numpy(positions), {Stream.CUT: 4}).uniform(Stream.CUT)
        given = rectangles(drawn, spec.cut, trained.picture_shape[1:])
    return condition_of(trained.coder, spec, pixels, given).numpy()


def check_ahead(trained: Trained) -> None:
    """Raise SpecError unless images that ``trained`` draws can be conditions of its next images."""
    data = _conditioned(trained)
    condition = data.condition or ConditionSpec()
    fault = None
    if condition.kind != "stored" or trained.facts is None or not trained.are_fields:
        fault = "has no stored condition of fields"
    elif condition.vector:
        fault = f"needs a vector for each step (data.condition.vector = {', '.join(condition.vector)})"
    elif [Path(name).name for name in condition.variables] != [Path(name).name for name in data.variables]:
        fault = "has other variables in data.condition.variables than in data.variables"
    elif trained.facts.fields[CONDITION].shape != trained.image_shape:
        fault = "has a condition of another size or number of channels than its images"
    if fault is not None:
        raise SpecError(f"--steps-ahead feeds an image back as the next condition, and {trained.origin} {fault}")


def check_unconditioned(trained: Trained) -> None:
    """Raise SpecError if ``trained`` draws images for inputs."""
    if trained.is_conditioned:
        either = f"give --conditions PATH or --conditions {HELD_OUT}"
        raise SpecError(f"{trained.origin} was trained with a condition (data.condition); {either}")


def _conditioned(trained: Trained) -> DataSpec:
    """Return the data section of a run with a condition; raise SpecError for a run without."""
    if not trained.is_conditioned:
        raise SpecError(f"--conditions: {trained.origin} was trained without a condition; leave it out")
    return trained.data


def held_out_images(
    trained: Trained, asked: str, dataset: Path | None = None, *, instead: str = "name a file or folder"
) -> Subset:
    """Return a run's held-out images, from its cache or a copy at ``dataset``, with the statistics of its training
    images. Messages name the option ``asked`` and the fix ``instead``.

    Raises:
        DataError: the cache is missing, damaged, or not the run's.
        SpecError: there is no run, or it has held out no image.
    """
    if trained.spec is None:
        raise SpecError(f"{asked}: {trained.origin} is an export; {instead}")
    data, group = trained.spec.data, trained.spec.bucket_group or 1
    if not data.held_out_images and data.held_out_path is None:
        raise SpecError(f"{asked}: {trained.origin} has held out no image (data.held_out_images = 0); {instead}")
    if dataset is not None and (data.text or data.buckets):
        fix = f"leave it out, and bring all of them to data.store_root = {data.store_root}"
        raise SpecError(f"--dataset {dataset}: {trained.origin} has text or buckets, in folders of their own; {fix}")
    learned, held_out = training_and_held_out(read_manifest(Path(trained.origin)).data_sha256)
    known = learned if data.held_out_path is None else held_out
    cache = prepare_held_out(data, group, known) if dataset is None else DatasetCache.open(dataset, progress=True)
    if by_field(cache.meta.sha256) != known:
        kind = "data set" if known is learned else "held-out data set"
        raise DataError(f"{cache.path} is not the {kind} of {trained.origin}; name that one")
    if trained.facts is not None:
        cache = cache.with_statistics(trained.facts.statistics)
    return parts(data, cache, cache)[1]


def held_out_captions(trained: Trained) -> list[str]:
    """Return the first caption of each held-out image of a run with text; raises as :func:`held_out_images`."""
    tags = None if trained.text is None else trained.text.tags
    return [*first_captions(*held_out_images(trained, f"--prompts {HELD_OUT}"), tags)]


class TrainedRegression:
    """Implements :class:`ddpm_ds.data.fields.Regression` for the averaged weights of a run.

    Raises SpecError: ``data.residual_of`` is no regression, or one of other fields than ``data``.
    """

    def __init__(self, data: DataSpec, device: torch.device) -> None:
        assert data.residual_of is not None, "the caller has set it"
        path = data.residual_of
        self._trained = load_trained(path, device=device)
        self.digest = self._trained.digest
        """Checksum of the weights."""
        objective = self._trained.diffusion.objective
        if self._trained.spec is None or OBJECTIVES[objective].diffuses:
            fault = f"its diffusion.objective is {objective}; name a run with diffusion.objective = regression"
            raise SpecError(f"data.residual_of = {path} is no regression: {fault}")
        its, asked = _compared(self._trained.data), _compared(data)
        for key, value in asked.items():
            if its[key] != value:
                fault = f"has {key} = {its[key]}, and this spec {value}; name a regression of the same fields"
                raise SpecError(f"data.residual_of = {path} {fault}")

    def predict(self, fields: DatasetCache, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the fields (n, C, H, W) that it predicts for ``positions`` (n,) of a cache, in their units."""
        if (facts := self._trained.facts) is not None:
            fields = fields.with_statistics(facts.statistics)  # masked values are read as in its training
        inputs = Inputs(self._trained, fields.fields, positions, key="")
        found: npt.NDArray[np.float32] = inputs.predicted(range(len(positions))).numpy()
        return found


def _compared(data: DataSpec) -> dict[str, object]:
    """Return values, as a spec has them, that must be equal in a regression and in the run on its residuals."""
    condition = data.condition or ConditionSpec()
    values = {"data.channels": data.channels, "data.image_size": written(data.size), "data.variables": data.variables}
    values |= {f"data.condition.{key}": getattr(condition, key) for key in CONDITION_KEYS}
    return {key: f"[{', '.join(value)}]" if isinstance(value, tuple) else value for key, value in values.items()}
