"""Train the digits in several ways, with several seeds each, and compare what they draw.

    python launch/quality.py --out quality

Same U-Net, same images seen; each run is scored on 2,000 samples of its averaged weights. Methods train in one process,
with as many runs at a time as there are cores; layouts train DDPM in two processes. What is there already is kept, so
the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from ddpm_ds import open_run
from ddpm_ds.command_line import aligned

LAUNCH = Path(__file__).resolve().parent
CONFIGS = LAUNCH.parent / "ds_configs"
SCORES = {
    "digits_frechet_2k": "Fréchet, features",
    "pixel_frechet_2k": "Fréchet, pixels",
    "digits_top_probability": "recognised",
    "digits_class_balance": "class balance",
}
"""Titles of the compared scores, by their names."""


@dataclass(frozen=True)
class Row:
    """Way of training, and of drawing."""

    settings: tuple[str, ...] = ()
    """Changes of the spec, or after ``ds.`` of the DeepSpeed JSON."""
    stages: int = 1
    processes: int = 1
    sampler: tuple[str, ...] = ()
    """Options of ``ddpm-ds evaluate``."""

    def command(self, run_dir: Path, images: int, seed: int) -> list[str]:
        """Return the arguments of ``ddpm-ds`` that train it."""
        settings = (f"train.images={images}", f"train.seed={seed}", "samples.every_images=null", *self.settings)
        return [
            *("train", "--processes", str(self.processes), "-p", str(self.stages)),
            *("--deepspeed_config", str(CONFIGS / "zero1_fp32.json"), "--run-dir", str(run_dir)),
            *(word for setting in settings for word in ("--set", setting)),
        ]


EDM = ("diffusion.schedule=edm", "diffusion.objective=v", "sampler.kind=heun", "sampler.clip=none")
FLOW = ("diffusion.schedule=flow", "diffusion.objective=velocity", "sampler.clip=none")
ROWS = {
    "ddpm": Row(),
    "v": Row(("diffusion.schedule=cosine", "diffusion.objective=v")),
    "edm": Row(EDM),
    "flow": Row(FLOW),
    "1f1b": Row(("ds.pipeline.schedule=1f1b",), stages=2, processes=2),
    "folded": Row(("ds.pipeline.schedule=folded",), stages=2, processes=2),
    "planned": Row(("ds.pipeline.schedule=planned",), stages=2, processes=2),
    "2 replicas": Row(processes=2),
}


def ddpm_ds(words: Sequence[str], log: Path) -> None:
    """Run a command of ``ddpm-ds`` on one core for each process; its output goes to the end of ``log``."""
    with log.open("a") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": ""}
        command = [sys.executable, "-m", "ddpm_ds.cli.main", *words]
        code = subprocess.run(command, stdout=file, stderr=file, env=environment, check=False).returncode
    if code:
        raise SystemExit(f"quality.py: a run ended with code {code}; {log} says why")


def scored(name: str, seed: int, out: Path, images: int) -> dict[str, float]:
    """Train a row with a seed and score it, unless that is done; returns the scores and the held-out loss."""
    row, run_dir = ROWS[name], out / f"{name.replace(' ', '-')}-{seed}"
    result, log = out / f"{run_dir.name}.json", out / f"{run_dir.name}.log"
    if not result.exists():
        ddpm_ds(row.command(run_dir, images, seed), log)
        ddpm_ds(["evaluate", str(run_dir), "--count", "2000", "--metrics", "pixel,digits", *row.sampler], log)
        (report,) = (run_dir / "evaluations").glob("*/scores.json")
        values = {score["name"]: score["value"] for score in json.loads(report.read_text())["scores"]}
        result.write_text(json.dumps({**values, "held-out loss": open_run(run_dir).evaluations["eval/loss"][-1]}))
    found: dict[str, float] = json.loads(result.read_text())
    return found


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Return mean and range over the seeds, a line for each row."""

    def cell(values: list[float]) -> str:
        return f"{mean(values):.4g} ({min(values):.4g}-{max(values):.4g})"

    lines = [("", "seeds", *SCORES.values(), "held-out loss")]
    for name, runs in results.items():
        columns = [[run[score] for run in runs] for score in (*SCORES, "held-out loss")]
        lines.append((name, str(len(runs)), *(cell(values) for values in columns)))
    return "\n".join(aligned(lines, {0}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, score and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--rows", default=",".join(ROWS), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (default 3)")
    parser.add_argument("--images", type=int, default=32_000, help="images seen by each run (default 32000)")
    options = parser.parse_args(arguments)
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows has {unknown[0]!r}; there are {', '.join(ROWS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, float]]] = {}
    for name in names:
        at_once = max(1, (os.cpu_count() or 1) // ROWS[name].processes)
        with ThreadPoolExecutor(at_once) as pool:
            jobs = [pool.submit(scored, name, seed, options.out, options.images) for seed in range(options.seeds)]
            results[name] = [job.result() for job in jobs]
        print(f"{name}: done", file=sys.stderr, flush=True)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
