"""``launch/data_rate.py``: a planted loader gives its planted rates and waits, and the program runs as documented."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import data_rate
import pytest


def test_rates_and_waits_are_those_that_were_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(0.0, 0.5)  # each look at the clock takes half a second
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert data_rate.rate(iter([10] * 100), 5.0) == 9 * 10 / 5.5
    assert data_rate.wait_share(iter([10] * 200), work_seconds=1.5) == pytest.approx(0.5 / 2.0)


def test_the_program_prints_a_row_for_each_number_of_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--workers", "0", "--seconds", "0.1", "--rounds", "1", "--needs", "1000000"]
    assert data_rate.main([*options, "--set", f"data.store_root={tmp_path}"]) == 0
    _, heading, row = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["workers", "images/s"] and row.split()[0] == "0"
    assert data_rate.main(["--workers", "many"]) == 2
