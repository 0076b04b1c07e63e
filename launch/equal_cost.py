"""Draw the same images by several samplers with equally many evaluations of the U-Net, and put them side by side.

    python launch/equal_cost.py runs/digits-edm --out equal_cost.png

Every panel begins with the same noise: rows are numbers of evaluations per image, columns are samplers. Each step of
heun but the last makes two evaluations, so only odd numbers are possible.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ddpm_ds import load_trained, sample
from ddpm_ds.command_line import OneLineParser, add_overwrite, check_outputs, file_path, positive, writing
from ddpm_ds.config.choices import SAMPLERS
from ddpm_ds.data.pictures import grid
from ddpm_ds.errors import UserError

KINDS = ("ddim", "dpm_solver", "heun")


def steps_of(kind: str, evaluations: int) -> int:
    """Return in how many steps a sampler evaluates the U-Net this often; heun needs an odd number of evaluations."""
    return (evaluations + 1) // 2 if SAMPLERS[kind].corrects else evaluations


def odd(text: str) -> tuple[int, ...]:
    """Parse numbers of evaluations, which must be odd for heun's sake."""
    found = tuple(positive(word) for word in text.split(","))
    if even := [number for number in found if number % 2 == 0]:
        raise argparse.ArgumentTypeError(f"{even[0]} is even, and heun's steps are odd numbers of evaluations")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw and write the picture."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("path", type=file_path, metavar="CHECKPOINT|RUN_DIR|EXPORT", help="folder of the weights")
    parser.add_argument("--out", type=file_path, required=True, metavar="FILE", help="PNG to write")
    add_overwrite(parser)
    parser.add_argument("--evaluations", type=odd, default=(5, 9, 19), metavar="N,...", help="default 5,9,19")
    parser.add_argument("--count", type=positive, default=16, metavar="N", help="images of a panel (default 16)")
    try:
        options = parser.parse_args(arguments)
        check_outputs(options, "out")
        with writing(options.out, overwrite=options.overwrite) as file:
            draw(options.path, options.evaluations, options.count, file)
    except UserError as error:
        print(f"equal_cost.py: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def draw(path: Path, evaluations: Sequence[int], count: int, file: BinaryIO) -> None:
    """Write a panel of ``count`` images for each number of evaluations and sampler."""
    trained = load_trained(path)
    figure = Figure(figsize=(2.2 * len(KINDS), 2.4 * len(evaluations)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(evaluations), len(KINDS), squeeze=False)
    for row, number in zip(panels, evaluations, strict=True):
        for axes, kind in zip(row, KINDS, strict=True):
            changes = {"kind": kind, "steps": steps_of(kind, number), "eta": 0.0, "churn": 0.0}
            images = sample(trained, count, sampler=trained.sampler.model_copy(update=changes))
            axes.imshow(np.asarray(grid(images)), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axes.set_title(f"{kind}, {number} evaluations", fontsize=8)
            axes.set_axis_off()
    figure.savefig(file, format="png", metadata={"Software": None})


if __name__ == "__main__":
    sys.exit(main())
