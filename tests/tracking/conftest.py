"""The output root of a run, for all tests of this folder."""

import shutil
from pathlib import Path

import pytest

from tests.forking import REPOSITORY


@pytest.fixture
def root(tmp_path: Path, empty_store: Path, forked_workers: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output root with an empty store and a run folder `run`."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    (tmp_path / "run").mkdir()
    return tmp_path
