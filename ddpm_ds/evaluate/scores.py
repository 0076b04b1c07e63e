"""The real images that drawn ones are compared with: those of the prepared store that was learned.

What is computed of drawn images and the real ones of a store; each score says what it is and of how many.

Scores as a table for people and as JSON for programs, and a picture of what was scored.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddpm_ds.checkpoint.manifest import read_manifest
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.loader import shuffled
from ddpm_ds.data.prepare import cache_path, prepare
from ddpm_ds.errors import DataError
from ddpm_ds.evaluate import FEWEST_IMAGES, METRICS, OF_INCEPTION

if TYPE_CHECKING:
    from ddpm_ds.evaluate.trained import Trained
import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import Tensor

import ddpm_ds
from ddpm_ds.checkpoint.folder import write_file
from ddpm_ds.command_line import aligned, cache_folder
from ddpm_ds.data.pictures import grid, write_png
from ddpm_ds.errors import EvaluationError, OutputError
from ddpm_ds.evaluate.classifier import DigitsClassifier
from ddpm_ds.evaluate.draw import Request
from ddpm_ds.evaluate.inception import (
    LARGEST_SIDE_PIXELS,
    Gaussian,
    Inception,
    Unavailable,
    find_inception,
    frechet_distance,
    inception_scores,
    kid_subset_images,
    pixel_gaussian,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpm_ds.evaluate.draw import Request

    pass
    from ddpm_ds.evaluate.trained import Trained


def open_reference(trained: Trained, given: Path | None, progress: bool) -> DatasetCache:
    """The store at ``given``, else that of the checkpoint's spec, prepared where it is missing; checksums verified.

    Of a run that has learned crops, the centres of the images.

    Raises:
        DataError: there is none, it is damaged, or it does not hold the images that were learned.
    """
    store = DatasetCache.open(given, progress=progress) if given is not None else _own_store(trained, progress)
    if trained.spec is not None:
        if store.meta.sha256 != read_manifest(Path(trained.origin)).data_sha256:
            raise DataError(
                f"{store.path} holds other images than those that {trained.origin} learned; name theirs with "
                "--store DIR"
            )
        store = store.centre(trained.spec.data.image_size)
    if store.meta.shape != trained.image_shape:
        stored, drawn = ("x".join(map(str, shape)) for shape in (store.meta.shape, trained.image_shape))
        raise DataError(f"--store {store.path} has images of {stored}, {trained.origin} draws {drawn}; name another")
    classes = trained.unet_spec.classes
    if classes is not None and classes != len(store.meta.classes):
        raise DataError(
            f"--store {store.path} has {len(store.meta.classes)} classes, {trained.origin} has {classes}; name another"
        )
    return store


def _own_store(trained: Trained, progress: bool) -> DatasetCache:
    if trained.spec is None:
        raise DataError(
            f"{trained.origin} is an export, which does not say what it learned; name the prepared store of its images "
            "with --store DIR"
        )
    data = trained.spec.data
    path = cache_path(data)
    if not path.exists() and data.path is not None and not data.path.is_dir():
        raise DataError(f"there is neither a prepared store at {path} nor a folder {data.path}; give --store DIR")
    return prepare(data, progress)


def labels_like(store: DatasetCache, count: int) -> list[int]:
    """``count`` labels in the proportions of the store, or all of its labels, to be gone through again."""
    return [int(label) for label in store.labels[shuffled(len(store))[:count]]]


Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Score:
    """One number, with what it takes to read it."""

    name: str
    """In MLflow after ``eval/``."""
    title: str
    value: float | None
    """Of the drawn images; None where only real images have it."""
    samples: int
    references: int
    tool: str
    real: float | None = None
    """The same of real images, where that is something."""
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """As it is logged."""
        values = {f"eval/{self.name}": self.value, f"eval/{self.name}_real": self.real}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Scorer:
    """Which scores can be had, and what they are computed with."""

    metrics: tuple[str, ...]
    store: DatasetCache
    inception: Inception | None
    cache: Path

    @classmethod
    def prepare(
        cls, asked: Sequence[str] | None, store: DatasetCache, weights: Path | None, say: Callable[[str], None]
    ) -> Scorer:
        """Find out what can be had of the metrics ``asked`` for, of all where None; ``say`` names what can't.

        Raises:
            EvaluationError: one was asked for by name and can't be had.
        """
        if len(store) < FEWEST_IMAGES:
            raise EvaluationError(f"{store.path} has {len(store)} images, too few to compare with; use a larger store")
        wanted = set(METRICS if asked is None else asked)
        if "digits" in wanted and store.meta.source != "digits":
            if asked is not None:
                raise EvaluationError(
                    f"--metrics digits: the classifier reads handwritten digits, and {store.path} is of source "
                    f"{store.meta.source}; leave digits out"
                )
            wanted.remove("digits")
        inception = None
        if needing := [name for name in OF_INCEPTION if name in wanted]:
            try:
                inception = find_inception(weights)
            except Unavailable as reason:
                if asked is not None:
                    raise EvaluationError(f"--metrics {','.join(needing)} can't be had: {reason}") from None
                say(f"FID, KID, precision and recall are left out: {reason}")
                wanted.difference_update(OF_INCEPTION)
        return cls(tuple(name for name in METRICS if name in wanted), store, inception, cache_beside(store.path))

    def scores(self, images: Pixels, labels: Tensor | None, device: torch.device, progress: bool) -> list[Score]:
        """Of uint8 ``images`` (N, C, H, W); ``labels`` (N,) are the classes that they were asked to be, if any."""
        found = []
        if self.inception is not None:
            found += self._of_inception(self.inception, images, device, progress)
        if "pixel" in self.metrics:
            found.append(self._of_pixels(images))
        if "digits" in self.metrics:
            found += self._of_digits(images, None if labels is None else labels.numpy())
        return found

    def _of_inception(self, inception: Inception, images: Pixels, device: torch.device, progress: bool) -> list[Score]:
        values = inception_scores(
            inception,
            images,
            self.store.images,
            reference_sha256=self.store.key,
            cache=self.cache,
            wanted=self.metrics,
            device=device,
            progress=progress,
        )
        subset = kid_subset_images(len(images), len(self.store))
        details = {"kid": {"standard_deviation": values.pop("kid_std", None), "subset_images": subset}}
        titles = {"fid": "FID", "kid": "KID", "precision": "precision", "recall": "recall"}
        counts = (len(images), len(self.store), inception.tool)
        return [
            Score(f"{name}_{short(len(images))}", titles[name], value, *counts, details=details.get(name, {}))
            for name, value in values.items()
        ]

    def _of_pixels(self, images: Pixels) -> Score:
        reference, halves = self._pixels_of_reference()
        return Score(
            f"pixel_frechet_{short(len(images))}",
            f"pixel Fréchet distance, {reference.dims:,} dims",
            frechet_distance(pixel_gaussian(images), reference),
            len(images),
            len(self.store),
            f"ddpm_ds {ddpm_ds.__version__}",
            real=halves,
            details={"dims": reference.dims, "real_is": "between two halves of the reference"},
        )

    def _pixels_of_reference(self) -> tuple[Gaussian, float]:
        """The Gaussian of the reference, and the distance between those of its halves; kept in the cache."""
        path = self.cache / f"{self.store.key[:16]}-pixels{LARGEST_SIDE_PIXELS}.safetensors"
        try:
            kept = load_file(path)
            return Gaussian(kept["mean"], kept["covariance"]), float(kept["halves"])
        except (OSError, SafetensorError, KeyError):  # not there, or damaged
            order = shuffled(len(self.store))
            fitted = pixel_gaussian(self.store.images)
            first, second = (pixel_gaussian(self.store.images[np.sort(half)]) for half in np.array_split(order, 2))
            halves = frechet_distance(first, second)
            values = {"mean": fitted.mean, "covariance": fitted.covariance, "halves": np.array(halves)}
            with contextlib.suppress(OSError):  # it only saves time
                write_file(path, save(values))
            return fitted, halves

    def _of_digits(self, images: Pixels, labels: Labels | None) -> list[Score]:
        classifier = DigitsClassifier(np.asarray(self.store.images), self.store.labels)
        read, real = classifier.read(images), classifier.real
        counts = (len(images), len(real.labels))
        tool = f"classifier of {classifier.trained_on:,} other real digits, ddpm_ds {ddpm_ds.__version__}"
        shares = {"shares": read.shares, "shares_real": real.shares}
        accuracy = None if labels is None else read.accuracy(labels)
        scores = [
            ("top_probability", "digits: mean top probability", read.top_probability, real.top_probability, {}),
            ("class_balance", "digits: class balance, entropy / log 10", read.balance, real.balance, shares),
            ("accuracy", "digits: read as their label", accuracy, classifier.real_accuracy, {}),
        ]
        return [
            Score(f"digits_{name}", title, value, *counts, tool, real=of_real, details=details)
            for name, title, value, of_real, details in scores
        ]


def cache_beside(store: Path) -> Path:
    """A folder for what is computed of the reference once: beside the store, or in the home folder's cache.

    Raises:
        OutputError: neither can be written.
    """
    folder = store.resolve().parent / "evaluation_cache"
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
    if os.access(folder, os.W_OK):
        return folder
    own = cache_folder()
    try:
        own.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{own} can't be made ({error.strerror}), nor {folder}; name a folder for caches with XDG_CACHE_HOME"
        ) from None
    return own


def short(count: int) -> str:
    """A count in a metric's name: 10k, 500."""
    return f"{count // 1000}k" if count % 1000 == 0 else str(count)


