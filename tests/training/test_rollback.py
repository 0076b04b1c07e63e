"""Numbers that go bad: the run goes back to its newest checkpoint, leaves the images since out and ends well."""

import contextlib
import math
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from ddpm_ds.ground.errors import Preempted
from ddpm_ds.observe.observer import Observers
from ddpm_ds.processes.requests import SaveOrStop
from ddpm_ds.processes.watchdog import Watchdog
from ddpm_ds.tracking.recorder import Recorder
from ddpm_ds.training import session
from ddpm_ds.training.meters import Interval
from ddpm_ds.training.session import SPIKE_POINTS, Training, _bad_loss
from tests.launching import tiny_spec
from tests.training.ranks import BATCH, Ranks, end_of, mlflow_run, points

SCRIPT = Path(__file__).with_name("faulty_train.py")
IMAGES, SAVED, BAD = 480, 240, 243
ROLLBACK = (
    *(f"train.images={IMAGES}", "checkpoint.every_images=80", "bad_numbers.policy=rollback"),
    *(f"samples.every_images={IMAGES // 2}", f"evaluation.every_images={IMAGES // 2}"),
    *("optimizer.warmup_images=80", "optimizer.learning_rate=2e-3"),  # so that so few images show
)


def train(run_dir: Path, first: int, last: int, *changes: str, config: str, count: int) -> tuple[list[int], str]:
    """Exit codes and output of a run in which the numbers of some images are bad."""
    fault = f"noise {first} {last} nan"
    with Ranks(run_dir, *ROLLBACK, *changes, config=config, count=count, script=SCRIPT, FAULT=fault) as ranks:
        return ranks.codes(), ranks.said


def check_it_ended_well(run_dir: Path, said: str, skipped: int) -> None:
    """One rollback to the checkpoint before, over so many images, and good numbers afterwards."""
    lines = [line for line in said.splitlines() if "rolled back to" in line]
    assert len(lines) == 1 and f"rolled back to images-{SAVED:09d}" in lines[0] and "rollback 1 of 3" in lines[0]
    state = end_of(run_dir).state
    assert (state.images_seen, state.skipped_images, state.rollbacks) == (IMAGES, skipped, 1)
    client, run = mlflow_run(run_dir)
    assert run.info.status == "FINISHED" and run.data.metrics["train/rollbacks"] == 1
    assert [file.path for file in client.list_artifacts(run.info.run_id, "rollbacks")] == ["rollbacks/1.txt"]
    after = [point for point in points(run_dir) if point["train/seen_images"] > SAVED][-10:]
    assert all(math.isfinite(point["train/loss"]) and point["train/loss"] < 2 for point in after)
    assert points(run_dir)[-1]["train/loss"] < 0.5


@pytest.mark.launch
def test_a_nan_is_left_out_on_all_ranks(tmp_path: Path) -> None:
    run_dir = tmp_path / "nan"
    codes, said = train(run_dir, BAD, BAD, config="zero1_fp32.json", count=2)
    assert codes == [0, 0], said[-4000:]
    assert "train/loss was not finite in 1 of the last 2 steps" in said
    check_it_ended_well(run_dir, said, skipped=2 * BATCH)


def run_of(spike_factor: float | None, fp16: bool) -> Training:
    """The parts of a run that decide whether a loss is bad."""
    spec = SimpleNamespace(bad_numbers=SimpleNamespace(spike_factor=spike_factor))
    engine = SimpleNamespace(images_seen=8, fp16_enabled=lambda: fp16)
    return cast(Training, SimpleNamespace(spec=spec, engine=engine, recent=deque(maxlen=SPIKE_POINTS)))


def test_a_loss_far_above_the_last_ten_points_is_a_spike() -> None:
    run = run_of(20.0, fp16=False)

    def trouble(loss: float) -> str | None:
        return _bad_loss(run, Interval(2, 16, 1.0, loss, non_finite_steps=0, data_wait_seconds=0.0), done=False)

    assert [trouble(loss) for loss in (50.0, *[1.0] * (SPIKE_POINTS - 1), 117.0)] == [None] * (SPIKE_POINTS + 1)
    found = trouble(260.0)
    assert found is not None and found.startswith("train/loss = 260 is over 20 times the 12.6 of the points before")
    assert trouble(249.0) is None, "a spike is not among what later points are compared with"

    def in_fp16(loss: float, overflows: int) -> str | None:
        return _bad_loss(half, Interval(2, 16, 1.0, loss, overflows, data_wait_seconds=0.0), done=False)

    half = run_of(20.0, fp16=True)
    assert [in_fp16(loss, 2 * (loss != 1.0)) for loss in (*[1.0] * SPIKE_POINTS, math.nan)] == [None] * 11
    assert in_fp16(21.0, 0) is not None, "nor are points whose steps were all skipped"


