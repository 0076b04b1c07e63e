"""The learning rate that the spec decides: the papers' formulas, in real runs, whatever the layout they go on in."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.training.objective import rate_of
from tests.launching import tiny_spec
from tests.training.test_runs import TINY, train


def rate_at(spec: RunSpec, images: int) -> float:
    rate = rate_of(spec.optimizer, spec.train.images)
    assert rate is not None
    return rate(images, 0)


def spec_with(images: int = 1000, **optimizer: Any) -> RunSpec:
    return tiny_spec(optimizer={"learning_rate": 0.01, **optimizer}, train={"images": images, "batch_images": 8})


QUARTER = 0.001 + 0.009 * (1 + math.cos(math.pi / 4)) / 2


@pytest.mark.parametrize(
    ("images", "expected"),
    [(0, 0), (100, 0.005), (200, 0.01), (400, QUARTER), (600, 0.0055), (1000, 0.001), (2000, 0.001)],
)
def test_cosine_falls_from_the_end_of_warm_up_to_the_end_of_the_run(images: int, expected: float) -> None:
    assert rate_at(spec_with(decay="cosine", decay_to=0.1, warmup_images=200), images) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("left", "expected"), [(1.0, 1.0), (0.5, 0.909091), (0.1, 0.526316), (0.01, 0.091743), (0.0, 0.0)]
)
def test_rex_falls_late_as_onetrainers(left: float, expected: float) -> None:
    images = round(200 + 800 * (1 - left))
    found = rate_at(spec_with(decay="rex", decay_to=0.1, warmup_images=200), images)
    assert found == pytest.approx(0.001 + 0.009 * expected, rel=1e-6)


@pytest.mark.parametrize("images", [0, 50, 100, 399, 400, 401, 1600, 10**9])
def test_inverse_sqrt_is_that_of_edm2(images: int) -> None:
    """In EDM2's code: ref_lr / sqrt(max(images / reference, 1)), times min(images / rampup, 1)."""
    spec = spec_with(decay="inverse_sqrt", reference_images=400, warmup_images=100)
    expected = 0.01 / math.sqrt(max(images / 400, 1.0)) * min(images / 100, 1.0)
    assert rate_at(spec, images) == pytest.approx(expected)
    assert rate_at(spec_with(decay="inverse_sqrt", reference_images=400), 0) == 0.01


@pytest.mark.parametrize("decay", ["cosine", "rex", "inverse_sqrt"])
def test_no_step_of_a_run_has_the_rate_0(decay: str) -> None:
    spec = spec_with(images=80, decay=decay, reference_images=40, warmup_images=16)
    rate = rate_of(spec.optimizer, 80)
    assert rate is not None and rate_of(spec_with().optimizer, 80) is None
    assert min(rate(before, 8) for before in range(0, 80, 8)) > 0
    assert rate(0, 8) == rate_at(spec, 4) == pytest.approx(0.01 / 4)


def test_a_rate_that_is_not_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"inverse_sqrt needs optimizer\.reference_images; give that, or use null"):
        spec_with(decay="inverse_sqrt")
    with pytest.raises(ValueError, match=r"warmup_images = 1000 leaves none of train\.images = 1000"):
        spec_with(decay="cosine", warmup_images=1000)
    with pytest.raises(ValueError, match=r"train\.images = 1000 to optimizer\.decay = rex; use fewer"):
        spec_with(decay="rex", warmup_images=1000)


@pytest.mark.launch
@pytest.mark.long
def test_a_run_follows_the_rate_and_goes_on_with_it_on_another_layout(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "decaying"
    changes = [*TINY, "logging.log_every_images=32", "samples.every_images=null", "evaluation.every_images=null"]
    changes += ["optimizer.decay=inverse_sqrt", "optimizer.reference_images=128", "optimizer.warmup_images=64"]
    train(1, folder, overrides=[*changes, "train.images=128"])
    train(2, folder, "-p", "2", config="zero2_fp16.json", overrides=[*changes, "train.images=320"])
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [point["train/seen_images"] for point in points] == list(range(32, 321, 32))
    for point in points:
        middle = point["train/seen_images"] - 16
        expected = 1e-3 * min(middle / 64, 1) / math.sqrt(max(middle / 128, 1))
        assert point["train/lr"] == pytest.approx(expected, rel=1e-12)
