"""Scores by Inception v3, whose features torch-fidelity (extra ``fid``) computes, and Fréchet distances of raw pixels.

FID: Heusel et al. 2017; KID: Binkowski et al. 2018; precision and recall: Kynkäänniemi et al. 2019, who use VGG-16.
Inception's features, as here and in ADM, give other numbers. A Fréchet distance of pixels depends on brightness,
colours and the pixels that vary together; it can't be compared with an FID.
"""

import importlib.util
from collections.abc import Collection
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

from ddpm_ds.data.cache import DatasetCache, Indices, StoredImages
from ddpm_ds.data.sources.base import network_limit
from ddpm_ds.ground.errors import EvaluationError
from ddpm_ds.ground.files import sha256_of

Array = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.uint8]

LARGEST_SIDE_PIXELS = 32
"""Height and width to which larger images are averaged down; the covariance of more pixels would need more images."""
CHUNK_IMAGES = 4096
EXTRACTOR = "inception-v3-compat"
"""torch-fidelity's name for its port of the TensorFlow network that published FIDs are computed with."""
LAYER = "2048"
"""torch-fidelity's name for the pooled features before the classifier."""
KID_SUBSETS, KID_SUBSET_IMAGES = 100, 1000
NEIGHBOUR = 3
"""Rank k of the neighbour whose distance is the radius of a sample's ball, for precision and recall."""
DISTANCES_AT_ONCE = 2048
"""Rows of a distance matrix that are in memory at once, for precision and recall."""
ANSWER_SECONDS = 10.0
"""Maximum seconds for each answer from the weights' host; without a limit a download could hang."""
SAFE_TO_UNPICKLE: list[Any] = [np.empty(0).__reduce__()[0], np.ndarray, np.dtype, *(type(np.dtype(t)) for t in "fd")]
"""Classes in torch-fidelity's cached statistics besides tensors."""


@dataclass(frozen=True)
class Gaussian:
    """Mean (D,) and covariance (D, D) of a set of vectors, in float64."""

    mean: Array
    covariance: Array


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """Return |m_a - m_b|^2 + tr(A + B - 2 (A B)^(1/2)), the squared 2-Wasserstein distance (Dowson and Landau 1982).

    The trace of (A B)^(1/2) is the sum of the singular values of A^(1/2) B^(1/2). Both roots come from eigenvalues of
    symmetric matrices. Eigenvalues that are zero up to rounding are dropped, so singular covariances are exact, too.
    """
    difference = a.mean - b.mean
    common = np.linalg.svd(_root(a.covariance).T @ _root(b.covariance), compute_uv=False).sum()
    distance = difference @ difference + np.trace(a.covariance) + np.trace(b.covariance) - 2 * common
    return max(float(distance), 0.0)


def _root(covariance: Array) -> Array:
    """Return R (D, rank) with R R^T = ``covariance``."""
    values, vectors = np.linalg.eigh(covariance)
    kept = values > values[-1] * len(values) * np.finfo(np.float64).eps
    return vectors[:, kept] * np.sqrt(values[kept])


def pixel_gaussian(images: Pixels | StoredImages, positions: Indices | None = None) -> Gaussian:
    """Fit a Gaussian to uint8 images (N, C, H, W), N > 1, or to those at ``positions``, as vectors in [-1, 1].

    D = C x 32 x 32, or less if the images are smaller. Few images are in memory at a time.
    """
    positions = np.arange(len(images)) if positions is None else positions
    total, products = np.zeros(()), np.zeros(())
    for first in range(0, len(positions), CHUNK_IMAGES):
        chunk = torch.from_numpy(images[positions[first : first + CHUNK_IMAGES]]).double()  # (n, C, H, W)
        if max(chunk.shape[2:]) > LARGEST_SIDE_PIXELS:
            height, width = (min(side, LARGEST_SIDE_PIXELS) for side in chunk.shape[2:])
            chunk = F.adaptive_avg_pool2d(chunk, (height, width))
        pixels = (chunk / 127.5 - 1).flatten(1).numpy()  # (n, D)
        total = total + pixels.sum(0)
        products = products + pixels.T @ pixels
    mean = total / len(positions)
    # Subtracting large, nearly equal sums would lose digits; with pixels in [-1, 1] the mean is small and few are lost.
    return Gaussian(mean, (products - len(positions) * np.outer(mean, mean)) / (len(positions) - 1))


class Unavailable(Exception):
    """Error: Inception's scores can't be computed on this machine; the message has the reason and the fix."""


