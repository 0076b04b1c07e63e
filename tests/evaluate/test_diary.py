"""The diary: what is made of a checkpoint is a child of its run in MLflow."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from ddpm_ds.evaluate.diary import Child
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.tracking.run_folder import RunFolder
from ddpm_ds.tracking.tracker import UNSENT_FILE, Tracker
from ddpm_ds.tracking.worker import START_TAG

PATIENCE_SECONDS = 60.0


@pytest.fixture
def run_dir(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, in an output root with an empty store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return tmp_path / "run"


def saved_by(run_dir: Path | None) -> Trained:
    """Weights saved by the run of a folder, as far as the diary looks at them."""
    origin = str(run_dir / "checkpoints" / "images-000000640") if run_dir else "exported"
    spec = SimpleNamespace(logging=SimpleNamespace(experiment="digits")) if run_dir else None
    seen = 640 if run_dir else None
    return cast(
        Trained,
        SimpleNamespace(origin=origin, run_dir=run_dir, spec=spec, images_seen=seen, digest="d" * 64, weights="ema"),
    )


def client_of(run_dir: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{run_dir.parent}/mlflow.db")


def train(run_dir: Path, experiment: str = "digits") -> str:
    """The MLflow run of a training run, as far as a child looks for it; returns its id."""
    client = client_of(run_dir)
    experiment_id = client.create_experiment(experiment, (run_dir.parent / "mlartifacts").as_uri())
    return client.create_run(experiment_id, tags={START_TAG: RunFolder(run_dir).identity()}).info.run_id


def read_child(run_dir: Path) -> Run:
    """The only run of the store that is not training."""
    client = client_of(run_dir)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], "tags.kind LIKE '%'")
    return run


def test_scores_are_a_child_of_the_run_with_params_tags_metrics_and_artifacts(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.01")
    identity = RunFolder(run_dir).identity()
    training = Tracker.start(
        "digits", "run", params={}, tags={}, output_root=run_dir.parent, run_dir=run_dir, identity=identity
    )
    parent = training.finish("FINISHED", PATIENCE_SECONDS).run_id
    (run_dir / "scores.json").write_text("{}")
    with Child.begin(saved_by(run_dir), "evaluate", {"sampler": {"kind": "ddim", "steps": 50}}) as child:
        child.metrics({"eval/fid_10k": 3.5})
        child.artifact(run_dir / "scores.json")
        child.text("as good as it looks", "verdict.txt")
        assert child.recorded

    run = read_child(run_dir)
    assert run.data.tags["mlflow.parentRunId"] == parent and run.info.status == "FINISHED"
    assert run.info.run_name == "evaluate images-000000640"
    assert run.data.params == {"sampler.kind": "ddim", "sampler.steps": "50"}
    tags = {name: run.data.tags[name] for name in ("kind", "checkpoint", "weights", "digest", "images_seen")}
    expected = {"kind": "evaluate", "checkpoint": "images-000000640", "weights": "ema", "images_seen": "640"}
    assert tags == expected | {"digest": "d" * 64}
    assert run.data.metrics == {"eval/fid_10k": 3.5}, "and no system metrics"
    (point,) = client_of(run_dir).get_metric_history(run.info.run_id, "eval/fid_10k")
    assert point.step == 640, "the images seen"
    assert [file.path for file in client_of(run_dir).list_artifacts(run.info.run_id)] == ["scores.json", "verdict.txt"]
    assert not (run_dir / UNSENT_FILE).exists()


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "KILLED"), (ValueError, "FAILED")])
def test_a_child_ends_as_its_work_did(run_dir: Path, error: type[BaseException], status: str) -> None:
    with pytest.raises(error), Child.begin(saved_by(run_dir), "sample", {}):
        raise error
    assert read_child(run_dir).info.status == status


def test_without_the_run_the_child_stands_alone_and_says_so(run_dir: Path) -> None:
    said: list[str] = []
    train(run_dir, experiment="another")  # MLflow nests runs within an experiment only
    with Child.begin(saved_by(run_dir), "evaluate", {}, said.append) as child:
        child.metrics({"eval/fid_10k": 3.5})
    run = read_child(run_dir)
    assert "mlflow.parentRunId" not in run.data.tags and run.data.metrics == {"eval/fid_10k": 3.5}
    assert len(said) == 1 and "stands alone" in said[0] and str(run_dir) in said[0]


def test_an_export_is_recorded_nowhere_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    with Child.begin(saved_by(None), "evaluate", {}, said.append) as child:
        child.metrics({"eval/fid_10k": 3.5})
        child.artifact(tmp_path / "missing")
        child.text("text", "name.txt")
        child.register("model", "folder")
    assert child.finish() is None and not child.recorded
    assert len(said) == 1 and "exported is not in the folder of a run" in said[0] and "MLflow" in said[0]


def test_what_mlflow_does_not_take_is_left_in_the_run_folder(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    identity, said = RunFolder(run_dir).identity(), list[str]()
    child = Child.begin(saved_by(run_dir), "evaluate", {}, said.append)
    child.metrics({"eval/fid_10k": 3.5})
    assert child._tracker is not None
    child._tracker.finish("FINISHED", 0.1)
    records = [json.loads(line) for line in (run_dir / UNSENT_FILE).read_text().splitlines()]
    assert [next(iter(record)) for record in records] == ["start", "metrics", "finish"]
    assert records[0]["start"]["parent"] == identity and "could not be sent" in said[-1]


def test_an_export_can_be_registered_as_versions_of_a_model(run_dir: Path) -> None:
    train(run_dir)
    export = run_dir / "hub"
    (export / "unet").mkdir(parents=True)
    (export / "unet" / "config.json").write_text("{}")
    said: list[str] = []
    for _ in range(2):
        with Child.begin(saved_by(run_dir), "export", {}, said.append) as child:
            child.artifact(export)
            child.register("digits-unet", "hub")
            child.register("digits-unet", "hub")  # as a worker does that died before its answer was read
    assert [line.split()[3] for line in said] == ["1", "2"] and "models:/digits-unet/2" in said[1]

    client = client_of(run_dir)
    versions = client.search_model_versions("name = 'digits-unet'")
    assert len(versions) == 2 and len({version.run_id for version in versions}) == 2
    for version in versions:
        run = client.get_run(version.run_id or "")
        assert version.source == f"{run.info.artifact_uri}/hub" and run.data.tags["kind"] == "export"
        assert [file.path for file in client.list_artifacts(run.info.run_id, "hub/unet")] == ["hub/unet/config.json"]


def test_a_name_that_the_registry_refuses_does_not_lose_the_rest(run_dir: Path) -> None:
    train(run_dir)
    said: list[str] = []
    with Child.begin(saved_by(run_dir), "export", {}, said.append) as child:
        child.register("not/a:name", "hub")
        child.metrics({"eval/fid_10k": 3.5})
    assert read_child(run_dir).data.metrics == {"eval/fid_10k": 3.5} and "refused a record" in said[0]
