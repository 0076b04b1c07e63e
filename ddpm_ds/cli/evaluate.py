"""``ddpm-ds evaluate``: score how near the images of trained weights are to the real ones."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_ds.cli.sample import add_drawing_options, load
from ddpm_ds.command_line import ema_length, file_path, number, whole
from ddpm_ds.errors import SpecError
from ddpm_ds.evaluate import FEWEST_IMAGES, METRICS
from ddpm_ds.processes.ranks import set_environment

if TYPE_CHECKING:
    from ddpm_ds.config.spec import SamplerSpec
    from ddpm_ds.data.cache import DatasetCache
    from ddpm_ds.evaluate.outputs import Request
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
      scores over the guidance, and a picture of them
  ddpm-ds evaluate runs/digits --ema-lengths 0.05,0.1,0.15 --metrics pixel
      scores over the length of the average, of a run that keeps snapshots (ema.profiles), and a picture of them
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
        "--ema-lengths",
        type=_different(ema_length),
        default=(),
        metavar="L,...",
        help="evaluate averages of these relative lengths, made from a run's snapshots, and draw the scores over them",
    )
    parser.add_argument(
        "--guidances",
        type=_different(_guidance),
        default=(),
        metavar="W,...",
        help="evaluate with each of these guidances, of each length, and draw the scores over them",
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


def _guidance(text: str) -> float:
    return number(text, 0.0, 1e3, "a guidance from 0 to 1,000")


def _different(kind: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    """Return a parser of different numbers separated by commas, each parsed by ``kind``."""

    def read(text: str) -> tuple[float, ...]:
        values = tuple(map(kind, text.split(",")))
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} has one number twice")
        return values

    return read


def _evaluate(options: argparse.Namespace) -> None:
    set_environment()
    from ddpm_ds.evaluate.mlflow_child import check_recordable, record_child
    from ddpm_ds.evaluate.outputs import writing
    from ddpm_ds.evaluate.scores import Scorer, open_reference
    from ddpm_ds.evaluate.sweeps import SweepPoint, sweep_metrics, sweep_table, write_sweep

    swept = {"ema_length": options.ema_lengths, "guidance": options.guidances}
    swept = {name: values for name, values in swept.items() if values}
    _check_swept(options)
    scorer, found = None, []
    for length in options.ema_lengths or (None,):
        trained, samplers, guide = load(options, options.guidances, ema_length=length)
        check_recordable(trained)
        if scorer is None:
            reference = open_reference(trained, options.dataset)
            scorer = Scorer(options.metrics, reference, options.inception_weights)
        for sampler in samplers:
            folder, scores = _evaluate_one(options, trained, sampler, guide, reference, scorer)
            point = {} if length is None else {"ema_length": length}
            point |= {"guidance": sampler.guidance} if options.guidances else {}
            found.append(SweepPoint(point, folder.name, scores))
    if not swept:
        return
    folder = folder.parent / f"sweep-{'-'.join(swept)}-{_checksum(''.join(point.evaluation for point in found))}"
    print(f"\n{sweep_table(found)}\n\noutputs    {folder}")
    seen = "" if trained.images_seen is None else f", {trained.images_seen:,} images"
    with writing(folder):
        files = write_sweep(folder, found, f"{(trained.run_dir or Path(trained.origin)).resolve().name}{seen}")
    trained = replace(trained, weights=options.weights)  # the kind for all points of the sweep
    record_child(trained, "sweep", swept, metrics=sweep_metrics(found), artifacts=dict.fromkeys(files, ""))


def _check_swept(options: argparse.Namespace) -> None:
    """Raise an error, before the first image is drawn, if the options can't be swept."""
    from ddpm_ds.checkpoint.power_ema import Reconstruction
    from ddpm_ds.tracking.run_folder import snapshots_of

    if options.guidances and options.guidance is not None:
        raise SpecError("--guidance and --guidances exclude each other; name all in --guidances")
    if options.ema_lengths and options.weights == "raw":
        raise SpecError("--weights raw is not averaged, and --ema-lengths are those of averages; leave one of them out")
    for length in options.ema_lengths:
        Reconstruction(snapshots_of(options.path), length)


def _evaluate_one(
    options: argparse.Namespace,
    trained: Trained,
    sampler: SamplerSpec,
    guide: Trained | None,
    reference: DatasetCache,
    scorer: Scorer,
) -> tuple[Path, list[Score]]:
    """Draw, score and record images of the given weights and sampler; return the folder and the scores."""
    from ddpm_ds.evaluate.mlflow_child import record_child
    from ddpm_ds.evaluate.outputs import BatchFolder, Request, titled_grid, writing
    from ddpm_ds.evaluate.sampling import draw_missing
    from ddpm_ds.evaluate.scores import about, labels_like, table, write_report

    labels = None if trained.unet_spec.classes is None else labels_like(reference, options.count)
    numbers = {name: getattr(options, name) for name in ("seed", "count", "batch_images")}
    request = Request.of(trained, sampler, labels, guide, **numbers)
    folder = (options.out or (trained.run_dir or Path()) / "evaluations") / _name(request)
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
    return folder, scores


def _name(request: Request) -> str:
    """Return the folder name of an evaluation: readable facts, and a checksum of all that determines the images."""
    from ddpm_ds.evaluate.scores import short

    followed = request.model_dump_json(exclude={"origin", "weights", "images_seen", "guide", "batch_images"})
    sampler = request.sampler
    parts = (Path(request.origin).resolve().name, request.weights, sampler.kind, sampler.steps, short(request.count))
    return "-".join(map(str, (*parts, _checksum(followed))))


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
