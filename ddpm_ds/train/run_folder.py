"""The small files of a run's folder. No torch."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, BinaryIO

from ddpm_ds.checkpoint.folder import write_file
from ddpm_ds.errors import OutputError
from ddpm_ds.train.plan import LOCK

METRICS, EVALUATIONS, OBSERVATIONS = "metrics.jsonl", "evaluations.jsonl", "observations.jsonl"
"""Files of a run's folder: the log points, the held-out losses, and what observers of steps have measured."""
IDENTITY = "identity"
"""File with what finds the folder's MLflow run again."""


def checkpoints_of(run_dir: Path) -> Path:
    """The folder of a run's checkpoints."""
    return run_dir / "checkpoints"


def claim_folder(run_dir: Path) -> IO[str]:
    """Make the run's folder and lock it for as long as the returned file is open.

    Raises:
        OutputError: another process trains into it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = (run_dir / LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(
            f"--run-dir {run_dir} is in use by a run that is still going; stop it or name another"
        ) from None
    except OSError:  # a file system without locks
        pass
    return lock


def identity_of(run_dir: Path) -> str | None:
    """What finds the folder's MLflow run again; None where nothing was trained in it. Changes nothing."""
    file = run_dir / IDENTITY
    return file.read_text().strip() if file.is_file() else None


@dataclass
class RunFolder:
    """The small files of a run's folder that outlive a process; used on rank 0."""

    path: Path

    def identity(self) -> str:
        """What finds the folder's MLflow run again: made once."""
        file = self.path / IDENTITY
        if not file.exists():
            write_file(file, f"{uuid.uuid4().hex}\n".encode())
        return file.read_text().strip()

    def logged_step(self, name: str) -> int:
        """The step of the last point in one of these files, 0 where there is none.

        A resumed run repeats steps, and logs none of them twice. After a rewind the last step is not the highest.
        """
        file = self.path / name
        for line in reversed(file.read_text().splitlines() if file.exists() else []):
            try:
                return int(json.loads(line)["step"])
            except ValueError:  # cut off when the disk was full
                continue
        return 0

    def append(self, name: str, values: Mapping[str, float], step: int) -> None:
        """Add a point to one of these files, on a line of its own."""
        with (self.path / name).open("ab+") as file:
            if file.tell() and not _ends_a_line(file):
                file.write(b"\n")
            file.write(json.dumps({"step": step, **values}).encode() + b"\n")

    def samples(self, images_seen: int) -> Path:
        """The picture drawn after so many images."""
        return self.path / "samples" / f"images-{images_seen:09}.png"

    def forget_samples(self, images_seen: int) -> None:
        """Remove the pictures drawn after more than ``images_seen``: they are of a course that the run has left."""
        for path in (self.path / "samples").glob("images-*.png"):
            if path.name > self.samples(images_seen).name:
                path.unlink(missing_ok=True)

    def add_resume(self, checkpoint: Path, changed: Sequence[str]) -> int:
        """Note in ``resumes.jsonl`` that the run goes on, and with what changes; returns how often it has."""
        file = self.path / "resumes.jsonl"
        with file.open("a") as stream:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            stream.write(json.dumps({"at": now, "from": checkpoint.name, "changed": list(changed)}) + "\n")
        return len(file.read_text().splitlines())


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
