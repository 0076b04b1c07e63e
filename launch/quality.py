"""Compare samples of digits from DDPM, from EDM, and from DDPM in several layouts, with several seeds each.

    python launch/quality.py --out quality

All runs have the same U-Net and see the same images. A classifier of real digits scores samples of their averaged
weights. As many runs share the machine as its cores allow. Finished runs and scores are kept: the same command
continues after an interruption, also with more rows or seeds.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline

from ddpm_ds import open_run
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.data.prepare import prepare
from ddpm_ds.evaluate.inception import Array, Pixels, frechet_distance, gaussian
from ddpm_ds.ground.errors import OptionError
from ddpm_ds.ground.options import file_path, positive
from ddpm_ds.ground.units import aligned

LAUNCH = Path(__file__).resolve().parent
SCORES = ("Fréchet, features", "held-out loss", "recognised", "class balance")


class DigitsClassifier:
    """Logistic regression on radial basis functions around three quarters of the real digits.

    Far from all of them every basis function is near zero, so noise and grey are not recognised.
    """

    def __init__(self, images: Pixels, labels: npt.NDArray[np.int64]) -> None:
        """Train on ``images`` (N, C, H, W) uint8 with ``labels`` (N,)."""
        places = np.arange(len(labels))
        known, self.held_out = train_test_split(places, test_size=0.25, stratify=labels, random_state=0)
        bases = Nystroem(gamma=0.2, n_components=min(600, len(known)), random_state=0)  # best likelihood of held-out
        self._model = make_pipeline(bases, LogisticRegression(C=100.0, max_iter=1000))
        self._model.fit(_grey(images[known]), labels[known])
        self._real = gaussian(self._features(images))

    def probabilities(self, images: Pixels) -> Array:
        """Return the probabilities of the classes (N, classes) that uint8 images (N, C, H, W) show."""
        return np.asarray(self._model.predict_proba(_grey(images)))

    def scores(self, images: Pixels) -> dict[str, float]:
        """Score uint8 images (N, C, H, W): Fréchet distance of the regression's inputs to those of real digits, share
        of images with a class more probable than not, and balance of the classes.
        """
        probabilities = self.probabilities(images)
        shares = np.bincount(probabilities.argmax(1), minlength=probabilities.shape[1]) / len(images)
        return {
            "Fréchet, features": frechet_distance(gaussian(self._features(images)), self._real),
            "recognised": float((probabilities.max(1) > 0.5).mean()),
            "class balance": balance(shares),
        }

    def _features(self, images: Pixels) -> Array:
        return np.asarray(self._model[:-1].transform(_grey(images)))


@functools.cache
def classifier() -> DigitsClassifier:
    """Return the classifier, trained on the digits that all rows learn."""
    real = prepare(load_spec(LAUNCH / "specs" / "digits.yaml").data)
    return DigitsClassifier(real.images[:], real.labels)


def balance(shares: Array) -> float:
    """Return the entropy of the classes' shares, divided by that of equal shares."""
    return float(0.0 - (shares * np.log(np.where(shares > 0, shares, 1.0))).sum() / np.log(len(shares)))


def _grey(images: Pixels) -> Array:
    """Return the images averaged to 8 x 8 grey values in [0, 1], as (N, 64)."""
    grey = torch.from_numpy(np.array(images)).double().mean(1, keepdim=True) / 255
    return np.asarray(F.adaptive_avg_pool2d(grey, 8).flatten(1).numpy())


FIRST = "ddpm"
EDM = ("diffusion.schedule=edm", "diffusion.objective=v", "sampler.clip=none")
ROWS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    FIRST: (1, 1, ()),
    "edm": (1, 1, EDM),
    **{name: (2, 2, (f"ds.pipeline.schedule={name}",)) for name in ("1f1b", "folded", "planned")},
    "2 replicas": (2, 1, ()),
}
"""Number of processes and of stages, and settings of the spec, or after ``ds.`` of the DeepSpeed JSON."""


class Run(NamedTuple):
    """Result of one training of a row: scores by name, and the training loss at each log point."""

    scores: Mapping[str, float]
    losses: Sequence[float]


