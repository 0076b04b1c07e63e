"""Exports on the Hugging Face hub, which are drawn from by name, and the picture of an export of a run with text."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpm_ds.cli.main import main
from ddpm_ds.evaluate.trained import load_trained
from ddpm_ds.ground.errors import CheckpointError
from tests.evaluate.conftest import FakeTracker
from tests.evaluate.planted import UNLABELLED, plant, same_weights
from tests.model_hub import ModelHub


def test_an_export_on_the_hub_is_drawn_from_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint outside of a run's folder is planted, so that nothing is recorded in MLflow."""
    plant(tmp_path / "run", diffusion={"timesteps": 4}, sampler={"steps": 2}, **UNLABELLED).replace(tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    assert main(["export", "saved", "out", "--samples", "2"]) == 0
    hub = ModelHub(tmp_path / "cache")
    hub.repositories["me/digits"] = tmp_path / "out"
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    trained = load_trained("me/digits")
    assert trained.origin == "me/digits" and same_weights(trained.unet, load_trained("saved").unet)
    for name, grid in (("me/digits", "1.npz"), ("out", "2.npz")):
        assert main(["sample", name, "--count", "2", "--steps", "2", "--device", "cpu", "--out", grid]) == 0
    assert Path("1.npz").read_bytes() == Path("2.npz").read_bytes()
    with pytest.raises(CheckpointError, match=r"^me/digits is no folder here, and on .* leave out --weights raw$"):
        load_trained("me/digits", weights="raw")


def test_a_run_with_text_shows_its_last_picture(
    tmp_path: Path, trackers: list[FakeTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    text = {"context_channels": 8, "tokens": 4, "blocks": [1, 1], "heads": [2, 4]}
    data = {"source": "folder", "path": "p", "text": {"encoders": str(tmp_path / "missing"), "layer": "last"}}
    unet = {**UNLABELLED["unet"], "attention_resolutions": [], "text": text}
    plant(run, data=data, unet=unet, train=UNLABELLED["train"])
    (run / "samples").mkdir()
    for images in ("images-000000160", "images-000000320"):
        (run / "samples" / f"{images}.png").write_text(images)
    assert main(["export", str(run), str(out)]) == 0
    assert (out / "samples.png").read_text() == "images-000000320" and "samples.png" in (out / "README.md").read_text()
    for number, words in enumerate((["--samples", "0"], ["--weights", "raw"])):
        assert main(["export", str(run), str(tmp_path / str(number)), *words]) == 0
        assert not (tmp_path / str(number) / "samples.png").exists()
