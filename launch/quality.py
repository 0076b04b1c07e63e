"""Train the digits as DDPM and as EDM, and DDPM in several layouts, with several seeds each, and compare the samples.

    python launch/quality.py --out quality

It prints two tables: of the processes in one layout, and of the layouts for one process. All runs have the same U-Net
and see the same images; each is scored on samples of its averaged weights, which a classifier of real digits reads. As
many run at a time as there are cores for. Finished runs and scores are kept: the same command continues after an
interruption, also with more rows or seeds.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from ddpm_ds.command_line import aligned, file_path, positive
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.data.prepare import prepare
from ddpm_ds.evaluate.inception import Array, Pixels, frechet_distance, gaussian

LAUNCH = Path(__file__).resolve().parent
CONFIGS = LAUNCH.parent / "ds_configs"
SCORES = {
    "digits_frechet": "Fréchet, features",
    "held-out loss": "held-out loss",
    "digits_recognised": "recognised",
    "digits_class_balance": "class balance",
}
"""Titles of the compared scores, by their names."""

Labels = npt.NDArray[np.int64]
SIDE_PIXELS = 8
GAMMA, BASES, INVERSE_PENALTY = 0.2, 600, 100.0
"""Kernel width, number of basis functions and inverse penalty, chosen for the likelihood of held-out digits."""
HELD_OUT_FRACTION = 0.25


class DigitsClassifier:
    """Logistic regression on radial basis functions around three quarters of the real digits; the same digits always
    give the same classifier.

    Far from all of them every basis function is near zero, so no class is probable. Noise and grey are therefore not
    recognised; a plain network would recognise them.
    """

    def __init__(self, images: Pixels, labels: Labels) -> None:
        """Train on ``images`` (N, C, H, W) uint8 with ``labels`` (N,)."""
        known, self.held_out = train_test_split(
            np.arange(len(labels)), test_size=HELD_OUT_FRACTION, stratify=labels, random_state=0
        )
        self._model = make_pipeline(
            Nystroem(gamma=GAMMA, n_components=min(BASES, len(known)), random_state=0),
            LogisticRegression(C=INVERSE_PENALTY, max_iter=1000),
        )
        self._model.fit(_grey(images[known]), labels[known])
        self._real = gaussian(self._features(images))

    def probabilities(self, images: Pixels) -> Array:
        """Return the probabilities of the classes (N, classes) that uint8 images (N, C, H, W) show."""
        return np.asarray(self._model.predict_proba(_grey(images)))

    def scores(self, images: Pixels) -> dict[str, float]:
        """Return how near uint8 images (N, C, H, W) are to the real digits: the Fréchet distance of the regression's
        inputs, the share of images with a class more probable than not, and the entropy of the shares of the classes
        relative to that of equal shares.
        """
        probabilities = self.probabilities(images)
        shares = np.bincount(probabilities.argmax(1), minlength=probabilities.shape[1]) / len(images)
        return {
            "digits_frechet": frechet_distance(gaussian(self._features(images)), self._real),
            "digits_recognised": float((probabilities.max(1) > 0.5).mean()),
            "digits_class_balance": balance(shares),
        }

    def _features(self, images: Pixels) -> Array:
        return np.asarray(self._model[:-1].transform(_grey(images)))


@functools.cache
def classifier() -> DigitsClassifier:
    """Return the classifier of the digits that all rows learn."""
    real = prepare(load_spec(LAUNCH / "specs" / "digits.yaml").data)
    return DigitsClassifier(real.images[:], real.labels)


def balance(shares: Array) -> float:
    """Return the entropy of the shares of classes, relative to that of equal shares: 1 if all classes are equally
    frequent, 0 if there is only one.
    """
    return float(0.0 - (shares * np.log(np.where(shares > 0, shares, 1.0))).sum() / np.log(len(shares)))


def _grey(images: Pixels) -> Array:
    """Return the images averaged to 8 x 8 grey values in [0, 1], as (N, 64)."""
    grey = torch.from_numpy(np.array(images)).double().mean(1, keepdim=True) / 255
    return np.asarray(F.adaptive_avg_pool2d(grey, SIDE_PIXELS).flatten(1).numpy())


@dataclass(frozen=True)
class Row:
    """Way of training."""

    settings: tuple[str, ...] = ()
    """Changes of the spec, or after ``ds.`` of the DeepSpeed JSON."""
    stages: int = 1
    processes: int = 1

    def command(self, run_dir: Path, images: int, seed: int) -> list[str]:
        """Return the arguments of ``ddpm-ds`` that train it."""
        settings = (f"train.images={images}", f"train.seed={seed}", "samples.every_images=null", *self.settings)
        return [
            *("train", "--processes", str(self.processes), "-p", str(self.stages)),
            *("--deepspeed_config", str(CONFIGS / "zero1_fp32.json"), "--run-dir", str(run_dir)),
            *(word for setting in settings for word in ("--set", setting)),
        ]


EDM = ("diffusion.schedule=edm", "diffusion.objective=v", "sampler.kind=heun", "sampler.steps=10", "sampler.clip=none")
FLOW = ("diffusion.schedule=flow", "diffusion.objective=velocity", "sampler.clip=none")
PROCESSES = {
    "ddpm": Row(),
    "edm": Row(EDM),
    "v": Row(("diffusion.schedule=cosine", "diffusion.objective=v")),
    "flow": Row(FLOW),
}
"""Processes, each in the first layout; EDM's 10 steps evaluate the U-Net 19 times, the others' 20 steps 20 times."""
LAYOUTS = {
    "1f1b": Row(("ds.pipeline.schedule=1f1b",), stages=2, processes=2),
    "folded": Row(("ds.pipeline.schedule=folded",), stages=2, processes=2),
    "planned": Row(("ds.pipeline.schedule=planned",), stages=2, processes=2),
    "2 replicas": Row(processes=2),
}
"""Layouts of the first process besides one device."""
ROWS = PROCESSES | LAYOUTS
FIRST = "ddpm"
USUAL = (FIRST, "edm", *LAYOUTS)


class Run(NamedTuple):
    """Result of one training of a row."""

    scores: Mapping[str, float]
    """Scores by the names of SCORES."""
    losses: Sequence[float]
    """Training loss at each log point."""


@dataclass(frozen=True)
class Work:
    """Runs in a folder, each of ``images`` images and scored on ``count`` samples."""

    out: Path
    images: int
    count: int

    def train(self, name: str, seed: int) -> None:
        """Train a row with a seed, or to its end."""
        if not self._result(name, seed).exists():
            self._ddpm_ds(name, seed, ROWS[name].command(self._folder(name, seed), self.images, seed))

    def draw(self, name: str, seed: int) -> Path:
        """Return the file of the images of a trained run, which are drawn unless they are there."""
        folder, result = self._folder(name, seed), self._result(name, seed)
        samples = result.with_suffix(".npz")
        if not samples.exists():
            self._ddpm_ds(name, seed, ["sample", str(folder), "--count", str(self.count), "--out", str(samples)])
        return samples

    def score(self, name: str, seed: int) -> Run:
        """Return the scores of a trained run, which are computed unless they are there."""
        result = self._result(name, seed)
        if not result.exists():
            with np.load(self.draw(name, seed)) as archive:
                scores = classifier().scores(archive["arr_0"].transpose(0, 3, 1, 2))
            run = open_run(self._folder(name, seed))
            scores["held-out loss"] = run.evaluations["eval/loss"][-1]
            result.write_text(json.dumps({"scores": scores, "losses": run.metrics["train/loss"]}))
        return Run(**json.loads(result.read_text()))

    def _folder(self, name: str, seed: int) -> Path:
        return self.out / f"{name.replace(' ', '-')}-{seed}-{self.images}"

    def _result(self, name: str, seed: int) -> Path:
        folder = self._folder(name, seed)
        return folder.with_name(f"{folder.name}-{self.count}.json")

    def _ddpm_ds(self, name: str, seed: int, words: Sequence[str]) -> None:
        """Run a command of ``ddpm-ds`` on one core for each process; its output goes to the end of the run's log."""
        log = self._folder(name, seed).with_suffix(".log")
        with log.open("a") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": ""}
            command = [sys.executable, "-m", "ddpm_ds.cli.main", *words]
            code = subprocess.run(command, stdout=file, stderr=file, env=environment, check=False).returncode
        if code:
            raise SystemExit(f"quality.py: a run ended with code {code}; {log} says why")


