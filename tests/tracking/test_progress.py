"""The progress line on a terminal and in a log file, and the summary."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ddpm_ds.observe.observer import Pauses
from ddpm_ds.tracking import progress
from ddpm_ds.tracking.progress import ProgressLine, duration, summary
from ddpm_ds.tracking.tracker import RunLink
from tests.launching import wait_for


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """What the user sees: what follows a carriage return is written over the line."""
        lines = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for text in line.split("\r"):
                shown = text + shown[len(text) :]
            lines.append(shown.rstrip())
        return lines


@pytest.fixture
def clock() -> Mock:
    """Seconds that pass when the test sets ``now``."""
    clock = Mock(now=0.0)
    clock.side_effect = lambda: clock.now
    return clock


@pytest.fixture
def line_on(clock: Mock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[io.StringIO], ProgressLine]]:
    """Progress lines of 1,000 images on 80 columns, whose own clock ticks only where a test calls ``_tick``."""
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda: os.terminal_size((80, 24)))
    monkeypatch.setattr(progress, "TICK_SECONDS", 1e6)
    lines = []

    def made(stream: io.StringIO) -> ProgressLine:
        lines.append(ProgressLine(1000, stream=stream, clock=clock))
        return lines[-1]

    yield made
    for line in lines:
        line.close()


def test_a_log_file_gets_plain_lines_at_log_points_and_where_it_would_be_silent(
    line_on: Callable[[io.StringIO], ProgressLine], clock: Mock
) -> None:
    stream = io.StringIO()
    line = line_on(stream)
    with line.doing("building the pipeline"):
        for clock.now in (1.0, 5.0, 6.0):
            line.tick()
    clock.now = 10.0
    for images in (10, 20):
        clock.now += 1.0
        line.step(images)
    line.first_loss(0.98765)
    clock.now = 15.0
    line.tick()
    line.log_point(500, loss=0.21341, images_per_second=250.0, loss_scale=65536.0)
    line.log("something else")
    clock.now, lasted = 600.0, 9.9
    line.log_point(1000, loss=0.1, images_per_second=250.0)
    with line.doing("drawing samples"):
        clock.now += lasted  # a sixtieth of the run's age is longer
        line.tick()
        clock.now += lasted
        line.tick()
    line.close()
    line.tick()
    assert stream.getvalue().splitlines() == [
        "building the pipeline, 5 s",
        "20/1,000 images (2%)  loss 0.9877  10 images/s  1:38 left",
        "500/1,000 images (50%)  loss 0.2134  250 images/s  0:02 left  loss scale 65536",
        "something else",
        "1,000/1,000 images (100%)  loss 0.1000  250 images/s  0:00 left",
        "1,000/1,000 images (100%)  loss 0.1000  250 images/s  0:00 left  drawing samples, 19 s",
    ]
    assert "\r" not in stream.getvalue() and stream.getvalue().endswith("\n")


def test_a_terminal_gets_one_line_that_moves_below_what_others_say_and_fits_it(
    line_on: Callable[[io.StringIO], ProgressLine], clock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    line = line_on(stream)
    line.log("early")
    with line.doing("building the pipeline"):
        clock.now = 2.0
        line.tick()
        assert stream.screen()[-1] == "building the pipeline, 2 s"
    line.step(10)
    assert stream.screen()[0] == "early" and stream.screen()[-1] == "  1%|          | 10/1000 images"
    clock.now = 3.0
    line.step(30)
    assert stream.screen()[-1] == "  3%|▎         | 30/1000 images, 20 images/s  0:48 left"
    line.log_point(100, loss=0.5, images_per_second=10.0)
    line.log("MLflow fails")
    assert stream.screen()[1:] == [
        "MLflow fails",
        " 10%|█         | 100/1000 images, loss 0.5000  10 images/s  1:30 left",
    ]
    with line.doing("drawing samples"):
        assert " 10%|█         | 100/1000 images  drawing samples, loss" in stream.screen()[-1]
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda: os.terminal_size((20, 24)))
    clock.now = 4.0
    line.step(300)
    assert len(stream.screen()[-1]) < 80 and stream.getvalue().rsplit("\r", 1)[-1].strip().startswith("30%")
    line.close()
    line.close()
    assert stream.screen()[-1] == ""


def test_a_clock_moves_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.01)
    stream = Terminal()
    with contextlib.closing(ProgressLine(1000, stream=stream)) as line, line.doing("importing"):
        before = len(stream.getvalue())
        wait_for(lambda: len(stream.getvalue()) > before)


def test_the_summary_says_what_came_out_and_where_it_is() -> None:
    uri = "sqlite:////runs/mlflow.db"
    values: dict[str, Any] = {"loss": 0.11468, "images": 128_000, "images_per_second": 1302.4, "steps": 2000}
    values |= {"skipped_steps": 3, "pauses": Pauses(100.0, 0.2, 1.5), "run_dir": Path("runs/digits")}
    link = RunLink("abc", uri, "http://127.0.0.1:5000/#/runs/abc", f"mlflow ui --backend-store-uri {uri}")
    assert summary(**values, link=link).splitlines() == [
        "final loss                0.1147",
        "trained                   128,000 images in 1:40; sampling and validation 1.5%, checkpoints 0.2% of the time",
        "speed                     1,302 images/s, without these pauses and the first log interval",
        "skipped steps             3 of 2,000",
        "run folder                runs/digits",
        "MLflow run                abc",
        "serve it with             mlflow ui --backend-store-uri sqlite:////runs/mlflow.db",
        "open it at                http://127.0.0.1:5000/#/runs/abc",
    ]
    assert [duration(seconds) for seconds in (0.4, 59.6, 3599, 36061)] == ["0:00", "1:00", "59:59", "10:01:01"]
    unreached = summary(**values, link=RunLink(None, "http://127.0.0.1:5000", "http://127.0.0.1:5000", None))
    assert "not reached at http://127.0.0.1:5000" in unreached and "serve" not in unreached
