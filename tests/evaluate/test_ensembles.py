"""ddpm-ds evaluate of runs with conditions: what it scores, prints, writes and records, and its one-line errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddpm_ds.config.spec import SamplerSpec
from ddpm_ds.data.prepare import prepare
from ddpm_ds.evaluate import ensembles
from ddpm_ds.evaluate.inputs import Inputs
from ddpm_ds.evaluate.trained import load_trained
from tests.evaluate.conditioned import HELD_OUT, arrays, draw_ensembles, plant_fields, plant_on
from tests.evaluate.planted import evaluate_verb, report
from tests.gaussian_fields import field_scores
from tests.launching import tiny_spec

SAMPLER: dict[str, Any] = {"kind": "ddim", "steps": 2, "clip": "none"}
MEMBERS = 3
Evaluate = Callable[..., str]


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of fields of two channels."""
    return plant_fields(tmp_path_factory.mktemp("fields")).run_dir


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that learns pictures of 16x16 pixels from pictures of 4x4."""
    folder = tmp_path_factory.mktemp("pictures")
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
    np.save(folder / "pixels.npy", pixels)
    data = {"source": "arrays", "path": str(folder / "pixels.npy"), "image_size": 16, "channels": 3}
    data |= {"horizontal_flips": False, "held_out_images": 4, "store_root": str(folder / "data")}
    spec = tiny_spec(
        data={**data, "condition": {"kind": "reduced", "factor": 4}},
        unet={"classes": None, "attention_resolutions": [8]},
        train={"label_drop": 0.0},
    )
    return plant_on(prepare(spec.data), folder / "run", spec).run_dir


@pytest.fixture(autouse=True)
def _few_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spectra, which take most of an evaluation of a tiny run, are drawn where a test looks at them."""
    if request.function is not test_the_members_of_every_held_out_field_are_scored_against_it:
        monkeypatch.setattr(ensembles, "spectra_plot", lambda spectra, channels, path: path.touch())


@pytest.fixture
def evaluate(trackers: list[Any], capfd: pytest.CaptureFixture[str]) -> Evaluate:
    return evaluate_verb(capfd)


def drawn(run_dir: Path, members: int, **sampler: Any) -> tuple[Any, Any]:
    """Members (K, N, C, H, W) of all held-out inputs, and their truths (N, C, H, W)."""
    trained = load_trained(run_dir)
    inputs, how = Inputs.held_out(trained), SamplerSpec(**{**SAMPLER, **sampler})
    every = range(len(inputs))
    found = draw_ensembles(trained, how, inputs, every, members, seed=0, batch_images=64)
    return torch.stack([members for _, members in found], dim=1), inputs.truth(every)


def table_of(out: str) -> list[str]:
    """The lines of the table, from its header to its last row."""
    lines = out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("channel"))
    return [line for line in lines[first:] if "  " in line]


def test_the_members_of_every_held_out_field_are_scored_against_it(
    fields: Path, evaluate: Evaluate, trackers: list[Any], tmp_path: Path
) -> None:
    out = evaluate(fields, "--members", MEMBERS, "--out", tmp_path / "here")
    expected = field_scores(*drawn(fields, MEMBERS), channels=["t2m", "u"])
    content = report(tmp_path / "here")
    scores = content["scores"]
    for found, true in [
        (scores["total"], expected.total),
        *((scores["channels"][n], expected.channels[n]) for n in "u"),
    ]:
        assert list(found.values()) == pytest.approx(list(vars(true).values()), rel=1e-4)
    assert expected.spectra is not None
    assert np.allclose(scores["spectra"]["members"], expected.spectra.members, rtol=1e-3)
    assert (scores["inputs"], scores["members"], content["seed"], content["count"]) == (HELD_OUT, MEMBERS, 0, 15)
    (child,) = trackers
    assert child.kind == "evaluate" and child.logged["eval/crps_channel/u"] == scores["channels"]["u"]["crps"]
    assert child.artifacts == [("scores.json", ""), ("samples.png", ""), ("spectra.png", "")]
    (plot,) = (tmp_path / "here").glob("*/spectra.png")
    assert Image.open(plot).width > 500
    table = [line.split() for line in table_of(out)]
    assert table[0][:3] == ["channel", "rmse", "crps"] and [row[0] for row in table[1:]] == ["t2m", "u", "all"]
    assert table[1][-6:] == [str(HELD_OUT), str(MEMBERS), "ddim", "2", "ema", "-"]