def trained(monkeypatch: pytest.MonkeyPatch, watchdog: Watchdog, saver: Mock, bad: int, **others: Any) -> Any:
    """Train three steps without a pipeline, whose loss is not finite in step ``bad``; return the engine."""
    engine: Any = SimpleNamespace(images_seen=0, global_steps=0, fp16_enabled=lambda: False)
    engine.train_batch_size = lambda: 8

    def train_batch(batches: object) -> torch.Tensor:
        engine.images_seen, engine.global_steps = engine.images_seen + 8, engine.global_steps + 1
        return torch.tensor(math.nan if engine.global_steps == bad else 1.0)

    engine.train_batch = train_batch
    monkeypatch.setattr(session, "gather", lambda interval, engine: interval)
    monkeypatch.setattr(session, "metrics", lambda interval, engine, macs: {})
    run: dict[str, Any] = {
        "spec": tiny_spec(
            train={"images": 24, "batch_images": 8},
            checkpoint={"every_images": 8, "every_minutes": None},
            bad_numbers={"policy": "rollback"},
        ),
        "macs": 0,
        "batches": lambda: None,
        "requests": Mock(**{"poll.return_value": SaveOrStop()}),
        "validation": Mock(**{"due.return_value": (False, False)}),
        "observer": Observers(),
        "recorder": Recorder(),
    }
    with contextlib.suppress(Preempted):
        session.train(Training(engine=engine, saver=saver, watchdog=watchdog, **run | others))
    return engine


def test_reading_and_writing_checkpoints_takes_as_long_as_the_disk_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does so beyond --hang-seconds does not hang."""
    watchdog, saver = Watchdog(0, ["rank 0"], None), Mock(rollbacks=1)
    paused: list[tuple[str, int]] = []
    for name in ("save", "roll_back"):

        def noted(*_: object, name: str = name) -> float:
            paused.append((name, watchdog._heartbeat.pauses))
            return 0.0

        getattr(saver, name).side_effect = noted
    trained(monkeypatch, watchdog, saver, bad=2)
    assert paused == [(name, 1) for name in ("save", "roll_back", "save")] and watchdog._heartbeat.pauses == 0


def test_a_signal_while_pictures_are_drawn_saves_and_stops_without_another_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saver, validation = Mock(**{"save.return_value": 0.0}), Mock(**{"due.return_value": (True, False)})
    requests = Mock(**{"poll.side_effect": [SaveOrStop(), SaveOrStop(stop=True)]})
    watchdog = Watchdog(0, ["rank 0"], None)
    engine = trained(monkeypatch, watchdog, saver, bad=0, requests=requests, validation=validation)
    assert engine.global_steps == 1 and saver.save.called and requests.saved.called


@pytest.mark.launch
def test_images_that_overflow_in_fp16_at_every_scale_are_left_out(tmp_path: Path) -> None:
    """From 65536 it takes 1 step of hysteresis and 16 halvings to the floor, and 8 steps there count as bad."""
    run_dir = tmp_path / "overflow"
    steps = 1 + 16 + 8
    every_step = f"logging.log_every_images={BATCH}"  # overflows are read where the run logs
    changes = (f"checkpoint.every_images={SAVED}", every_step)
    codes, said = train(run_dir, SAVED, SAVED + steps * BATCH - 1, *changes, config="zero2_fp16.json", count=1)
    assert codes == [0], said[-4000:]
    assert "at the lowest loss scale, 1," in said
    check_it_ended_well(run_dir, said, skipped=steps * BATCH)
    assert end_of(run_dir).state.loss_scaler.cur_scale == 65536


@pytest.mark.launch
@pytest.mark.long
def test_too_many_rollbacks_end_the_run_on_all_ranks(tmp_path: Path) -> None:
    run_dir = tmp_path / "hopeless"
    codes, said = train(run_dir, BAD, 10**9, "bad_numbers.max_rollbacks=2", config="zero1_fp32.json", count=2)
    assert codes == [3, 3], said[-4000:]
    assert said.count("rolled back to") == 2 and "the run was rolled back 2 times" in said
    assert mlflow_run(run_dir)[1].info.status == "FAILED"
    assert end_of(run_dir).state.images_seen == SAVED, "nothing bad was saved"


def test_an_fp16_run_does_not_end_well_without_a_finite_loss_in_its_last_interval() -> None:
    run = run_of(None, fp16=True)
    interval = Interval(1, 8, 1.0, float("nan"), non_finite_steps=1, data_wait_seconds=0.0)
    assert _bad_loss(run, interval, done=False) is None, "the loss scale may still be looked for"
    found = _bad_loss(run, interval, done=True)
    assert found is not None and found.startswith(
        "train/loss was not finite in any of the last 1 steps, after 8 images"
    )
