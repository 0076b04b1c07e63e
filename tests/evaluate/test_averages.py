"""Averages of other lengths on the way to images: ddpm-ds ema, what takes its result, and scores of some lengths."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpm_ds.checkpoint.power_ema import profile_kind
from ddpm_ds.cli.main import main
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.evaluate.trained import load_trained
from tests.evaluate.planted import FAST, plant, same_weights, unet_of
from tests.launching import tiny_spec

LENGTHS = (0.05, 0.1)
TIMES = (160, 240, 320)
PROFILES: dict[str, Any] = {"profiles": list(LENGTHS), "snapshot_images": 80}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, digits: DatasetCache) -> Path:
    """The folder of a run with a checkpoint and three snapshots, whose averages have nothing to do with each other."""
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    data = {"store_root": str(digits.path.parent), "held_out_images": 20}
    sections: dict[str, Any] = {"data": data, "ema": PROFILES}
    how: dict[str, Any] = {"data_sha256": digits.meta.sha256, **sections}
    plant(run_dir, **how)
    for time in TIMES:
        unets = {
            profile_kind(length): unet_of(tiny_spec(), time + number).half().float()
            for number, length in enumerate(LENGTHS)
        }
        plant(run_dir, time, unets=unets, what="snapshot", cuts=(0.4,), **how)
    return run_dir


@pytest.fixture
def run_dir(original: Path, tmp_path: Path) -> Path:
    """A copy of it, for what is written into it."""
    return shutil.copytree(original, tmp_path / "run")


def said(arguments: list[object], capfd: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert main([str(argument) for argument in arguments]) == code
    out, err = capfd.readouterr()
    return err.strip() if code else out


def test_the_average_is_drawn_from_scored_and_exported_like_a_checkpoint(
    run_dir: Path, trackers: list[Any], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = run_dir / "averages" / "images-000000320-ema-0.1"
    line = said(["ema", run_dir, "--length", "0.1"], capfd)
    assert line.startswith(f"{made}: average of relative length 0.1 after 320 images") and "0.00% off" in line
    trained = load_trained(made)
    assert (trained.weights, trained.images_seen, trained.run_dir) == ("ema-0.1", 320, run_dir.resolve())
    expected = unet_of(tiny_spec(), 321).half().float()
    for mine, theirs in zip(trained.unet.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert same_weights(trained.unet, load_trained(run_dir, ema_length=0.1).unet)
    assert not same_weights(trained.unet, load_trained(run_dir).unet)

    assert "ema-0.1 weights after 320 images" in said(["sample", made, *FAST, "--count", 4], capfd)
    said(["export", made, tmp_path / "hub", "--samples", 0], capfd)
    assert "averaged over training (EMA) of relative length 0.1" in (tmp_path / "hub" / "README.md").read_text()
    said(["evaluate", made, *FAST, "--count", 12, "--metrics", "pixel"], capfd)
    (folder,) = (run_dir / "evaluations").iterdir()
    assert folder.name.startswith("images-000000320-ema-0.1-ema-0.1-ddim-3-12-")
    assert [tracker.kind for tracker in trackers] == ["export", "evaluate"], "children of the run that made them"


def test_an_average_of_the_past_goes_where_it_is_told_to(
    run_dir: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said(["ema", run_dir, "--length", 0.08, "--at", 240, "--output", tmp_path / "past"], capfd)
    past = load_trained(tmp_path / "past")
    assert (past.weights, past.images_seen, past.run_dir) == ("ema-0.08", 240, None)
    line = said(["ema", run_dir, "--length", 0.08, "--at", 240, "--output", tmp_path / "past"], capfd, code=2)
    assert line.endswith("past exists; name a new folder with --output, or remove it first")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--length", "-0.1"], "argument --length: '-0.1' is not a relative length from 0.001 to 0.28, such as 0.1"),
        (["--length", "0.25"], "--length 0.25 is outside of what the 3 snapshots in"),
        (["--length", "0.07", "--at", "100"], "--at 100 is the time of no snapshot in"),
        (["--length", "0.07", "--at", str(10**15)], "--at 1000000000000000 is the time of no snapshot in"),
        (["--length", "0.07", "--at", str(10**15 + 1)], "'1000000000000001' is not a number of images from 1 to 10^15"),
        (["--length", "0.07", "--at", "160"], "holds one snapshot of up to 160 images"),
    ],
)
def test_what_can_not_be_made_is_one_line(
    arguments: list[str], problem: str, original: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = said(["ema", original, *arguments], capfd, code=2)
    assert problem in line and "\n" not in line
    assert not (original / "averages").exists()


def test_a_run_without_snapshots_and_a_snapshot_are_no_weights(
    original: Path, planted: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "holds no snapshot to make averages from" in said(["ema", planted, "--length", 0.1], capfd, code=2)
    line = said(["sample", original / "snapshots" / "images-000000320", *FAST], capfd, code=2)
    assert line.endswith("has no ema weights; it has ema-0.05, ema-0.1, of which `ddpm-ds ema` makes weights")


def test_some_lengths_are_evaluations_of_their_own_in_one_table(
    run_dir: Path, trackers: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", run_dir, *FAST, "--count", 12, "--metrics", "pixel", "--ema-length"]
    out = said([*arguments, "0.1,0.05,0.08"], capfd)
    reports = [json.loads(path.read_text()) for path in (run_dir / "evaluations").glob("*/scores.json")]
    values = {report["weights"]: f"{report['scores'][0]['value']:.4g}" for report in reports}
    rows = [line.split() for line in out.split("\n\n")[-1].splitlines() if line.startswith("pixel")]
    weights = ["ema-0.1", "ema-0.05", "ema-0.08"]
    assert [(row[11], row[5]) for row in rows] == [(kind, values[kind]) for kind in weights]
    assert len(set(values.values())) == 3, "three other weights"
    assert [tracker.kind for tracker in trackers] == ["evaluate"] * 3
    arguments = ["evaluate", run_dir, "--device", "cpu", "--metrics", "loss", "--ema-length", "0.1,0.08"]
    header, losses, *_ = said(arguments, capfd).split("\n\n")[-1].splitlines()
    assert header.split() == ["held-out", "loss", "ema-0.1", "ema-0.08"]
    assert [float(loss) for loss in losses.split()[1:]] == pytest.approx(
        [tracker.logged["eval/loss"] for tracker in trackers[3:]], rel=1e-3
    )
    assert len(set(losses.split())) == 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--ema-length", "0.05,"], "argument --ema-length: '' is not a relative length from 0.001 to 0.28"),
        (["--ema-length", "0.05,0.25"], "--length 0.25 is outside of what the 3 snapshots in"),
        (["--ema-length", "0.05", "--weights", "raw"], "--weights raw is not averaged"),
    ],
)
def test_lengths_that_can_not_be_made_are_refused_before_the_first_is_drawn(
    arguments: list[str], problem: str, original: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = said(["evaluate", original, *FAST, "--count", 12, "--metrics", "pixel", *arguments], capfd, code=2)
    assert problem in line and "\n" not in line
    assert not (original / "evaluations").exists()