def test_inputs_of_a_file_are_scored_if_it_has_true_images(fields: Path, evaluate: Evaluate, tmp_path: Path) -> None:
    others = {name: values[::-1] if len(values) > 8 else values for name, values in arrays().items()}
    np.savez(tmp_path / "others.npz", **others)
    evaluate(fields, "--conditions", tmp_path / "others.npz", "--count", 2, "--members", 1, "--out", tmp_path)
    (images,) = tmp_path.glob("*/drawn/images.npy")
    truths = np.stack([others["t2m"][:2], others["u"][:2]], axis=1)
    total = report(tmp_path)["scores"]["total"]
    assert total["crps"] == pytest.approx(np.abs(np.load(images) - truths).mean(), rel=1e-5)
    np.savez(tmp_path / "unknown.npz", **{name: others[name] for name in ("coarse", "lead", "land")})
    said = evaluate(fields, "--conditions", tmp_path / "unknown.npz", code=2)
    assert "--conditions has no true images to compare with; leave it out for those held out" in said


def test_pictures_are_scored_by_colour(pictures: Path, evaluate: Evaluate, tmp_path: Path) -> None:
    evaluate(pictures, "--members", 2, "--clip", "static", "--out", tmp_path)
    members, truths = drawn(pictures, 2, clip="static")
    scores = report(tmp_path)["scores"]
    expected = field_scores(members.float(), truths.float()).total
    assert scores["total"]["crps"] == pytest.approx(expected.crps, rel=1e-4)
    assert list(scores["channels"]) == ["red", "green", "blue"]


def test_masked_pixels_are_not_scored(tmp_path: Path, evaluate: Evaluate) -> None:
    holed = arrays()
    holed["t2m"][:, 2:] = np.nan
    np.savez(tmp_path / "fields.npz", **holed)
    run_dir = plant_fields(tmp_path, data={"mask": "nan"}).run_dir
    evaluate(run_dir, "--members", 2, "--out", tmp_path / "here")
    members, truths = drawn(run_dir, 2)
    expected = field_scores(members[:, :, :1, :2], truths[:, :1, :2]).total
    scores = report(tmp_path / "here")["scores"]
    assert list(scores["channels"]["t2m"].values()) == pytest.approx(list(vars(expected).values()), rel=1e-4)
    assert scores["spectra"] is None and not list(tmp_path.glob("here/*/spectra.png"))


def test_a_regression_has_one_member_without_a_spread(tmp_path: Path, evaluate: Evaluate) -> None:
    planted = plant_fields(tmp_path, diffusion={"objective": "regression"})
    evaluate(planted.run_dir, "--out", tmp_path / "here", "--steps", 1)
    total = report(tmp_path / "here")["scores"]["total"]
    assert total["spread_over_skill"] is None and total["crps"] > 0
    said = evaluate(planted.run_dir, "--members", 2, "--steps", 1, code=2)
    assert "--members 2: a regression draws one image of each input; use 1" in said


@pytest.mark.parametrize(
    "options, message",
    [
        (("--metrics", "fid,pixel"), "--metrics fid,pixel is of images without conditions, and"),
        (("--inception-weights", "file.pth"), "--inception-weights file.pth is of images without conditions"),
        (("--count", HELD_OUT + 1), f"--count {HELD_OUT + 1}: --conditions has {HELD_OUT} inputs; name some of these"),
        (("--members", "0"), "'0' is not a whole number from 1 to 1,000,000"),
        (("--members", "2"), "was trained without conditions; leave it out"),
        (("--conditions", "x.npz"), "was trained without conditions; leave it out"),
    ],
)
def test_options_of_runs_with_and_without_conditions_are_refused_for_the_others(
    fields: Path, without_classes: Path, evaluate: Evaluate, options: tuple[object, ...], message: str
) -> None:
    run_dir = without_classes if "without conditions;" in message else fields
    assert message in evaluate(run_dir, *options, code=2)
    assert not (run_dir / "evaluations").exists()
