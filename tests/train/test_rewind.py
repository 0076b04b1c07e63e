"""Numbers that go bad: the run goes back to its newest checkpoint, leaves the images since out and ends well."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.train.ranks import BATCH, Ranks, end_of, mlflow_run, points

pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).with_name("planted_train.py")
IMAGES, SAVED, BAD = 640, 400, 403
REWIND = (f"train.images={IMAGES}", "checkpoint.every_images=80", "bad_numbers.policy=rewind")


def train(run_dir: Path, planted: str, *changes: str, config: str, count: int) -> tuple[list[int], str]:
    """Exit codes and output of a run in which the numbers of some images are bad."""
    with Ranks(run_dir, *REWIND, *changes, config=config, count=count, script=SCRIPT, PLANTED=planted) as ranks:
        return ranks.codes(), ranks.said


def check_it_ended_well(run_dir: Path, said: str, skipped: int) -> None:
    """One rewind to the checkpoint before, over so many images, and good numbers afterwards."""
    lines = [line for line in said.splitlines() if "went back to" in line]
    assert len(lines) == 1 and f"went back to images-{SAVED:09d}" in lines[0] and "rewind 1 of 3" in lines[0]
    state = end_of(run_dir).state
    assert (state["images_seen"], state["skipped_images"], state["rewinds"]) == (IMAGES, skipped, 1)
    client, run = mlflow_run(run_dir)
    assert run.info.status == "FINISHED" and run.data.metrics["train/rewinds"] == 1
    assert [file.path for file in client.list_artifacts(run.info.run_id, "rewinds")] == ["rewinds/1.txt"]
    after = [point for point in points(run_dir) if point["progress/images"] > SAVED][-10:]
    assert all(math.isfinite(point["train/loss"]) and point["train/loss"] < 2 for point in after)
    assert points(run_dir)[-1]["train/loss"] < 0.5


def test_a_nan_is_left_out_on_all_ranks(tmp_path: Path) -> None:
    run_dir = tmp_path / "nan"
    codes, said = train(run_dir, f"{BAD} {BAD} nan", config="zero1_fp32.json", count=2)
    assert codes == [0, 0], said[-4000:]
    assert "train/loss was not finite in 1 of the last 2 steps" in said
    check_it_ended_well(run_dir, said, skipped=2 * BATCH)


def test_a_spike_is_left_out(tmp_path: Path) -> None:
    run_dir = tmp_path / "spike"
    planted, spiking = f"{BAD} {BAD} 1000", "bad_numbers.spike_factor=20"
    codes, said = train(run_dir, planted, spiking, config="zero0_fp32.json", count=1)
    assert codes == [0], said[-4000:]
    assert "is over 20 times the" in said
    check_it_ended_well(run_dir, said, skipped=2 * BATCH)


def test_images_that_overflow_in_fp16_at_every_scale_are_left_out(tmp_path: Path) -> None:
    """From 65536 it takes 1 step of hysteresis and 16 halvings to the floor, and 8 steps there count as bad."""
    run_dir = tmp_path / "overflow"
    steps = 1 + 16 + 8
    planted = f"{SAVED} {SAVED + steps * BATCH - 1} nan"
    codes, said = train(run_dir, planted, "checkpoint.every_images=400", config="zero2_fp16.json", count=1)
    assert codes == [0], said[-4000:]
    assert "at the lowest loss scale, 1," in said
    check_it_ended_well(run_dir, said, skipped=steps * BATCH)
    assert end_of(run_dir).state["loss_scaler"]["cur_scale"] == 65536


def test_too_many_rewinds_end_the_run_on_all_ranks(tmp_path: Path) -> None:
    run_dir = tmp_path / "hopeless"
    planted = f"{BAD} {10**9} nan"
    codes, said = train(run_dir, planted, "bad_numbers.max_rewinds=2", config="zero1_fp32.json", count=2)
    assert codes == [3, 3], said[-4000:]
    assert said.count("went back to") == 2 and "the run was rewound 2 times before" in said
    assert mlflow_run(run_dir)[1].info.status == "FAILED"
    assert end_of(run_dir).state["images_seen"] == SAVED, "nothing bad was saved"
