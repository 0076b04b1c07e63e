"""ddpm-ds evaluate, of drawn images and of losses: what it prints, writes, records and keeps, and its errors."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_fidelity
from mlflow import MlflowClient
from PIL import Image
from torch import Tensor

from ddpm_ds import __version__ as VERSION
from ddpm_ds.cli.main import main
from ddpm_ds.data.cache import BUCKETS, DatasetCache, StoredImages
from ddpm_ds.data.held_out import HELD_OUT, checksums_of, prepare_all
from ddpm_ds.data.prepare import How, prepare
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.evaluate import inception, sampling, scores, trained
from ddpm_ds.evaluate.outputs import record_child
from ddpm_ds.evaluate.sampling import Setup
from ddpm_ds.evaluate.scores import Score, Scorer, cache_beside, labels_like, open_reference
from ddpm_ds.evaluate.trained import load_trained
from ddpm_ds.ground.errors import DataError, OutputError
from ddpm_ds.tracking.run_folder import START_TAG, RunFolder
from ddpm_ds.tracking.tracker import Tracker
from tests.evaluate.conditioned import plant_fields
from tests.evaluate.planted import FAST, UNLABELLED, evaluate_verb, plant, refusal, report, trained_of, unet_of
from tests.launching import tiny_spec

Evaluate = Callable[..., str]
Watch = Callable[..., list[int]]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run_dir(tmp_path: Path, digits: DatasetCache) -> Path:
    """The folder of a run, class-conditional, whose checkpoint learned these digits and has held out twenty."""
    data = {"store_root": str(digits.path.parent), "held_out_images": 20}
    plant(tmp_path / "run", data_sha256=digits.meta.sha256, data=data)
    return tmp_path / "run"


@pytest.fixture
def evaluate(run_dir: Path, trackers: list[Any], no_network: None, capfd: pytest.CaptureFixture[str]) -> Evaluate:
    verb = evaluate_verb(capfd)
    return lambda *arguments, path=run_dir, code=0: verb(path, *arguments, code=code)


def by_name(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {score["name"]: score for score in content["scores"]}


def no_drawing(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("nothing is to be drawn")


def test_real_digits_score_as_real_ones_and_noise_does_not(
    run_dir: Path, digits: DatasetCache, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def real_digits(_: Setup, index: Tensor, *, labels: Tensor, **__: Any) -> Tensor:
        of_class = [np.flatnonzero(digits.labels == label) for label in range(10)]
        chosen = [of_class[label][i % len(of_class[label])] for i, label in zip(index, labels, strict=True)]
        return torch.from_numpy(np.array(digits.images[chosen]))

    evaluate("--count", 600, "--seed", 1, "--out", run_dir / "noise", "--steps", 1)
    monkeypatch.setattr(sampling, "draw", real_digits)
    evaluate("--count", 600, "--out", run_dir / "real")
    content = report(run_dir / "real")
    assert content["reference"] == {"store": str(digits.path), "images": 1797, "sha256": digits.meta.sha256}
    assert (content["sampler"]["steps"], content["weights"], content["count"]) == (2, "ema", 600)
    noise, real = by_name(report(run_dir / "noise")), by_name(content)
    assert real["pixel_frechet_600"]["value"] < 1.0 < noise["pixel_frechet_600"]["value"]
    assert 0.0 < real["pixel_frechet_600"]["real"] < 1.0, "the distance between two halves of the real digits"
    (picture,) = (run_dir / "real").glob("*/samples.png")
    assert Image.open(picture).size == (530, 694), "enlarged, with a title and labels"


def test_other_metrics_draw_nothing_anew_and_leave_the_scores_that_are_there(
    run_dir: Path, digits: DatasetCache, evaluate: Evaluate, trackers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate("--count", 20, "--metrics", "pixel")
    monkeypatch.setattr(sampling, "draw", no_drawing)
    other = Score("other_20", "another", 1.0, 20, 1797, "a test")
    monkeypatch.setattr(Scorer, "scores", lambda *_: [other])
    out = evaluate("--count", 20)
    assert "pixel" not in out and "another" in out
    assert list(by_name(report(run_dir / "evaluations"))) == ["pixel_frechet_20", "other_20"]
    assert ["eval/pixel_frechet_20" in child.logged for child in trackers] == [True, False]


def test_an_interrupted_evaluation_keeps_its_batches_and_records_nothing(
    evaluate: Evaluate, trackers: list[Any], watch_drawing: Watch
) -> None:
    watch_drawing(2, KeyboardInterrupt())
    out = evaluate("--count", 35, "--batch-images", 10, "--metrics", "pixel", code=130)
    assert "interrupted: the finished batches are kept" in out and trackers == []
    drawn = watch_drawing()
    evaluate("--count", 35, "--batch-images", 10, "--metrics", "pixel")
    assert drawn == [*range(20, 35)] and len(trackers) == 1


def test_some_samplers_and_guidances_are_evaluations_of_their_own_in_one_table(
    run_dir: Path, evaluate: Evaluate, trackers: list[Any], watch_drawing: Watch
) -> None:
    drawn = watch_drawing()
    guide = plant(run_dir.parent / "guide", 640, unets={"ema": unet_of(tiny_spec(), 7)})
    arguments = ("--count", 20, "--metrics", "pixel", "--sampler", "ddim,dpm_solver", "--steps", 4, "--guide", guide)
    out = evaluate(*arguments, "--guidance", "1,3.5")
    reports = [json.loads(path.read_text()) for path in (run_dir / "evaluations").glob("*/scores.json")]
    found = {(report["sampler"]["kind"], report["sampler"]["guidance"]): report for report in reports}
    points = [("ddim", 1.0), ("ddim", 3.5), ("dpm_solver", 1.0), ("dpm_solver", 3.5)]
    assert sorted(found) == points and len(trackers) == 4 and len(drawn) == 80
    assert [found[point]["guide"] for point in points] == [None, str(guide)] * 2
    rows = [line.split()[5:] for line in out.split("\n\n")[-1].splitlines() if line.startswith("pixel")]
    values = [f"{found[point]['scores'][0]['value']:.4g}" for point in points]
    assert [row[0] for row in rows] == values and len(set(values)) == 4
    assert [(row[4], row[7]) for row in rows] == [(kind, f"{guidance:g}") for kind, guidance in points]
    assert [row[8:10] for row in rows] == [["ddpm_ds", VERSION], ["by", "guide"]] * 2
    evaluate(*arguments, "--guidance", "1,3.5")
    assert len(drawn) == 80


def test_labels_are_asked_for_in_the_proportions_of_the_reference(digits: DatasetCache) -> None:
    few, all_labels = labels_like(digits, 500), labels_like(digits, 10_000)
    assert all_labels[:500] == few and len(all_labels) == len(digits)
    assert np.bincount(all_labels).tolist() == np.bincount(digits.labels).tolist()
    assert min(np.bincount(few)) > 30, "and shuffled: the first ones have all classes"


@pytest.mark.long
def test_inceptions_scores_by_name_count_and_tool(
    run_dir: Path, digits: DatasetCache, weights: Path, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inception, "LAYER", "64")
    meta = digits.meta.model_copy(update={"count": 24})
    small = replace(digits, meta=meta, images=StoredImages(digits.path, meta, None), labels=digits.labels[:24])
    monkeypatch.setattr(scores, "images_of", lambda *_, **__: small)
    monkeypatch.setattr(scores, "cache_beside", lambda _: run_dir / "cache")
    out = evaluate("--count", 20, "--metrics", "fid,kid,pr", "--inception-weights", weights)
    found = by_name(report(run_dir / "evaluations"))
    assert set(found) == {"fid_20", "kid_20", "precision_20", "recall_20"}
    assert found["kid_20"]["details"]["subset_images"] == 20 and found["fid_20"]["title"] == "FID"
    assert all((score["samples"], score["references"]) == (20, 24) for score in found.values())
    assert f"torch-fidelity {torch_fidelity.__version__}, inception-v3-compat" in out


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that say nothing of a run, in the place of all others."""
    loaded = replace(trained_of(tiny_spec()), weights="export", spec=None, images_seen=None, origin="export")
    monkeypatch.setattr(trained, "load_trained", lambda *_, **__: loaded)
    monkeypatch.chdir(tmp_path)


