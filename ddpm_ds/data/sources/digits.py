"""scikit-learn's handwritten digits, which come with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpm_ds.data.sources.arrays import ArraySource

if TYPE_CHECKING:
    from ddpm_ds.config.spec import DataSpec


def open_digits(spec: DataSpec, progress: bool) -> ArraySource:
    """Open 1,797 grey digits of 8x8 pixels."""
    import numpy as np
    from sklearn.datasets import load_digits  # takes a second

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), stored as 0..16
    return ArraySource(tuple(map(str, digits.target_names)), digits.target.astype(np.int64), images)