def command(name: str, run_dir: Path, images: int, seed: int) -> list[str]:
    """Return the arguments of ``ddpm-ds`` that train a row."""
    processes, stages, changes = ROWS[name]
    settings = (f"train.images={images}", f"train.seed={seed}", "samples.every_images=null", *changes)
    config = str(LAUNCH.parent / "ds_configs" / "zero1_fp32.json")
    words = ["train", "--processes", str(processes), "-p", str(stages), "--deepspeed_config", config]
    return [*words, "--run-dir", str(run_dir), *(word for setting in settings for word in ("--set", setting))]


def ddpm_ds(log: Path, words: Sequence[str]) -> None:
    """Run a command of ``ddpm-ds``, each process on one core, and append its output to a log."""
    with log.open("a") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": ""}
        command = [sys.executable, "-m", "ddpm_ds.cli.main", *words]
        done = subprocess.run(command, stdout=file, stderr=file, env=environment, check=False)
    if code := done.returncode:
        raise SystemExit(f"quality.py: a run ended with code {code}; see {log}")


def result(name: str, seed: int, options: argparse.Namespace) -> Run:
    """Train a row with a seed and score its samples, unless that is done, and return the result."""
    images, count = options.images, options.count
    folder = options.out / f"{name.replace(' ', '-')}-{seed}-{images}"
    file = folder.with_name(f"{folder.name}-{count}.json")
    if not file.exists():
        samples, log = file.with_suffix(".npz"), folder.with_suffix(".log")
        ddpm_ds(log, command(name, folder, images, seed))
        if not samples.exists():
            ddpm_ds(log, ["sample", str(folder), "--count", str(count), "--out", str(samples)])
        with np.load(samples) as archive:
            scores = classifier().scores(archive["arr_0"].transpose(0, 3, 1, 2))
        run = open_run(folder)
        scores["held-out loss"] = run.evaluations["eval/loss"][-1]
        file.write_text(json.dumps({"scores": scores, "losses": run.metrics["train/loss"]}))
        print(f"trained and scored {name}, seed {seed}", file=sys.stderr, flush=True)
    return Run(**json.loads(file.read_text()))


def table(results: Mapping[str, Sequence[Run]]) -> str:
    """Return a line for each row: mean over its runs, and least to most.

    Layouts of the first row also have the largest relative difference between their training losses and its own.
    """
    lines: list[tuple[str, ...]] = [("", "seeds", *SCORES, "loss differs by")]
    for name, runs in results.items():
        columns = ([run.scores[score] for run in runs] for score in SCORES)
        cells = [f"{mean(values):.4g} ({min(values):.4g} to {max(values):.4g})" for values in columns]
        pairs = list(zip(runs, results.get(FIRST, ()), strict=False)) if ROWS[name][0] > 1 else []
        both = [losses for run, one in pairs for losses in zip(run.losses, one.losses, strict=True)]
        difference = f"{max(abs(mine / its - 1) for mine, its in both):.1e}" if both else ""
        lines.append((name, str(len(runs)), *cells, difference))
    return "\n".join(aligned(lines, {0}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, score and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=file_path, required=True, help="folder of the runs")
    parser.add_argument("--rows", default=",".join(ROWS), help="some of %(default)s (default: all)")
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each row (default %(default)s)")
    parser.add_argument("--images", type=positive, default=12_800, help="images each run sees (default %(default)s)")
    parser.add_argument("--count", type=positive, default=1000, help="samples of each run (default %(default)s)")
    try:
        options = parser.parse_args(arguments)
        names = options.rows.split(",")
        if unknown := [name for name in names if name not in ROWS]:
            raise OptionError(f"--rows has {unknown[0]!r}; there are {', '.join(ROWS)}")
        options.out.mkdir(parents=True, exist_ok=True)
    except OptionError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out {options.out} can't be made ({error.strerror}); name another folder")
    results: dict[str, list[Run]] = {name: [] for name in names}
    for processes in (1, 2):
        jobs = [(name, seed) for name in names for seed in range(options.seeds) if ROWS[name][0] == processes]
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // processes)) as pool:
            runs = pool.map(lambda job: result(job[0], job[1], options), jobs)
            for (name, _), run in zip(jobs, runs, strict=True):
                results[name].append(run)
    print(f"{options.images:,} images seen, {options.count:,} samples; mean over the seeds, and the least to the most.")
    print(f"Held-out losses of different processes can't be compared.\n\n{table(results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
