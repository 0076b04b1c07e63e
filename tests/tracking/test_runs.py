"""Runs found in MLflow by what people call them."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpm_ds.cli.main import main
from ddpm_ds.tracking.run_folder import EVENTS, PARENT_TAG, EventFile, unsent
from ddpm_ds.tracking.runs import ExperimentError, find_run, find_runs
from tests.launching import REPOSITORY
from tests.tracking.stored import Store

ZERO2 = REPOSITORY / "ds_configs" / "zero2_fp16.json"
DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
READERS = ("compare digits-3", "note digits-3", "diagnose digits-3")
WRITERS = (
    f"sweep --spec {DIGITS} --vary train.seed=1,2 --deepspeed_config {ZERO2}",
    f"train --processes 1 --deepspeed_config {ZERO2}",
)
"""Verbs that read MLflow's store, and verbs that begin runs in it."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Store:
    """Two runs, a sweep with two trials, and an evaluation."""
    root = tmp_path_factory.mktemp("runs")
    shutil.copy(empty_store, root / "mlflow.db")
    store = Store(root)
    one = store.run("digits-1")
    store.run("digits-2")
    sweep = store.run("sweep-digits", kind="sweep")
    for trial in ("baseline", "fp16"):
        store.run(f"sweep-digits.{trial}", **{PARENT_TAG: sweep})
    store.run("evaluate images-000000640", kind="evaluate", **{PARENT_TAG: one})
    return store


@pytest.fixture(autouse=True)
def _no_other_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield


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
    trials = ["sweep-digits.baseline", "sweep-digits.fp16"]
    assert [run.name for run in find_runs("digits", root=store.root)] == ["digits-1", "digits-2", *trials]
    assert [run.name for run in find_runs("sweep-digits", root=store.root)] == trials
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


@pytest.mark.parametrize(
    ("uri", "package"),
    [
        ("mysql://me:hush@db/ml", "mysqlclient"),
        ("postgresql+psycopg2://me:hush@db/ml", "psycopg2-binary"),
        ("mssql:///?odbc_connect=PWD%3Dhush", "pyodbc"),
    ],
)
@pytest.mark.parametrize("words", [*READERS, *WRITERS])
def test_a_driver_that_is_missing_is_said_by_every_program_with_what_installs_it(
    words: str,
    uri: str,
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for module in ("MySQLdb", "psycopg2", "pyodbc"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(words.split()) == 2
    out, err = capfd.readouterr()
    assert err.count("\n") == 1 and f"; pip install '{package}'" in err and "hush" not in out + err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "uri",
    [
        "http://me:{}@127.0.0.1:1",
        "http://127.0.0.1:1/?sig={}",
        "http://127.0.0.1:1/x#token={}",
        "http://me:{}/x",
        "databricks://none:{}",
        "sqlite:///{root}/mlflow.db?key={}",
        "sqlite:///{root}/none.db?key={}",
        "mysql://me:{}@db/ml",
        "me:{}@host",
    ],
)
@pytest.mark.parametrize("secret", ["hush'hu sh", "hush%0Ahu%40sh", 'hush"hu\nsh'])
def test_nothing_that_is_said_or_written_has_a_secret_of_the_tracking_uri(
    uri: str,
    secret: str,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(store.root / "mlflow.db", tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.replace("{root}", str(tmp_path)).replace("{}", secret))
    monkeypatch.setenv("NCCL_TOKEN", secret)
    for words in READERS:
        assert main(words.split()) == 2
    EventFile(tmp_path / EVENTS, print).append({"start": {"output_root": str(tmp_path)}})
    print(unsent(tmp_path / EVENTS))
    out, err = capfd.readouterr()
    written = "".join(file.read_text(errors="replace") for file in tmp_path.iterdir())
    for part in ("hush", "hu sh", "hu%40sh", "hu@sh"):
        assert part not in out + err and part not in written and part not in str([*tmp_path.iterdir()])
    assert "Traceback" not in err and len(err.splitlines()) == 3


def test_a_tracking_server_that_is_down_is_said_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@127.0.0.1:{port}")
    with pytest.raises(
        ExperimentError, match=rf"^MLflow at http://127.0.0.1:{port} fails \(.*nothing is lost"
    ) as error:
        find_run("digits-1")
    assert "secret" not in str(error.value) and "\n" not in str(error.value)
