"""ddpm-ds evaluate: what it prints, writes and records, what it keeps for another time, and its one-line errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from PIL import Image
from torch import Tensor

from ddpm_ds.cli.main import main
from ddpm_ds.config.spec import DataSpec
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.prepare import prepare
from ddpm_ds.evaluate import diary, inception, sampling, scores, trained
from ddpm_ds.evaluate.inception import Unavailable
from ddpm_ds.evaluate.scores import cache_beside, labels_like, short
from ddpm_ds.tracking.run_folder import RunFolder
from ddpm_ds.tracking.tracker import RunLink
from ddpm_ds.tracking.worker import START_TAG
from tests.evaluate.inception_weights import write_weights
from tests.evaluate.planted import plant, trained_of
from tests.launching import REPOSITORY, tiny_spec

FAST = ("--sampler", "ddim", "--steps", "2", "--device", "cpu")
Draw = Callable[..., Tensor]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DatasetCache:
    """The real digits."""
    root = tmp_path_factory.mktemp("data")
    return prepare(DataSpec(source="digits", image_size=8, channels=1, store_root=root))


@pytest.fixture
def run_dir(tmp_path: Path, store: DatasetCache) -> Path:
    """The folder of a run, class-conditional, whose checkpoint learned these digits."""
    data = {"store_root": str(store.path.parent)}
    plant(tmp_path / "run", data_sha256=store.meta.sha256, data=data, sampler={"guidance": 2.0})
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inception's weights are a download."""

    def find(weights: Path | None) -> Any:
        if weights is None:
            raise Unavailable("there is no network here")
        return inception.find_inception(weights)

    monkeypatch.setattr(scores, "find_inception", find)


class FakeTracker:
    """Takes what would go to MLflow."""

    made: list[FakeTracker]

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self.options = name, options
        self.logged: dict[str, float] = {}
        self.artifacts: list[str] = []

    def metrics(self, values: dict[str, float], step: int) -> None:
        self.logged |= values

    def artifact(self, path: Path, folder: str) -> None:
        self.artifacts.append(path.name)

    def finish(self, status: str) -> RunLink:
        return RunLink("the-id", "1", "uri", "mlflow ui")


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> type[FakeTracker]:
    def start(experiment: str, name: str, **options: Any) -> FakeTracker:
        FakeTracker.made.append(FakeTracker(name, options))
        return FakeTracker.made[-1]

    FakeTracker.made = []
    monkeypatch.setattr(diary, "Tracker", SimpleNamespace(start=start))
    return FakeTracker


