"""Evaluations of trained weights: drawn images are scored and recorded; the held-out loss is that of training."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from ddpm_ds.checkpoint.manifest import read_manifest
from ddpm_ds.data.cache import DatasetCache, Subset, by_field
from ddpm_ds.data.held_out import shuffled, training_and_held_out
from ddpm_ds.data.latents import pixels_learned
from ddpm_ds.data.prepare import How, Recipes, images_of
from ddpm_ds.evaluate import FEWEST_IMAGES, METRICS, OF_INCEPTION
from ddpm_ds.evaluate.inception import (
    KID_SUBSET_IMAGES,
    Inception,
    Pixels,
    Unavailable,
    find_inception,
    frechet_distance,
    inception_scores,
    pixel_gaussian,
)
from ddpm_ds.evaluate.outputs import DrawnImages, Request, as_output_error, record_child, titled_grid
from ddpm_ds.evaluate.sampling import Setup, draw_missing, fitting
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.ground.errors import DataError, EvaluationError, OutputError, print_to_stderr
from ddpm_ds.ground.files import write_file
from ddpm_ds.ground.formats import read_json
from ddpm_ds.ground.outputs import cache_folder
from ddpm_ds.ground.units import aligned
from ddpm_ds.ground.version import __version__
from ddpm_ds.schema.types import ALL_SIGMAS
from ddpm_ds.tracking.pictures import write_png
from ddpm_ds.training.held_out_loss import HeldOutLoss
from ddpm_ds.training.objective import encoders_of

GRID_IMAGES = 64
HEADER = ("score", "value", "of real", "samples", "reference", "sampler", "steps", "weights", "guidance", "tool")
TEXT_COLUMNS = {0, 5, 7, 9}
VERSIONS = {"ddpm_ds": __version__, "torch": torch.__version__}


def open_reference(trained: Trained, given: Path | None) -> DatasetCache:
    """Open the prepared images at ``given``, or the data set of the checkpoint's spec, prepared now if it is missing.

    Checksums are verified. A run trained on crops is compared with the centres of its images, a run trained on latents
    with the encoded pixels. Raises DataError: there are no images, they are damaged, or the run was trained on others.
    """
    origin, spec, learned = trained.origin, trained.spec, None
    if spec is not None:
        learned = pixels_learned(training_and_held_out(read_manifest(Path(origin)).data_sha256)[0])
    if given is not None:
        reference = DatasetCache.open(given, progress=True)
    elif spec is None:
        raise DataError(f"{origin} has no data set; name the folder of its prepared images with --dataset DIR")
    else:
        recipe = Recipes(spec.data).all(spec.bucket_group or 1)[0]
        reference = images_of(recipe.base or recipe, How(progress=True), learned)
    if learned is not None:
        if by_field(reference.meta.sha256) != learned:
            raise DataError(f"{reference.path} is not the data set of {origin}; name that one with --dataset DIR")
        reference = reference.centre(trained.picture_shape[1:])
    if reference.meta.shape != trained.picture_shape:
        there, drawn = ("x".join(map(str, shape)) for shape in (reference.meta.shape, trained.picture_shape))
        raise DataError(f"--dataset {reference.path} has images of {there}, {origin} draws {drawn}; name another")
    classes, found = trained.unet_spec.classes, len(reference.meta.classes)
    if classes not in (None, found):
        raise DataError(f"--dataset {reference.path} has {found} classes, {origin} has {classes}; name another")
    return reference


def labels_like(reference: DatasetCache, count: int) -> list[int]:
    """Return ``count`` labels in the proportions of the reference, or all its labels if it has fewer."""
    return [int(label) for label in reference.labels[shuffled(len(reference))[:count]]]


@dataclass(frozen=True)
class Score:
    """Score, with the counts and the program that its meaning depends on."""

    name: str
    """Name in MLflow, without its ``eval/``."""
    title: str
    value: float
    """Score of the drawn images."""
    samples: int
    references: int
    tool: str
    real: float | None = None
    """The same score for real images, if there is one."""
    details: Mapping[str, object] = field(default_factory=dict)


class Scorer:
    """Scorer that computes the requested scores, or all that this machine can compute."""

    def __init__(self, asked: Sequence[str] | None, reference: DatasetCache, weights: Path | None) -> None:
        """Prepare the scores ``asked`` for, by their names in METRICS. None takes all that can be computed, and names
        the others on stderr. FID, KID, precision and recall need Inception's ``weights``, a file or None for a
        download.

        Raises EvaluationError: a score was asked for by name and can't be computed.
        """
        if len(reference) < FEWEST_IMAGES:
            raise EvaluationError(f"{reference.path} has only {len(reference)} images; use a larger data set")
        self.reference = reference
        """Cache of the real images."""
        self._inception: tuple[Inception, Path] | None = None  # with the folder for features of the reference
        self._wanted = set(METRICS if asked is None else asked)
        if needing := [name for name in OF_INCEPTION if name in self._wanted]:
            try:
                self._inception = find_inception(weights), cache_beside(reference.path)
            except Unavailable as reason:
                if asked is not None:
                    raise EvaluationError(f"--metrics {','.join(needing)} can't be computed: {reason}") from None
                print_to_stderr(f"FID, KID, precision and recall are left out: {reason}")

    def scores(self, images: Pixels, device: torch.device) -> list[Score]:
        """Return the scores of drawn images (N, C, H, W), uint8."""
        found, real, counts = list[Score](), self.reference.images, (len(images), len(self.reference))
        if self._inception is not None:
            inception, kept = self._inception
            values = inception_scores(inception, images, self.reference, kept, self._wanted, device)
            subset = min(KID_SUBSET_IMAGES, *counts)
            of_kid = {"standard_deviation": values.pop("kid_std", None), "subset_images": subset}
            for name, value in values.items():
                title, of_name = name.upper() if name in ("fid", "kid") else name, of_kid if name == "kid" else {}
                found.append(Score(f"{name}_{short(counts[0])}", title, value, *counts, inception.tool, None, of_name))
        if "pixel" in self._wanted:
            fitted, halves = pixel_gaussian(real), np.array_split(shuffled(len(real)), 2)
            between = frechet_distance(*(pixel_gaussian(real, np.sort(places)) for places in halves))
            dims, value = len(fitted.mean), frechet_distance(pixel_gaussian(images), fitted)
            title, tool = f"pixel Fréchet distance, {dims:,} dims", f"ddpm_ds {__version__}"
            of_pixels = {"dims": dims, "real_is": "between two halves of the reference"}
            found.append(Score(f"pixel_frechet_{short(counts[0])}", title, value, *counts, tool, between, of_pixels))
        return found


@contextlib.contextmanager
def drawn_for_scores(
    setup: Setup, request: Request, out: Path | None, counted: str, against: Mapping[str, str]
) -> Iterator[tuple[Path, np.ndarray]]:
    """Draw a request's missing images; yield the folder of its evaluation, and all images (N, C, H, W).

    ``counted`` is the number of images as the folder's name has it; ``against`` are more lines to print.
    """
    kind, steps, trained = request.sampler.kind, request.sampler.steps, setup.trained
    folder = folder_for(trained, out, f"{kind}-{steps}-{counted}-{request.key}")
    lines = {
        "weights": f"{request.weights} of {trained.origin}, {request.precision} on {trained.device.type}",
        **({} if request.guide is None else {"guide": f"averaged weights of {request.guide}"}),
        "sampler": f"{kind} in {steps} steps, seed {request.seed}",
        **against,
        "outputs": str(folder),
    }
    print(*(f"{name:<10} {text}" for name, text in lines.items()), sep="\n", flush=True)
    drawn = DrawnImages(folder / "drawn", request)
    try:
        draw_missing(setup, request, drawn)
        yield folder, drawn.images()
    except KeyboardInterrupt:
        print("interrupted: the finished batches are kept, and the same command continues from there")
        raise


def folder_for(trained: Trained, out: Path | None, name: str) -> Path:
    """Return the folder of an evaluation, in ``out`` or by default among the run's evaluations."""
    origin = Path(trained.origin).resolve().name
    return (out or (trained.run_dir or Path()) / "evaluations") / f"{origin}-{trained.weights}-{name}"