SCORES, PICTURE = "scores.json", "samples.png"
FILES = (SCORES, PICTURE)
HEADER = ("score", "value", "of real", "samples", "reference", "sampler", "steps", "weights", "guidance", "tool")
TEXT_COLUMNS = {0, 5, 7, 9}


def table(scores: Sequence[Score], drawn: Request) -> str:
    """A line for each score, with all that it depends on; then the shares of classes, where there are any."""
    sampler = drawn.sampler
    guidance = "-" if drawn.labels is None else f"{sampler.guidance:g}"
    how = (sampler.kind, str(sampler.steps), drawn.weights, guidance)
    rows = [HEADER]
    for score in scores:
        value, real = _number(score.value), _number(score.real)
        rows.append((score.title, value, real, f"{score.samples:,}", f"{score.references:,}", *how, score.tool))
    lines = aligned(rows, TEXT_COLUMNS)
    for score in scores:
        if "shares" in score.details:
            lines += ["", *_shares(score.details)]
    return "\n".join(lines)


def _shares(details: Mapping[str, Any]) -> list[str]:
    rows = [("class", *map(str, range(len(details["shares"]))))]
    for title, key in (("samples", "shares"), ("of real", "shares_real")):
        rows.append((title, *(f"{share:.1%}" for share in details[key])))
    return aligned(rows, {0})


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def about(drawn: Request, store: DatasetCache) -> dict[str, Any]:
    """What the scores are of."""
    labels = None if drawn.labels is None else "in the proportions of the reference"
    reference = {"store": str(store.path), "images": len(store), "sha256": store.meta.sha256}
    versions = {"ddpm_ds": ddpm_ds.__version__, "torch": torch.__version__}
    return {**drawn.model_dump(mode="json"), "labels": labels, "reference": reference, "version": versions}


def write_report(folder: Path, facts: Mapping[str, Any], scores: Sequence[Score], pictured: Pixels) -> None:
    """Write :data:`FILES` into ``folder``: the scores and the facts :func:`about` them as JSON, and some images.

    Scores of an earlier evaluation of the same images against the same reference stay, unless they are made anew.

    Raises:
        OSError: the file system refuses.
    """
    path, new = folder / SCORES, [asdict(score) for score in scores]
    try:
        before = json.loads(path.read_text())
        kept = before["scores"] if before["reference"]["sha256"] == facts["reference"]["sha256"] else []
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not ours
        kept = []
    names = {score["name"] for score in new}
    content = {**facts, "scores": [score for score in kept if score["name"] not in names] + new}
    write_file(path, (json.dumps(content, indent=2) + "\n").encode())
    write_png(grid(torch.from_numpy(np.array(pictured))), folder / PICTURE)
