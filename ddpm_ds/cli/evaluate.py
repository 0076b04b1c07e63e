"""What ``ddpm-ds evaluate`` may be asked for. No torch.

``ddpm-ds evaluate``: how near the images of trained weights are to the real ones, in numbers.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_ds.command_line import positive, seed, whole
from ddpm_ds.evaluate.draw import add_sampler_options, sampler_from
from ddpm_ds.processes.ranks import set_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpm_ds.evaluate.draw import Request
    from ddpm_ds.evaluate.scores import Score
    from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.evaluate import FEWEST_IMAGES, METRICS

GRID_IMAGES = 64

DESCRIPTION = """\
Draw images and compare them with the real ones of the prepared store: FID, KID, precision and recall of Inception
features (extra [fid] and a download), a Fréchet distance of raw pixels, and for handwritten digits what a classifier
of real digits makes of them. The numbers go to a table, to RUN_DIR/evaluations/NAME, and into MLflow as a child of the
run. docs/evaluation.md says what each is and is not.
"""

EXAMPLES = """\
examples
  ddpm-ds evaluate runs/digits
  ddpm-ds evaluate runs/digits --count 2000 --metrics pixel,digits --sampler ddim --steps 100
  ddpm-ds evaluate runs/cifar10 --count 50000 --sampler ddpm --metrics fid
  ddpm-ds evaluate exported --store data/cifar10-32px-3ch --inception-weights inception.pth

Interrupted, it keeps what is drawn, and the same command goes on from there; other --metrics draw nothing anew.

exit codes
  0 done   2 bad input, or a score of --metrics can't be had: nothing was drawn   130 interrupted   1 a bug
"""


def add_evaluate(verbs: argparse._SubParsersAction[Any]) -> None:
    """The verb."""
    parser = verbs.add_parser(
        "evaluate",
        help="score a checkpoint or an export against the real images",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("path", type=Path, metavar="CHECKPOINT|RUN_DIR|EXPORT", help="folder of the weights")
    parser.add_argument("--count", type=_count, default=10_000, metavar="N", help="images to draw (default 10000)")
    parser.add_argument(
        "--metrics",
        type=_metrics,
        metavar="NAME,...",
        help=f"some of {','.join(METRICS)}, each of which must be possible then (default: all that are)",
    )
    parser.add_argument("--store", type=Path, metavar="DIR", help="prepared store, of an export or where it has moved")
    parser.add_argument(
        "--inception-weights", type=Path, metavar="FILE", help="of torch-fidelity, instead of a download"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of evaluations (default RUN_DIR/evaluations, or ./evaluations)"
    )
    parser.add_argument("--batch-images", type=positive, default=64, metavar="N", help="drawn at once (default 64)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of all noise (default 0)")
    parser.add_argument("--weights", choices=("ema", "raw"), default="ema", help="averaged or as trained (default ema)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA if any")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp32", help="default fp32")
    add_sampler_options(parser)
    parser.set_defaults(run=_evaluate)


def _count(text: str) -> int:
    return whole(text, FEWEST_IMAGES, 2**40, f"a number from {FEWEST_IMAGES} on; fewer images can't be compared")


def _metrics(text: str) -> tuple[str, ...]:
    names = text.split(",")
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(METRICS)}")
    return tuple(names)


def _evaluate(options: argparse.Namespace) -> None:
    set_environment()
    from ddpm_ds.device import DTYPES, choose_device
    from ddpm_ds.evaluate.draw import Request
    from ddpm_ds.evaluate.sampling import draw_many, writing
    from ddpm_ds.evaluate.scores import Scorer, about, labels_like, open_reference, table, write_report
    from ddpm_ds.evaluate.trained import load_trained
    from ddpm_ds.tracking.tracker import print_to_stderr

    device, dtype = choose_device(options.device), DTYPES[options.precision][1]
    trained = load_trained(options.path, weights=options.weights, device=device, dtype=dtype)
    classes = trained.unet_spec.classes
    sampler = sampler_from(options, trained.sampler, timesteps=trained.diffusion.timesteps, classes=classes)
    store = open_reference(trained, options.store, progress=True)
    scorer = Scorer.prepare(options.metrics, store, options.inception_weights, say=print_to_stderr)
    labels = None if classes is None else labels_like(store, options.count)
    drawn = Request.of(trained, sampler, options.seed, labels, first=0, count=options.count)
    folder = (options.out or (trained.run_dir or Path()) / "evaluations") / _name(drawn)
    print(
        f"weights    {drawn.weights} of {trained.origin}, {options.precision} on {device.type}\n"
        f"sampler    {drawn.sampler.kind} in {drawn.sampler.steps} steps, seed {drawn.seed}\n"
        f"reference  {store.path}, {len(store):,} images\n"
        f"outputs    {folder}",
        flush=True,
    )
    try:
        images = draw_many(
            trained,
            sampler,
            count=options.count,
            seed=options.seed,
            labels=labels,
            batch_images=options.batch_images,
            store=folder / "drawn",
        )
        scores = scorer.scores(images, drawn.labels_of(drawn.index), device, progress=True)
    except KeyboardInterrupt:
        print("interrupted: what is drawn is kept, and the same command goes on from there")
        raise
    print(f"\n{table(scores, drawn)}\n")
    facts = about(drawn, store)
    with writing(folder):
        write_report(folder, facts, scores, images[:GRID_IMAGES])
    _record(trained, facts, scores, folder)


def _name(drawn: Request) -> str:
    """The folder of an evaluation: what it is for people, and a checksum of all that the images follow from."""
    from ddpm_ds.evaluate.scores import short

    checksum = hashlib.sha256(drawn.model_dump_json(exclude={"origin", "weights", "images_seen"}).encode()).hexdigest()
    sampler = drawn.sampler
    parts = (Path(drawn.origin).resolve().name, drawn.weights, sampler.kind, sampler.steps, short(drawn.count))
    return "-".join(map(str, (*parts, checksum[:8])))


def _record(trained: Trained, facts: Mapping[str, Any], scores: Sequence[Score], folder: Path) -> None:
    """Into MLflow, as a child of the run."""
    from ddpm_ds.evaluate.diary import Child
    from ddpm_ds.evaluate.scores import FILES

    with Child.begin(trained, "evaluate", facts) as child:
        for score in scores:
            child.metrics(score.metrics)
        for name in FILES:
            child.artifact(folder / name)
    if link := child.finish():
        print(f"MLflow run {link.run_id}\nopen with  {link.open_with}")
