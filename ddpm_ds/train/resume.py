"""Whether a run goes on from a checkpoint, from which one, and what may have changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddpm_ds.checkpoint.folder import clean, newest_good
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.errors import CheckpointError
from ddpm_ds.spec import RunSpec
from ddpm_ds.train.run_folder import checkpoints_of
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
