"""ddpm-ds evaluate --metrics loss: what it prints, writes and records, and its one-line errors.

Its numbers are compared with those of training in tests/train, where there are real runs.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ddpm_ds.cli.main import main
from ddpm_ds.data.cache import BUCKETS, DatasetCache
from ddpm_ds.data.held_out import HELD_OUT, checksums_of, prepare_all
from ddpm_ds.evaluate import sampling, trained
from tests.evaluate.conditioned import plant_fields
from tests.evaluate.planted import UNLABELLED, plant, trained_of
from tests.launching import tiny_spec

NAMES = ["eval/loss", *(f"validation/loss_t{percent}" for percent in range(10, 100, 10))]


def evaluate(capfd: pytest.CaptureFixture[str], path: Path, *words: object, code: int = 0) -> str:
    """Run the verb in this process and return what it printed."""
    capfd.readouterr()
    assert main(["evaluate", str(path), "--device", "cpu", *map(str, words)]) == code
    said = capfd.readouterr()
    return said.err if code else said.out


def report(run_dir: Path) -> dict[str, Any]:
    (path,) = run_dir.glob("evaluations/*-loss-*/scores.json")
    return dict(json.loads(path.read_text()))


@pytest.fixture
def run_dir(tmp_path: Path, digits: DatasetCache) -> Path:
    """The folder of a run that has held out twenty digits."""
    data = {"store_root": str(digits.path.parent), "held_out_images": 20}
    plant(tmp_path / "run", data_sha256=digits.meta.sha256, data=data)
    return tmp_path / "run"


def test_losses_are_written_recorded_and_in_a_table_and_nothing_is_drawn(
    run_dir: Path,
    digits: DatasetCache,
    trackers: list[Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "draw", None)
    said = evaluate(capfd, run_dir, "--metrics", "loss")
    content = report(run_dir)
    assert (content["weights"], content["images_seen"], content["precision"]) == ("ema", 320, "fp32")
    assert content["reference"] == {"store": str(digits.path), "images": 20, "sha256": digits.meta.sha256}
    scores = content["scores"]
    assert list(scores) == NAMES and scores["eval/loss"] == pytest.approx(
        sum(scores.values()) / 9 - scores[NAMES[0]] / 9
    )
    (child,) = trackers
    assert (child.kind, child.logged, child.artifacts) == ("evaluate", scores, [("scores.json", "")])
    assert f"held out   20 images of {digits.path}" in said
    rows = dict(line.rsplit(maxsplit=1) for line in said.split("\n\n")[-1].splitlines())
    assert rows == {"held-out loss": "ema", **{name: f"{value:.4g}" for name, value in scores.items()}}


def test_losses_and_scores_of_drawn_images_may_be_asked_for_together(
    run_dir: Path, trackers: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--metrics", "pixel,loss", "--count", 20, "--sampler", "ddim,dpm_solver", "--steps", 2)
    first, second = evaluate(capfd, run_dir, *words).split("\n\n")[-2:]
    assert first.startswith("held-out loss") and second.startswith("score") and len(second.splitlines()) == 3
    assert ["eval/loss" in child.logged for child in trackers] == [True, False, False]


def test_pictures_held_out_of_another_folder_are_in_the_buckets_that_are_trained_on(
    tmp_path: Path, trackers: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """One of the three shapes of the held-out images has no bucket."""
    for name, shapes in (("train", ((40, 40), (50, 33))), ("val", ((40, 40), (50, 33), (33, 50)))):
        (tmp_path / name).mkdir()
        for number in range(12):
            pixels = np.random.default_rng(number).integers(0, 256, shapes[number % len(shapes)], np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    paths = {"path": str(tmp_path / "train"), "held_out_path": str(tmp_path / "val")}
    data = {**paths, "store_root": str(tmp_path / "stores"), "image_size": 40, "buckets": {"step": 8, "images": 4}}
    sections: dict[str, Any] = {
        "data": {**data, "source": "folder"},
        "unet": {"classes": None, "attention_resolutions": [], "attention_levels": [1], "dropout": 0.0},
        "train": {"label_drop": 0.0},
    }
    spec = tiny_spec(**sections)
    checksums = checksums_of(*prepare_all(spec.data, group=4))
    assert sum(name.startswith(HELD_OUT + BUCKETS) for name in checksums) > 0
    plant(tmp_path / "run", data_sha256=checksums, **sections)
    evaluate(capfd, tmp_path / "run", "--metrics", "loss", "--batch-images", 5)
    assert report(tmp_path / "run")["reference"]["images"] == 12


def test_images_that_are_not_there_and_options_of_drawing_are_one_line(
    tmp_path: Path, run_dir: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path / "none", **UNLABELLED)
    (tmp_path / "fields").mkdir()
    fields = plant_fields(tmp_path / "fields")
    lines = [
        evaluate(capfd, run_dir, "--metrics", "loss", "--prompts", "held-out", code=2),
        evaluate(capfd, tmp_path / "none", "--metrics", "loss", code=2),
        evaluate(capfd, run_dir, "--metrics", "loss", "--dataset", fields.store.path, code=2),
        evaluate(capfd, fields.run_dir, "--metrics", "loss,pixel", code=2),
    ]
    shutil.rmtree(fields.store.path)
    (tmp_path / "fields" / "fields.npz").unlink()
    lines.append(evaluate(capfd, fields.run_dir, "--metrics", "loss", code=2))
    loaded = replace(trained_of(tiny_spec()), weights="export", spec=None, origin="export")
    monkeypatch.setattr(trained, "load_trained", lambda *_, **__: loaded)
    lines.append(evaluate(capfd, run_dir, "--metrics", "loss", code=2))
    for line, expected in zip(
        lines,
        (
            "--prompts held-out is of images that are drawn, and --metrics loss draws none; leave it out",
            "images-000000320 has held out no image (data.held_out_images = 0); leave it out",
            f"{fields.store.path} holds other images than those that ",
            "--metrics pixel is of images without conditions",
            f"data.path = {tmp_path / 'fields' / 'fields.npz'}",
            "--metrics loss: export is an export; leave it out",
        ),
        strict=True,
    ):
        assert expected in line and len(line.splitlines()) == 1 and line.startswith("ddpm-ds: error: ")
    assert not (run_dir / "evaluations").exists()
