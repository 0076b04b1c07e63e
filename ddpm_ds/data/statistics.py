"""Statistics of a field by channel, gathered in parts and merged.

Each part sums float64 distances from its own mean, so values near 1e6 with a variance of 1e-4 are right. Source: Chan,
Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance".
"""

from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

BLOCK_VALUES = 2**17
"""Values that are widened to float64 together: a processor's cache holds them."""

Numbers: TypeAlias = tuple[float, ...]
Moments: TypeAlias = npt.NDArray[np.float64]
"""Count, mean, sum of squared distances from the mean, smallest and largest value of each channel, (5, C); zeros where
a channel has no value."""


class Kept(BaseModel):
    """Part of a JSON file that a cache or a run keeps."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Statistics(Kept):
    """Statistics of a field's unmasked values, one number for each channel."""

    mean: Numbers
    std: Numbers
    """Standard deviation, by the count of values and not the count minus one."""
    low: Numbers
    high: Numbers

    @classmethod
    def of(cls, moments: Moments) -> Self:
        """Return the statistics of values with these moments."""
        count, mean, squares, low, high = moments
        rows = (mean, np.sqrt(squares / np.maximum(count, 1.0)), low, high)
        return cls(**{name: tuple(row.tolist()) for name, row in zip(cls.model_fields, rows, strict=True)})


def rounding_of(name: str) -> str:
    """Return the key of the moments of a field's rounding errors."""
    return f"rounding of {name}"


def moments_of(values: npt.NDArray[Any], masked: bool = False) -> Moments:
    """Return the moments of values (C, ...), of ``masked`` ones without NaN; the mean may not be finite."""
    found = list[Moments]()
    for channel in values.reshape(len(values), -1):
        kept, blocks = channel[~np.isnan(channel)] if masked else channel, list[tuple[float, ...]]()
        for first in range(0, len(kept), BLOCK_VALUES):
            block = kept[first : first + BLOCK_VALUES].astype(np.float64)
            low, high, mean = float(block.min()), float(block.max()), float(block.mean())
            if np.isfinite(mean):
                block -= mean
            blocks.append((len(block), mean, float(np.square(block, out=block).sum()), low, high))
        found.append(merged(np.array(blocks)[:, :, None]) if len(blocks) > 1 else np.array(blocks or [(0.0,) * 5]).T)
    return np.concatenate(found, axis=1)


def shares_of_spread(values: Moments, errors: Moments) -> Numbers:
    """Return the RMS of errors by channel as a share of the values' standard deviation; 0 where that is 0."""
    count, mean, squares, *_ = errors
    total = squares + count * mean**2
    return tuple(np.sqrt(np.divide(total, values[2], out=np.zeros_like(total), where=values[2] > 0)).tolist())


def merged(parts: npt.NDArray[np.float64]) -> Moments:
    """Return the moments of all parts together, whose own moments are (parts, 5, C)."""
    count, mean, squares, low, high = parts.swapaxes(0, 1)  # (parts, C) each
    total = count.sum(0)
    centre = (count / np.maximum(total, 1.0) * mean).sum(0)
    squares = (squares + count * (mean - centre) ** 2).sum(0)
    low, high = np.where(count, low, np.inf).min(0), np.where(count, high, -np.inf).max(0)
    return np.stack([total, centre, squares, np.where(total, low, 0.0), np.where(total, high, 0.0)])
