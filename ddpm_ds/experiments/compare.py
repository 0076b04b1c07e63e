"""Comparison of runs: the settings that differ, and metrics with their ratios to the first run, as one table.

Runs are read from their folders. A resumed run has the settings of its last start.
"""

import difflib
import glob
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ddpm_ds.ground.errors import SpecError
from ddpm_ds.ground.units import aligned
from ddpm_ds.tracking.run_folder import DERIVED, IDENTITY, SPEC, RunFolder, mean_of_points
from ddpm_ds.tracking.runs import ExperimentError, open_run

DEFAULT = (
    *("train/seen_images", "train/loss", "eval/loss", "perf/images_per_second", "usage/step_seconds"),
    *("usage/peak_memory_bytes", "perf/bubble_fraction", "perf/mfu", "perf/data_wait_fraction"),
    *("flops/stage*_gflops", "validation/loss_channel_*"),
)
"""Metrics that are compared by default, where any run has them."""
SHARES = ("*_fraction", "perf/mfu")
PACES = ("perf/*_per_second", "usage/*_seconds", "usage/*tflops*")
"""Metrics compared by :func:`~ddpm_ds.tracking.run_folder.mean_of_points` instead of their last log point."""
UNITS = {
    "_bytes": ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " B")),
    "_seconds": ((1, " s"), (1e-3, " ms"), (1e-6, " µs")),
}
REPEATED = {
    "derived.batch_images": "ds_config.train_batch_size",
    "derived.micro_batch_images": "ds_config.train_micro_batch_size_per_gpu",
    "derived.micro_batches": "ds_config.gradient_accumulation_steps",
    "derived.stages": "ds_config.pipeline.stages",
    "derived.zero_stage": "ds_config.zero_optimization.stage",
}
"""Settings that are left out if the DeepSpeed JSON already gives them, with its keys."""


@dataclass(frozen=True)
class Compared:
    """Run of a comparison."""

    name: str
    status: str
    settings: Mapping[str, str]
    metrics: Mapping[str, float]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def of_folder(folder: Path) -> Compared:
    """Return the run in a folder, by its files; a run that is still going or was killed may lack some."""
    run = RunFolder(folder)
    try:
        metrics = {
            name: mean_of_points(name, points) if _matches(name, PACES) else points[-1][1]
            for name, points in run.histories().items()
        }
        return Compared(folder.resolve().name, run.status, run.settings, metrics)
    except (OSError, ValueError, AttributeError, SpecError) as error:
        raise ExperimentError(f"run {folder} can't be read ({error}); leave it out") from None


def find_compared(folder: Path) -> list[Compared]:
    """Return the run in a folder, or a sweep's trials in the order of their start; ExperimentError if there is none."""
    trials = list(folder.parent.glob(f"{glob.escape(folder.name)}.*/{IDENTITY}"))
    if not trials or os.path.isfile(folder / SPEC):
        return [of_folder(open_run(folder).folder)]
    return [of_folder(identity.parent) for identity in sorted(trials, key=lambda file: file.stat().st_mtime_ns)]


def number(name: str, value: float) -> str:
    """Return a metric's value with four digits, in the unit that suits it."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if _matches(name, SHARES):
        return f"{value:.1%}"
    units = next((units for ending, units in UNITS.items() if name.endswith(ending)), ((1, ""),))
    size, word = next((unit for unit in units if abs(value) >= unit[0]), units[-1])
    scaled = value / size
    return f"{scaled:,.0f}{word}" if 1000 <= abs(scaled) < 1e12 else f"{scaled:.4g}{word}"


def table_rows(runs: Sequence[Compared], metrics: Sequence[str] | None = None) -> list[list[str]]:
    """Return rows of a name and a text for each run: status if one is unfinished, settings that differ, and metrics;
    ExperimentError if no run has a metric of ``metrics``.
    """
    there = sorted({name for run in runs for name in run.metrics})
    for name in metrics or ():
        if name not in there:
            near = difflib.get_close_matches(name, there, n=3, cutoff=0.4) or there[:3]
            known = f"use one such as {', '.join(near)}" if near else "they have no metrics at all"
            raise ExperimentError(f"--metrics {name}: no run has this metric; {known}")
    usual = [name for pattern in DEFAULT for name in there if fnmatchcase(name, pattern)]
    sweeps = {run.name.partition(".")[0] if "." in run.name else "" for run in runs}
    prefix = f"{sweeps.pop()}." if len(sweeps) == 1 and len(runs) > 1 else ""
    names = [run.name.removeprefix(prefix) for run in runs]  # equal names get numbers
    equal = Counter(names)
    rows = [["", *(name if equal[name] == 1 else f"{name} ({place})" for place, name in enumerate(names, start=1))]]
    if any(run.status != "FINISHED" for run in runs):
        rows.append(["status", *(run.status for run in runs)])
    values = {name: [run.settings.get(name) for run in runs] for run in runs for name in run.settings}
    for name in sorted(values, key=lambda name: (name.startswith(DERIVED), name.startswith("ds_config."), name)):
        if len(set(values[name])) > 1 and values[name] != values.get(REPEATED.get(name, "")):
            rows.append([name, *(value or "-" for value in values[name])])
    for name in usual if metrics is None else dict.fromkeys(metrics):
        base = runs[0].metrics.get(name, math.nan) if len(runs) > 1 else math.nan
        rows.append([name])
        for value in (run.metrics.get(name) for run in runs):
            share = value / base if value is not None and base else math.nan
            relative = f" ({share:.3g}x)" if math.isfinite(share) else ""
            rows[-1].append("-" if value is None else number(name, value) + relative)
    return [["".join(letter if letter.isprintable() else " " for letter in cell) for cell in row] for row in rows]


def terminal(runs: Sequence[Compared], metrics: Sequence[str] | None = None, width: int = 120) -> str:
    """Return tables with as many runs side by side as fit into ``width`` characters."""
    rows, parts, begin = table_rows(runs, metrics), list[str](), 1
    widths = [max(map(len, cells)) + 2 for cells in zip(*rows, strict=True)]
    while begin < len(widths):
        end = begin + 1
        while end < len(widths) and widths[0] + sum(widths[begin : end + 1]) - 2 <= width:
            end += 1
        parts.append("\n".join(aligned([row[:1] + row[begin:end] for row in rows], left={0})))
        begin = end
    return "\n\n".join(parts)
