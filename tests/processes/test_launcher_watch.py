"""A rank sees that what has started it is gone: its parent, or who reads its output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.launching import REPOSITORY

RANK = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from ddpm_ds.processes.requests import Launcher

    launcher, said = Launcher(), Path(sys.argv[1])
    said.write_text("here")
    until = time.monotonic() + 20
    while not launcher.is_gone() and time.monotonic() < until:
        time.sleep(0.01)
    print("this goes to nowhere", flush=True)
    said.write_text("gone" if launcher.is_gone() else "still there")
    """
)
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def wait_for(said: Path, word: str) -> None:
    until = time.monotonic() + 20
    while not (said.exists() and said.read_text() == word):
        assert time.monotonic() < until, said.read_text() if said.exists() else "nothing"
        time.sleep(0.01)


@pytest.mark.parametrize("launched", [True, False])
def test_a_parent_that_is_killed_is_missed_where_it_was_a_launcher(launched: bool, tmp_path: Path) -> None:
    said, log = tmp_path / "said", (tmp_path / "log").open("w")
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), **({"CROSS_RANK": "0"} if launched else {})}
    command = [sys.executable, "-c", LAUNCHER, RANK, str(said)]
    launcher = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(said, "here")
        launcher.kill()
        launcher.wait()
        if launched:
            wait_for(said, "gone")
        else:
            time.sleep(0.3)
            assert said.read_text() == "here"
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.parametrize("output", ["stdout", "stderr"])
def test_an_output_that_nobody_reads_any_more_is_missed(output: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, output: subprocess.PIPE}
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", RANK, str(said)], env=variables, **streams) as rank:  # type: ignore[call-overload]
        wait_for(said, "here")
        getattr(rank, output).close()
        wait_for(said, "gone")
        assert rank.wait(10) == 0