def report(
    trained: Trained,
    folder: Path,
    facts: Mapping[str, object],
    scores: object,
    metrics: Mapping[str, float],
    **pictures: Callable[[Path], object],
) -> None:
    """Write an evaluation's ``scores.json``, with ``facts`` about it, and ``pictures``; record all in MLflow."""
    facts = {**facts, "version": VERSIONS}
    files = {folder / "scores.json": None, **{folder / f"{name}.png": draw for name, draw in pictures.items()}}
    with as_output_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps({**facts, "scores": scores}, indent=2) + "\n"
        for path, draw in files.items():
            draw(path) if draw else write_file(path, content.encode())
    record_child(trained, "evaluate", facts, metrics=metrics, artifacts=dict.fromkeys(files, ""))


def evaluate(
    setup: Setup, scorer: Scorer, out: Path | None, *, count: int, **numbers: int
) -> tuple[Request, list[Score]]:
    """Draw, score and record ``count`` images, in a folder of their own in ``out``. ``numbers`` are ``seed`` and
    ``batch_images``. Earlier scores of the same images against the same reference stay, unless computed again.
    """
    reference, trained = scorer.reference, setup.trained
    labels = None if trained.unet_spec.classes is None else labels_like(reference, count)
    request = setup.request(labels, count=count, **numbers)
    real = {"store": str(reference.path), "images": len(reference), "sha256": by_field(reference.meta.sha256)}
    against = {"reference": f"{reference.path}, {len(reference):,} images"}
    facts = request.model_dump(mode="json", exclude={"batch_images"})
    facts |= {"labels": None if labels is None else "in the proportions of the reference", "reference": real}
    with drawn_for_scores(setup, request, out, short(count), against) as (folder, images):
        scores = scorer.scores(images, trained.device)
        kept: list[dict[str, object]] = []
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # missing, or written by something else
            before = read_json(folder / "scores.json")
            if before["reference"]["sha256"] == real["sha256"]:
                names = {score.name for score in scores}
                kept = [score for score in before["scores"] if score["name"] not in names]
        labels_shown = request.labels_of(request.index[:GRID_IMAGES])
        grid = titled_grid(trained, setup.sampler, images[:GRID_IMAGES], labels_shown)
        metrics = {f"eval/{score.name}": score.value for score in scores}
        metrics |= {f"eval/{score.name}_real": score.real for score in scores if score.real is not None}
        every = kept + [asdict(score) for score in scores]
        report(trained, folder, facts, every, metrics, samples=lambda path: write_png(grid, path))
    return request, scores


