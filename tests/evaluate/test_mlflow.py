"""Scores, samples and exports of a checkpoint are children of its run in MLflow."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ddpm_ds.cli.main import main
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.evaluate.outputs import record_child
from ddpm_ds.evaluate.trained import load_trained
from ddpm_ds.tracking.run_folder import START_TAG, RunFolder
from ddpm_ds.tracking.tracker import Tracker
from tests.evaluate.planted import FAST, plant


@pytest.mark.parametrize(
    "verb", [["evaluate", *FAST], ["export", "--samples", "0", "hub"], ["sample", "--mlflow", "--out", "grid"]]
)
def test_work_that_mlflow_could_not_keep_is_refused_before_it_is_done(
    verb: list[str],
    tmp_path: Path,
    digits: DatasetCache,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    plant(tmp_path / "run", data_sha256=digits.meta.sha256, data={"store_root": str(digits.path.parent)})
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "/data/mlruns")
    assert main([verb[0], "run", *verb[1:]]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ddpm-ds: error: MLFLOW_TRACKING_URI=/data/mlruns is a path") and err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_scores_and_exports_are_children_of_the_run_with_params_tags_metrics_and_artifacts(
    tmp_path: Path,
    empty_store: Path,
    forked_workers: None,
    no_network: None,
    digits: DatasetCache,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.01")
    finish = Tracker.finish
    monkeypatch.setattr(Tracker, "finish", lambda tracker, status: finish(tracker, status, 300.0))  # on a busy machine
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    run_dir, client = tmp_path / "run", MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    data = {"store_root": str(digits.path.parent)}
    plant(run_dir, data_sha256=digits.meta.sha256, data=data, sampler={"guidance": 2.0})

    record_child(load_trained(run_dir), "sample", {}, artifacts={})  # its run is not in this MLflow yet
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "stands alone" in line]
    assert str(run_dir) in said
    experiment = client.get_experiment_by_name("ddpm_ds")
    assert experiment is not None
    (alone,) = client.search_runs([experiment.experiment_id])
    assert "mlflow.parentRunId" not in alone.data.tags and alone.info.status == "FINISHED"

    tags = {START_TAG: RunFolder(run_dir).identity()}
    parent = client.create_run(experiment.experiment_id, tags=tags).info.run_id
    capfd.readouterr()
    assert main(["evaluate", str(run_dir), *FAST, "--count", "20", "--weights", "raw"]) == 0
    out, err = capfd.readouterr()
    assert "FID, KID, precision and recall are left out: there is no network here" in err
    (line,) = (line for line in out.splitlines() if line.startswith("pixel Fréchet distance, 64 dims"))
    assert line.split()[7:14] == ["20", "1,797", "ddim", "3", "raw", "2", "ddpm_ds"], "counts, how drawn, by what"
    (folder,) = (run_dir / "evaluations").iterdir()
    content = json.loads((folder / "scores.json").read_text())
    (child,) = client.search_runs([experiment.experiment_id], "tags.kind = 'evaluate'")
    assert child.info.run_id in out and child.info.run_name == "evaluate images-000000320"
    found = {name: child.data.tags[name] for name in ("mlflow.parentRunId", "checkpoint", "weights", "images_seen")}
    wanted = {"checkpoint": "images-000000320", "weights": "raw", "images_seen": "320"}
    assert found == wanted | {"mlflow.parentRunId": parent}
    values = {f"eval/{score['name']}": score["value"] for score in content["scores"]}
    real = {f"eval/{score['name']}_real": score["real"] for score in content["scores"]}
    assert child.data.metrics == pytest.approx(values | real), "and no system metrics"
    assert set(values) == {"eval/pixel_frechet_20"}
    (point,) = client.get_metric_history(child.info.run_id, "eval/pixel_frechet_20")
    assert point.step == 320, "the images seen"
    assert child.data.params["sampler.kind"] == "ddim" and child.data.params["count"] == "20"
    assert [file.path for file in client.list_artifacts(child.info.run_id)] == ["samples.png", "scores.json"]

    assert main(["export", str(run_dir), str(tmp_path / "hub"), "--samples", "0"]) == 0
    (export,) = client.search_runs([experiment.experiment_id], "tags.kind = 'export'")
    run_id = export.info.run_id
    assert export.data.tags["mlflow.parentRunId"] == parent and export.data.params["dtype"] == "fp32"
    unet = [file.path for file in client.list_artifacts(run_id, "export/unet")]
    assert unet == ["export/unet/config.json", "export/unet/diffusion_pytorch_model.safetensors"]
