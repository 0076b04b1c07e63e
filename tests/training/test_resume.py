"""Rung d: a run that was stopped and resumed is the run, bit for bit; on another layout, within rounding."""

import functools
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml

from ddpm_ds.checkpoint.folder import CompleteCheckpoint, images_of
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.ground.errors import CheckpointError
from ddpm_ds.tracking.run_folder import EVALUATIONS, METRICS, RunFolder, checkpoints_of, identity_of
from ddpm_ds.training.resume import check_resume, remove_abandoned_points
from tests.launching import tiny_spec
from tests.training.courses import BATCH, CALM, GRIDS, LAYOUTS, Courses, about, sources_of, train_all
from tests.training.ranks import the_same

pytestmark = pytest.mark.launch

KINDS = ("ema", "exp_avg", "exp_avg_sq", "master")
TOLERANCES = {
    "fp32": dict.fromkeys(("loss", *KINDS), 1e-6),
    "fp16": {"loss": 2e-5, "master": 5e-4, "ema": 5e-4, "exp_avg": 3e-3, "exp_avg_sq": 3e-3},
    "changed": {"loss": 3e-3, "master": 5e-3, "ema": 5e-3, "exp_avg": 1e-1, "exp_avg_sq": 1e-1},
}
"""About ten times what was seen. What differs between layouts is the order of sums: in fp32 one part in 2**24, in fp16
one in 2**11 of each gradient. Between precisions every activation and gradient differs in its rounding to fp16."""

MARKS = {"few": (), "many": (pytest.mark.long,)}
in_every_layout = pytest.mark.parametrize(
    ("grid", "layout", "precision"),
    [
        pytest.param(grid, layout, precision, marks=MARKS[grid])
        for grid, precisions in GRIDS.items()
        for precision, layouts in precisions.items()
        for layout in layouts
    ],
)
in_each_precision = pytest.mark.parametrize(
    ("grid", "precision"),
    [pytest.param(grid, one, marks=MARKS[grid]) for grid, precisions in GRIDS.items() for one in precisions],
)
in_each_grid = pytest.mark.parametrize("grid", [pytest.param(grid, marks=MARKS[grid]) for grid in GRIDS])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Courses]:
    """Courses of a grid, which are trained when they are first asked for."""
    return functools.cache(lambda grid: train_all(tmp_path_factory.mktemp("courses"), grid))


@pytest.fixture
def courses(grid: str, trained: Callable[[str], Courses]) -> Courses:
    return trained(grid)


def equal_or_both_nan(one: float, other: float, tolerance: float = 0.0) -> bool:
    return math.isclose(one, other, rel_tol=tolerance) or (math.isnan(one) and math.isnan(other))


def differences(courses: Courses, course: str, source: str, rounding: str) -> list[str]:
    """Values at which ``course``, resumed from ``source``, and ``source`` itself end apart, beyond ``rounding``."""
    found, tolerances = [], TOLERANCES[rounding]
    pairs = zip(courses.losses(course, source), courses.losses(source), strict=True)
    for step, (loss, expected) in enumerate(pairs):
        if not equal_or_both_nan(loss, expected, tolerances["loss"]):
            found.append(f"loss {loss} instead of {expected} in step {step} after")
    end, expected_end = courses.end(course, source), courses.end(source)
    for kind in KINDS:
        values, wanted = (
            torch.cat([reader.read(kind, name) for name in reader.manifest.parameters])
            for reader in (end, expected_end)
        )
        if not (error := ((values - wanted).norm() / wanted.norm()).item()) <= tolerances[kind.partition("-")[0]]:
            found.append(f"{kind} is off by {error:.1e} of its norm")
    state, wanted_state = (reader.state.model_dump(exclude={"loss_scaler"}) for reader in (end, expected_end))
    if state != wanted_state:
        found.append(f"{state} instead of {wanted_state}")
    return [f"{course} from {source}: {difference}" for difference in found]


@in_every_layout
def test_stopped_and_resumed_is_never_stopped_bit_for_bit(layout: str, precision: str, courses: Courses) -> None:
    source = f"{layout}-{precision}"
    course = f"resumed-{source}"
    for loss, expected in zip(courses.losses(course, source), courses.losses(source), strict=True):
        assert equal_or_both_nan(loss, expected)
    end = courses.end(course, source)
    assert the_same(end, courses.end(source)) and end.manifest.kinds == KINDS
    assert end.state.learning_rate > 0 and end.state.skipped_steps == (2 if precision == "fp16" else 0)


@in_each_precision
def test_every_layout_goes_on_from_others_within_rounding(grid: str, precision: str, courses: Courses) -> None:
    found = [
        difference
        for layout in GRIDS[grid][precision]
        for source in sources_of(grid, layout, precision)[1:]
        for difference in differences(courses, f"resumed-{layout}-{precision}", f"{source}-{precision}", precision)
    ]
    assert not found, "\n".join(found)


@in_each_grid
def test_precision_may_change(grid: str, courses: Courses) -> None:
    found = differences(courses, "to-fp32", "calm-fp16", "changed")
    for other in CALM[grid][1]:
        found += differences(courses, "to-fp16", f"{other}-fp32", "changed")
    assert not found, "\n".join(found)


@in_every_layout
def test_a_rank_averages_only_what_it_owns_by_the_formula(layout: str, precision: str, courses: Courses) -> None:
    owners = LAYOUTS[layout].replicas if LAYOUTS[layout].zero else 1
    for report in courses.reports(f"{layout}-{precision}"):
        assert max(report["ema_errors"]) < 1e-6
        padding = report["shadow_elements"] - report["stage_elements"] / owners
        assert 0 <= padding < BATCH


