"""Which micro-batches are tried in a layout, and what their DeepSpeed JSON says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpm_ds.errors import LayoutError, SpecError
from ddpm_ds.fit.task import LARGEST, FitRequest, Task, TrialLayout, candidates, layouts_of
from tests.launching import REPOSITORY, write_json

DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
ZERO = REPOSITORY / "ds_configs" / "zero0_fp32.json"
FOLDED = REPOSITORY / "ds_configs" / "folded_zero2_fp16.json"


def job(*overrides: str, config: Path = ZERO, accumulation: int | None = None) -> FitRequest:
    return FitRequest(DIGITS, overrides, config, accumulation)


def task(of: FitRequest, layout: TrialLayout, **values: Any) -> Task:
    limits = {"device": "cpu", "budget_bytes": 2**30, "most_bytes": None, "steps": 1, "hang_seconds": 600.0}
    return Task(of, layout, **{"sizes": (), **limits, **values})


def test_layouts_of_processes() -> None:
    assert list(map(str, layouts_of(4))) == ["1x4", "2x2", "4x1"]


@pytest.mark.parametrize(
    ("stages", "replicas", "config", "sizes"),
    [
        (1, 1, ZERO, [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]),
        (2, 2, ZERO, [1, 2, 3, 4, 6, 8, 12, 24]),
        (2, 1, FOLDED, [1, 2, 3, 4, 6, 8, 12]),  # of which there are 4 or more
        (4, 1, FOLDED, [1, 2, 3, 4, 6]),
    ],
)
def test_the_batch_stays_so_a_replicas_share_is_a_number_of_micro_batches(
    stages: int, replicas: int, config: Path, sizes: list[int]
) -> None:
    of, layout = job("train.batch_images=48", config=config), TrialLayout(stages, replicas)
    assert candidates(of, layout, []) == sizes
    for size in sizes:
        filled = of.config(layout, size)
        made = filled["train_micro_batch_size_per_gpu"] * filled["gradient_accumulation_steps"] * replicas
        assert (made, filled["pipeline"]["stages"]) == (48, stages)


def test_with_accumulation_any_micro_batch_is_possible_and_the_batch_grows(tmp_path: Path) -> None:
    of, layout = job("train.batch_images=48", "train.accumulation=6", accumulation=4), TrialLayout(1, 2)
    assert candidates(of, layout, []) == range(1, LARGEST + 1)
    assert candidates(of, layout, [5, 7]) == [5, 7]
    plan = task(of, layout).plan(7, tmp_path)
    assert plan.ds.layout.batch_images == plan.spec.train.batch_images == 2 * 4 * 7
    assert (plan.ds.layout.micro_batch_images, plan.ds.layout.micro_batches) == (7, 4)


def test_what_the_json_says_of_its_own_micro_batch_is_replaced(tmp_path: Path) -> None:
    config = write_json(
        tmp_path / "ds.json",
        {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        },
    )
    of = job("optimizer.warmup_images=0", config=config)
    filled = of.config(TrialLayout(1, 1), 4)
    assert (filled["train_micro_batch_size_per_gpu"], filled["gradient_accumulation_steps"]) == (4, 16)
    assert filled["gradient_clipping"] == 0.5 and filled["pipeline"] == {"stages": 1}


@pytest.mark.parametrize(
    ("of", "layout", "asked", "kind", "message"),
    [
        (job(), TrialLayout(1, 3), [], LayoutError, "train.batch_images = 64 can't be shared by 3 replicas; use --set"),
        (job(), TrialLayout(2, 1), [4, 5], LayoutError, "--micro-batch 5 does not divide the 64 images of a replica"),
        (job(config=FOLDED), TrialLayout(2, 1), [32], LayoutError, "needs 4 micro-batches or more"),
        (job(config=FOLDED), TrialLayout(1, 2), [], LayoutError, "has nothing to fold on one stage"),
        (job(config=FOLDED, accumulation=3), TrialLayout(2, 1), [], LayoutError, "needs 4 micro-batches or more"),
        (
            job("train.accumulation=4"),
            TrialLayout(1, 1),
            [],
            SpecError,
            "leaves one micro-batch to try; use --set train",
        ),
    ],
)
def test_what_can_not_be_is_said_in_one_line(
    of: FitRequest, layout: TrialLayout, asked: list[int], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as raised:
        candidates(of, layout, asked)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_task_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = task(job("unet.channels=8", accumulation=2), TrialLayout(2, 3), sizes=(1, 2, 5))
    written.write(tmp_path)
    assert Task.read(tmp_path) == written