def test_an_export_is_compared_with_a_data_set_that_is_named_and_recorded_nowhere(
    tmp_path: Path, digits: DatasetCache, evaluate: Evaluate, trackers: list[Any], exported: None
) -> None:
    assert "name the folder of its prepared images with --dataset DIR" in evaluate("--count", 20, code=2)
    assert "--metrics loss: export is an export; leave it out" in evaluate("--metrics", "loss", code=2)
    larger = prepare(DataSpec(source="digits", image_size=16, channels=1, store_root=tmp_path / "larger"))
    assert "has images of 1x16x16, export draws 1x8x8" in evaluate("--dataset", larger.path, code=2)
    out = evaluate("--count", 20, "--dataset", digits.path, "--metrics", "pixel")
    assert "export is not in the folder of a run, so nothing is recorded in MLflow" in out and trackers == []
    assert report(tmp_path / "evaluations")["weights"] == "export"


OF_DRAWN = "--prompts held-out is an option for drawn images, and --metrics loss draws none; leave it out"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--metrics fid", "--metrics fid can't be computed: there is no network here"),
        ("--metrics pixel,inception", "'inception' is none of fid, kid, pr, pixel"),
        ("--metrics digits", "is none of fid, kid, pr, pixel, loss"),
        ("--count 9", "--count 9 should be 10 to 1,000,000; fewer images can't be compared"),
        ("--inception-weights nowhere.pt", "--inception-weights nowhere.pt can't be used (No such file"),
        ("--guidance 1,x", "'x' is not a guidance from 0 to 1,000"),
        ("--guidance 1,2,1", "'1,2,1' has one value twice"),
        ("--sampler ddim,best", "'best' is none of "),
        ("--sampler ddim,dpm_solver --eta 0.5", "--eta = 0.5 is used only with --sampler: ddim"),
        ("--dataset LARGER", " is not the data set of "),
        ("--metrics loss --dataset LARGER", " is not the data set of "),
        ("--metrics loss --prompts held-out", OF_DRAWN),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_drawn_or_written(
    arguments: str, line: str, evaluate: Evaluate, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "draw", no_drawing)
    if "LARGER" in arguments:
        larger = prepare(DataSpec(source="digits", image_size=16, channels=1, store_root=run_dir.parent))
        arguments = arguments.replace("LARGER", str(larger.path))
    out = evaluate(*arguments.split(), code=2)
    assert line in out and len(out.splitlines()) == 1 and out.startswith("ddpm-ds: error: ")
    assert not (run_dir / "evaluations").exists()


