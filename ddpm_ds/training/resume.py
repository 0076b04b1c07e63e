"""Start of a run: its claimed folder, a checkpoint of the same run, or a file of initial weights."""

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from ddpm_ds.checkpoint.folder import CompleteCheckpoint, Gather, check_shared, clean, names, newest, whole
from ddpm_ds.checkpoint.manifest import Description, read_manifest
from ddpm_ds.config.spec_file import SPEC
from ddpm_ds.data.held_out import training_and_held_out
from ddpm_ds.ground.errors import CheckpointError, OutputError, SpecError
from ddpm_ds.ground.files import path_fault, read_text
from ddpm_ds.ground.formats import open_tensors, parse_json
from ddpm_ds.planning.finished_run import SUMMARY
from ddpm_ds.processes.rendezvous import Rendezvous
from ddpm_ds.schema.section import flatten
from ddpm_ds.tracking.run_folder import IDENTITY, RESUMES, RunFolder, checkpoints_of, claim_folder
from ddpm_ds.unet.shards import Shard
from ddpm_ds.unet.tensor_group import read_part

SOURCES = "`ddpm-ds import` and `ddpm-ds checkpoint consolidate` write such files"


Shapes = Mapping[str, tuple[int, ...]]
ALL = slice(None)


class InitialWeights:
    """Open safetensors file of whole tensors, of any float dtype, by the global names of a U-Net's parameters.

    SpecError if it can't be read, its names or ``shapes`` are others, or values are not finite in the run's ``dtype``.
    This process checks the values of a ``part`` of the parameters.
    """

    def __init__(self, path: Path, shapes: Shapes, dtype: torch.dtype = torch.float32, part: slice = ALL) -> None:
        self.path, self._shapes = path, dict(shapes)
        try:
            self._file = open_tensors(path)
        except OSError as error:
            raise SpecError(f"train.initial_weights = {path} can't be read ({error.strerror}); {SOURCES}") from None
        found = set(self._file.keys())
        for wrong, what in ((self._shapes.keys() - found, "lacks"), (found - self._shapes.keys(), "also has")):
            if wrong:
                raise self._of_another_unet(f"it {what} {min(wrong)}")
        for name, shape in self._shapes.items():
            piece = self._file.get_slice(name)
            if tuple(piece.get_shape()) != shape:
                raise self._of_another_unet(f"{name} is {tuple(piece.get_shape())}, not {shape}")
            if piece.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                raise self._of_another_unet(f"{name} is {piece.get_dtype()}, no float")
        for name in [*self._shapes][part]:
            if not self.read(name).to(dtype).isfinite().all():
                what = f"values that are not finite in {str(dtype).removeprefix('torch.')}"
                raise SpecError(f"train.initial_weights = {path}: {name} has {what}; use other weights or precision")

    def read(self, name: str, first: int = 0, length: int | None = None) -> Tensor:
        """Return ``length`` values (to the end if None) of flattened parameter ``name``, from ``first`` on.

        (length,) fp32 in host memory, a copy; only the rows that hold them are read.
        """
        shape = self._shapes[name]
        row, stop = math.prod(shape[1:]), math.prod(shape) if length is None else first + length
        low = first // row
        rows = self._file.get_slice(name)[low : math.ceil(stop / row)]
        return rows.flatten()[first - low * row : stop - low * row].to(torch.float32, copy=True)

    def read_part(self, name: str, shard: Shard | None, start: int, length: int) -> Tensor:
        """Return ``length`` values of a rank's part (None: the whole) of a flattened parameter, from ``start`` on."""
        return read_part(partial(self.read, name), shard, start, length)

    def _of_another_unet(self, what: str) -> SpecError:
        return SpecError(
            f"train.initial_weights = {self.path} is of another U-Net than the section unet: {what}; use its own spec, "
            "or null"
        )


MAY_CHANGE = (
    *("name", "train.images", "train.accumulation", "ema.on_host"),
    *("checkpoint.", "bad_numbers.", "sampler.", "samples.", "evaluation.", "logging."),
    *("data.workers", "data.store_root", "data.autoencoder", "data.max_bad_fraction"),
    *("data.path", "data.held_out_path", "data.condition.path", "data.condition.held_out_path", "data.mask"),
)
"""Spec keys that a resumed run may change: length, layout, cadences, samples, logging, machine and places."""
NUMBERS = ("fp16", "bf16", "data_types", "gradient_clipping", "optimizer", "scheduler")
"""Keys of the DeepSpeed JSON on which the numbers of a run depend beyond rounding."""
MOST_CHANGES = 5
"""Maximum settings that a message names; a checkpoint with more differences is of another run."""


class Claim(NamedTuple):
    """Run folder, locked on rank 0 until the claim is dropped."""

    run_dir: Path
    lock: BinaryIO | None


def gather_in(rendezvous: Rendezvous) -> Gather:
    """Return a collective that works before there is a process group."""
    topics = itertools.count()
    return lambda value: [one["value"] for one in rendezvous.agree(f"checkpoints/{next(topics)}", {"value": value})]


def claim_run(run_dir: Path, rank: int, hosts: Sequence[str], gather: Gather) -> Claim:
    """Make and lock the run's folder, check that all hosts share it, and clean up after a killed run; collective.

    OutputError if another process trains into it, it can't be written, or hosts don't share it.
    """
    lock = claim_folder(run_dir) if rank == 0 else None
    run_dir = Path(gather(str(run_dir))[0])
    folder = checkpoints_of(run_dir)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    check_shared(folder, rank, hosts, gather)
    if rank == 0:
        try:
            clean(folder)
        except OSError as error:
            raise OutputError(f"{folder} can't be changed ({error.strerror}); make it writable") from None
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it is empty: a run that ends before its first checkpoint leaves none
    return Claim(run_dir, lock)


