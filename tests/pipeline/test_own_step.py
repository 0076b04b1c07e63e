"""The loss scale on the device moves as DeepSpeed's scalers do on the host."""

import itertools
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler

from ddpm_ds.pipeline.deepspeed_insides import SCALER_FIELDS, ScaleSettings
from ddpm_ds.pipeline.graph import Pace
from ddpm_ds.pipeline.own_step import LossScale

STEPS = 60
SETTINGS = list(itertools.product((1, 2, 5), (1, 2, 3), (False, True)))
"""Windows, hysteresis, and whether a step without overflow restores the hysteresis."""


def scales(window: int, hysteresis: int, at_once: bool) -> tuple[LossScale, loss_scaler.DynamicLossScaler]:
    settings = ScaleSettings(16.0, True, 1.0, 2.0, window, hysteresis, at_once)
    theirs = loss_scaler.DynamicLossScaler(
        init_scale=16.0,
        scale_window=window,
        min_scale=1.0,
        delayed_shift=hysteresis,
        consecutive_hysteresis=at_once,
        raise_error_at_min_scale=False,
    )
    return LossScale(settings, torch.device("cpu")), theirs


def move(own: LossScale, overflows: bool) -> None:
    invalid = torch.tensor(overflows)
    own.update(invalid, invalid.float())
    own.count()


@pytest.mark.parametrize(("window", "hysteresis", "at_once"), SETTINGS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_it_moves_as_deepspeeds_also_after_either_was_restored_from_the_other(
    window: int, hysteresis: int, at_once: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # rank 0 prints
    own, theirs = scales(window, hysteresis, at_once)
    run = 0
    for step, overflows in enumerate(np.random.default_rng(window).random(STEPS) < share):
        run = run + 1 if overflows and theirs.cur_scale <= 1.0 else 0
        move(own, bool(overflows))
        theirs.update_scale(bool(overflows))
        assert float(own.value) == theirs.cur_scale, step
        assert int(own.overflows_at_floor) == run, step
        if step % 7 == 3:
            state, (fresh, other) = own.state(), scales(window, hysteresis, at_once)
            fresh.load({field: getattr(theirs, field) for field in SCALER_FIELDS})
            fresh.overflows_at_floor.fill_(run)
            vars(other).update(state)
            own, theirs = fresh, other


def test_the_host_waits_for_a_device_that_is_two_steps_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [Mock() for _ in range(4)]
    monkeypatch.setattr(torch.cuda, "Event", Mock(side_effect=events))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    pace, waited = Pace(torch.device("cuda")), []
    for _ in range(4):
        pace.wait()
        pace.mark()
        waited.append([event.synchronize.called for event in events])
    assert waited == [[False] * 4, [False] * 4, [True, *[False] * 3], [True, True, False, False]]


def test_a_fixed_scale_stays_and_counts_what_overflows() -> None:
    own = LossScale(ScaleSettings(128.0, False, 128.0), torch.device("cpu"))
    for overflows in (True, True):
        move(own, overflows)
    assert (float(own.value), int(own.overflows_at_floor), own.state()) == (128.0, 2, {})
    move(own, False)
    assert int(own.overflows_at_floor) == 0


def test_a_checkpoint_of_an_optimizer_without_hysteresis_can_be_read() -> None:
    state: dict[str, Any] = {"cur_scale": 4.0, "cur_iter": 7, "last_overflow_iter": 3}
    own, _ = scales(5, 1, at_once=False)
    own.load(state)
    assert own.state() == {**state, "cur_hysteresis": 1}
    own.load({})
    assert own.state()["cur_scale"] == 4.0
