"""Scores as a table for people and as JSON for programs, and a picture of what was scored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ddpm_ds
from ddpm_ds.checkpoint.folder import write_file
from ddpm_ds.data.pictures import grid, write_png
from ddpm_ds.data.store import Store
from ddpm_ds.evaluate.recipe import Request
from ddpm_ds.evaluate.scores import Pixels, Score
from ddpm_ds.table import aligned

SCORES, PICTURE = "scores.json", "samples.png"
FILES = (SCORES, PICTURE)
HEADER = ("score", "value", "of real", "samples", "reference", "sampler", "steps", "weights", "guidance", "tool")
TEXT_COLUMNS = {0, 5, 7, 9}


def table(scores: Sequence[Score], drawn: Request) -> str:
    """A line for each score, with all that it depends on; then the shares of classes, where there are any."""
    sampler = drawn.sampler
    guidance = "-" if drawn.labels is None else f"{sampler.guidance:g}"
    how = (sampler.kind, str(sampler.steps), drawn.weights, guidance)
    rows = [HEADER]
    for score in scores:
        value, real = _number(score.value), _number(score.real)
        rows.append((score.title, value, real, f"{score.samples:,}", f"{score.references:,}", *how, score.tool))
    lines = aligned(rows, TEXT_COLUMNS)
    for score in scores:
        if "shares" in score.details:
            lines += ["", *_shares(score.details)]
    return "\n".join(lines)


def _shares(details: Mapping[str, Any]) -> list[str]:
    rows = [("class", *map(str, range(len(details["shares"]))))]
    for title, key in (("samples", "shares"), ("of real", "shares_real")):
        rows.append((title, *(f"{share:.1%}" for share in details[key])))
    return aligned(rows, {0})


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def about(drawn: Request, store: Store) -> dict[str, Any]:
    """What the scores are of."""
    labels = None if drawn.labels is None else "in the proportions of the reference"
    reference = {"store": str(store.path), "images": len(store), "sha256": store.meta.sha256}
    versions = {"ddpm_ds": ddpm_ds.__version__, "torch": torch.__version__}
    return {**drawn.model_dump(mode="json"), "labels": labels, "reference": reference, "version": versions}


def write_report(folder: Path, facts: Mapping[str, Any], scores: Sequence[Score], pictured: Pixels) -> None:
    """Write :data:`FILES` into ``folder``: the scores and the facts :func:`about` them as JSON, and some images.

    Scores of an earlier evaluation of the same images against the same reference stay, unless they are made anew.

    Raises:
        OSError: the file system refuses.
    """
    path, new = folder / SCORES, [asdict(score) for score in scores]
    try:
        before = json.loads(path.read_text())
        kept = before["scores"] if before["reference"]["sha256"] == facts["reference"]["sha256"] else []
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not ours
        kept = []
    names = {score["name"] for score in new}
    content = {**facts, "scores": [score for score in kept if score["name"] not in names] + new}
    write_file(path, (json.dumps(content, indent=2) + "\n").encode())
    write_png(grid(torch.from_numpy(np.array(pictured))), folder / PICTURE)
