"""Which images of a store are trained on, and which are held out."""

from __future__ import annotations

import numpy as np

from ddpm_ds.data.order import Indices
from ddpm_ds.errors import SpecError


def split(count: int, held_out: int) -> tuple[Indices, Indices]:
    """Positions in a store of ``count`` images, int64 and rising: those to train on, and ``held_out`` others.

    They follow from the two numbers alone, so that runs of any seed are measured on the same images.

    Raises:
        SpecError: nothing would be left to train on.
    """
    if held_out >= count:
        raise SpecError(
            f"data.held_out_images = {held_out:,} leaves nothing of the {count:,} images; --set data.held_out_images="
            f"{count // 10}"
        )
    order = shuffled(count)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def shuffled(count: int) -> Indices:
    """The positions 0 to ``count - 1``, int64, in an order that is always the same."""
    return np.random.Generator(np.random.Philox(key=np.uint64(0))).permutation(count)
