"""Sizes and speeds as people write them, and what is said of others."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from ddpm_ds.command_line import bandwidth, gib, memory_size, teraflops


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (memory_size, "80GiB", 80 * 2**30),
        (memory_size, "24GB", 24 * 10**9),
        (memory_size, "1.5 TiB", 3 * 2**39),
        (memory_size, "512MiB", 2**29),
        (bandwidth, "300GB/s", 300e9),
        (bandwidth, "400Gbit/s", 50e9),
        (bandwidth, ".5MiB/s", 2**19),
        (teraflops, "120", 120e12),
    ],
)
def test_what_is_understood(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (memory_size, "80", "'80' has no unit; give a size such as 80GiB or 24GB"),
        (memory_size, "80gib", "'80gib' has unknown unit 'gib'; write 80GiB; give a size such as 80GiB or 24GB"),
        (memory_size, "80 furlongs", "'80 furlongs' has unknown unit 'furlongs'; give a size such as 80GiB or 24GB"),
        (memory_size, "-1GiB", "'-1GiB' is not a size such as 80GiB or 24GB"),
        (memory_size, "0GiB", "'0GiB' is not a size such as 80GiB or 24GB"),
        (bandwidth, "300GB", "'300GB' has unknown unit 'GB'; give a speed such as 300GB/s or 400Gbit/s"),
        (teraflops, "fast", "'fast' is not a number of TFLOP/s such as 120"),
    ],
)
def test_what_is_not_understood_is_said_in_a_line(parse: Callable[[str], float], text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        parse(text)
    assert str(raised.value) == message


def test_sizes_are_shown_in_a_unit_that_fits() -> None:
    assert gib(3 * 2**30) == "3.00 GiB" and gib(2**20) == "1.0 MiB"
