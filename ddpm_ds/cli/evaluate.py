"""``ddpm-ds evaluate``: how near the images of trained weights are to the real ones, in numbers."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_ds.cli.sample import add_drawing_options, load
from ddpm_ds.command_line import file_path, number, whole
from ddpm_ds.errors import SpecError
from ddpm_ds.evaluate import FEWEST_IMAGES, METRICS
from ddpm_ds.processes.ranks import set_environment

if TYPE_CHECKING:
    from ddpm_ds.config.spec import SamplerSpec
    from ddpm_ds.data.cache import DatasetCache
    from ddpm_ds.evaluate.sampling import Request
    from ddpm_ds.evaluate.scores import Score, Scorer
    from ddpm_ds.evaluate.trained import Trained

GRID_IMAGES = 64

DESCRIPTION = """\
Draw images and compare them with the real ones of the prepared data set: FID, KID, precision and recall of Inception
features (extra [fid] and a download), a Fréchet distance of raw pixels, and for handwritten digits what a classifier
of real digits makes of them. The numbers go to a table, to RUN_DIR/evaluations/NAME, and into MLflow as a child of the
run. docs/evaluation.md says what each is and is not.
"""

EXAMPLES = """\
examples
  ddpm-ds evaluate runs/digits
  ddpm-ds evaluate runs/digits --count 2000 --metrics pixel,digits --sampler ddim --steps 100
  ddpm-ds evaluate runs/cifar10 --count 50000 --sampler ddpm --metrics fid
  ddpm-ds evaluate runs/faces --guidances 1,1.5,2,3 --guidance-between 0.3,5
  ddpm-ds evaluate exported --dataset data/cifar10-32px-3ch --inception-weights inception.pth

Interrupted, it keeps what is drawn, and the same command continues from there; other --metrics draw nothing anew.

exit codes
  0 done   2 bad input, or a score of --metrics can't be had: nothing was drawn   130 interrupted   1 a bug
"""


def add_evaluate(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "evaluate",
        help="score a checkpoint or an export against the real images",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("--count", type=_count, default=10_000, metavar="N", help="images to draw (default 10000)")
    parser.add_argument(
        "--metrics",
        type=_metrics,
        metavar="NAME,...",
        help=f"some of {','.join(METRICS)}, each of which must be possible then (default: all that are)",
    )
    parser.add_argument(
        "--dataset",
        type=file_path,
        metavar="DIR",
        help="folder of the prepared real images, for an export or where it has moved",
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
        "--guidances",
        type=_guidances,
        default=(),
        metavar="W,...",
        help="evaluate with each of these guidances, and compare them in a table and a picture",
    )
    add_drawing_options(parser)
    parser.set_defaults(run=_evaluate)


def _count(text: str) -> int:
    return whole(
        text, FEWEST_IMAGES, 10**6, f"a number from {FEWEST_IMAGES} to 1,000,000; fewer images can't be compared"
    )


def _metrics(text: str) -> tuple[str, ...]:
    names = text.split(",")
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(METRICS)}")
    return tuple(names)


def _guidances(text: str) -> tuple[float, ...]:
    found = tuple(number(word, 0.0, 1e3, "a guidance from 0 to 1,000") for word in text.split(","))
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names a guidance twice")
    return found


def _evaluate(options: argparse.Namespace) -> None:
    set_environment()
    from ddpm_ds.evaluate.outputs import writing
    from ddpm_ds.evaluate.scores import Scorer, open_reference
    from ddpm_ds.evaluate.variants import draw_variants, variants_table

    if options.guidances and options.guidance is not None:
        raise SpecError("--guidance and --guidances exclude each other; name all in --guidances")
    trained, samplers, guide = load(options, options.guidances)
    reference = open_reference(trained, options.dataset)
    scorer = Scorer(options.metrics, reference, options.inception_weights)
    out = options.out or (trained.run_dir or Path()) / "evaluations"
    found = [_scored(options, trained, sampler, guide, reference, scorer, out) for sampler in samplers]
    if options.guidances:
        variants = {f"{guidance:g}": scores for guidance, scores in zip(options.guidances, found, strict=True)}
        values = "-".join(variants)
        picture = out / f"{Path(trained.origin).resolve().name}-{trained.weights}-guidance-{values}.png"
        with writing(picture):
            draw_variants("guidance", variants, picture)
        print(f"\n{variants_table('guidance', variants)}\n\npicture    {picture}")


def _scored(
    options: argparse.Namespace,
    trained: Trained,
    sampler: SamplerSpec,
    guide: Trained | None,
    reference: DatasetCache,
    scorer: Scorer,
    out: Path,
) -> list[Score]:
    """Draw and score the images of one sampler, and record them in a folder of their own in ``out`` and in MLflow."""
    from ddpm_ds.evaluate.mlflow_child import record_child
    from ddpm_ds.evaluate.outputs import BatchFolder, titled_grid, writing
    from ddpm_ds.evaluate.sampling import Request, draw_missing
    from ddpm_ds.evaluate.scores import about, labels_like, table, write_report

    labels = None if trained.unet_spec.classes is None else labels_like(reference, options.count)
    numbers = {name: getattr(options, name) for name in ("seed", "count", "batch_images")}
    request = Request.of(trained, sampler, labels, guide, **numbers)
    folder = out / _name(request)
    device = next(trained.unet.parameters()).device
    guided = "" if request.guide is None else f"guide      averaged weights of {request.guide}\n"
    print(
        f"weights    {request.weights} of {trained.origin}, {request.precision} on {device.type}\n"
        f"{guided}"
        f"sampler    {request.sampler.kind} in {request.sampler.steps} steps, seed {request.seed}\n"
        f"reference  {reference.path}, {len(reference):,} images\n"
        f"outputs    {folder}",
        flush=True,
    )
    drawn = BatchFolder(folder / "drawn", request)
    drawn.check()
    try:
        draw_missing(trained, request, drawn, guide=guide)
        images = drawn.images()
        scores = scorer.scores(images, request.labels_of(request.index), device)
    except KeyboardInterrupt:
        print("interrupted: what is drawn is kept, and the same command continues from there")
        raise
    print(f"\n{table(scores, request)}\n")
    facts = about(request, reference)
    with writing(folder):
        labelled = request.labels_of(request.index[:GRID_IMAGES])
        samples = titled_grid(trained, sampler, images[:GRID_IMAGES], labelled)
        files = write_report(folder, facts, scores, samples)
    metrics = {name: value for score in scores for name, value in score.metrics.items()}
    record_child(trained, "evaluate", facts, metrics=metrics, artifacts=dict.fromkeys(files, ""))
    return scores


def _name(request: Request) -> str:
    """Return the folder name of an evaluation: readable facts, and a checksum of all that determines the images."""
    from ddpm_ds.evaluate.scores import short

    followed = request.model_dump_json(exclude={"origin", "weights", "images_seen", "guide", "batch_images"})
    checksum = hashlib.sha256(followed.encode()).hexdigest()
    sampler = request.sampler
    parts = (Path(request.origin).resolve().name, request.weights, sampler.kind, sampler.steps, short(request.count))
    return "-".join(map(str, (*parts, checksum[:8])))
