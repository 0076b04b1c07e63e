"""Averages of any length from snapshots: the mathematics of EDM2, what is read and written, and its one-line errors."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ddpm_ds.checkpoint.folder import checkpoint_name, names, set_aside
from ddpm_ds.checkpoint.manifest import read_manifest
from ddpm_ds.checkpoint.power_ema import (
    FARTHEST,
    Reconstruction,
    averaged_kind,
    combination,
    gamma_of,
    length_of,
    power_decay,
    profile_kind,
)
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.checkpoint.writer import Fragment
from ddpm_ds.errors import CheckpointError, OutputError, SpecError
from tests.checkpoint.saving import SHAPES, describe, ranks, save, scalars

STEPS, BATCH, EVERY = 96, 10, 6
LENGTHS = (0.05, 0.1)
HALF = 2.0**-11
"""Largest relative error of rounding to fp16."""


def shares(length: float, steps: int) -> np.ndarray:
    """The weight of each step in the average by its definition: the integral of t ** gamma over it, (steps,)."""
    ends = (np.arange(steps + 1) / steps) ** (gamma_of(length) + 1)
    return np.diff(ends)


@pytest.fixture(scope="module")
def course() -> dict[str, Tensor]:
    """The weights of each step of a training: a walk that slows down, (STEPS, elements) fp64."""
    generator = torch.Generator().manual_seed(0)
    slower = torch.arange(1, STEPS + 1, dtype=torch.float64).rsqrt()[:, None]
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    drawn = {n: torch.randn(STEPS, size, generator=generator, dtype=torch.float64) for n, size in sizes.items()}
    return {name: (slower * steps).cumsum(0) for name, steps in drawn.items()}


def average(course: dict[str, Tensor], name: str, length: float, steps: int = STEPS) -> Tensor:
    return (torch.from_numpy(shares(length, steps)) @ course[name][:steps]).double()


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory, course: dict[str, Tensor]) -> Path:
    return trained(tmp_path_factory.mktemp("run") / "snapshots", course)


def trained(folder: Path, course: dict[str, Tensor]) -> Path:
    """Snapshots of averages that were updated step by step in fp32, as training does, written by two ranks."""
    # what a run begins with has no weight
    kept = {(length, name): torch.full(values.shape[1:], 1e9) for length in LENGTHS for name, values in course.items()}
    writers = ranks(folder, 2, pytest.fail, what="snapshot")
    for step in range(1, len(next(iter(course.values()))) + 1):
        images = step * BATCH
        for (length, name), values in kept.items():
            decay = power_decay(gamma_of(length), images, BATCH)
            values.lerp_(course[name][step - 1].float(), 1.0 - decay)
        if step % EVERY == 0:
            for rank, writer in enumerate(writers):
                own = [
                    Fragment(profile_kind(length), name, start, values[start:stop])
                    for (length, name), values in kept.items()
                    for start, stop in [((0, values.numel() // 2), (values.numel() // 2, values.numel()))[rank]]
                ]
                writer.begin(f"rank{rank}", own, describe(images), scalars(images))
            assert all([writer.wait() for writer in writers])
    return folder


def test_powers_are_those_of_the_paper() -> None:
    assert gamma_of(0.05) == pytest.approx(16.97, abs=0.01) and gamma_of(0.1) == pytest.approx(6.94, abs=0.01)
    for length in (0.001, 0.015, 0.14, 0.28):
        gamma, times = gamma_of(length), np.linspace(0, 1, 200_001)
        profile = times**gamma / np.sum(times**gamma)
        mean = np.sum(times * profile)
        assert math.sqrt(np.sum((times - mean) ** 2 * profile)) == pytest.approx(length, rel=1e-3)


@pytest.mark.parametrize("length", [0.03, 0.05, 0.07, 0.1, 0.15, 0.2])
def test_coefficients_are_those_of_least_squares(length: float) -> None:
    """Against the same problem with profiles as vectors of many short intervals, solved and divided as such."""
    fine = 4096
    times = np.repeat(np.arange(1, 17) / 16, 2)
    lengths = list(LENGTHS) * 16
    found, distance = combination(list(times * 5000), lengths, 5000, length)
    columns = [
        np.pad(shares(each, round(time * fine)), (0, fine - round(time * fine)))
        for time, each in zip(times, lengths, strict=True)
    ]
    matrix, wanted = np.stack(columns, axis=1), shares(length, fine)
    best = np.linalg.lstsq(matrix, wanted, rcond=None)[0]
    best /= best.sum()
    error = np.linalg.norm(matrix @ found - wanted) / np.linalg.norm(wanted)
    assert error == pytest.approx(np.linalg.norm(matrix @ best - wanted) / np.linalg.norm(wanted), abs=1e-4)
    assert distance == pytest.approx(error, abs=1e-4)
    if length in LENGTHS:
        assert np.allclose(found, np.eye(32)[30 + LENGTHS.index(length)], atol=1e-8) and distance < 1e-6


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8, 16, 64])
def test_the_average_of_weights_that_do_not_change_is_these_weights(count: int) -> None:
    times, lengths = np.repeat(np.arange(1, count + 1), 2).tolist(), list(LENGTHS) * count
    found = [combination(times, lengths, count, length) for length in np.linspace(0.004, 0.28, 70)]
    accepted = [coefficients.sum() for coefficients, distance in found if distance <= FARTHEST]
    assert len(accepted) > 10 and accepted == pytest.approx([1.0] * len(accepted), abs=1e-9)


def test_snapshots_of_a_training_that_stands_still_are_averaged_to_its_weights(tmp_path: Path) -> None:
    still = {name: torch.linspace(-2, 3, math.prod(shape)).expand(4 * EVERY, -1) for name, shape in SHAPES.items()}
    folder = trained(tmp_path / "snapshots", still)
    for length in (0.04, 0.07, 0.12, 0.145):
        made = Reconstruction(folder, length)
        for name, values in still.items():
            assert (made.read(name) - values[-1]).norm() <= HALF * values[-1].norm()


@pytest.mark.parametrize("steps", [STEPS, STEPS // 2])
@pytest.mark.parametrize(("length", "tolerance"), [(0.05, HALF), (0.06, 3e-3), (0.08, 3e-3), (0.1, HALF), (0.15, 2e-2)])
def test_an_average_is_the_one_that_training_would_have_kept(
    length: float, tolerance: float, steps: int, snapshots: Path, course: dict[str, Tensor]
) -> None:
    made = Reconstruction(snapshots, length, steps * BATCH)
    assert (made.snapshots, made.images) == (steps // EVERY, steps * BATCH)
    for name in SHAPES:
        wanted = average(course, name, length, steps)
        assert (made.read(name) - wanted).norm() <= tolerance * wanted.norm()


def test_what_is_written_is_a_checkpoint_of_the_average_alone(snapshots: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "average"
    made = Reconstruction(snapshots, 0.07)
    assert made.images == STEPS * BATCH, "without a time it is that of the newest snapshot"
    made.write(out)
    reader = Reader(out)
    reader.verify()
    assert reader.manifest.kinds == ("ema-0.07",) and averaged_kind(reader.manifest.kinds) == "ema-0.07"
    assert reader.manifest.spec == describe(0).spec and reader.state.images_seen == made.images
    for name in SHAPES:
        assert torch.equal(reader.read("ema-0.07", name), made.read(name))
    with pytest.raises(OutputError, match="exists; name a new folder with --output"):
        made.write(out)
    assert [path.name for path in out.parent.iterdir()] == ["average"]


def test_snapshots_are_in_half_precision_and_never_deleted(snapshots: Path, tmp_path: Path) -> None:
    found = names(snapshots)
    assert len(found) == STEPS // EVERY
    elements = len(LENGTHS) * sum(map(math.prod, SHAPES.values()))
    files = [path.stat().st_size for path in (snapshots / found[0]).glob("*.safetensors")]
    assert len(files) == 2 and 2 * elements < sum(files) < 2 * elements + 4096
    assert read_manifest(snapshots / found[0]).dtype == "F16"
    save(tmp_path, 60)
    assert "dtype" not in (tmp_path / checkpoint_name(60) / "manifest.json").read_text(), "as it was before snapshots"


def test_what_a_run_has_left_is_no_longer_read(snapshots: Path, tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    for name in names(snapshots)[:5]:
        (folder / name).symlink_to(snapshots / name)
    assert set_aside(folder, 3 * EVERY * BATCH) == ["abandoned-images-000000240", "abandoned-images-000000300"]
    assert Reconstruction(folder, 0.07).snapshots == 3
    assert set_aside(folder, 3 * EVERY * BATCH) == []


@pytest.mark.parametrize(
    ("length", "at", "problem"),
    [
        (0.01, None, r"--length 0\.01 is outside of what the 16 snapshots .*; use one nearer to 0\.05 or 0\.1$"),
        (0.07, 77, r"--at 77 is the time of no snapshot in .*; use one of its 16, such as 60, 120, 180$"),
        (0.07, EVERY * BATCH, "holds one snapshot of up to 60 images, and an average is made from two or more"),
    ],
)
def test_what_snapshots_can_not_make_is_one_line(length: float, at: int | None, problem: str, snapshots: Path) -> None:
    with pytest.raises(CheckpointError, match=problem):
        Reconstruction(snapshots, length, at)


@pytest.mark.parametrize("length", [-0.1, 0.0, 0.5, math.nan])
def test_lengths_out_of_range_are_refused(length: float, snapshots: Path) -> None:
    with pytest.raises(SpecError, match=f"a relative length of {length} is outside of 0.001 to 0.28; use 0.1"):
        Reconstruction(snapshots, length)


def test_no_snapshots_and_damaged_ones_are_one_line(snapshots: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no snapshot to make averages from; name the folder of a run"):
        Reconstruction(tmp_path, 0.07)
    folder = tmp_path / "snapshots"
    for name in names(snapshots)[:2]:
        (folder / name).mkdir(parents=True)
        for file in (snapshots / name).iterdir():
            (folder / name / file.name).write_bytes(file.read_bytes())
    damaged = folder / names(folder)[0] / "rank0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    made = Reconstruction(folder, 0.07)
    with pytest.raises(CheckpointError, match=r"rank0\.safetensors has another checksum"):
        made.write(tmp_path / "average")
    assert not (tmp_path / "average").exists()


def test_what_is_no_snapshot_among_them_is_refused(snapshots: Path, tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    (folder / checkpoint_name(EVERY * BATCH)).symlink_to(snapshots / checkpoint_name(EVERY * BATCH))
    save(folder, 80)
    with pytest.raises(CheckpointError, match=r"images-000000060 is of another run than .*images-000000080"):
        Reconstruction(folder, 0.07)
    shutil.rmtree(folder / checkpoint_name(80))
    (folder / checkpoint_name(60)).unlink()
    for images in (60, 80):
        save(folder, images)
    with pytest.raises(CheckpointError, match="it holds ema, which is no average of a length"):
        Reconstruction(folder, 0.07)
    (folder / checkpoint_name(60)).rename(folder / checkpoint_name(70))
    with pytest.raises(CheckpointError, match="it is of 60 images"):
        Reconstruction(folder, 0.07)


def test_other_kinds_have_no_length() -> None:
    assert length_of(profile_kind(0.1)) == 0.1
    assert not any(map(length_of, ("ema-", "ema-nan", "ema-0.5", "ema-1e-3", "ema-0.0", "ema--0.1", "ema")))


def test_the_farthest_length_is_where_the_profile_is_off_by_a_tenth() -> None:
    times, lengths = list(itertools.chain.from_iterable((t, t) for t in range(1, 9))), list(LENGTHS) * 8
    distances = [combination(times, lengths, 8, length)[1] for length in (0.03, 0.07, 0.2, 0.25)]
    assert [distance > FARTHEST for distance in distances] == [True, False, False, True]
