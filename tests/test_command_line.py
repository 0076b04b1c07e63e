"""What every program does before it reads its command line."""

from __future__ import annotations

import os

import pytest

from ddpm_ds.command_line import set_environment

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("0", "1", "0", "1")),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}, ("5", "8", "1", "4")),  # DeepSpeed's
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, ("5", "8", "1", "4")),
    ],
    ids=["alone", "deepspeed", "torchrun"],
)
def test_every_launcher_makes_the_same_world(
    given: dict[str, str], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    set_environment()
    assert tuple(os.environ[name] for name in NAMES[:4]) == expected