@pytest.fixture
def evaluate(run_dir: Path, tracker: type[FakeTracker], capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the verb in this process and gives what it printed, its bars left out."""

    def run(*arguments: object, path: Path = run_dir, code: int = 0) -> str:
        assert main(["evaluate", str(path), *FAST, *map(str, arguments)]) == code
        out, err = capfd.readouterr()
        return out + "".join(line for line in err.splitlines(keepends=True) if "\r" not in line)

    return run


def report(folder: Path) -> dict[str, Any]:
    """The only scores.json in a folder of evaluations."""
    (path,) = folder.glob("*/scores.json")
    return dict(json.loads(path.read_text()))


def by_name(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {score["name"]: score for score in content["scores"]}


def real_digits(store: DatasetCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw images of the store that have the asked-for labels, each another one."""

    def draw(_: Any, __: Any, index: Tensor, *, labels: Tensor, **___: Any) -> Tensor:
        of_class = [np.flatnonzero(store.labels == label) for label in range(10)]
        chosen = [of_class[label][i % len(of_class[label])] for i, label in zip(index, labels, strict=True)]
        return torch.from_numpy(np.array(store.images[chosen]))

    monkeypatch.setattr(sampling, "draw", draw)


def no_drawing(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("nothing is to be drawn")


def test_the_scores_go_to_a_table_a_file_and_mlflow_as_a_child_of_the_run(
    run_dir: Path, store: DatasetCache, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client = MlflowClient(f"sqlite:///{run_dir.parent}/mlflow.db")
    experiment_id = client.create_experiment("ddpm_ds", (run_dir.parent / "mlartifacts").as_uri())
    parent = client.create_run(experiment_id, tags={START_TAG: RunFolder(run_dir).identity()}).info.run_id
    assert main(["evaluate", str(run_dir), *FAST, "--count", "20", "--weights", "raw"]) == 0
    out, err = capfd.readouterr()

    assert "FID, KID, precision and recall are left out: there is no network here" in err
    (line,) = (line for line in out.splitlines() if line.startswith("pixel Fréchet distance, 64 dims"))
    assert line.split()[7:14] == ["20", "1,797", "ddim", "2", "raw", "2", "ddpm_ds"], "counts, how drawn, by what"
    assert "digits: mean top probability" in out and "classifier of 1,347 other real digits" in out
    content = report(run_dir / "evaluations")
    assert content["sampler"]["steps"] == 2 and content["weights"] == "raw" and content["count"] == 20
    assert content["reference"] == {"store": str(store.path), "images": 1797, "sha256": store.meta.sha256}

    (child,) = client.search_runs([experiment_id], "tags.kind = 'evaluate'")
    assert child.data.tags["mlflow.parentRunId"] == parent and child.data.tags["checkpoint"] == "images-000000320"
    values = {f"eval/{name}": score["value"] for name, score in by_name(content).items()}
    real = {f"eval/{name}_real": score["real"] for name, score in by_name(content).items()}
    assert child.data.metrics == pytest.approx(values | real)
    names = {"pixel_frechet_20", "digits_top_probability", "digits_class_balance", "digits_accuracy"}
    assert set(values) == {f"eval/{name}" for name in names}
    assert child.data.params["sampler.kind"] == "ddim" and child.data.params["count"] == "20"
    assert [file.path for file in client.list_artifacts(child.info.run_id)] == ["samples.png", "scores.json"]
    assert child.info.run_id in out
    (picture,) = (run_dir / "evaluations").glob("*/samples.png")
    assert Image.open(picture).size[0] > 100


def test_real_digits_score_as_real_ones_and_noise_does_not(
    run_dir: Path, store: DatasetCache, evaluate: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate("--count", 600, "--seed", 1, "--out", run_dir / "noise", "--steps", 1)
    real_digits(store, monkeypatch)
    evaluate("--count", 600, "--out", run_dir / "real")
    noise, real = (by_name(report(run_dir / which)) for which in ("noise", "real"))
    assert real["digits_accuracy"]["value"] > 0.97 and noise["digits_accuracy"]["value"] < 0.3
    top = "digits_top_probability"
    assert real[top]["value"] > 0.95 and noise[top]["value"] < 0.5 and noise[top]["real"] == real[top]["real"] > 0.95
    assert real["digits_class_balance"]["value"] > 0.99
    assert real["pixel_frechet_600"]["value"] < 1.0 < noise["pixel_frechet_600"]["value"]
    assert 0.0 < real["pixel_frechet_600"]["real"] < 1.0, "the distance between two halves of the real digits"


def test_other_metrics_draw_nothing_anew_and_leave_the_scores_that_are_there(
    run_dir: Path, evaluate: Callable[..., str], tracker: type[FakeTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate("--count", 20, "--metrics", "pixel")
    monkeypatch.setattr(sampling, "draw", no_drawing)
    out = evaluate("--count", 20, "--metrics", "digits")
    assert "pixel" not in out and "left out" not in out
    assert next(iter(by_name(report(run_dir / "evaluations")))) == "pixel_frechet_20"
    assert len(report(run_dir / "evaluations")["scores"]) == 4
    assert [set(child.logged) & {"eval/pixel_frechet_20"} for child in tracker.made] == [
        {"eval/pixel_frechet_20"},
        set(),
    ]


@pytest.mark.parametrize("change", [("--seed", 1), ("--weights", "raw"), ("--steps", 3), ("--count", 21)])
def test_other_images_are_another_evaluation(
    change: tuple[object, ...], run_dir: Path, evaluate: Callable[..., str]
) -> None:
    evaluate("--count", 20, "--metrics", "pixel")
    evaluate("--count", 20, "--metrics", "pixel", *change)
    assert len(list((run_dir / "evaluations").iterdir())) == 2


def test_an_interrupted_evaluation_keeps_what_is_drawn_and_records_nothing(
    run_dir: Path, evaluate: Callable[..., str], tracker: type[FakeTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    draw = sampling.draw

    def watched(trained: Any, sampler: Any, index: Tensor, **options: Any) -> Tensor:
        if len(drawn) == 20:
            raise KeyboardInterrupt
        drawn.extend(index.tolist())
        return draw(trained, sampler, index, **options)

    monkeypatch.setattr(sampling, "draw", watched)
    out = evaluate("--count", 35, "--batch-images", 10, "--metrics", "pixel", code=130)
    assert "interrupted: what is drawn is kept" in out and tracker.made == []
    drawn.append(-1)
    evaluate("--count", 35, "--batch-images", 10, "--metrics", "pixel")
    assert drawn == [*range(20), -1, *range(20, 35)] and len(tracker.made) == 1


def test_labels_are_asked_for_in_the_proportions_of_the_store(
    store: DatasetCache, evaluate: Callable[..., str], run_dir: Path
) -> None:
    few, all_labels = labels_like(store, 500), labels_like(store, 10_000)
    assert all_labels[:500] == few and len(all_labels) == len(store)
    assert np.bincount(all_labels).tolist() == np.bincount(store.labels).tolist()
    assert min(np.bincount(few)) > 30, "and shuffled: the first ones have all classes"
    evaluate("--count", 20, "--metrics", "pixel")
    (record,) = (run_dir / "evaluations").glob("*/drawn/sampling.json")
    assert json.loads(record.read_text())["labels"] == few[:20]


def test_without_classes_no_label_is_asked_for(
    tmp_path: Path, store: DatasetCache, evaluate: Callable[..., str], tracker: type[FakeTracker]
) -> None:
    data = {"store_root": str(store.path.parent)}
    sections: dict[str, Any] = {"data": data, "unet": {"classes": None}, "train": {"label_drop": 0.0}}
    plant(tmp_path / "plain", data_sha256=store.meta.sha256, **sections)
    out = evaluate("--count", 20, path=tmp_path / "plain")
    (line,) = (line for line in out.splitlines() if line.startswith("digits: read as their label"))
    assert line.split()[5:7] == ["-", "0.9867"], "the classifier's own accuracy on real digits is said all the same"
    assert "eval/digits_accuracy" not in tracker.made[0].logged
    assert tracker.made[0].logged["eval/digits_accuracy_real"] > 0.97


def test_inceptions_scores_by_name_count_and_tool(
    run_dir: Path,
    store: DatasetCache,
    tmp_path: Path,
    evaluate: Callable[..., str],
    tracker: type[FakeTracker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = pytest.importorskip("torch_fidelity").__version__
    monkeypatch.setattr(inception, "LAYER", "64")
    weights = write_weights(tmp_path / "weights.pt", monkeypatch)
    meta = store.meta.model_copy(update={"count": 24})
    small = DatasetCache(store.path, meta, store.images[:24], store.labels[:24])  # a view
    monkeypatch.setattr("ddpm_ds.evaluate.scores.prepare", lambda *_: small)
    monkeypatch.setattr(scores, "cache_beside", lambda _: tmp_path / "cache")
    out = evaluate("--count", 20, "--metrics", "fid,kid,pr", "--inception-weights", weights)
    names = {"fid_20", "kid_20", "precision_20", "recall_20"}
    assert set(tracker.made[0].logged) == {f"eval/{name}" for name in names}
    found = by_name(report(run_dir / "evaluations"))
    assert set(found) == names and found["kid_20"]["details"]["subset_images"] == 20
    assert all((score["samples"], score["references"]) == (20, 24) for score in found.values())
    assert f"torch-fidelity {version}, inception-v3-compat" in out and found["fid_20"]["title"] == "FID"


def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that say nothing of a run."""
    loaded = replace(trained_of(tiny_spec()), weights="export", spec=None, images_seen=None, origin="export")
    monkeypatch.setattr(trained, "load_trained", lambda *_, **__: loaded)
    monkeypatch.chdir(tmp_path)


def test_an_export_is_compared_with_a_store_that_is_named_and_recorded_nowhere(
    tmp_path: Path,
    store: DatasetCache,
    evaluate: Callable[..., str],
    tracker: type[FakeTracker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported(tmp_path, monkeypatch)
    assert "name the prepared store of its images with --store DIR" in evaluate("--count", 20, code=2)
    out = evaluate("--count", 20, "--store", store.path)
    assert "export is not in the folder of a run, so nothing is recorded in MLflow" in out and tracker.made == []
    assert report(tmp_path / "evaluations")["weights"] == "export"


def test_a_store_that_has_moved_is_named(
    tmp_path: Path, store: DatasetCache, evaluate: Callable[..., str], run_dir: Path
) -> None:
    moved = prepare(DataSpec(source="digits", image_size=8, channels=1, store_root=tmp_path / "moved"))
    evaluate("--count", 20, "--metrics", "pixel", "--store", moved.path)
    assert report(run_dir / "evaluations")["reference"]["store"] == str(moved.path)
    assert (moved.path.parent / "evaluation_cache").is_dir()


def test_reference_statistics_are_kept(
    store: DatasetCache, evaluate: Callable[..., str], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate("--count", 20, "--metrics", "pixel")
    before = by_name(report(run_dir / "evaluations"))
    fit, fitted = scores.pixel_gaussian, list[int]()

    def watched(images: scores.Pixels) -> scores.Gaussian:
        fitted.append(len(images))
        return fit(images)

    monkeypatch.setattr(scores, "pixel_gaussian", watched)
    evaluate("--count", 20, "--metrics", "pixel")
    assert fitted == [20] and by_name(report(run_dir / "evaluations")) == before
    (kept,) = cache_beside(store.path).glob(f"{store.meta.sha256['images.npy'][:16]}-pixels*")
    kept.write_bytes(b"damaged")
    evaluate("--count", 20, "--metrics", "pixel")
    assert len(fitted) == 5 and by_name(report(run_dir / "evaluations")) == before


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--metrics", "fid"), "--metrics fid can't be had: there is no network here"),
        (("--metrics", "pixel,inception"), "'inception' is none of fid, kid, pr, pixel, digits"),
        (("--count", "9"), "'9' is not a number from 10 on"),
        (("--inception-weights", "nowhere.pt"), "--inception-weights nowhere.pt can't be used (No such file"),
        (("--store", "nowhere"), "there is no prepared store at nowhere"),
        (("--steps", "2000"), "--steps = 2000 is above the 1000 timesteps"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_drawn_or_written(
    arguments: tuple[str, ...], line: str, evaluate: Callable[..., str], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "draw", no_drawing)
    pytest.importorskip("torch_fidelity")
    out = evaluate(*arguments, code=2)
    assert line in out and len(out.splitlines()) == 1 and out.startswith("ddpm-ds: error: ")
    assert not (run_dir / "evaluations").exists()


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (DataSpec(source="digits", image_size=16, channels=1), "holds other images than those that"),
        (None, "is of source folder; leave digits out"),
    ],
)
def test_a_store_that_does_not_fit_is_one_line(
    spec: DataSpec | None,
    line: str,
    tmp_path: Path,
    run_dir: Path,
    store: DatasetCache,
    evaluate: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if spec is None:
        other = replace(store, meta=store.meta.model_copy(update={"source": "folder"}))
        monkeypatch.setattr("ddpm_ds.evaluate.scores.prepare", lambda *_: other)
        out = evaluate("--metrics", "digits", code=2)
    else:
        made = prepare(spec.model_copy(update={"store_root": tmp_path}))
        out = evaluate("--store", made.path, code=2)
        exported(tmp_path, monkeypatch)
        assert "has images of 1x16x16, export draws 1x8x8" in evaluate("--store", made.path, code=2)
    assert line in out and len(out.splitlines()) == 1 and not (run_dir / "evaluations").exists()


def test_a_read_only_data_folder_keeps_its_statistics_in_the_home_folders_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "access", lambda path, mode: "home" in str(path))
    assert cache_beside(tmp_path / "data" / "store") == tmp_path / "home" / "ddpm_ds"


def test_counts_in_names() -> None:
    assert [short(count) for count in (50_000, 10_000, 500, 2500)] == ["50k", "10k", "500", "2500"]


def test_the_command_line_is_read_without_torch() -> None:
    program = (
        "import sys, ddpm_ds.cli.evaluate\n"
        "sys.exit(str({'torch', 'numpy', 'mlflow', 'deepspeed', 'sklearn'} & set(sys.modules) or '') or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