def spread(values: Sequence[float]) -> str:
    """Return the mean over the seeds and their range."""
    return f"{mean(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def table(results: Mapping[str, Sequence[Run]], one: Sequence[Run] = ()) -> str:
    """Return a line for each row, with mean and spread over its runs.

    With the runs of ``one`` device there is one more column: the largest relative difference between their training
    losses and those of the same seeds.
    """
    lines = [("", "seeds", *SCORES.values(), *(["loss differs by"] if one else []))]
    for name, runs in results.items():
        cells = [spread([run.scores[score] for run in runs]) for score in SCORES]
        if one:
            cells.append(f"{max(most_apart(*pair) for pair in zip(runs, one, strict=False)):.1e}")
        lines.append((name, str(len(runs)), *cells))
    return "\n".join(aligned(lines, {0}))


def most_apart(run: Run, other: Run) -> float:
    """Return the largest difference of two loss curves, relative to the second."""
    return max(abs(mine - its) / its for mine, its in zip(run.losses, other.losses, strict=True))


def report(results: Mapping[str, Sequence[Run]], images: int, count: int) -> str:
    """Return the tables of the processes and of the layouts that there are."""
    processes, layouts = ({name: results[name] for name in results if name in rows} for rows in (PROCESSES, LAYOUTS))
    spreads = "mean over the seeds, and the least to the most"
    parts = []
    if processes:
        title = f"Processes on one device: {images:,} images seen, {count:,} samples; {spreads}."
        parts += [f"{title}\nHeld-out losses of different processes can't be compared.\n\n{table(processes)}"]
    if layouts and FIRST in results:
        title = f"Layouts of {FIRST}, and by how much their fp32 training losses differ from those of one device."
        parts += [f"{title}\n\n{table({'1 device': results[FIRST], **layouts}, results[FIRST])}"]
    return "\n\n".join(parts)


