"""Sampling for tests: planted runs, the verb in this process, and drawings that are cut short."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ddpm_ds.cli.main import main
from ddpm_ds.evaluate import sampling
from ddpm_ds.evaluate.draw import draw
from tests.evaluate.planted import FAST, plant


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose U-Net has 10 classes."""
    run_dir = tmp_path_factory.mktemp("runs") / "classes"
    plant(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def without_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "plain"
    plant(run_dir, unet={"classes": None}, train={"label_drop": 0.0})
    return run_dir


@pytest.fixture
def sample(planted: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the verb in this process and gives what it printed."""

    def run(*arguments: object, code: int = 0, run_dir: Path = planted) -> str:
        capsys.readouterr()
        assert main(["sample", str(run_dir), *FAST, *map(str, arguments)]) == code, capsys.readouterr().err
        said = capsys.readouterr()
        if code != 2:
            return said.out
        line, *more = [line for line in said.err.splitlines() if line and "images/s" not in line]
        assert line.startswith("ddpm-ds: error: ") and not more
        return line

    return run


@pytest.fixture
def watch_drawing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Lists the images that are drawn from now on; batches beyond the first few can be made to fail."""

    def watch(batches: int = 0, error: BaseException | None = None) -> list[int]:
        drawn: list[int] = []
        calls = iter(range(10**6))

        def watched(trained: Any, sampler: Any, index: Tensor, **options: Any) -> Tensor:
            if error is not None and next(calls) >= batches:
                raise error
            drawn.extend(index.tolist())
            return draw(trained, sampler, index, **options)

        monkeypatch.setattr(sampling, "draw", watched)
        return drawn

    return watch
