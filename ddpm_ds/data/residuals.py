"""Residuals, what a regression leaves of fields: learned instead of the fields, and added to its predictions again.

::

    fields     (N, C, H, W) ──minus predictions, once──▶ residuals (N, C, H, W) ──▶ training
    condition, vector ──────┘                                 │ drawn by a sampler
    fields     (N, C, H, W) ◀──plus predictions───────────────┘

Other modules treat residuals as fields, with statistics of their own; condition, mask and vector are copied. Source:
Mardani et al. 2025, "Residual corrective diffusion modeling for km-scale atmospheric downscaling" (CorrDiff).
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ddpm_ds.config.spec import DataSpec
from ddpm_ds.data.cache import IMAGES, DatasetCache, StoredImages
from ddpm_ds.data.latents import PIXELS
from ddpm_ds.data.statistics import Moments, merged, moments_of
from ddpm_ds.data.writing import Chunk
from ddpm_ds.errors import DataError

REGRESSION = "regression"
"""Key of the regression's weights in the checksums of a cache of residuals; those of its fields are as of pixels."""
TOGETHER_BYTES = 2**20
"""Bytes of fields that are predicted together, at least one field."""


class Regression(Protocol):
    """Trained regression."""

    @property
    def digest(self) -> str:
        """Checksum of its weights."""

    def predict(self, fields: DatasetCache, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the fields (n, C, H, W) that it predicts at ``positions`` (n,) of a cache, in their units."""


def fields_of(data: DataSpec) -> DataSpec:
    """Return the spec of the fields of whose residuals ``data`` is the spec; ``data`` itself if it is of fields."""
    return data if data.residual_of is None else data.model_copy(update={"residual_of": None})


def made_of(fields: DatasetCache, regression: Regression) -> dict[str, str]:
    """Return the checksums of regression and fields that a cache of residuals keeps."""
    return {REGRESSION: regression.digest, **{f"{PIXELS}{name}": value for name, value in fields.meta.sha256.items()}}


def residuals(fields: DatasetCache, regression: Regression, numbers: range) -> Iterator[Chunk]:
    """Yield a range of the residuals of all ``fields``, in chunks.

    Raises:
        DataError: a prediction is not finite, or a residual is beyond the type that is stored.
    """
    unfilled = fields.meta.model_copy(update={"masked": False})  # masked values stay NaN, for the statistics
    stored = {name: StoredImages(fields.path, unfilled, None, name=name) for name in fields.fields}
    together = max(1, TOGETHER_BYTES // fields.meta.field(IMAGES).nbytes)
    for first in range(numbers.start, numbers.stop, together):
        positions = np.arange(first, min(first + together, numbers.stop))
        read = {name: images.read(positions) for name, images in stored.items()}
        predicted = regression.predict(fields, positions)
        with np.errstate(over="ignore"):
            found = (read[IMAGES] - predicted).astype(read[IMAGES].dtype)
        bad = ~np.isfinite(predicted) | np.isinf(found)
        if bad.any():
            number, channel = (int(place[0]) for place in bad.nonzero()[:2])
            raise DataError(
                f"data.residual_of predicts {predicted[bad][0]:g} in image {first + number}, channel {channel} of "
                f"{fields.path}, whose residual is beyond {found.dtype}; train that regression anew, or --set "
                "data.values=float32"
            )
        read[IMAGES] = found
        others = {name: [each.data for each in values] for name, values in read.items() if name != IMAGES}
        labels = fields.labels[positions].tolist()
        yield Chunk([each.data for each in found], labels, [], others, _moments(read, fields))


def _moments(read: Mapping[str, npt.NDArray[np.generic]], fields: DatasetCache) -> dict[str, Moments]:
    """Return the moments of the fields that have statistics."""
    return {
        name: merged(np.stack([moments_of(values, fields.meta.masked) for values in read[name]]))
        for name in fields.meta.statistics
    }