def test_images_held_out_in_another_file_are_not_in_the_reference(tmp_path: Path) -> None:
    for name, count in (("train", 12), ("val", 10)):
        np.save(tmp_path / f"{name}.npy", np.random.default_rng(count).integers(0, 256, (count, 8, 8), np.uint8))
    paths = {"path": str(tmp_path / "train.npy"), "held_out_path": str(tmp_path / "val.npy")}
    section = {"source": "arrays", **paths, "store_root": str(tmp_path / "stores")}
    spec = tiny_spec(data=section, **UNLABELLED)
    store, held_out = prepare_all(spec.data, How())
    checkpoint = plant(tmp_path / "run", data_sha256=checksums_of(store, held_out), data=section, **UNLABELLED)
    learned = replace(trained_of(spec), origin=str(checkpoint))
    assert open_reference(learned, None).path == store.path
    with pytest.raises(DataError, match="is not the data set of"):
        open_reference(learned, held_out.path)


def test_for_a_run_that_learned_crops_the_centres_are_the_reference(tmp_path: Path) -> None:
    section = {"crop_from": 11, "store_root": str(tmp_path / "stores")}
    spec = tiny_spec(data=section)
    whole = prepare(spec.data)
    checkpoint = plant(tmp_path / "run", data_sha256=whole.meta.sha256, data=section)
    learned = replace(trained_of(spec), origin=str(checkpoint))
    for given in (None, whole.path):
        reference = open_reference(learned, given)
        assert reference.meta.shape == (1, 8, 8) and (reference.images[:] == whole.images[:][:, :, 1:9, 1:9]).all()
        assert reference.key != whole.key  # statistics of whole images are not taken for those of crops
    with pytest.raises(DataError, match=r"has images of 1x11x11, .* draws 1x8x8"):
        open_reference(replace(learned, spec=None), whole.path)


