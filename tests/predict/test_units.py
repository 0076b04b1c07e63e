"""Sizes and speeds as people write them, and what is said of others."""

from __future__ import annotations

import argparse

import pytest

from ddpm_ds.command_line import bandwidth, counted, gib, memory_size, teraflops


def test_what_is_understood() -> None:
    sizes = {"80GiB": 80 * 2**30, "24GB": 24 * 10**9, "1.5 TiB": 3 * 2**39, "512MiB": 2**29}
    assert {text: memory_size(text) for text in sizes} == sizes
    speeds = {"300GB/s": 300e9, "400Gbit/s": 50e9, ".5MiB/s": 2**19}
    assert {text: bandwidth(text) for text in speeds} == speeds
    assert teraflops("120") == 120e12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("80", "'80' has no unit"),
        ("80gib", "'80gib' has unknown unit 'gib'; write 80GiB"),
        ("80 furlongs", "'80 furlongs' has unknown unit 'furlongs'"),
        ("-1GiB", "'-1GiB' is not a size such as 80GiB or 24GB"),
        ("0GiB", "'0GiB' is not a size such as 80GiB or 24GB"),
    ],
)
def test_what_is_not_understood_is_said_in_a_line(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message) as raised:
        memory_size(text)
    assert "a size such as 80GiB or 24GB" in str(raised.value) and "\n" not in str(raised.value)


def test_other_quantities_name_their_own_examples() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'300GB' has unknown unit 'GB'; give a speed such as 300GB/s"):
        bandwidth("300GB")
    with pytest.raises(argparse.ArgumentTypeError, match="'fast' is not a number of TFLOP/s such as 120"):
        teraflops("fast")


def test_numbers_are_shown_with_a_unit_that_fits() -> None:
    assert gib(3 * 2**30) == "3.00 GiB" and gib(2**20) == "1.0 MiB"
    assert [counted(1, "process"), counted(2, "micro-batch"), counted(3000, "stage")] == [
        "1 process",
        "2 micro-batches",
        "3,000 stages",
    ]
