"""Which micro-batches are tried in a layout, and what their DeepSpeed JSON says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpm_ds.command_line import MOST_BATCH
from ddpm_ds.errors import LayoutError, SpecError
from ddpm_ds.fit.task import Task, TrialLayout, largest_fitting
from tests.launching import REPOSITORY, write_json

DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
ZERO = REPOSITORY / "ds_configs" / "zero0_fp32.json"
FOLDED = REPOSITORY / "ds_configs" / "folded_zero2_fp16.json"


def task(*overrides: str, stages: int = 1, replicas: int = 1, config: Path = ZERO, **values: Any) -> Task:
    """The search of a layout of the digits."""
    limits = {"device": "cpu", "budget_bytes": 2**30, "most_bytes": None, "steps": 1, "hang_seconds": 600.0}
    layout = TrialLayout(stages, replicas)
    given = {"spec": DIGITS, "overrides": overrides, "ds_config": config, "accumulation": None}
    return Task(layout=layout, **{**given, **limits, **values})


@pytest.mark.parametrize(
    ("stages", "replicas", "config", "sizes"),
    [
        (2, 2, ZERO, [1, 2, 3, 4, 6, 8, 12, 24]),
        (2, 1, FOLDED, [1, 2, 3, 4, 6, 8, 12]),  # of which there are 4 or more
        (4, 1, FOLDED, [1, 2, 3, 4, 6]),
    ],
)
def test_the_batch_stays_so_a_replicas_share_is_a_number_of_micro_batches(
    stages: int, replicas: int, config: Path, sizes: list[int]
) -> None:
    of = task("train.batch_images=48", config=config, stages=stages, replicas=replicas)
    assert list(of.choosing_from([]).candidates) == sizes
    for size in sizes:
        filled = of.config(size)
        made = filled["train_micro_batch_size_per_gpu"] * filled["gradient_accumulation_steps"] * replicas
        assert (made, filled["pipeline"]["stages"]) == (48, stages)


def test_with_accumulation_any_micro_batch_is_possible_and_the_batch_grows(tmp_path: Path) -> None:
    of = task("train.batch_images=48", "train.accumulation=6", accumulation=4, replicas=2)
    possible = of.choosing_from([]).candidates
    assert possible == range(1, MOST_BATCH // 8 + 1)
    assert of.load_spec(possible[-1]).train.batch_images == MOST_BATCH
    assert of.choosing_from([5, 7]).candidates == (5, 7)
    plan = of.plan(7, tmp_path)
    assert plan.ds.layout.batch_images == plan.spec.train.batch_images == 2 * 4 * 7
    assert (plan.ds.layout.micro_batch_images, plan.ds.layout.micro_batches) == (7, 4)


def test_what_the_json_says_of_its_own_micro_batch_is_replaced(tmp_path: Path) -> None:
    given = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    filled = task("optimizer.warmup_images=0", config=write_json(tmp_path / "ds.json", given)).config(4)
    assert (filled["train_micro_batch_size_per_gpu"], filled["gradient_accumulation_steps"]) == (4, 16)
    assert filled["gradient_clipping"] == 0.5 and filled["pipeline"] == {"stages": 1}


@pytest.mark.parametrize(
    ("of", "asked", "kind", "message"),
    [
        (task(replicas=3), [], LayoutError, "train.batch_images = 64 can't be shared by 3 replicas; use --set"),
        (task(stages=2), [4, 5], LayoutError, "--micro-batch 5 does not divide the 64 images of a replica"),
        (task(config=FOLDED, stages=2), [32], LayoutError, "needs 4 micro-batches or more"),
        (task(config=FOLDED, replicas=2), [], LayoutError, "has nothing to fold on one stage"),
        (task(config=FOLDED, accumulation=3, stages=2), [], LayoutError, "needs 4 micro-batches or more"),
        (task(accumulation=4), [2**19], SpecError, "train.batch_images = 2097152 should be a"),
        (task("train.accumulation=4"), [], SpecError, "leaves one micro-batch to try; use --set train"),
    ],
)
def test_what_can_not_be_is_one_line(of: Task, asked: list[int], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        of.choosing_from(asked)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("sizes", [range(1, 70), [7], [3, 4, 5, 50, 51], [6, 1000]], ids=str)
def test_the_largest_that_fits_is_found_whatever_the_budget(sizes: Sequence[int]) -> None:
    for budget in range(sizes[-1] + 2):
        asked: list[int] = []

        def fits(size: int, budget: int = budget, asked: list[int] = asked) -> bool:
            assert all(size < other for other in asked if other > budget)  # what is larger than what died is not tried
            asked.append(size)
            return size <= budget

        assert largest_fitting(sizes, fits) == max((size for size in sizes if size <= budget), default=None)
        assert len(asked) == len(set(asked))
        assert asked[0] == sizes[0]  # of which it can be said what it needs, if it does not fit
        assert len(asked) <= 2 * math.log2(len(sizes)) + 2 + math.log2(sizes[-1] / sizes[0])


def test_sizes_double_until_one_does_not_fit_and_are_bisected_then() -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= 21

    assert largest_fitting(range(1, 2**20 + 1), fits) == 21
    assert asked == [1, 2, 4, 8, 16, 32, 24, 20, 22, 21]
    assert largest_fitting([1, 2, 3], lambda size: True) == 3  # the last size, although it is no double