def each(what: str, do: Callable[[str, int], object], jobs: Sequence[tuple[str, int]], at_once: int) -> None:
    """Do a job for each row and seed, ``at_once`` at a time; after one fails, no other begins."""
    with ThreadPoolExecutor(at_once) as pool:
        for (name, seed), _ in zip(jobs, pool.map(lambda job: do(*job), jobs), strict=True):
            print(f"{what} {name}, seed {seed}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, score and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=file_path, required=True, help="folder of the runs")
    parser.add_argument("--rows", default=",".join(USUAL), help=f"some of {','.join(ROWS)} (default: %(default)s)")
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each row (default %(default)s)")
    parser.add_argument(
        "--layout-seeds", type=positive, default=1, help="runs of each layout, which all train the same (%(default)s)"
    )
    parser.add_argument("--images", type=positive, default=12_800, help="images each run sees (default %(default)s)")
    parser.add_argument("--count", type=positive, default=1000, help="samples of each run (default %(default)s)")
    options = parser.parse_args(arguments)
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows has {unknown[0]!r}; there are {', '.join(ROWS)}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out} can't be made ({error.strerror}); name another folder")
    work, cores = Work(options.out, options.images, options.count), len(os.sched_getaffinity(0))
    seeds = {name: range(options.layout_seeds if name in LAYOUTS else options.seeds) for name in names}
    jobs = [(name, seed) for name in names for seed in seeds[name]]
    for processes in sorted({ROWS[name].processes for name in names}):
        as_many = [job for job in jobs if ROWS[job[0]].processes == processes]
        each("trained", work.train, as_many, max(1, cores // processes))
    each("drew", work.draw, jobs, cores)
    results = {name: [work.score(name, seed) for seed in seeds[name]] for name in names}
    print(report(results, options.images, options.count))
    return 0


if __name__ == "__main__":
    sys.exit(main())
