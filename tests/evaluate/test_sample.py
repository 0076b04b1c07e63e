"""ddpm-ds sample: what it writes, and its one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ddpm_ds.data.pictures import grid
from ddpm_ds.evaluate import outputs, trained
from ddpm_ds.evaluate.draw import Request, draw
from ddpm_ds.evaluate.trained import load_trained
from tests.evaluate.planted import FAST_SAMPLER, trained_of
from tests.launching import REPOSITORY, tiny_spec


def expected(planted: Path, count: int, labels: Tensor | None, first: int = 0, seed: int = 0) -> Tensor:
    index = torch.arange(first, first + count)
    return draw(load_trained(planted), FAST_SAMPLER, index, labels=labels, seed=seed)


def read_pngs(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))}


def test_a_grid_of_64_goes_into_the_runs_folder(planted: Path, sample: Callable[..., str]) -> None:
    out = planted / "samples-000000320.png"
    said = sample()
    assert said == f"{out}: 64 images by ddim in 3 steps, seed 0, ema weights after 320 images\n"
    wanted = expected(planted, 64, torch.arange(64) % 10)
    assert np.asarray(Image.open(out)).tolist() == np.asarray(grid(wanted)).tolist()
    assert sorted(path.name for path in planted.iterdir()) == ["checkpoints", out.name]
    out.unlink()


def test_an_npz_is_what_evaluators_of_guided_diffusion_read(
    planted: Path, without_classes: Path, tmp_path: Path, sample: Callable[..., str]
) -> None:
    sample("--count", 7, "--first", 5, "--seed", 9, "--labels", "4,2,0", "--out", tmp_path / "x.npz")
    labels = torch.tensor([4, 2, 0])[torch.arange(5, 12) % 3]
    with np.load(tmp_path / "x.npz") as archive:
        assert archive.files == ["arr_0", "arr_1"]
        images, written = archive["arr_0"], archive["arr_1"]
    assert images.dtype == np.uint8 and images.shape == (7, 8, 8, 1)
    assert written.tolist() == labels.tolist()
    wanted = expected(planted, 7, labels, first=5, seed=9)
    assert images.transpose(0, 3, 1, 2).tolist() == wanted.tolist()
    for run_dir, option in ((planted, ["--labels", "none"]), (without_classes, [])):
        sample("--count", 2, "--out", tmp_path / f"{run_dir.name}.npz", *option, run_dir=run_dir)
        assert np.load(tmp_path / f"{run_dir.name}.npz").files == ["arr_0"]


def test_an_npz_of_several_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: Callable[..., str]) -> None:
    sample("--count", 7, "--out", tmp_path / "whole.npz")
    monkeypatch.setattr(outputs, "CHUNK_IMAGES", 3)
    sample("--count", 7, "--out", tmp_path / "pieces.npz")
    assert (tmp_path / "whole.npz").read_bytes() == (tmp_path / "pieces.npz").read_bytes()


def test_a_folder_of_pngs_numbered_by_image(planted: Path, tmp_path: Path, sample: Callable[..., str]) -> None:
    sample("--count", 3, "--first", 10, "--out", tmp_path / "pngs", "--labels", "3")
    found = read_pngs(tmp_path / "pngs")
    wanted = expected(planted, 3, torch.tensor([3, 3, 3]), first=10)
    assert list(found) == ["000010.png", "000011.png", "000012.png"]
    assert [image.tolist() for image in found.values()] == wanted[:, 0].tolist()
    record = json.loads((tmp_path / "pngs" / "sampling.json").read_text())
    assert (record["seed"], record["labels"], record["sampler"]["steps"]) == (0, [3], 3)


def test_raw_weights_are_others_than_the_averaged_ones(tmp_path: Path, sample: Callable[..., str]) -> None:
    for weights in ("ema", "raw"):
        sample("--count", 2, "--weights", weights, "--out", tmp_path / weights)
    assert read_pngs(tmp_path / "ema")["000000.png"].tolist() != read_pngs(tmp_path / "raw")["000000.png"].tolist()


def test_the_batch_size_changes_nothing_but_roundings(tmp_path: Path, sample: Callable[..., str]) -> None:
    images = []
    for size in (1, 5, 64):
        sample("--count", 12, "--batch-images", size, "--out", tmp_path / f"{size}.npz")
        images.append(np.load(tmp_path / f"{size}.npz")["arr_0"].astype(int))
    assert all(np.abs(images[0] - other).max() <= 1 for other in images[1:])


def test_fp16_on_a_cpu_says_how_it_computes(tmp_path: Path, sample: Callable[..., str]) -> None:
    said = sample("--count", 2, "--precision", "fp16", "--out", tmp_path / "x.png")
    assert said.startswith("fp16 on a CPU: stored in fp16, computed in fp32\n")


@pytest.mark.parametrize("name", ["x.npz", "x.png", "pngs", "folder.png"])
def test_what_is_not_ours_is_never_overwritten(name: str, tmp_path: Path, sample: Callable[..., str]) -> None:
    mine = tmp_path / name
    if name in ("pngs", "folder.png"):
        mine.mkdir()
        mine = mine / "holiday.png"
    Image.new("RGB", (4, 4)).save(mine, format="PNG")
    content = mine.read_bytes()
    assert "exists and does not say how it was drawn" in sample("--count", 2, "--out", tmp_path / name, code=2)
    assert mine.read_bytes() == content and len(list(tmp_path.rglob("*"))) <= 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--sampler euler", "argument --sampler: invalid choice: 'euler'"),
        ("--steps 1001", "--steps = 1001 is above the 1000 timesteps"),
        ("--sampler ddpm --eta 0.5", "--eta = 0.5 is of ddim, not of ddpm"),
        ("--labels 10", "--labels 10 is out of range: the U-Net has 10 classes, 0 to 9"),
        ("--labels 0,1,-2", "--labels 0,1,-2 is none of all, none, a class such as 3"),
        ("--labels none --guidance 3", "--guidance 3 needs classes to guide to"),
        ("--count 0", "argument --count: '0' is not a positive number"),
        ("--first -1", "argument --first"),
        ("--seed 4294967296", "argument --seed: '4294967296' is not a number from 0 to 2^32 - 1"),
        ("--batch-images x", "argument --batch-images: 'x' is not a positive number"),
        ("--precision fp8", "argument --precision: invalid choice: 'fp8'"),
        ("--out OUT/x.jpg", "the suffix .jpg is of no format; use .png, .npz or none, or say --format"),
        ("--out OUT/x.png --format npz", "has the suffix of a grid, not of --format npz"),
        ("--out OUT/x.npz --mlflow", "--mlflow logs a grid"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    arguments: str, said: str, planted: Path, tmp_path: Path, sample: Callable[..., str]
) -> None:
    words = arguments.replace("OUT", str(tmp_path)).split()
    assert said in sample(*words, *([] if "--out" in words else ["--out", tmp_path / "x.png"]), code=2)
    assert not any(tmp_path.iterdir()) and [path.name for path in planted.iterdir()] == ["checkpoints"]


def test_a_u_net_without_classes_takes_no_labels_and_no_guidance(
    without_classes: Path, tmp_path: Path, sample: Callable[..., str]
) -> None:
    out = ("--out", tmp_path / "x.png")
    for labels in ("all", "3"):
        said = sample("--labels", labels, *out, run_dir=without_classes, code=2)
        assert f"--labels {labels}: the U-Net has no classes (unet.classes is null); leave it out" in said
    said = sample("--guidance", 2, *out, run_dir=without_classes, code=2)
    assert "--guidance = 2 needs a class-conditional U-Net" in said
    sample("--labels", "none", "--count", 1, *out, run_dir=without_classes)


def test_a_path_without_weights_is_one_line(tmp_path: Path, sample: Callable[..., str]) -> None:
    assert str(tmp_path) in sample("--out", tmp_path / "x.png", run_dir=tmp_path, code=2)


def test_an_export_has_one_set_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: Callable[..., str]
) -> None:
    export = replace(trained_of(tiny_spec()), weights="export", images_seen=None, spec=None)
    monkeypatch.setattr(trained, "load_trained", lambda *arguments, **options: export)
    monkeypatch.chdir(tmp_path)
    assert "--weights raw: an export has only one set of weights" in sample("--weights", "raw", code=2)
    assert sample("--count", 2) == "samples.png: 2 images by ddim in 3 steps, seed 0, export weights\n"
    assert (tmp_path / "samples.png").exists()


def test_the_record_of_a_file_says_how_it_was_drawn(tmp_path: Path, sample: Callable[..., str]) -> None:
    for name in ("x.npz", "x.png"):
        sample("--count", 2, "--first", 3, "--seed", 4, "--labels", "7", "--out", tmp_path / name)
        record = outputs._record_of(tmp_path / name)
        assert isinstance(record, Request) and record.sampler == FAST_SAMPLER
        assert (record.first, record.count, record.seed, record.labels, record.images_seen) == (3, 2, 4, (7,), 320)


def test_the_grid_is_logged_where_that_is_asked_for(
    planted: Path, tmp_path: Path, sample: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[Any] = []

    class Child:
        @classmethod
        def begin(cls, trained: Any, kind: str, params: Any) -> Child:
            logged.extend([trained.run_dir, kind, params["seed"]])
            return cls()

        def artifact(self, path: Path) -> None:
            logged.append(path)

        def finish(self) -> None:
            logged.append("finished")

    monkeypatch.setattr("ddpm_ds.evaluate.diary.Child", Child)
    sample("--count", 2, "--out", tmp_path / "x.png")
    assert logged == []
    sample("--count", 2, "--out", tmp_path / "y.png", "--mlflow")
    assert logged == [planted, "sample", 0, tmp_path / "y.png", "finished"]


def test_help_needs_no_torch() -> None:
    program = """
import sys
from ddpm_ds.cli.main import main
try:
    main(["sample", "--help"])
except SystemExit:
    sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0 and "usage: ddpm-ds sample" in done.stdout
