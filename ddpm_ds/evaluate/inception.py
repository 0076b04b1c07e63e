"""Fréchet distance between Gaussians, and with it a distance between two sets of images by their raw pixels.

It sees brightness, colours and which pixels vary together. It knows nothing of what is pictured, and no number of it
compares with an FID.

FID, KID, precision and recall, computed by torch-fidelity (extra ``fid``) from features of Inception v3.

FID: Heusel et al. 2017; KID: Binkowski et al. 2018; precision and recall: Kynkaanniemi et al. 2019, whose features are
those of VGG-16: on Inception's, as here and in ADM, the numbers are others.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import pickle
import socket
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from ddpm_ds.errors import EvaluationError

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


Pixels = npt.NDArray[np.uint8]

EXTRACTOR = "inception-v3-compat"
"""torch-fidelity's name of the port of the TensorFlow network by which FIDs are published."""
LAYER = "2048"
"""The pooled features before the classifier."""
KID_SUBSETS, KID_SUBSET_IMAGES = 100, 1000
NEIGHBOUR = 3
"""Precision and recall: a sample's ball reaches to its third nearest neighbour."""
DISTANCES_AT_ONCE = 2048
"""Rows of the matrices of distances behind precision and recall, which are not held whole."""
ANSWER_SECONDS = 8.0
"""For the host of the weights to answer; a network that swallows packets would hold an evaluation up for minutes."""
READ_SECONDS = 20.0
SAFE_TO_UNPICKLE: list[Any] = [np.empty(0).__reduce__()[0], np.ndarray, np.dtype, *(type(np.dtype(t)) for t in "fd")]
"""What torch-fidelity's cached statistics are made of besides tensors."""


class Unavailable(Exception):
    """Inception's scores can't be had on this machine; the message says why and what would help."""


@dataclass(frozen=True)
class Inception:
    """The network that there is."""

    weights: Path
    digest: str
    """sha256 of the file of its weights."""

    @property
    def tool(self) -> str:
        """What computes the scores."""
        return f"torch-fidelity {version('torch-fidelity')}, {EXTRACTOR} {self.digest[:8]}"


def find_inception(weights: Path | None) -> Inception:
    """Inception's weights: the file ``weights``, else those that torch-fidelity keeps, downloaded when missing.

    Raises:
        EvaluationError: ``weights`` was given and is no file of these weights.
        Unavailable: torch-fidelity is not installed, or its weights can't be downloaded or read.
    """
    if importlib.util.find_spec("torch_fidelity") is None:
        raise Unavailable("torch-fidelity is not installed; pip install 'ddpm_ds[fid]'")
    from torch_fidelity.utils import create_feature_extractor

    path = weights or _downloaded()
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        torch.load(path, map_location="cpu", weights_only=True)  # first: torch-fidelity would execute what is in it
        create_feature_extractor(
            EXTRACTOR, [LAYER], cuda=False, feature_extractor_weights_path=str(path), verbose=False
        )
    except (OSError, RuntimeError, TypeError, EOFError, pickle.UnpicklingError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not the weights of torch-fidelity's Inception v3"
        if weights is None:
            raise Unavailable(f"Inception's weights at {path} can't be used ({reason}); delete them") from None
        raise EvaluationError(f"--inception-weights {path} can't be used ({reason}); name another file") from None
    return Inception(path, digest)


def _downloaded() -> Path:
    from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

    url = str(URL_INCEPTION_V3)
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[1]
    if path.exists():
        return path
    try:
        _wait_for_answer(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _read_timeout():
            torch.hub.download_url_to_file(url, str(path), hash_prefix=path.stem.rsplit("-", 1)[1])
    except (OSError, RuntimeError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise Unavailable(
            f"Inception's weights can't be downloaded ({' '.join(str(reason).split())[:120]}); get {url} elsewhere and "
            "name the file with --inception-weights"
        ) from None
    return path


def _wait_for_answer(url: str) -> None:
    """Raises OSError unless ``url`` answers in time; a look-up of its name can't be given a limit by other means."""
    failure: list[OSError] = [TimeoutError(f"no answer in {ANSWER_SECONDS:g} s")]

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_SECONDS):
                failure.clear()
        except OSError as error:
            if not isinstance(getattr(error, "reason", error), TimeoutError):
                failure[0] = error

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS)
    for error in tuple(failure):
        raise error


@contextlib.contextmanager
def _read_timeout() -> Iterator[None]:
    """A limit for every read of the network; the function that downloads has none of its own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(READ_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def inception_scores(
    inception: Inception,
    images: Pixels,
    reference: Pixels,
    *,
    reference_sha256: str,
    cache: Path,
    wanted: Sequence[str],
    device: torch.device,
    progress: bool,
) -> dict[str, float]:
    """``fid``, ``kid`` and ``kid_std``, ``precision`` and ``recall`` of uint8 images (N, C, H, W) against others.

    ``wanted`` is some of ``fid``, ``kid``, ``pr``. The features of the reference are kept in ``cache``, by
    ``reference_sha256``, the weights and the version of torch-fidelity.
    """
    from torch_fidelity import calculate_metrics

    kept = f"{reference_sha256[:16]}-{version('torch-fidelity')}-{inception.digest[:16]}"
    _drop_damaged(cache, kept)
    with _Bar(images, "features of samples", progress) as samples, _Bar(reference, "reference", progress) as real:
        found = calculate_metrics(
            input1=samples,
            input2=real,
            input2_cache_name=kept,
            cache_root=str(cache),
            fid="fid" in wanted,
            kid="kid" in wanted,
            prc="pr" in wanted,
            feature_extractor=EXTRACTOR,
            feature_extractor_weights_path=str(inception.weights),
            feature_layer_fid=LAYER,
            feature_layer_kid=LAYER,
            feature_layer_prc=LAYER,
            kid_subsets=KID_SUBSETS,
            kid_subset_size=kid_subset_images(len(images), len(reference)),
            prc_neighborhood=NEIGHBOUR,
            prc_batch_size=DISTANCES_AT_ONCE,
            save_cpu_ram=True,  # no loader processes, no whole matrix of distances
            cuda=device.type == "cuda",
            verbose=False,
        )
    names = {
        "fid": "frechet_inception_distance",
        "kid": "kernel_inception_distance_mean",
        "kid_std": "kernel_inception_distance_std",
        "precision": "precision",
        "recall": "recall",
    }
    return {ours: float(found[theirs]) for ours, theirs in names.items() if theirs in found}


def kid_subset_images(samples: int, reference: int) -> int:
    """Images in each of the subsets over which KID is averaged."""
    return min(KID_SUBSET_IMAGES, samples, reference)


def _drop_damaged(cache: Path, kept: str) -> None:
    """Remove what torch-fidelity would choke on, or execute: it unpickles its cache."""
    for path in cache.glob(f"{kept}-*.pt"):
        try:
            with torch.serialization.safe_globals(SAFE_TO_UNPICKLE):
                torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError):
            path.unlink()


class _Bar(Dataset[Tensor]):
    """Images as torch-fidelity takes them, uint8 RGB (3, H, W); a bar on stderr follows their first reading."""

    def __init__(self, images: Pixels, title: str, shown: bool) -> None:
        self._images = images
        self._bar = tqdm(total=len(images), desc=title, unit=" images", leave=False, disable=not shown)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, i: int) -> Tensor:
        self._bar.update(max(0, i + 1 - self._bar.n))
        image = torch.from_numpy(np.array(self._images[i]))
        return image.expand(3, -1, -1)  # grey three times

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
