"""Runs with tensor groups: the curves, held-out losses and pictures of one process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.train.ranks import mlflow_run
from tests.train.test_runs import TINY, curve, tiles_of, train

SHORT = [
    "train.images=160",
    "logging.log_every_images=32",
    "samples.every_images=160",
    "evaluation.every_images=160",
    "unet.multipliers=[1]",
    "unet.attention_resolutions=[8]",
    "unet.head_channels=4",
    "ema.halflife_images=100",
]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor") / "one"
    done = train(1, folder, config="zero1_fp32.json", overrides=[*TINY, *SHORT])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


@pytest.mark.launch
@pytest.mark.parametrize(
    ("processes", "stages"),
    [
        pytest.param(2, 1, marks=pytest.mark.long),
        pytest.param(4, 2, marks=pytest.mark.long),
        pytest.param(4, 1, marks=pytest.mark.long, id="4-1: two replicas"),
    ],
)
def test_a_run_with_tensor_groups_is_that_of_one_process(
    processes: int, stages: int, one_process: Path, tmp_path: Path
) -> None:
    split = tmp_path / "runs" / "split"
    options = ("-p", str(stages), "--set", 'ds.pipeline.tensor={"size":2}', "--trace-steps", "2-3")
    done = train(processes, split, *options, config="zero1_fp32.json", overrides=[*TINY, *SHORT])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "layers split; a rank sends " in done.stdout, "all that can be: groups and heads divide"
    losses = curve(split)
    assert len(losses) == 5 and losses == pytest.approx(curve(one_process), rel=1e-5)
    assert curve(split, "eval/loss") == pytest.approx(curve(one_process, "eval/loss"), rel=1e-4)
    for images in (0, 160):
        drawn, expected = (tiles_of(run / "samples" / f"images-{images:09}.png") for run in (split, one_process))
        assert drawn.shape == expected.shape and np.abs(drawn - expected).max() <= 1
    assert mlflow_run(split)[1].data.params["derived.tensor_size"] == "2"
    summary = json.loads((split / "trace" / "summary.json").read_text())
    assert [rank["part"] for rank in summary["ranks"]] == [0, 1] * (processes // 2)
