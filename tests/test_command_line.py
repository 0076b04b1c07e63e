"""Sizes and speeds as people write them, and what is said of others."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpm_ds.command_line import bandwidth, counted, file_path, gib, memory_size, teraflops


def test_what_is_understood() -> None:
    sizes = {"80GiB": 80 * 2**30, "24GB": 24 * 10**9, "1.5 TiB": 3 * 2**39, "512MiB": 2**29}
    assert {text: memory_size(text) for text in sizes} == sizes
    speeds = {"300GB/s": 300e9, "400Gbit/s": 50e9, ".5MiB/s": 2**19}
    assert {text: bandwidth(text) for text in speeds} == speeds
    assert teraflops("120") == 120e12


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (memory_size, "80", "'80' has no unit; give a size such as 80GiB or 24GB"),
        (memory_size, "80gib", "'80gib' has unknown unit 'gib'; write 80GiB"),
        (memory_size, "0GiB", "'0GiB' is not a size such as 80GiB or 24GB"),
        (bandwidth, "300GB", "'300GB' has unknown unit 'GB'; give a speed such as 300GB/s"),
        (teraflops, "fast", "'fast' is not a number of TFLOP/s such as 120"),
    ],
)
def test_what_is_not_understood_is_said_in_a_line(parse: Callable[[str], float], text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message) as raised:
        parse(text)
    assert "\n" not in str(raised.value)


def test_a_folder_of_somebody_else_can_not_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(argparse.ArgumentTypeError, match=r"can't be used \(Permission denied\)"):
        file_path(str(tmp_path))
    assert file_path(str(tmp_path / "file")) == tmp_path / "file"
    assert file_path(str(tmp_path / "new")) == tmp_path / "new"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert file_path("~/new") == tmp_path / "new" and file_path("./~") == Path("~")
    with pytest.raises(argparse.ArgumentTypeError, match="there is no home folder ~nobody-here"):
        file_path("~nobody-here/new")


def test_numbers_are_shown_with_a_unit_that_fits() -> None:
    assert gib(3 * 2**30) == "3.00 GiB" and gib(2**20) == "1.0 MiB"
    counts = [counted(1, "process"), counted(2, "micro-batch"), counted(3000, "stage")]
    assert counts == ["1 process", "2 micro-batches", "3,000 stages"]
