"""Make pairs of coarse and fine temperature fields, to learn downscaling from: ``python make_fields.py``.

A day's fine field has 32x32 pixels of 2.5 km, or more with ``--size``. It is the sum of three parts: large weather,
small weather within a few pixels, and the land's height times the day's lapse rate. The coarse field has the means of
blocks of 4x4 pixels. It shows the lapse rate, but not the small weather, which has to be drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SIDE, BLOCK = 32, 4
"""Pixels of the smallest fine field, each way, and of a coarse pixel."""
MEAN_K, LAPSE_K_PER_KM, LAPSE_SPREAD = 285.0, -6.5, 2.5
"""Mean temperature at sea level; mean of the days' lapse rates, and their standard deviation."""
LARGE_K, LARGE_PIXELS, SMALL_K, SMALL_PIXELS = 4.0, 16.0, 1.8, 2.5
"""Standard deviations and lengths of the two kinds of weather."""


def smooth(count: int, length: float, generator: np.random.Generator, side: int) -> NDArray[np.float64]:
    """Draw fields (count, side, side) of mean 0 and variance 1 with a Matérn covariance of smoothness 3/2.

    Fields larger than 32x32 continue at the opposite edge, so that a Fourier transform draws them.
    """
    if side > SIDE:
        apart = np.minimum(np.arange(side), side - np.arange(side))
        scaled = np.sqrt(3.0) / length * np.hypot(apart[:, None], apart)
        root = np.sqrt(np.fft.fft2((1.0 + scaled) * np.exp(-scaled)).real.clip(0.0))
        noise = generator.standard_normal((count, side, side))
        return np.stack([np.fft.ifft2(np.fft.fft2(each) * root).real for each in noise])
    places = np.stack(np.divmod(np.arange(SIDE**2), SIDE), axis=1)
    scaled = np.sqrt(3.0) / length * np.linalg.norm(places[:, None] - places, axis=-1)
    root = np.linalg.cholesky((1.0 + scaled) * np.exp(-scaled))
    return (generator.standard_normal((count, SIDE**2)) @ root.T).reshape(-1, SIDE, SIDE)


def make(path: Path, count: int, seed: int, side: int) -> None:
    """Write a .npz file: ``t2m`` (N, side, side) and ``coarse`` (N, side / 4, side / 4) in kelvin, ``height`` (side,
    side) in metres.
    """
    generator = np.random.default_rng(seed)
    height = 1000.0 * np.maximum(smooth(1, 5.0, generator, side)[0] + 0.5, 0.0)
    lapse = LAPSE_K_PER_KM + LAPSE_SPREAD * generator.standard_normal((count, 1, 1))
    large, small = (smooth(count, length, generator, side) for length in (LARGE_PIXELS, SMALL_PIXELS))
    t2m = MEAN_K + LARGE_K * large + SMALL_K * small + lapse * height / 1000.0
    coarse = t2m.reshape(count, side // BLOCK, BLOCK, side // BLOCK, BLOCK).mean(axis=(2, 4))
    np.savez(path, t2m=t2m.astype(np.float32), coarse=coarse.astype(np.float32), height=height.astype(np.float32))


def main() -> None:
    """Read the options and write the file."""
    parser = argparse.ArgumentParser(description="Make pairs of coarse and fine temperature fields.")
    parser.add_argument("--out", type=Path, default=Path("fields.npz"), help="file to write (default fields.npz)")
    parser.add_argument("--count", type=int, default=6000, metavar="N", help="days (default 6000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all draws (default 0)")
    parser.add_argument("--size", type=int, default=SIDE, metavar="N", help=f"pixels of a side (default {SIDE})")
    options = parser.parse_args()
    if options.size < SIDE or options.size % BLOCK:
        parser.error(f"--size {options.size} should be a multiple of {BLOCK} from {SIDE} on")
    make(options.out, options.count, options.seed, options.size)
    print(f"{options.out}: {options.count:,} days")


if __name__ == "__main__":
    main()
