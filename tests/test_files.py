"""Files that are complete or as they were, and what killed writers leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ddpm_ds.files import temporary_beside


def test_the_next_writer_of_an_output_removes_what_killed_ones_left(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    out, killed, running = tmp_path / "out[1].bin", ended.pid, os.getppid()
    names = [f".out[1].bin.writing-{owner}" for owner in (killed, running, "mine")]
    names += [f".other.writing-{killed}", f"out[1].bin.writing-{killed}"]
    for name in names:
        (tmp_path / name).touch()
    folder = tmp_path / "folder"
    (tmp_path / f".folder.writing-{killed}" / "unet").mkdir(parents=True)
    assert temporary_beside(out) == tmp_path / f".out[1].bin.writing-{os.getpid()}"
    assert temporary_beside(folder) == tmp_path / f".folder.writing-{os.getpid()}"
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])
