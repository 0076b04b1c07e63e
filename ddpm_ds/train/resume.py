"""Whether a run goes on from a checkpoint, from which one, and what may have changed since."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, BinaryIO

from ddpm_ds.checkpoint.folder import clean, newest_good, write_file
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.errors import CheckpointError, OutputError
from ddpm_ds.spec import RunSpec
from ddpm_ds.train.plan import LOCK
from ddpm_ds.train.tracking import flatten

MAY_CHANGE = (
    "name",
    "train.images",
    "train.accumulation",
    "checkpoint.",
    "bad_numbers.",
    "sampler.",
    "samples.",
    "evaluation.",
    "logging.",
    "data.workers",
    "data.store_root",
    "data.path",
    "data.max_bad_fraction",
)
"""Spec keys that a resumed run may change: length, cadences, samples, logging, layout, machine."""


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


def find_checkpoint(run_dir: Path, resume: str, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from, its checksums verified; None starts from the beginning.

    ``resume`` is ``auto`` (the run folder's newest good one), ``never``, or the path of a checkpoint.

    Raises:
        CheckpointError: the path is no good checkpoint, or the run folder has checkpoints and none is good.
    """
    if resume == "never":
        return None
    if resume == "auto":
        folder = checkpoints_of(run_dir)
        try:
            clean(folder)  # the newest one may have been about to be replaced when the process died
        except OSError as error:
            raise CheckpointError(f"{folder} can't be changed ({error.strerror}); make it writable") from None
        return newest_good(folder, say=say, progress=True)
    reader = Reader(Path(resume))
    reader.verify(progress=True)
    return reader.path


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two nested mappings, as ``key: old -> new`` by dotted key."""
    before, after = flatten(old), flatten(new)
    return [
        f"{key}: {before.get(key, 'unset')} -> {after.get(key, 'unset')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def check_resume(
    reader: Reader, spec: RunSpec, ds_config: Mapping[str, Any], data_sha256: Mapping[str, str]
) -> list[str]:
    """What has changed since the checkpoint, all of it allowed.

    Raises:
        CheckpointError: the spec trains something else, or the images are others.
    """
    found = changes(reader.manifest.spec, spec.model_dump(mode="json"))
    refused = [change for change in found if not change.startswith(MAY_CHANGE)]
    if refused:
        raise CheckpointError(
            f"{reader.path} was trained with another spec: {'; '.join(refused)}; undo that, or train it as a new run "
            "with another --run-dir"
        )
    if reader.manifest.data_sha256 != data_sha256:
        raise CheckpointError(
            f"{reader.path} was trained on other images than those of the prepared store; give it the same images, or "
            "train a new run with another --run-dir"
        )
    return found + [f"ds_config.{change}" for change in changes(reader.manifest.ds_config, ds_config)]


METRICS, EVALUATIONS, OBSERVATIONS = "metrics.jsonl", "evaluations.jsonl", "observations.jsonl"
"""Files of a run's folder: the log points, the held-out losses, and what observers of steps have measured."""


@dataclass
class RunFolder:
    """The small files of a run's folder that outlive a process; used on rank 0."""

    path: Path

    def identity(self) -> str:
        """What finds the folder's MLflow run again: made once."""
        file = self.path / "identity"
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