def test_a_read_only_data_folder_keeps_its_statistics_in_the_home_folders_cache(
    tmp_path: Path, digits: DatasetCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).is_relative_to(tmp_path / "home"))
    assert cache_beside(tmp_path / "data" / "digits") == tmp_path / "home" / "ddpm_ds"
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OutputError, match="name a folder for caches with XDG_CACHE_HOME"):
        cache_beside(tmp_path / "data" / "digits")
    Scorer(["pixel"], digits, None)  # which keeps no statistics


NAMES = ["eval/loss", *(f"validation/loss_t{percent}" for percent in range(10, 100, 10))]


def test_losses_are_written_recorded_and_in_a_table_and_nothing_is_drawn(
    run_dir: Path, digits: DatasetCache, trackers: list[Any], evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "draw", None)
    printed = evaluate("--metrics", "loss")
    content = report(run_dir / "evaluations")
    assert (content["weights"], content["images_seen"], content["precision"]) == ("ema", 320, "fp32")
    assert content["reference"] == {"store": str(digits.path), "images": 20, "sha256": digits.meta.sha256}
    scores = content["scores"]
    assert list(scores) == NAMES and scores["eval/loss"] == pytest.approx(
        sum(scores.values()) / 9 - scores[NAMES[0]] / 9
    )
    (child,) = trackers
    assert (child.kind, child.logged, child.artifacts) == ("evaluate", scores, [("scores.json", "")])
    assert f"held out   20 images of {digits.path}" in printed
    rows = dict(line.rsplit(maxsplit=1) for line in printed.split("\n\n")[-1].splitlines())
    assert rows == {"held-out loss": "ema", **{name: f"{value:.4g}" for name, value in scores.items()}}


def test_losses_and_scores_of_drawn_images_may_be_asked_for_together(evaluate: Evaluate, trackers: list[Any]) -> None:
    words = ("--metrics", "pixel,loss", "--count", 20, "--sampler", "ddim,dpm_solver", "--steps", 2)
    first, second = evaluate(*words).split("\n\n")[-2:]
    assert first.startswith("held-out loss") and second.startswith("score") and len(second.splitlines()) == 3
    assert ["eval/loss" in child.logged for child in trackers] == [True, False, False]