@in_every_layout
def test_the_logged_rate_is_that_with_which_the_optimizer_stepped(
    layout: str, precision: str, courses: Courses
) -> None:
    course = f"{layout}-{precision}"
    for report in courses.reports(course):
        assert all(set(used) <= {rate, float(np.float32(rate))} for rate, used in report["rates"])
        assert len({rate for rate, _ in report["rates"]}) == len(report["rates"]) - 1, "it warms up from 0 and 0"
    assert courses.end(course).state.skipped_steps == (2 if precision == "fp16" else 0)


def checkpoint_at(path: Path, **sha256: str) -> CompleteCheckpoint:
    """A checkpoint of a tiny run."""
    manifest = SimpleNamespace(spec=tiny_spec().model_dump(mode="json"), data_sha256=sha256, ds_config={})
    return cast(CompleteCheckpoint, SimpleNamespace(path=path, manifest=manifest))


def test_a_new_run_is_advised_in_a_way_that_has_not_been_tried(tmp_path: Path) -> None:
    """In its own folder a run needs another one; with --resume from elsewhere it has that already."""
    for of, advice in (("own", "use another --run-dir"), ("other", "leave --resume out")):
        checkpoint = checkpoint_at(checkpoints_of(tmp_path / of) / "step_00000002", train="0")
        for after, images in ((tiny_spec(train={"seed": 7}), {"train": "0"}), (tiny_spec(), {"train": "1"})):
            with pytest.raises(CheckpointError, match=f"to train a new run, {advice}$"):
                check_resume(checkpoint, about(after, images), tmp_path / "own")


def test_a_checkpoint_from_before_a_key_goes_on_with_its_default() -> None:
    checkpoint, now = checkpoint_at(Path("older")), about(tiny_spec(), {})
    del checkpoint.manifest.spec["data"]["crop_from"]
    assert check_resume(checkpoint, now, Path()) == []
    checkpoint.manifest.spec["data"]["gone"] = 1
    with pytest.raises(CheckpointError, match=r"data\.gone: 1 -> unset"):
        check_resume(checkpoint, now, Path())


@pytest.mark.parametrize("changed", [5, 6])
def test_more_than_five_other_settings_are_another_run(changed: int) -> None:
    others = {"seed": 7, "batch_images": 48}
    optimizer = {"learning_rate": 0.5, "warmup_images": 3, "decay": "cosine", "decay_to": 0.5}
    after = tiny_spec(train=others, optimizer=dict(list(optimizer.items())[: changed - len(others)]))
    with pytest.raises(CheckpointError) as refused:
        check_resume(checkpoint_at(Path("older")), about(after, {}), Path())
    named = f"older is of another run, with {changed} other settings; to train a new run, leave --resume out"
    assert (str(refused.value) == named) == (changed > 5) and ("train.seed: " in str(refused.value)) == (changed <= 5)


def test_points_after_the_checkpoint_of_a_start_with_other_settings_are_removed(tmp_path: Path) -> None:
    """Else its numbers, which may have gone bad, would stay in the curves of what is trained now."""
    folder, config = RunFolder(tmp_path), {"gradient_clipping": 1.0, "pipeline": {"stages": 1}}
    slow = tiny_spec(optimizer={"learning_rate": 1e-4})
    longer = tiny_spec(train={"images": 128}, samples={"count": 4})
    state = SimpleNamespace(steps=2, images_seen=32)
    saved = cast(CompleteCheckpoint, SimpleNamespace(state=state))

    def left(
        checkpoint: CompleteCheckpoint | None, spec: RunSpec, config: dict[str, Any]
    ) -> tuple[str | None, list[int], list[int | None], bool]:
        """The message, the steps of the points, the images of the pictures, and whether it is the same run."""
        identity = folder.identity()
        said = remove_abandoned_points(tmp_path, checkpoint, about(spec, {}, config))
        steps = [int(point["step"]) for name in (METRICS, EVALUATIONS) for point in RunFolder(tmp_path).points(name)]
        return said, steps, [images_of(path.stem) for path in folder.all_samples()], identity_of(tmp_path) == identity

    assert remove_abandoned_points(tmp_path, None, about(slow, {}, config)) is None, "a new folder"
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(tiny_spec().model_dump(mode="json"), sort_keys=False))
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    (tmp_path / "samples").mkdir()
    for images in (0, 32, 48):
        folder.samples(images).touch()
    for step in (1, 2, 3):
        folder.append(METRICS, {"train/loss": math.nan}, step)
    folder.append(EVALUATIONS, {"eval/loss": 0.5}, 3)
    for checkpoint in (None, saved):
        for kept in (config, {**config, "pipeline": {"stages": 2}, "kernels": "fused"}):
            assert left(checkpoint, longer, kept) == (None, [1, 2, 3, 3], [0, 32, 48], True)
    said, *there = left(saved, longer, {**config, "gradient_clipping": 0.5})
    assert said is not None and "something else (ds_config.gradient_clipping: 1.0 -> 0.5)" in said
    assert there == [[1, 2], [0, 32], True]
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "summary.json").touch()
    said, *there = left(None, slow, config)
    assert not any((tmp_path / "trace").iterdir())
    assert said is not None and "(optimizer.learning_rate: 0.001 -> 0.0001) and saved nothing" in said
    assert there == [[], [], False]
    (tmp_path / "spec.yaml").write_text("name: ti")
    assert left(None, slow, config)[0] is None, "cut off by a kill"


@in_each_precision
def test_every_layout_is_the_same_run(grid: str, precision: str, courses: Courses) -> None:
    for layout in GRIDS[grid][precision]:
        losses, expected = courses.losses(f"{layout}-{precision}"), courses.losses(f"1x1-{precision}")
        assert all(map(equal_or_both_nan, losses, expected, itertools.repeat(TOLERANCES[precision]["loss"])))
