"""What is said of trials: the table and the numbers."""

from __future__ import annotations

from ddpm_ds.fit.report import numbers, table, winner
from ddpm_ds.fit.trial import Found, TriedSize
from tests.fit.test_trial import GIB, task


def trial(size: int, speed: float, gibibytes: float = 0.0) -> TriedSize:
    """A trial that fits if it has a speed."""
    if not speed:
        return TriedSize(size, 64 // size, 64, "rank 0 ran out of memory")
    return TriedSize(size, 64 // size, 64, "", [64 / speed], [int(gibibytes * GIB), GIB // 8])


ONE = Found(task(replicas=2), (trial(1, 50, 0.5), trial(2, 97, 1), trial(4, 100, 2), trial(8, 0)))
OTHER = Found(task(stages=2), (trial(1, 40, 0.25), trial(2, 60, 0.5), trial(4, 90, 1), trial(8, 50, 1.5)))


def test_the_winner_is_the_layout_with_the_fastest_knee() -> None:
    assert winner([OTHER, ONE]) is ONE
    assert (ONE.knee.micro_batch_images, ONE.largest.micro_batch_images) == (2, 4)


def test_every_trial_has_a_line() -> None:
    lines = table([ONE, OTHER]).splitlines()
    assert len(lines) == 1 + 8
    assert lines[2].split()[:7] == ["1x2", "2", "32", "97", "1.000", "-", "*"]
    assert lines[2].endswith("* within 5% of the fastest") and lines[3].endswith("largest that fits")
    assert lines[4].split()[:3] == ["1x2", "8", "8"] and lines[4].endswith("does not fit: rank 0 ran out of memory")
    assert lines[7].endswith("-  within 5% of the fastest") and lines[8].endswith("largest that could be tried")


def test_the_numbers_are_all_of_them() -> None:
    found = numbers([ONE, OTHER], command="ddpm-ds fit")
    assert found["command"] == "ddpm-ds fit"
    assert found["best"] == {"layout": {"stages": 1, "replicas": 2}, "micro_batch_images": 2}
    first, other = found["layouts"]
    assert first["layout"] == {"stages": 1, "replicas": 2}
    assert (first["largest_micro_batch_images"], first["ended_by_memory"], other["ended_by_memory"]) == (4, True, False)
    assert [one["micro_batch_images"] for one in first["trials"]] == [1, 2, 4, 8]
    assert [one["fits"] for one in first["trials"]] == [True, True, True, False]