def test_pictures_held_out_of_another_folder_are_in_the_buckets_that_are_trained_on(
    tmp_path: Path, trackers: list[Any], evaluate: Evaluate
) -> None:
    """One of the three shapes of the held-out images has no bucket."""
    for name, shapes in (("train", ((40, 40), (50, 33))), ("val", ((40, 40), (50, 33), (33, 50)))):
        (tmp_path / name).mkdir()
        for number in range(12):
            pixels = np.random.default_rng(number).integers(0, 256, shapes[number % len(shapes)], np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    paths = {"path": str(tmp_path / "train"), "held_out_path": str(tmp_path / "val")}
    data = {**paths, "store_root": str(tmp_path / "stores"), "image_size": 40, "buckets": {"step": 8, "images": 4}}
    unet = {"classes": None, "attention_resolutions": [], "attention_levels": [1], "dropout": 0.0}
    sections: dict[str, Any] = {**UNLABELLED, "data": {**data, "source": "folder"}, "unet": unet}
    checksums = checksums_of(*prepare_all(tiny_spec(**sections).data, How(), group=4))
    assert sum(name.startswith(HELD_OUT + BUCKETS) for name in checksums) > 0
    plant(tmp_path / "run", data_sha256=checksums, **sections)
    evaluate("--metrics", "loss", "--batch-images", 5, path=tmp_path / "run")
    assert report(tmp_path / "run" / "evaluations")["reference"]["images"] == 12


def test_losses_of_images_that_are_not_there_are_one_line(tmp_path: Path, evaluate: Evaluate) -> None:
    plant(tmp_path / "none", **UNLABELLED)
    fields = plant_fields(tmp_path)
    lines = [
        evaluate("--metrics", "loss", path=tmp_path / "none", code=2),
        evaluate("--metrics", "loss,pixel", path=fields.run_dir, code=2),
    ]
    shutil.rmtree(fields.store.path)
    (tmp_path / "fields.npz").unlink()
    lines.append(evaluate("--metrics", "loss", path=fields.run_dir, code=2))
    held_out = "images-000000320 has held out no image (data.held_out_images = 0); leave it out"
    expected = (
        held_out,
        "--metrics pixel is an option for runs without conditions",
        f"data.path = {tmp_path / 'fields.npz'}",
    )
    for line, message in zip(lines, expected, strict=True):
        assert message in line and len(line.splitlines()) == 1 and line.startswith("ddpm-ds: error: ")


@pytest.mark.parametrize(
    "verb", [["evaluate", *FAST], ["export", "--samples", "0", "hub"], ["sample", "--mlflow", "--out", "grid"]]
)
def test_work_that_mlflow_could_not_keep_is_refused_before_it_is_done(
    verb: list[str], tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "/data/mlruns")
    assert "MLFLOW_TRACKING_URI=/data/mlruns is a path" in refusal(capsys, verb[0], "run", *verb[1:])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("forked_workers", "no_network")
def test_scores_and_exports_are_children_of_the_run_with_params_tags_metrics_and_artifacts(
    tmp_path: Path, empty_store: Path, digits: DatasetCache, monkeypatch: pytest.MonkeyPatch, capfd: Capture
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
    (printed,) = [line for line in capfd.readouterr().err.splitlines() if "stands alone" in line]
    assert str(run_dir) in printed
    experiment = client.get_experiment_by_name("ddpm_ds")
    assert experiment is not None
    ids = [experiment.experiment_id]
    (alone,) = client.search_runs(ids)
    assert "mlflow.parentRunId" not in alone.data.tags and alone.info.status == "FINISHED"

    tags = {START_TAG: RunFolder(run_dir).identity()}
    parent = client.create_run(experiment.experiment_id, tags=tags).info.run_id
    assert main(["evaluate", str(run_dir), *FAST, "--count", "20", "--weights", "raw"]) == 0
    out, err = capfd.readouterr()
    assert "FID, KID, precision and recall are left out: there is no network here" in err
    (line,) = (line for line in out.splitlines() if line.startswith("pixel Fréchet distance, 64 dims"))
    assert line.split()[7:14] == ["20", "1,797", "ddim", "3", "raw", "2", "ddpm_ds"], "counts, how drawn, by what"
    content = report(run_dir / "evaluations")
    (child,) = client.search_runs(ids, "tags.kind = 'evaluate'")
    assert child.info.run_id in out and child.info.run_name == "evaluate images-000000320"
    wanted = {"checkpoint": "images-000000320", "weights": "raw", "images_seen": "320", "mlflow.parentRunId": parent}
    assert wanted.items() <= child.data.tags.items()
    values = {f"eval/{score['name']}": score["value"] for score in content["scores"]}
    real = {f"eval/{score['name']}_real": score["real"] for score in content["scores"]}
    assert child.data.metrics == pytest.approx(values | real), "and no system metrics"
    (point,) = client.get_metric_history(child.info.run_id, "eval/pixel_frechet_20")
    assert point.step == 320, "the images seen"
    assert child.data.params["sampler.kind"] == "ddim" and child.data.params["count"] == "20"
    assert [file.path for file in client.list_artifacts(child.info.run_id)] == ["samples.png", "scores.json"]

    assert main(["export", str(run_dir), str(tmp_path / "hub"), "--samples", "0"]) == 0
    (export,) = client.search_runs(ids, "tags.kind = 'export'")
    assert export.data.tags["mlflow.parentRunId"] == parent and export.data.params["dtype"] == "fp32"
    unet = [file.path for file in client.list_artifacts(export.info.run_id, "export/unet")]
    assert unet == ["export/unet/config.json", "export/unet/diffusion_pytorch_model.safetensors"]
