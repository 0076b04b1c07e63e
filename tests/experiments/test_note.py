"""Notes: why a run is made, and what was learned from it."""

import shutil
from datetime import date
from pathlib import Path

import pytest

from ddpm_ds.cli.main import main
from ddpm_ds.tracking.run_folder import FOLDER_TAG, NOTE_TAG, labels, write_labels
from ddpm_ds.tracking.runs import NOTE_CHARACTERS
from tests.tracking.stored import Store, read_run


@pytest.fixture
def root(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    Store(tmp_path).run("digits-1")
    return tmp_path


def note(root: Path, *words: str) -> int:
    return main(["note", str(root / "digits-1"), *words])


def test_notes_are_added_with_their_date_and_printed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("fp16 halves the time.\n\n- at batch 64\n",), ("not at batch 8",)):
        note(root, *words)
    assert "has no note yet" in capsys.readouterr().out
    note(root)
    today = date.today().isoformat()
    expected = f"{today}: fp16 halves the time.\n\n- at batch 64\n\n{today}: not at batch 8\n"
    assert capsys.readouterr().out == expected
    assert read_run(root).data.tags["mlflow.note.content"] == expected.rstrip()


def test_a_note_that_says_nothing_or_would_be_cut_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note(root, "keep this")
    assert note(root, " \n") == note(root, "x" * NOTE_CHARACTERS) == 2
    empty, long = capsys.readouterr().err.splitlines()
    assert "is empty" in empty and "MLflow keeps 8,000" in long
    note(root)
    assert capsys.readouterr().out.endswith(": keep this\n")


def test_a_run_begins_with_its_note_and_goes_on_without_touching_it(tmp_path: Path) -> None:
    printed: list[str] = []
    write_labels(tmp_path, {"sweep.values": "precision=fp16"})
    given = {"sweep.values": "precision=fp16", FOLDER_TAG: str(tmp_path)}
    assert labels(tmp_path, "why not", printed.append) == {**given, NOTE_TAG: "why not"}
    (tmp_path / "identity").write_text("1234\n")
    assert labels(tmp_path, None, printed.append) == given and printed == []
    assert labels(tmp_path, "another reason", printed.append) == given
    assert len(printed) == 1 and f"ddpm-ds note {tmp_path}" in printed[0]
