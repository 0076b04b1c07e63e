"""What is said of trials: the table, the sentences, the numbers and the picture."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from ddpm_ds.fit.report import Found, draw, numbers, table, why, winner
from ddpm_ds.fit.trial import TriedSize
from tests.fit.test_task import task

GIB = 2**30


def trial(size: int, speed: float, gibibytes: float = 0.0) -> TriedSize:
    """A trial that fits if it has a speed."""
    seconds, why = ([64 / speed], "") if speed else ([], "rank 0 ran out of memory")
    return TriedSize(size, 64 // size, 64, bool(speed), why, seconds, [int(gibibytes * GIB), GIB // 8], 0)


ONE = Found(task(replicas=2), (trial(1, 50, 0.5), trial(2, 97, 1), trial(4, 100, 2), trial(8, 0)))
OTHER = Found(task(stages=2), (trial(1, 40, 0.25), trial(2, 60, 0.5), trial(4, 90, 1), trial(8, 50, 1.5)))


def test_the_winner_is_the_layout_with_the_fastest_knee() -> None:
    assert winner([OTHER, ONE]) is ONE
    assert (ONE.knee.micro_batch_images, ONE.fastest.micro_batch_images, ONE.largest.micro_batch_images) == (2, 4, 4)
    said = why([OTHER, ONE])
    assert "Train with 1 stage x 2 replicas and micro-batches of 2: 97 images/s in 1.00 GiB, within 5%" in said
    assert "(4: 100 images/s in 2.00 GiB). The largest that fits is 4: 100 images/s in 2.00 GiB." in said
    assert "The next best layout, 2x1, reaches 93% of these images/s." in said
    assert "2x1: 8 is the largest that could be tried, not the memory's limit" in said
    assert "1x2: " not in said


def test_every_trial_has_a_line() -> None:
    lines = table([ONE, OTHER]).splitlines()
    assert len(lines) == 1 + 8
    assert lines[2].split() == ["1x2", "2", "32", "97", "659.79", "1.000", "-", "yes", "*", "knee"]
    assert lines[4].split()[:3] == ["1x2", "8", "8"] and lines[4].endswith("no  rank 0 ran out of memory")
    assert lines[7].endswith("yes  knee") and lines[8].endswith("yes  largest")


def test_the_numbers_are_all_of_them() -> None:
    found = numbers([ONE, OTHER], command="ddpm-ds fit")
    assert found["command"] == "ddpm-ds fit"
    assert found["best"] == {"layout": {"stages": 1, "replicas": 2}, "micro_batch_images": 2}
    assert found["layouts"][0]["layout"] == {"stages": 1, "replicas": 2}
    first = found["layouts"][0]
    assert (first["largest_micro_batch_images"], first["ended_by_memory"]) == (4, True)
    assert [one["micro_batch_images"] for one in first["trials"]] == [1, 2, 4, 8]


def test_the_picture_has_a_curve_for_each_layout() -> None:
    file = io.BytesIO()
    draw([ONE, OTHER], "a test", 2 * GIB, file)
    with Image.open(file) as image:
        assert image.format == "PNG" and image.width > 800
        colours = image.convert("RGB").getcolors(2**20)
    assert colours is not None and {(59, 125, 216), (224, 123, 57)} <= {colour for _, colour in colours}


def test_crosses_are_where_something_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    over = replace(trial(4, 70, 3), fits=False, why="rank 0 took over 2.00 GiB")
    found = Found(task(replicas=2), (trial(1, 50, 0.5), trial(2, 97, 1), over, trial(8, 0, 1.5)))
    draw([found], "a test", 2 * GIB, io.BytesIO())
    lines = [[line for line in axes.lines if line.get_marker() == "x"] for axes in figures[0].axes]
    crosses = [[np.ravel(line.get_xydata()).tolist() for line in those] for those in lines]
    assert crosses == [[[4, 70]], [[4, 3]]]


def test_the_knee_is_the_smallest_that_is_nearly_the_fastest() -> None:
    for speeds, knee in (({1: 50, 2: 94.9, 4: 95, 8: 100, 16: 90}, 4), ({1: 50, 2: 40}, 1), ({8: 99, 32: 100}, 8)):
        trials = tuple(trial(size, speed) for size, speed in speeds.items())
        assert Found(task(), trials).knee.micro_batch_images == knee
