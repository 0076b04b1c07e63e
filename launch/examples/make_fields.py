"""Make pairs of coarse and fine temperature fields, to learn downscaling from: ``python make_fields.py``.

A day's fine field has 32x32 pixels of 2.5 km. It is the sum of three parts: large weather, small weather within a few
pixels, and the land's height times the day's lapse rate. The coarse field has the means of blocks of 4x4 pixels. It
shows the lapse rate, but not the small weather, which has to be drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SIDE, BLOCK = 32, 4
"""Pixels of a fine field, each way, and of a coarse pixel."""
MEAN_K, LAPSE_K_PER_KM, LAPSE_SPREAD = 285.0, -6.5, 2.5
"""Mean temperature at sea level; mean of the days' lapse rates, and their standard deviation."""
LARGE_K, LARGE_PIXELS, SMALL_K, SMALL_PIXELS = 4.0, 16.0, 1.8, 2.5
"""Standard deviations and lengths of the two kinds of weather."""


def smooth(count: int, length: float, generator: np.random.Generator) -> NDArray[np.float64]:
    """Draw fields (count, 32, 32) of mean 0 and variance 1 with a Matérn covariance of smoothness 3/2."""
    places = np.stack(np.divmod(np.arange(SIDE**2), SIDE), axis=1)
    scaled = np.sqrt(3.0) / length * np.linalg.norm(places[:, None] - places, axis=-1)
    root = np.linalg.cholesky((1.0 + scaled) * np.exp(-scaled))
    return (generator.standard_normal((count, SIDE**2)) @ root.T).reshape(-1, SIDE, SIDE)


def make(path: Path, count: int, seed: int) -> None:
    """Write a .npz file: ``t2m`` (N, 32, 32) and ``coarse`` (N, 8, 8) in kelvin, ``height`` (32, 32) in metres."""
    generator = np.random.default_rng(seed)
    height = 1000.0 * np.maximum(smooth(1, 5.0, generator)[0] + 0.5, 0.0)
    lapse = LAPSE_K_PER_KM + LAPSE_SPREAD * generator.standard_normal((count, 1, 1))
    weather = LARGE_K * smooth(count, LARGE_PIXELS, generator) + SMALL_K * smooth(count, SMALL_PIXELS, generator)
    t2m = MEAN_K + weather + lapse * height / 1000.0
    coarse = t2m.reshape(count, SIDE // BLOCK, BLOCK, SIDE // BLOCK, BLOCK).mean(axis=(2, 4))
    np.savez(path, t2m=t2m.astype(np.float32), coarse=coarse.astype(np.float32), height=height.astype(np.float32))


def main() -> None:
    """Read the options and write the file."""
    parser = argparse.ArgumentParser(description="Make pairs of coarse and fine temperature fields.")
    parser.add_argument("--out", type=Path, default=Path("fields.npz"), help="file to write (default fields.npz)")
    parser.add_argument("--count", type=int, default=6000, metavar="N", help="days (default 6000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all draws (default 0)")
    options = parser.parse_args()
    make(options.out, options.count, options.seed)
    print(f"{options.out}: {options.count:,} days")


if __name__ == "__main__":
    main()
