"""``ddpm-ds evaluate``: score how near the images of trained weights are to the real ones."""

from __future__ import annotations

import argparse
from typing import Any

from ddpm_ds.cli.sample import add_drawing_options, different, load
from ddpm_ds.command_line import ema_length, file_path, whole
from ddpm_ds.errors import SpecError
from ddpm_ds.evaluate import FEWEST_IMAGES, METRICS
from ddpm_ds.processes.ranks import set_environment
from ddpm_ds.tracking.run_folder import snapshots_of

DESCRIPTION = """\
Draw images and compare them with the real ones of the prepared data set: FID, KID, precision and recall of Inception
features (extra [fid] and a download), and a Fréchet distance of raw pixels. Lists of samplers, guidances and lengths of
the average are evaluated one by one. The numbers go to one table, to a folder RUN_DIR/evaluations/NAME for each, and
into MLflow as children of the run. docs/evaluation.md says what each score is and is not.
"""

EXAMPLES = """\
examples
  ddpm-ds evaluate runs/digits
  ddpm-ds evaluate runs/digits --count 2000 --metrics pixel --sampler ddim,dpm_solver --steps 100
  ddpm-ds evaluate runs/cifar10 --count 50000 --sampler ddpm --metrics fid
  ddpm-ds evaluate runs/faces --guidance 1,1.5,2,3 --guidance-between 0.3,5
  ddpm-ds evaluate runs/digits --ema-length 0.05,0.1,0.15 --metrics pixel
      averages of other lengths, of a run that keeps snapshots (ema.profiles)
  ddpm-ds evaluate exported --dataset data/cifar10-32px-3ch --inception-weights inception.pth

Interrupted, it keeps what is drawn, and the same command continues from there. With other --metrics no image is drawn
again.

exit codes
  0 done   2 bad input, or a score of --metrics can't be computed: nothing was drawn   130 interrupted   1 a bug
"""


def add_evaluate(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb ``evaluate``."""
    what = "score a checkpoint or an export against the real images"
    parser = verbs.add_parser("evaluate", help=what, description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--count", type=_count, default=10_000, metavar="N", help="images to draw (default 10000)")
    parser.add_argument(
        "--metrics",
        type=_metrics,
        metavar="NAME,...",
        help=f"scores, some of {','.join(METRICS)}; an error if one can't be computed (default: all that can)",
    )
    parser.add_argument(
        "--dataset",
        type=file_path,
        metavar="DIR",
        help="folder of the prepared real images; needed for an export, or if the folder has moved",
    )
    parser.add_argument(
        "--inception-weights", type=file_path, metavar="FILE", help="torch-fidelity's weights, instead of a download"
    )
    parser.add_argument(
        "--out",
        type=file_path,
        metavar="DIR",
        help="folder of evaluations (default RUN_DIR/evaluations, or ./evaluations)",
    )
    parser.add_argument(
        "--ema-length",
        type=different(ema_length),
        default=(None,),
        metavar="L,...",
        help="evaluate averages of these relative lengths, made from a run's snapshots",
    )
    add_drawing_options(parser, several=True)
    parser.set_defaults(run=_evaluate)


def _count(text: str) -> int:
    return whole(
        text, FEWEST_IMAGES, 10**6, f"a number from {FEWEST_IMAGES} to 1,000,000; fewer images can't be compared"
    )


def _metrics(text: str) -> tuple[str, ...]:
    names = text.split(",")
    for name in names:
        if name not in METRICS:
            withdrawn = "; launch/quality.py has the classifier of digits" if name == "digits" else ""
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(METRICS)}{withdrawn}")
    return tuple(names)


def _evaluate(options: argparse.Namespace) -> None:
    set_environment()
    from ddpm_ds.checkpoint.power_ema import Reconstruction
    from ddpm_ds.evaluate.outputs import check_recordable
    from ddpm_ds.evaluate.scores import Scorer, evaluate, open_reference, table

    lengths = options.ema_length
    if lengths != (None,):
        if options.weights == "raw":
            raise SpecError("--weights raw is not averaged, and --ema-length is of averages; leave one out")
        for length in lengths:  # before the first image is drawn
            Reconstruction(snapshots_of(options.path), length)
    kinds, guidances = options.sampler or (None,), options.guidance or (None,)
    changes = [{"sampler": kind, "guidance": guidance} for kind in kinds for guidance in guidances]
    numbers = {name: getattr(options, name) for name in ("seed", "count", "batch_images")}
    scorer, found = None, []
    for length in lengths:
        trained, samplers, guide = load(options, changes, ema_length=length)
        check_recordable(trained)
        if scorer is None:
            scorer = Scorer(options.metrics, open_reference(trained, options.dataset), options.inception_weights)
        found += [evaluate(trained, sampler, guide, scorer, options.out, **numbers) for sampler in samplers]
    print(f"\n{table(found)}")