@dataclass(frozen=True)
class Inception:
    """Weights of Inception v3 on this machine."""

    weights: Path
    digest: str
    """SHA-256 of the file of the weights."""

    @property
    def tool(self) -> str:
        """Name and version of the program that computes the scores, and its weights."""
        return f"torch-fidelity {version('torch-fidelity')}, {EXTRACTOR} {self.digest[:8]}"


def find_inception(weights: Path | None) -> Inception:
    """Find Inception's weights: the file ``weights``, else torch-fidelity's, downloaded if missing.

    Raises:
        EvaluationError: ``weights`` was given and is not a file of Inception's weights.
        Unavailable: torch-fidelity is not installed, or its weights can't be downloaded or read.
    """
    if importlib.util.find_spec("torch_fidelity") is None:
        raise Unavailable("torch-fidelity is not installed; pip install 'ddpm_ds[fid]'")
    from torch_fidelity.utils import create_feature_extractor

    path = weights or _downloaded()
    try:
        digest = sha256_of(path)
        torch.load(path, map_location="cpu", weights_only=True)  # torch-fidelity would execute code in an unsafe file
        create_feature_extractor(
            EXTRACTOR, [LAYER], cuda=False, feature_extractor_weights_path=str(path), verbose=False
        )
    except Exception as error:  # a file of another kind can make its reader raise anything
        reason = error.strerror if isinstance(error, OSError) else "not the weights of torch-fidelity's Inception v3"
        if weights is None:
            raise Unavailable(f"Inception's weights at {path} can't be used ({reason}); delete them") from None
        raise EvaluationError(f"--inception-weights {path} can't be used ({reason}); name another file") from None
    return Inception(path, digest)


def _downloaded() -> Path:
    """Return torch-fidelity's own weights, downloaded if they are missing."""
    from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3

    url = str(URL_INCEPTION_V3)
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[1]
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with network_limit(ANSWER_SECONDS):
            torch.hub.download_url_to_file(url, str(path), hash_prefix=path.stem.rsplit("-", 1)[1])
    except (OSError, RuntimeError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        fault = f"Inception's weights can't be downloaded ({' '.join(str(reason).split())[:120]})"
        raise Unavailable(f"{fault}; get {url} elsewhere and name the file with --inception-weights") from None
    return path


def inception_scores(
    inception: Inception,
    images: Pixels,
    reference: DatasetCache,
    cache: Path,
    wanted: Collection[str],
    device: torch.device,
) -> dict[str, float]:
    """Compare uint8 images (N, C, H, W) with a ``reference`` by the ``wanted`` scores: ``fid``; ``kid``, which also
    returns ``kid_std``; ``pr``, which returns ``precision`` and ``recall``.

    The reference's features stay in the folder ``cache``, by its key, the weights and torch-fidelity's version.
    """
    from torch_fidelity import calculate_metrics

    kept = f"{reference.key[:16]}-{version('torch-fidelity')}-{inception.digest[:16]}"
    for path in cache.glob(f"{kept}-*.pt"):  # unreadable files and files with code are removed
        try:
            with torch.serialization.safe_globals(SAFE_TO_UNPICKLE):
                torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception:  # a damaged file can make its reader raise anything
            path.unlink()
    found = calculate_metrics(
        input1=_Rgb(images),
        input2=_Rgb(reference.images),
        input2_cache_name=kept,
        cache_root=str(cache),
        fid="fid" in wanted,
        kid="kid" in wanted,
        prc="pr" in wanted,
        feature_extractor=EXTRACTOR,
        feature_extractor_weights_path=str(inception.weights),
        **dict.fromkeys(("feature_layer_fid", "feature_layer_kid", "feature_layer_prc"), LAYER),
        kid_subsets=KID_SUBSETS,
        kid_subset_size=min(KID_SUBSET_IMAGES, len(images), len(reference.images)),
        prc_neighborhood=NEIGHBOUR,
        prc_batch_size=DISTANCES_AT_ONCE,
        save_cpu_ram=True,  # uses no loader processes and keeps no whole matrix of distances
        cuda=device.type == "cuda",
        verbose=True,  # progress bars on stderr
    )
    names = {
        "fid": "frechet_inception_distance",
        "kid": "kernel_inception_distance_mean",
        "kid_std": "kernel_inception_distance_std",
        "precision": "precision",
        "recall": "recall",
    }
    return {ours: float(found[theirs]) for ours, theirs in names.items() if theirs in found}


@dataclass
class _Rgb(Dataset[Tensor]):
    """Images as torch-fidelity takes them, uint8 RGB (3, H, W)."""

    images: Pixels | StoredImages

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> Tensor:
        return torch.from_numpy(np.array(self.images[i])).expand(3, -1, -1)  # grey is repeated in three channels
