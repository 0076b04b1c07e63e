"""Runs found in MLflow by their folders."""

import shutil
import sys
from pathlib import Path

import pytest

from ddpm_ds.cli.main import main
from ddpm_ds.processes.ranks import free_port
from ddpm_ds.tracking.run_folder import EVENTS, NOTE_TAG, append_event, unsent
from ddpm_ds.tracking.runs import ExperimentError, find_run
from tests.launching import REPOSITORY
from tests.tracking.stored import Store

ZERO2 = REPOSITORY / "ds_configs" / "zero2_fp16.json"
DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
WRITERS = (
    f"sweep --spec {DIGITS} --vary train.seed=1,2 --deepspeed_config {ZERO2}",
    f"train --processes 1 --deepspeed_config {ZERO2}",
)
"""Verbs that begin runs in MLflow's store."""


@pytest.fixture(autouse=True)
def run(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, beside a store that has it and others."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    store = Store(tmp_path)
    for name in ("run", "other"):
        store.client.set_tag(store.run(name), NOTE_TAG, f"of {name}")
    return tmp_path / "run"


def note_of(folder: Path) -> str:
    """The description of the run that is found."""
    with find_run(folder) as (_, found):
        return str(found.data.tags[NOTE_TAG])


def test_a_run_is_found_by_its_folder_in_the_store_that_the_environment_names_or_beside_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = run.rename(run.with_name("moved"))
    assert note_of(moved) == note_of(Path("moved")) == "of run"
    (run.parent / "deep").mkdir()
    elsewhere = moved.rename(run.parent / "deep" / "run")
    with pytest.raises(ExperimentError, match=r"there is no MLflow store sqlite:.*deep"):
        note_of(elsewhere)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{run.parent}/mlflow.db?timeout=30")
    assert note_of(elsewhere) == "of run"
    (elsewhere / "identity").write_text("of-no-run\n")
    with pytest.raises(ExperimentError, match=r"run .*run is not in sqlite:.*; set MLFLOW_TRACKING_URI"):
        note_of(elsewhere)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@127.0.0.1:{(port := free_port())}")
    with pytest.raises(
        ExperimentError, match=rf"^MLflow at http://127.0.0.1:{port} fails \(.*nothing is lost.*answers$"
    ):
        note_of(elsewhere)
    with pytest.raises(ExperimentError, match="deep has no identity of a run in MLflow; name the folder of a run"):
        note_of(run.parent / "deep")


@pytest.mark.parametrize(
    ("uri", "package"),
    [
        ("mysql://me:hush@db/ml", "mysqlclient"),
        ("postgresql+psycopg2://me:hush@db/ml", "psycopg2-binary"),
        ("mssql:///?odbc_connect=PWD%3Dhush", "pyodbc"),
    ],
)
@pytest.mark.parametrize("words", WRITERS)
def test_a_missing_driver_is_named_with_its_install_command_by_every_program(
    words: str,
    uri: str,
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for module in ("MySQLdb", "psycopg2", "pyodbc"):
        monkeypatch.setitem(sys.modules, module, None)
    before = set(tmp_path.iterdir())
    assert main(words.split()) == 2
    out, err = capfd.readouterr()
    assert err.count("\n") == 1 and f"; pip install '{package}'" in err and "hush" not in out + err
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "uri",
    [
        *("http://me:{}@127.0.0.1:1", "http://127.0.0.1:1/?sig={}", "http://127.0.0.1:1/x#token={}", "http://me:{}/x"),
        *("databricks://none:{}", "sqlite:///{root}/mlflow.db?key={}", "sqlite:///{root}/none.db?key={}"),
        *("mysql://me:{}@db/ml", "me:{}@host"),
    ],
)
@pytest.mark.parametrize("secret", ["hush'hu sh", "hush%0Ahu%40sh", 'hush"hu\nsh'])
def test_nothing_printed_or_written_has_a_secret_of_the_tracking_uri(
    uri: str,
    secret: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run" / "identity").write_text("of-no-run")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.replace("{root}", str(tmp_path)).replace("{}", secret))
    monkeypatch.setenv("NCCL_TOKEN", secret)
    with pytest.raises(ExperimentError) as refused:
        note_of(Path("run"))
    print(refused.value, file=sys.stderr)
    append_event(tmp_path / EVENTS, {"start": {"output_root": str(tmp_path)}})
    print(unsent(tmp_path / EVENTS))
    out, err = capfd.readouterr()
    written = "".join(file.read_text(errors="replace") for file in tmp_path.iterdir() if file.is_file())
    for part in ("hush", "hu sh", "hu%40sh", "hu@sh"):
        assert part not in out + err and part not in written and part not in str([*tmp_path.iterdir()])
    assert "Traceback" not in err and len(err.splitlines()) == 1
