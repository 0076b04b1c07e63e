"""Exports in MLflow's registry: what is sampled from a model that MLflow has loaded, and what is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from make_text import write_encoders
from mlflow import MlflowClient

from ddpm_ds.cli.main import main
from ddpm_ds.evaluate.registry import Drawer
from ddpm_ds.evaluate.sampling import sample
from ddpm_ds.evaluate.trained import load_trained
from ddpm_ds.tracking.run_folder import NOTE_TAG, START_TAG, RunFolder
from ddpm_ds.tracking.tracker import Tracker
from tests.evaluate.planted import plant, trained_of
from tests.launching import PATIENCE_SECONDS, tiny_spec

FEW: dict[str, Any] = {"diffusion": {"timesteps": 4}, "sampler": {"kind": "ddim", "steps": 2}}
Run = Callable[..., str]


@pytest.fixture
def store(tmp_path: Path, empty_store: Path, forked_workers: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a store in SQLite for runs in a folder."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    finish = Tracker.finish
    monkeypatch.setattr(Tracker, "finish", lambda tracker, status: finish(tracker, status, PATIENCE_SECONDS))
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Exports the run in `run` to a folder, and gives what was printed, or the one line of error."""
    plant(tmp_path / "run", **FEW)

    def export(*words: str, out: str = "out", code: int = 0) -> str:
        capfd.readouterr()
        assert main(["export", str(tmp_path / "run"), str(tmp_path / out), "--samples", "0", *words]) == code
        said = capfd.readouterr()
        if code == 0:
            return said.out
        (line,) = [line for line in said.err.splitlines() if line.startswith("ddpm-ds: error: ")]
        return line

    yield export
    mlflow.set_tracking_uri("")


def parent_in(uri: str, run_dir: Path) -> str:
    """The id of the training run of a folder, made in a store."""
    client = MlflowClient(uri)
    bare = uri.startswith("sqlite")  # a server knows where files go
    experiment = client.create_experiment("ddpm_ds", (run_dir.parent / "mlartifacts").as_uri() if bare else None)
    tags = {START_TAG: RunFolder(run_dir).identity(), NOTE_TAG: "why"}
    return client.create_run(experiment, tags=tags).info.run_id


def assert_sampled_from(model: Any, exported: Path) -> None:
    """Each row draws as many images as it asks for, those of the seed and the label, by the run's sampler."""
    trained = load_trained(exported)
    sampler = trained.sampler.model_copy(update={"kind": "ddim", "steps": 2})
    table = pd.DataFrame({"count": [2, 1], "seed": [3, 4], "label": [5, 1]})
    images = model.predict(table)
    assert images.shape == (3, 8, 8, 1) and images.dtype == np.uint8
    rows = [
        sample(trained, 2, seed=3, labels=[5], sampler=sampler),
        sample(trained, 1, seed=4, labels=[1], sampler=sampler),
    ]
    wanted = np.concatenate([row.permute(0, 2, 3, 1).numpy() for row in rows])
    np.testing.assert_array_equal(images, wanted)
    default = model.predict(pd.DataFrame({"count": [2]}))
    np.testing.assert_array_equal(default, sample(trained, 2, labels=None, sampler=sampler).permute(0, 2, 3, 1).numpy())
    more = model.predict(table, params={"steps": 3, "guidance": 2.0})
    guided = sampler.model_copy(update={"steps": 3, "guidance": 2.0})
    again = sample(trained, 1, seed=4, labels=[1], sampler=guided).permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(more[2:], again)


def test_a_registered_export_is_loaded_and_sampled_from(tmp_path: Path, store: str, run: Run) -> None:
    parent_in(store, tmp_path / "run")
    assert "MLflow has models:/digits/1" in run("--register", "digits")
    client = MlflowClient(store)
    version = client.get_model_version("digits", "1")
    assert version.run_id is not None
    (child,) = client.search_runs([client.get_run(version.run_id).info.experiment_id], "tags.kind = 'export'")
    assert version.run_id == child.info.run_id and child.info.status == "FINISHED"
    assert client.list_artifacts(child.info.run_id) == [], "whose model holds the export"

    mlflow.set_tracking_uri(store)
    model = mlflow.pyfunc.load_model("models:/digits/1")
    files = [path for path in (tmp_path / "mlartifacts").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {"", ".json", ".md", ".safetensors", ".txt", ".yaml"}, "nothing pickled"
    assert model.metadata.signature.inputs.input_names() == ["count", "seed", "label"]
    assert_sampled_from(model, tmp_path / "out")

    assert "MLflow has models:/digits/2" in run("--register", "digits", "--label", "none", out="again")
    second = mlflow.pyfunc.load_model("models:/digits/2")
    assert second.metadata.signature.inputs.input_names() == ["count", "seed"]


def test_an_mlflow_that_fails_is_one_line_after_which_the_export_is_whole(
    tmp_path: Path, store: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent_in(store, tmp_path / "run")
    monkeypatch.setattr(mlflow.pyfunc, "log_model", lambda **_: os.listdir(tmp_path / "no room"))
    line = run("--register", "digits", code=2)
    assert "--register digits: MLflow at sqlite:///" in line and f"no room'); {tmp_path / 'out'} is whole" in line
    assert (tmp_path / "out" / "unet").is_dir()


def test_a_model_with_text_draws_for_its_prompts(tmp_path: Path) -> None:
    write_encoders(tmp_path, ("a", "red", "blue", "circle"), width=12, tokens=9)
    text = {"context_channels": 12, "tokens": 9, "blocks": [1, 1], "heads": [2, 4]}
    data = {"source": "folder", "path": "p", "text": {"encoders": str(tmp_path), "layer": "last"}}
    unet: dict[str, Any] = {"classes": None, "attention_resolutions": [], "text": text}
    trained = trained_of(tiny_spec(data=data, unet=unet, train={"label_drop": 0.0}, **FEW))
    prompts = ["a red circle", "a blue circle"]
    images = Drawer(trained, trained.sampler).predict(pd.DataFrame({"prompt": prompts, "seed": [1, 1]}))
    wanted = [sample(trained, 1, seed=1, prompts=prompt).permute(0, 2, 3, 1).numpy() for prompt in prompts]
    np.testing.assert_array_equal(images, np.concatenate(wanted))
    assert (images[0] != images[1]).any()
