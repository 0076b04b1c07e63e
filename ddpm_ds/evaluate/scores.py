"""What is computed of drawn images and the real ones of a store; each score says what it is and of how many."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import Tensor

import ddpm_ds
from ddpm_ds.checkpoint.folder import write_file
from ddpm_ds.command_line import cache_folder
from ddpm_ds.data.split import shuffled
from ddpm_ds.data.store import Store
from ddpm_ds.errors import EvaluationError, OutputError
from ddpm_ds.evaluate.digits_classifier import DigitsClassifier
from ddpm_ds.evaluate.frechet import LARGEST_SIDE_PIXELS, Gaussian, frechet_distance, pixel_gaussian
from ddpm_ds.evaluate.inception import Inception, Unavailable, find_inception, inception_scores, kid_subset_images
from ddpm_ds.evaluate.metric_names import FEWEST_IMAGES, METRICS, OF_INCEPTION

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
    store: Store
    inception: Inception | None
    cache: Path

    @classmethod
    def prepare(
        cls, asked: Sequence[str] | None, store: Store, weights: Path | None, say: Callable[[str], None]
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
