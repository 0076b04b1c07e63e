"""Fréchet distance between Gaussians, and with it a distance between two sets of images by their raw pixels.

It sees brightness, colours and which pixels vary together. It knows nothing of what is pictured, and no number of it
compares with an FID.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

Array = npt.NDArray[np.float64]
LARGEST_SIDE_PIXELS = 32
"""Larger images are averaged down to this size: a covariance of more pixels needs more images than there are."""
CHUNK_IMAGES = 4096


@dataclass(frozen=True)
class Gaussian:
    """The mean (D,) and the covariance (D, D) of a set, float64."""

    mean: Array
    covariance: Array

    @property
    def dims(self) -> int:
        """D."""
        return len(self.mean)


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """|m_a - m_b|^2 + tr(A + B - 2 (A B)^(1/2)), the squared 2-Wasserstein distance (Dowson and Landau 1982).

    The trace of (A B)^(1/2) is the sum of the singular values of A^(1/2) B^(1/2). Both roots come from eigenvalues of
    symmetric matrices, without those that are zero but for rounding: so it is exact for singular covariances, too.
    """
    difference = a.mean - b.mean
    common = np.linalg.svd(_root(a.covariance).T @ _root(b.covariance), compute_uv=False).sum()
    distance = difference @ difference + np.trace(a.covariance) + np.trace(b.covariance) - 2 * common
    return max(float(distance), 0.0)


def _root(covariance: Array) -> Array:
    """R (D, rank) with R R^T = covariance."""
    values, vectors = np.linalg.eigh(covariance)
    kept = values > values[-1] * len(values) * np.finfo(np.float64).eps
    return vectors[:, kept] * np.sqrt(values[kept])


def pixel_gaussian(images: npt.NDArray[np.uint8]) -> Gaussian:
    """The Gaussian of uint8 images (N, C, H, W), N > 1, as vectors of pixels in [-1, 1].

    D = C x 32 x 32, or less where the images are smaller.
    """
    total: Array = np.zeros(())
    products: Array = np.zeros(())
    for pixels in _vectors(images):
        total = total + pixels.sum(0)
        products = products + pixels.T @ pixels
    mean = total / len(images)
    # Sums of products lose the digits that mean and spread share; pixels in [-1, 1] have few of those to lose.
    return Gaussian(mean, (products - len(images) * np.outer(mean, mean)) / (len(images) - 1))


def _vectors(images: npt.NDArray[np.uint8]) -> Iterator[Array]:
    """Pixels (n, D) of some images at a time."""
    for first in range(0, len(images), CHUNK_IMAGES):
        chunk = torch.from_numpy(np.array(images[first : first + CHUNK_IMAGES])).double()  # (n, C, H, W)
        if max(chunk.shape[2:]) > LARGEST_SIDE_PIXELS:
            chunk = F.adaptive_avg_pool2d(chunk, LARGEST_SIDE_PIXELS)
        yield (chunk / 127.5 - 1).flatten(1).numpy()
