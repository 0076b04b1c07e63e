"""Exports in MLflow's registry: what is sampled from a model that MLflow has loaded, and what is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

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
from ddpm_ds.processes.ranks import free_port
from ddpm_ds.tracking.run_folder import NOTE_TAG, START_TAG, RunFolder
from ddpm_ds.tracking.tracker import Tracker
from tests.evaluate.planted import plant, trained_of
from tests.hub_server import HubServer
from tests.launching import PATIENCE_SECONDS, tiny_spec, wait_for

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
    parent = parent_in(store, tmp_path / "run")
    said = run("--register", "digits")
    assert "MLflow has models:/digits/1, at http://127.0.0.1:5000/#/models/digits/versions/1" in said
    client = MlflowClient(store)
    version = client.get_model_version("digits", "1")
    assert version.source is not None
    logged = client.get_logged_model(version.source.removeprefix("models:/"))
    assert logged.status == "READY"
    (child,) = client.search_runs([logged.experiment_id], "tags.kind = 'export'")
    assert logged.source_run_id == version.run_id == child.info.run_id and child.info.run_id in said
    assert child.outputs is not None
    assert [model.model_id for model in child.outputs.model_outputs] == [logged.model_id]
    assert client.list_artifacts(child.info.run_id) == [], "whose model holds the export"
    note = client.get_run(parent).data.tags[NOTE_TAG]
    assert note.startswith("why\n\n") and note.endswith("versions/1?workflowType=machine_learning)")
    assert "exported as [models:/digits/1](http://127.0.0.1:5000/#/models/digits/" in note

    mlflow.set_tracking_uri(store)
    model = mlflow.pyfunc.load_model("models:/digits/1")
    files = [path for path in (tmp_path / "mlartifacts").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {"", ".json", ".md", ".safetensors", ".txt", ".yaml"}, "nothing pickled"
    assert model.metadata.signature.inputs.input_names() == ["count", "seed", "label"]
    assert_sampled_from(model, tmp_path / "out")
    assert model.predict(model.input_example).shape == (2, 8, 8, 1)

    assert "MLflow has models:/digits/2" in run("--register", "digits", "--label", "none", out="again")
    second = mlflow.pyfunc.load_model("models:/digits/2")
    assert second.metadata.signature.inputs.input_names() == ["count", "seed"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


def test_the_note_of_a_run_links_the_pages_of_hub_and_model(
    tmp_path: Path,
    store: str,
    run: Run,
    hub: HubServer,
) -> None:
    parent = parent_in(store, tmp_path / "run")
    run("--register", "digits", "--push-to-hub", "me/digits")
    note = MlflowClient(store).get_run(parent).data.tags[NOTE_TAG]
    assert f"exported as [me/digits]({hub.address}/me/digits) and [models:/digits/1](http" in note


def test_a_name_that_can_not_be_a_models_is_refused_before_anything_is_done(
    tmp_path: Path, store: str, run: Run
) -> None:
    mlflow.set_tracking_uri(store)
    MlflowClient(store).register_prompt("taken", "a {{colour}} circle")
    assert "--register taken is the name of a prompt of MLflow's; take another" in run("--register", "taken", code=2)
    assert "--register a/b should have 1 to 256 characters, and no / or :" in run("--register", "a/b", code=2)
    assert not (tmp_path / "out").exists() and not MlflowClient(store).search_registered_models("name = 'a/b'")


def test_a_registry_that_is_down_or_fails_is_one_line_that_names_what_is_left(
    tmp_path: Path, store: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    line = run("--register", "digits", code=2)
    assert line.startswith("ddpm-ds: error: --register digits can't be looked up: MLflow at http://127.0.0.1:1 fails (")
    assert not (tmp_path / "out").exists()
    monkeypatch.delenv("MLFLOW_TRACKING_URI")

    def fails(*_: object, **__: object) -> None:
        raise OSError("no room")

    for method, said in (("log_model_artifacts", "logged"), ("create_model_version", "registered")):
        with monkeypatch.context() as patch:
            patch.setattr(MlflowClient, method, fails)
            line = run("--register", "digits", out=method, code=2)
        whole = tmp_path / method
        assert f"--register digits can't be {said} ({whole} is whole, and models:/m-" in line and "(no room)" in line
        assert (whole / "unet").is_dir()
    assert not MlflowClient(store).search_model_versions("name = 'digits'")


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


@pytest.mark.launch
@pytest.mark.long
def test_a_server_of_mlflows_keeps_the_model_and_gives_it_back(
    tmp_path: Path, store: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, artifacts = free_port(), tmp_path / "served"
    uri = f"http://127.0.0.1:{port}"
    where = ["--backend-store-uri", store, "--artifacts-destination", str(artifacts), "--port", str(port)]
    command = [sys.executable, "-m", "mlflow", "server", *where, "--host", "127.0.0.1", "--workers", "1"]
    with subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:

        def answers() -> bool:
            assert server.poll() is None, "it has ended"
            try:
                with urlopen(f"{uri}/health", timeout=5) as answer:
                    return bool(answer.status == 200)
            except (URLError, OSError):
                return False

        try:
            wait_for(answers)
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
            parent = parent_in(uri, tmp_path / "run")
            assert f"at {uri}/#/models/digits/versions/1" in run("--register", "digits")
            assert f"{uri}/#/models/digits/versions/1" in MlflowClient(uri).get_run(parent).data.tags[NOTE_TAG]
            assert list(artifacts.rglob("*.safetensors"))
            mlflow.set_tracking_uri(uri)
            assert_sampled_from(mlflow.pyfunc.load_model("models:/digits/1"), tmp_path / "out")
        finally:
            server.terminate()
