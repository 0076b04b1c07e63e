"""The progress line on a terminal and in a log file, and the summary."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from ddpm_ds.tracking import progress
from ddpm_ds.tracking.progress import ProgressLine, duration, summary
from ddpm_ds.tracking.tracker import RunLink


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """What the user sees: a carriage return with an erase begins the line again."""
        return [line.rsplit("\r\x1b[K", 1)[-1] for line in self.getvalue().split("\n")]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda: os.terminal_size((100, 24)))


def test_a_log_file_gets_one_plain_line_per_log_point() -> None:
    stream = io.StringIO()
    line = ProgressLine(96_000, stream=stream)
    for images in (12_000, 12_800):
        line.step(images)
    line.log_point(12_800, loss=0.21341, images_per_second=1536.2, loss_scale=65536.0)
    line.log_point(96_000, loss=0.1, images_per_second=1536.2)
    line.log("something else")
    line.close()
    assert stream.getvalue().splitlines() == [
        "12,800/96,000 images (13%)  loss 0.2134  1,536 images/s  0:54 left  loss scale 65536",
        "96,000/96,000 images (100%)  loss 0.1000  1,536 images/s  0:00 left",
        "something else",
    ]
    assert "\r" not in stream.getvalue() and stream.getvalue().endswith("\n")


def test_a_terminal_gets_one_line_that_is_rewritten_below_what_others_say_cut_to_its_width_and_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal()
    line = ProgressLine(1000, stream=stream, clock=iter(range(100)).__next__)
    line.log("early")
    line.step(10)
    assert stream.screen() == ["early", "10/1,000 images (1%)"]
    line.log_point(100, loss=0.5, images_per_second=10.0)
    line.log("MLflow fails")
    line.step(200)
    assert stream.screen()[1:] == ["MLflow fails", "200/1,000 images (20%)  loss 0.5000  10 images/s  1:20 left"]
    monkeypatch.setattr(progress.shutil, "get_terminal_size", lambda: os.terminal_size((20, 24)))
    line.step(300)
    assert stream.screen()[-1] == "300/1,000 images (3"
    line.close()
    line.close()
    assert len(stream.screen()) == 4 and stream.screen()[-1] == ""


def test_steps_rewrite_the_line_a_few_times_per_second_at_most() -> None:
    stream, now = Terminal(), [0.0]
    line = ProgressLine(1000, stream=stream, clock=lambda: now[0])
    for images in range(100):
        now[0] = images * 0.01
        line.step(images)
    assert stream.getvalue().count("\r") == 5


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (36061, "10:01:01")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_summary_says_what_came_out_and_where_it_is() -> None:
    uri = "sqlite:////runs/mlflow.db"
    link = RunLink("abc", "1", uri, "http://127.0.0.1:5000/#/runs/abc", f"mlflow ui --backend-store-uri {uri}")

    def text(link: RunLink) -> str:
        seconds: dict[str, Any] = {"seconds": 100.0, "validation_seconds": 1.5, "run_dir": Path("runs/digits")}
        return summary(loss=0.11468, images=128_000, steps=2000, skipped_steps=3, link=link, **seconds)

    assert text(link).splitlines() == [
        "final loss                0.1147",
        "trained                   128,000 images in 1:40, 1,280 images/s",
        "sampling and validation   0:02 (1.5% of the time)",
        "skipped steps             3 of 2,000",
        "run folder                runs/digits",
        "MLflow run                abc",
        "serve it with             mlflow ui --backend-store-uri sqlite:////runs/mlflow.db",
        "open it at                http://127.0.0.1:5000/#/runs/abc",
    ]
    unreached = RunLink(None, None, "http://127.0.0.1:5000", "http://127.0.0.1:5000", None)
    assert "not reached at http://127.0.0.1:5000" in text(unreached) and "serve" not in text(unreached)
