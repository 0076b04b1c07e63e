"""launch/equal_cost.py: as many evaluations of the U-Net in every panel of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equal_cost
import pytest
from PIL import Image
from torch import Tensor

from ddpm_ds.config.spec import SamplerSpec
from ddpm_ds.evaluate.sampling import sample
from ddpm_ds.evaluate.trained import Trained
from tests.evaluate.planted import plant


def test_every_sampler_of_a_row_evaluates_the_u_net_equally_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path / "edm", diffusion={"schedule": "edm", "objective": "v"}, sampler={"kind": "heun", "churn": 5})
    asked: list[tuple[str, int]] = []

    def watched(trained: Trained, count: int, *, sampler: SamplerSpec, **options: Any) -> Tensor:
        asked.append((sampler.kind, sampler.evaluations_of(trained.diffusion)))
        return sample(trained, count, sampler=sampler, **options)

    monkeypatch.setattr(equal_cost, "sample", watched)
    words = [str(tmp_path / "edm"), "--evaluations", "3,5", "--count", "4", "--out", str(tmp_path / "x.png")]
    assert equal_cost.main(words) == 0
    assert asked == [(kind, number) for number in (3, 5) for kind in ("ddim", "dpm_solver", "heun")]
    assert Image.open(tmp_path / "x.png").size == (660, 480)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--evaluations", "3,4"], "4 is even, and heun's steps are odd numbers of evaluations"),
        (["--out", "nowhere/x.png"], "--out nowhere/x.png can't be written"),
        ([], "sampler.kind = heun is for noise that is finite"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(tmp_path / "flow", diffusion={"schedule": "flow", "objective": "velocity"})
    assert equal_cost.main([str(tmp_path / "flow"), "--out", str(tmp_path / "x.png"), *words]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1 and not (tmp_path / "x.png").exists()
