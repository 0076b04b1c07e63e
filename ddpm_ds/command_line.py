"""What the command lines of this project share. No torch."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from ddpm_ds.errors import OutputError, SpecError

OTHERS_WAIT_SECONDS = 5.0
"""How long ranks other than 0 hold back an error, so that rank 0 is the one to say it."""


class OneLineParser(argparse.ArgumentParser):
    """Raises a SpecError where argparse would print its usage and leave; descriptions are shown as they are written.

    The parsers of its verbs are of this class too.
    """

    def __init__(self, **options: Any) -> None:
        written = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{**written, **options})

    def error(self, message: str) -> NoReturn:
        raise SpecError(f"{message}; {self.prog} --help explains")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """``--set``, of every program and verb that takes a run spec."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change one value of the spec; may be repeated",
    )


def set_environment() -> None:
    """Make a process that no launcher started a world of its own, and keep idle OpenMP threads from spinning.

    GNU OpenMP's threads spin for long before they sleep, which takes a core from whoever shares it: on two cores with
    a neighbour a step was ten times slower, and on two idle ones a tenth. It is read when PyTorch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    of_deepspeed = os.environ.get("LOCAL_SIZE", "1")  # what torchrun calls LOCAL_WORLD_SIZE
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", of_deepspeed)):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that could not be written in the end.

    Raises:
        OutputError: it is a folder, or its folder is missing or somebody else's.
    """
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OutputError(f"{option} {path} can't be written; name a file in a folder that exists and is yours")


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def say_once(line: str) -> None:
    """Say what every rank has found, once. A launcher ends the other ranks as soon as rank 0 has left."""
    if int(os.environ["RANK"]) != 0:
        time.sleep(OTHERS_WAIT_SECONDS)
    print(line, file=sys.stderr, flush=True)
