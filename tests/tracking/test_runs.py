"""Runs read back from MLflow, and found by what people call them."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

from ddpm_ds.tracking.runs import ExperimentError, Point, find_run, find_runs
from ddpm_ds.tracking.worker import PARENT_TAG, START_TAG


class Store:
    """An output root with a store, to be filled."""

    def __init__(self, root: Path) -> None:
        self.root, self.client = root, MlflowClient(f"sqlite:///{root}/mlflow.db")
        self.experiment_id = self.client.create_experiment("digits", (root / "mlartifacts").as_uri())

    def run(self, name: str, **tags: str) -> str:
        """A run with a folder; returns its id."""
        (self.root / name).mkdir(exist_ok=True)
        (self.root / name / "identity").write_text(f"identity-of-{name.replace(' ', '-')}\n")
        tags = {START_TAG: f"identity-of-{name.replace(' ', '-')}", **tags}
        return self.client.create_run(self.experiment_id, tags=tags, run_name=name).info.run_id


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Store:
    """Two runs, a sweep with two trials, and an evaluation."""
    root = tmp_path_factory.mktemp("runs")
    shutil.copy(empty_store, root / "mlflow.db")
    store = Store(root)
    one = store.run("digits-1", **{"mlflow.note.content": "why not"})
    store.run("digits-2")
    sweep = store.run("vary-digits", kind="vary")
    for trial in ("baseline", "fp16"):
        store.run(f"vary-digits.{trial}", **{PARENT_TAG: sweep})
    store.run("evaluate images-000000640", kind="evaluate", **{PARENT_TAG: one})
    store.client.log_param(one, "unet.channels", "8")
    for step, value, at in ((5, 3.0, 100), (10, 2.0, 200), (10, 2.5, 400), (5, 3.5, 300)):  # rewound after 10
        store.client.log_batch(one, [Metric("train/loss", value, at, step)])
    store.client.log_text(one, "slow loader\n", "verdict/verdict.txt")
    store.client.set_terminated(one, "FINISHED")
    return store


@pytest.fixture(autouse=True)
def _no_other_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield


def test_a_run_is_read_with_all_that_is_known_of_it(store: Store) -> None:
    run = find_run("digits-1", root=store.root)
    assert (run.name, run.experiment, run.status, run.parent) == ("digits-1", "digits", "FINISHED", None)
    assert run.params == {"unet.channels": "8"} and run.metrics["train/loss"] == 2.5
    assert run.note == "why not"
    assert run.history("train/loss") == [Point(5, 300, 3.5), Point(10, 400, 2.5)]
    assert run.history("train/nothing") == []
    assert run.artifacts() == ["verdict"] and run.artifacts("verdict") == ["verdict/verdict.txt"]
    assert run.read_artifact("verdict/verdict.txt") == b"slow loader\n"
    assert run.read_artifact("verdict/other.txt") is None


def test_a_run_is_found_by_folder_id_beginning_of_an_id_and_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = find_run("digits-1", root=store.root)
    assert by_name.folder == store.root / "digits-1"
    assert find_run(by_name.id, root=store.root) == find_run(by_name.id[:8], root=store.root) == by_name
    assert find_run(str(by_name.folder)) == by_name  # the store is beside the folder, whatever --runs says
    monkeypatch.chdir(store.root.parent)
    assert find_run("digits-1", root=Path(store.root.name)).id == by_name.id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store.root}/mlflow.db")
    assert find_run("digits-1").id == by_name.id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store.root}/mlflow.db?timeout=30")
    assert find_run("digits-1").folder == by_name.folder


def test_a_folder_that_is_another_runs_by_now_is_not_taken_for_this_ones(store: Store) -> None:
    run = find_run("digits-2", root=store.root)
    assert run.folder is not None
    for other in ("another\n", "damaged, or somebody else's"):
        (run.folder / "identity").write_text(other)
        assert find_run("digits-2", root=store.root).folder is None
    (run.folder / "identity").write_text("identity-of-digits-2\n")


def test_an_experiment_means_its_training_runs_and_a_sweep_its_trials(store: Store) -> None:
    trials = ["vary-digits.baseline", "vary-digits.fp16"]
    assert [run.name for run in find_runs("digits", root=store.root)] == ["digits-1", "digits-2", *trials]
    assert [run.name for run in find_runs("vary-digits", root=store.root)] == trials
    assert [run.name for run in find_runs("digits-2", root=store.root)] == ["digits-2"]


def test_what_can_not_be_found_is_said_in_a_line_with_the_store_and_near_names(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"^digits1 is no run of sqlite:.*; did you mean digits-1") as error:
        find_run("digits1", root=store.root)
    assert str(store.root) in str(error.value)
    with pytest.raises(ExperimentError, match=r"xyz is no run and no experiment of .*; the latest are "):
        find_runs("xyz", root=store.root)
    again = store.run("digits-2")
    with pytest.raises(ExperimentError, match=f"2 runs are called digits-2 .*{again}.*name one by id"):
        find_run("digits-2", root=store.root)
    store.client.delete_run(again)
    with pytest.raises(ExperimentError, match="there is no MLflow store sqlite:"):
        find_run("digits-1", root=tmp_path)
    assert list(tmp_path.iterdir()) == []
    lost = tmp_path / "lost"
    lost.mkdir()
    (lost / "identity").write_text("of-no-run\n")
    shutil.copy(store.root / "mlflow.db", tmp_path)
    with pytest.raises(ExperimentError, match=r"run .*lost is not in sqlite:.*; set MLFLOW_TRACKING_URI"):
        find_run(str(lost))


def test_a_tracking_server_that_is_down_is_said_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@127.0.0.1:{port}")
    with pytest.raises(
        ExperimentError, match=rf"^MLflow at http://127.0.0.1:{port} fails \(.*nothing is lost"
    ) as error:
        find_run("digits-1")
    assert "secret" not in str(error.value) and "\n" not in str(error.value)