def images_learned(run_dir: Path, resume: str) -> dict[str, str] | None:
    """Return the image checksums in the newest checkpoint that :func:`find_checkpoint` may find; None without one."""
    path = run_dir if resume == "auto" else Path(resume)
    with contextlib.suppress(OSError, ValueError):  # of a path that is refused later
        folder = checkpoints_of(path)
        for checkpoint in () if resume == "never" else (path, *(folder / name for name in reversed(names(folder)))):
            with contextlib.suppress(CheckpointError):
                return read_manifest(checkpoint).data_sha256
    return None


def find_checkpoint(run_dir: Path, resume: str, log: Callable[[str], None]) -> CompleteCheckpoint | None:
    """Return the checkpoint to resume from, its checksums verified; None starts from the beginning.

    ``resume`` is ``auto`` (the run folder's newest good one), ``never``, or the path of a checkpoint or of another
    run's folder. A run that began from such a path and has saved since goes on from its own newest, so that the same
    command can be started again. CheckpointError if the path is no good checkpoint, or none of the folder's is good.
    """
    if resume == "never":
        return None
    path, own = Path(resume), resume == "auto"
    if not own:
        if fault := path_fault(checkpoints_of(path)):
            raise CheckpointError(f"--resume {path} can't be used ({fault}); name a checkpoint or a run's folder")
        if own := _has_saved_since(run_dir, path):
            log(f"{run_dir} began from {path} and has saved since: it goes on from its own checkpoints")
        elif not checkpoints_of(path).is_dir():
            return whole(path, progress=True)
    found = newest(checkpoints_of(run_dir if own else path), log, progress=True)
    if found is None and not own:
        raise CheckpointError(f"--resume {path}: this run has no checkpoint yet; name one that has saved")
    return found


def _has_saved_since(run_dir: Path, path: Path) -> bool:
    """Return whether the run has resumed from another run's ``path``, and has saved since."""
    own, began = checkpoints_of(run_dir), []
    try:
        path = path.resolve()
        if run_dir.resolve() in (path, *path.parents):  # the run is to go back
            return False
        for line in read_text(run_dir / RESUMES).splitlines():
            record = parse_json(line)
            if path in ((source := Path(record.get("path", ""))), source.parent.parent):
                began.append(datetime.fromisoformat(record["at"]))
        return bool(began) and read_manifest(own / names(own)[-1]).created > max(began)
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, CheckpointError):
        return False  # no records or checkpoints, or damaged ones


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences between two nested mappings, as ``key: old -> new`` by dotted key."""
    before, after = flatten(old), flatten(new)
    return [
        f"{key}: {before.get(key, 'unset')} -> {after.get(key, 'unset')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def check_resume(checkpoint: CompleteCheckpoint, about: Description, run_dir: Path) -> list[str]:
    """Return the run's allowed changes since the checkpoint, which may be of another run than ``run_dir``.

    CheckpointError if the spec trains something else, or the images are others.
    """
    before, spec = checkpoint.manifest, checkpoint.manifest.spec
    with contextlib.suppress(ValidationError):  # of another version
        spec = SPEC.read(spec).model_dump(mode="json")  # with keys that were added since
    found = changes(spec, about.spec)
    refused = [change for change in found if not change.startswith(MAY_CHANGE)]
    own = checkpoints_of(run_dir).resolve() in checkpoint.path.resolve().parents
    anew = f"to train a new run, {'use another --run-dir' if own else 'leave --resume out'}"
    if len(refused) > MOST_CHANGES:
        raise CheckpointError(f"{checkpoint.path} is of another run, with {len(refused)} other settings; {anew}")
    if refused:
        raise CheckpointError(
            f"{checkpoint.path} was trained with another spec: {'; '.join(refused)}; undo that, or {anew}"
        )
    if before.data_sha256 != about.data_sha256:
        old, new = (training_and_held_out(one.data_sha256)[0] for one in (before, about))
        raise CheckpointError(
            f"{checkpoint.path} {'held out' if old == new else 'was trained on'} other images than those of the "
            f"data-set cache; give it the same images, or {anew}"
        )
    return found + [f"ds_config.{change}" for change in changes(before.ds_config, about.ds_config)]


def remove_abandoned_points(run_dir: Path, checkpoint: CompleteCheckpoint | None, about: Description) -> str | None:
    """Remove the points and pictures after the checkpoint if the folder's last start trained something else; return a
    line about it, or None. Steps are logged once, so numbers that went bad would stay in the curves.

    Rank 0 calls this before the run is recorded. Without a checkpoint, MLflow gets a new run.
    """
    try:
        folder = RunFolder(run_dir)
        old, new = ({name: each.get(name) for name in NUMBERS} for each in (folder.ds_config, about.ds_config))
        found = changes(folder.spec.model_dump(mode="json"), about.spec)
    except (OSError, ValueError, AttributeError, SpecError):  # a new folder, or files that were cut off
        return None
    found = [change for change in found if not change.startswith(MAY_CHANGE)]
    found += [f"ds_config.{change}" for change in changes(old, new)]
    if not found:
        return None
    what = f"the last start in {run_dir} trained something else ({'; '.join(found)})"
    if checkpoint is not None:
        folder.forget_after(checkpoint.state.steps, checkpoint.state.images_seen)
        return f"{what}: its points and pictures after {checkpoint.state.images_seen:,} images are removed"
    folder.forget_after(0, -1)
    for file in (IDENTITY, SUMMARY):
        (run_dir / file).unlink(missing_ok=True)
    return f"{what} and saved nothing: its points, pictures and trace are removed, and MLflow has this as a new run"
