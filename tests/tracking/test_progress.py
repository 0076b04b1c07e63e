"""The progress line on a terminal and in a log file, and the summary."""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ddpm_ds.ground.errors import print_to_stderr
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
        "1,000/1,000 images (100%)  loss 0.1000  250 images/s",
        "1,000/1,000 images (100%)  loss 0.1000  drawing samples, 19 s",
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
        assert stream.screen()[-1] == " 10%|█         | 100/1000 images, loss 0.5000  1:30 left  drawing samples"
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda: os.terminal_size((20, 24)))
    clock.now = 4.0
    line.step(300)
    assert len(stream.screen()[-1]) < 80 and stream.getvalue().rsplit("\r", 1)[-1].strip().startswith("30%")
    line.close()
    line.close()
    assert stream.screen()[-1] == ""


@pytest.mark.parametrize(("stream", "written"), [(Terminal(), "\r\x1b[Ka line\n"), (io.StringIO(), "a line\n")])
def test_a_line_of_another_process_clears_the_bar_of_a_terminal(
    stream: io.StringIO, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    print_to_stderr("a line")
    assert stream.getvalue() == written


@pytest.mark.parametrize("doing", [None, "measuring the held-out loss"])
def test_the_longest_line_fits_100_columns(
    doing: str | None, line_on: Callable[[io.StringIO], ProgressLine], clock: Mock
) -> None:
    stream = io.StringIO()
    line = line_on(stream)
    line._total = 25_600_000
    with contextlib.nullcontext() if doing is None else line.doing(doing):
        clock.now = 100.0
        line.log_point(25_000_000, loss=0.1, images_per_second=12.34, loss_scale=65536.0)
    assert len(stream.getvalue().splitlines()[-1]) <= 100 and "13:30:22 left" in stream.getvalue()


def test_lines_of_this_process_are_printed_above_the_bar(
    line_on: Callable[[io.StringIO], ProgressLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    line = line_on(stream)
    line.step(500)
    print("a notice")
    logging.StreamHandler().handle(logging.makeLogRecord({"msg": "a log line"}))
    print("two\nlines")
    *above, bar = stream.screen()
    assert [text for text in above if text] == ["a notice", "a log line", "two", "lines"]
    assert bar == " 50%|█████     | 500/1000 images"
    line.close()
    assert sys.stdout is sys.stderr is stream


def test_the_time_left_counts_pauses_to_come_and_no_start(
    line_on: Callable[[io.StringIO], ProgressLine], clock: Mock
) -> None:
    """A run of 1,000 images: 10 in a second, after a slow start, and a picture of 5 s after each 200."""
    line = line_on(io.StringIO())
    line.paused("samples", 5.0, 200)  # before the first step
    line.step(10)
    clock.now = 100.0
    line.log_point(50, loss=1.0, images_per_second=0.5)
    for images in (100, 150, 200):
        clock.now += 5.0
        line.log_point(images, loss=1.0, images_per_second=10.0)
    assert line.seconds_left() == pytest.approx(80 + 4 * 5)
    line.paused("evaluation", 3.0, 300)
    line.paused("checkpoint", 1.0, None)
    assert line.seconds_left() == pytest.approx(80 + 4 * 5 + 4 * 3 + 1)
    line.log_point(100, loss=1.0, images_per_second=10.0)  # a rollback
    assert line.seconds_left() == pytest.approx(90 + 5 * 5 + 4 * 3 + 1)
    line.log_point(1000, loss=1.0, images_per_second=10.0)
    assert line.seconds_left() == 0


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
        "speed                     1,302 images/s, without pauses and the first log interval",
        "skipped steps             3 of 2,000",
        "run folder                runs/digits",
        "MLflow run                abc",
        "serve it with             mlflow ui --backend-store-uri sqlite:////runs/mlflow.db",
        "open it at                http://127.0.0.1:5000/#/runs/abc",
    ]
    nothing = summary(**values | {"skipped_steps": 0, "pauses": Pauses(100.0, 0.0, 0.04)}, link=link).splitlines()
    assert nothing[1] == "trained                   128,000 images in 1:40" and not any(
        "skipped" in row for row in nothing
    )
    assert [duration(seconds) for seconds in (0.4, 59.6, 3599, 36061)] == ["0:00", "1:00", "59:59", "10:01:01"]
    unreached = summary(**values, link=RunLink(None, "http://127.0.0.1:5000", "http://127.0.0.1:5000", None))
    assert "not reached at http://127.0.0.1:5000" in unreached and "serve" not in unreached
