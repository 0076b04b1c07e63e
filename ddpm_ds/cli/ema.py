"""``ddpm-ds ema``: make averaged weights of any length after training."""

from __future__ import annotations

import argparse
from typing import Any

from ddpm_ds.command_line import LONGEST_EMA, SHORTEST_EMA, ema_length, file_path, images_seen
from ddpm_ds.tracking.run_folder import averages_of, snapshots_of

DESCRIPTION = f"""\
Make the average of the weights that a run with ema.profiles would have kept for another length, from its snapshots. A
length is relative, {SHORTEST_EMA:g} to {LONGEST_EMA:g}: sigma_rel of EDM2, the standard deviation of the times of the
averaged weights as a share of the training so far. The result is a checkpoint of these weights alone; ddpm-ds sample,
evaluate and export take it. docs/evaluation.md says which length to choose.
"""

EXAMPLES = """\
examples
  ddpm-ds ema runs/digits --length 0.1
  ddpm-ds ema runs/digits --length 0.15 --at 64000 --output digits-0.15
  ddpm-ds sample runs/digits/averages/images-000128000-ema-0.1
  ddpm-ds evaluate runs/digits --ema-length 0.05,0.1,0.15
      scores of several lengths, without writing their weights
"""


def add_ema(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb ``ema``."""
    what = "make averaged weights of another length after training"
    parser = verbs.add_parser("ema", help=what, description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("run_dir", type=file_path, metavar="RUN_DIR", help="folder of a run that keeps snapshots")
    parser.add_argument("--length", type=ema_length, required=True, metavar="L", help="relative length, such as 0.1")
    parser.add_argument(
        "--at", type=images_seen, metavar="IMAGES", help="time of the snapshot that it ends at (default: the newest)"
    )
    parser.add_argument(
        "--output",
        type=file_path,
        metavar="FOLDER",
        help="folder to write; must not exist (default RUN_DIR/averages/images-IMAGES-ema-L)",
    )
    parser.set_defaults(run=_ema)


def _ema(options: argparse.Namespace) -> None:
    import torch

    from ddpm_ds.checkpoint.power_ema import Reconstruction, average_name

    torch.set_num_threads(1)  # the disk limits the speed
    made = Reconstruction(snapshots_of(options.run_dir), options.length, options.at)
    out = options.output or averages_of(options.run_dir) / average_name(made.images, options.length)
    made.write(out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(
        f"{out}: average of relative length {options.length:g} after {made.images:,} images, {size / 1e6:,.1f} MB, "
        f"from {made.snapshots} snapshots; its profile is {made.distance:.2%} off"
    )