def cache_beside(dataset: Path) -> Path:
    """Return a writable folder for the reference's features: beside the data set, or in the user's cache."""
    beside, own = dataset.resolve().parent / "evaluation_cache", cache_folder()
    for folder in (beside, own):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise OutputError(f"neither {beside} nor {own} can be written; name a folder for caches with XDG_CACHE_HOME")


def short(count: int) -> str:
    """Format a count for a metric's name, such as ``10k`` or ``500``."""
    return f"{count // 1000}k" if count % 1000 == 0 else str(count)


def table(results: Sequence[tuple[Request, Sequence[Score]]]) -> str:
    """Return a table of the same scores of some evaluations, with a line for each and all settings in it."""
    rows = [HEADER]
    for same in zip(*(scores for _, scores in results), strict=True):
        for score, (request, _) in zip(same, results, strict=True):
            counts = f"{score.samples:,}", f"{score.references:,}"
            how = request.sampler.kind, str(request.sampler.steps), request.weights, guidance_in_words(request)
            rows.append((score.title, four_digits(score.value), four_digits(score.real), *counts, *how, score.tool))
    return "\n".join(aligned(rows, TEXT_COLUMNS))


def guidance_in_words(request: Request) -> str:
    """Return the guidance in words, such as ``2 at 0.3-5 by guide``, without the usual noise levels and guide."""
    sampler = request.sampler
    if sampler.guidance == 1.0:
        return "-" if request.labels is None and request.guide is None else "1"
    low, high = sampler.guidance_between
    where = "" if sampler.guidance_between == ALL_SIGMAS else f" at {low:g}-{high:g}"
    return f"{sampler.guidance:g}{where}{'' if request.guide is None else ' by guide'}"


def four_digits(value: float | None) -> str:
    """Return a score with four digits; ``-`` if there is none."""
    return "-" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def evaluate_losses(trained: Trained, held_out: Subset, out: Path | None, batch_images: int) -> Mapping[str, float]:
    """Measure and record the held-out loss of a run's weights, ``batch_images`` at a time, in a folder of its own in
    ``out``. Return its values by their names in MLflow.
    """
    spec, (cache, positions) = trained.spec, held_out
    assert spec is not None, "an export has held out nothing"
    device = trained.device
    decisive = f"{trained.digest} {trained.precision} {cache.key} {positions.tolist()}"
    folder = folder_for(trained, out, f"loss-{hashlib.sha256(decisive.encode()).hexdigest()[:8]}")
    print(
        f"weights    {trained.weights} of {trained.origin}, {trained.precision} on {device.type}\n"
        f"held out   {len(positions):,} images of {cache.path}\n"
        f"outputs    {folder}",
        flush=True,
    )
    loss = HeldOutLoss(spec, device, cache, positions, encoders_of(spec.data.text, device), images=batch_images)
    sums = loss.zeros()
    with torch.inference_mode(), fitting(batch_images):
        for call in tqdm(range(loss.calls), "measuring", unit=" batches", disable=None):
            loss.add(sums, call, trained.unet(*loss.inputs(call), context=loss.context(call)).float())
    values = loss.values(sums.cpu())
    facts = trained.identity
    facts["reference"] = {"store": str(cache.path), "images": len(positions), "sha256": by_field(cache.meta.sha256)}
    report(trained, folder, facts, values, values)
    return values


def loss_table(weights: str, values: Mapping[str, float]) -> str:
    """Return a table of the held-out loss of some ``weights``, with a line for each value."""
    rows = [("held-out loss", weights), *((name, four_digits(value)) for name, value in values.items())]
    return "\n".join(aligned(rows, {0}))
