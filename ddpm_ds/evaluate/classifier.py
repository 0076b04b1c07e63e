"""Reference classifier of handwritten digits: tells whether a drawn image looks like a digit, and like which one.

It is a logistic regression on radial basis functions around real digits. Far from all of them every basis function is
near zero, so no class is probable. Noise and grey are therefore not recognised; a plain network would recognise them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ddpm_ds.evaluate.inception import Pixels

Labels = npt.NDArray[np.int64]

SIDE_PIXELS = 8
GAMMA, BASES, INVERSE_PENALTY = 0.2, 600, 100.0
"""Kernel width, number of basis functions and inverse penalty, chosen for the likelihood of held-out digits."""
HELD_OUT_FRACTION = 0.25


@dataclass(frozen=True)
class Reading:
    """Classes that the classifier assigns to a set of images."""

    labels: Labels
    """Most probable class of each image, (N,)."""
    top_probability: float
    """Mean probability of an image's most probable class."""
    recognised: float
    """Share of the images whose most probable class has a probability above a half."""
    shares: tuple[float, ...]
    """Share of each class among the ``labels``."""

    @property
    def balance(self) -> float:
        """Entropy of the shares, relative to that of equal shares: 1 if all classes are equally frequent, 0 if there is
        only one.
        """
        shares = np.array(self.shares)
        return float(0.0 - (shares * np.log(np.where(shares > 0, shares, 1.0))).sum() / np.log(len(shares)))

    def accuracy(self, labels: Labels) -> float:
        """Return the share of images whose most probable class is their label (N,)."""
        return float((self.labels == labels).mean())


class DigitsClassifier:
    """Classifier trained on three quarters of the real digits; the same digits always give the same classifier."""

    def __init__(self, images: Pixels, labels: Labels) -> None:
        """Train on ``images`` (N, C, H, W) with ``labels`` (N,)."""
        from sklearn.kernel_approximation import Nystroem
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import train_test_split
        from sklearn.pipeline import make_pipeline

        known, held_out = train_test_split(
            np.arange(len(labels)), test_size=HELD_OUT_FRACTION, stratify=labels, random_state=0
        )
        self._model = make_pipeline(
            Nystroem(gamma=GAMMA, n_components=min(BASES, len(known)), random_state=0),
            LogisticRegression(C=INVERSE_PENALTY, max_iter=1000),
        )
        self._model.fit(_features(images[known]), labels[known])
        self.trained_on = len(known)
        self.real = self.read(images[held_out])
        """Reading of the real digits that the classifier was not trained on."""
        self.real_accuracy = self.real.accuracy(labels[held_out])

    def features(self, images: Pixels) -> npt.NDArray[np.float64]:
        """Return the inputs of the regression, (N, bases), for uint8 images (N, C, H, W)."""
        return np.asarray(self._model[:-1].transform(_features(images)))

    def read(self, images: Pixels) -> Reading:
        """Read the classes of uint8 images (N, C, H, W)."""
        probabilities = self._model.predict_proba(_features(images))  # (N, classes)
        classes = self._model.classes_
        labels = classes[probabilities.argmax(1)]
        shares = np.bincount(labels, minlength=classes[-1] + 1) / len(labels)
        top = probabilities.max(1)
        return Reading(labels, float(top.mean()), float((top > 0.5).mean()), tuple(shares.tolist()))


def _features(images: Pixels) -> npt.NDArray[np.float64]:
    """Return the images averaged to 8 x 8 grey values in [0, 1], as (N, 64)."""
    grey = torch.from_numpy(np.array(images)).double().mean(1, keepdim=True) / 255
    return np.asarray(F.adaptive_avg_pool2d(grey, SIDE_PIXELS).flatten(1).numpy())
